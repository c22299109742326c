"""Weights on disk: saved runs to resume from, and the released layout."""
