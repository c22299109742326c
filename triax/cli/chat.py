"""`triax chat`: talk to a checkpoint."""


def chat() -> None:
    """Talk."""
