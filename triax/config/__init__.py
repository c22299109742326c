"""Settings and recipes, checked before anything runs; nothing here imports torch."""
