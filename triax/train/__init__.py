"""Learning from text: the loop, its steps, what it writes down."""
