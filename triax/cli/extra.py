"""Parts of triax that need an extra of the installation."""

from collections.abc import Generator
from contextlib import contextmanager

from triax.errors import UnsupportedError
from triax.machine import install_command


@contextmanager
def needs(extra: str, what: str) -> Generator[None]:
    """Say which extra is missing where an import fails for the lack of it.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as problem:
        if _package(problem) in ("", "triax"):
            raise
        raise UnsupportedError(_told(what, extra, problem)) from None


def absent(problem: ModuleNotFoundError, verb: str) -> str | None:
    """Say what to install where a verb that bears the name of an extra lacks a module.

    Args:
        problem: The import that failed.
        verb: The first word of the command.

    Returns:
        A message, or none where no installation mends it: our own module, or a verb without an extra.
    """
    from triax import machine

    package = _package(problem)
    if verb not in machine.EXTRAS or package in ("", "triax"):
        return None
    if machine.extras()[verb]:  # nothing of the extra is missing, so that no extra brings this package
        return f"{verb}: needs the package `{package}`; it is not installed; install it with `pip install {package}`"
    return _told(verb, verb, problem)


def _package(problem: ModuleNotFoundError) -> str:
    return (problem.name or "").partition(".")[0]


def _told(what: str, extra: str, problem: ModuleNotFoundError) -> str:
    return f"{what}: needs the extra `{extra}`; found no `{problem.name}`; install it with `{install_command(extra)}`"
