"""Which implementation of an operation runs: the fast one, the reference, or the batch-invariant one.

Every operation's `__init__` asks `mode` and chooses; layers call the operation and never ask.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch

from triax.errors import ConfigError

Mode = Literal["fast", "reference", "batch_invariant"]
"""Kernels; the definitions that they are held to; results whose bits depend on a token's own sequence alone."""

VARIABLE = "TRIAX_KERNELS"
"""Environment variable that asks for `fast` (the default) or `reference`."""

_BATCH_INVARIANT: ContextVar[bool] = ContextVar("batch_invariant", default=False)


def mode() -> Mode:
    """Return what operations choose by, in this context.

    Raises:
        ConfigError: The environment variable names no mode.
    """
    if _BATCH_INVARIANT.get():
        return "batch_invariant"
    asked = os.environ.get(VARIABLE) or "fast"
    if asked == "fast" or asked == "reference":
        return asked
    known = " or ".join(f"`{name}`" for name in get_args(Mode)[:2])
    raise ConfigError(f"{VARIABLE}: `{asked}` is no mode of the kernels; set it to {known}, or leave it unset")


@contextmanager
def batch_invariant(on: bool = True) -> Generator[None]:
    """Compute each token by itself, in one fixed order, inside the context; without gradients.

    Products go tile by tile, KDA token by token, attention page by page, experts in small tiles. One thread works,
    since torch lets scalar code finish each thread's share and that code rounds otherwise. Give the model a memory
    (`triax.model.memory`) and a stream of a multiple of 32 tokens.
    """
    if not on:
        yield
        return
    threads, mark = torch.get_num_threads(), _BATCH_INVARIANT.set(True)
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        _BATCH_INVARIANT.reset(mark)
