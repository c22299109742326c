"""One script for each published figure."""
