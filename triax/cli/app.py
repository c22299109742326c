"""The command `triax`: its verbs, and how failures reach the shell."""

import errno
import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from triax.cli import (
    bench,
    chat,
    checkpoint,
    convert,
    doctor,
    model,
    recipe,
    report,
    runs,
    sample,
    sandbox,
    serve,
    train,
)
from triax.cli.extra import absent
from triax.errors import TriaxError, UnsupportedError
from triax.machine import wait_passively

FULL_OR_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    name="triax",
    epilog="Exit status: 0 done, 1 failed, 2 misused. Settings of a recipe: `triax recipe show RECIPE`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
)


def _version(is_asked: bool) -> bool:
    if is_asked:
        from triax import __version__

        print(f"triax {__version__}")
        raise typer.Exit
    return is_asked


@app.callback()
def triax(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train Kimi K3 and its relatives, look inside them, and talk to them."""


app.command()(train.train)
app.command()(runs.runs)
app.command()(report.report)
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(sample.sample)
app.add_typer(model.app)
app.add_typer(checkpoint.app)
app.command()(convert.convert)
app.add_typer(recipe.app)
app.add_typer(bench.app)
app.add_typer(sandbox.app)
app.command()(doctor.doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a failure that a user can act on is a message, any other keeps its traceback.

    Args:
        arguments: Words after `triax`; those of the shell if not given.
    """
    _take_any_text()
    wait_passively()
    try:
        app(args=arguments)
    except TriaxError as problem:
        _fail(str(problem), problem.exit_status)
    except ModuleNotFoundError as problem:
        told = absent(problem, next(iter(sys.argv[1:] if arguments is None else arguments), ""))
        if told is None:
            raise
        _fail(told, UnsupportedError.exit_status)
    except OSError as problem:
        if problem.errno not in FULL_OR_FORBIDDEN:
            raise
        found = str(problem.strerror).lower()
        _fail(
            f"{problem.filename or 'disk'}: cannot be written or read; found {found}; make room or give access, "
            "and go on: what was saved before is still there",
            1,
        )


def _take_any_text() -> None:
    """Let no byte that is typed, and no character that a terminal lacks, break a command off in the middle."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _fail(message: str, status: int) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"error: {message}\n")
    sys.exit(status)
