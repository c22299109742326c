"""The network: every layer of the family, its caches and its counts."""
