"""Sandboxes under the interfaces of other people's tools."""
