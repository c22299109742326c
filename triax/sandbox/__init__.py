"""A computer for an agent, which can be paused, put away, brought back and split into copies."""
