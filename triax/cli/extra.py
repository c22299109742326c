"""Parts of triax that need an extra of the installation."""

from collections.abc import Generator
from contextlib import contextmanager

from triax.errors import UnsupportedError


@contextmanager
def needs(extra: str, what: str) -> Generator[None]:
    """Say which extra is missing where an import fails for the lack of it.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] == "triax":
            raise
        raise UnsupportedError(
            f"{what}: needs the extra `{extra}`; found no `{problem.name}`; install it with "
            f"`pip install 'triax[{extra}]'`"
        ) from None
