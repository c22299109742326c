"""The command line: each file is one verb, and none holds logic."""
