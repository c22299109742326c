"""`triax sample`: talk to a checkpoint."""


def sample() -> None:
    """Talk."""
