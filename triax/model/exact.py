"""A forward whose results have the same bits whatever company, cuts and caches a token has."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_ON: ContextVar[bool] = ContextVar("exact", default=False)


@contextmanager
def exact(on: bool = True) -> Generator[None]:
    """Let layers compute each token by itself, in one fixed order, inside the context; without gradients.

    Products go tile by tile, KDA token by token, attention page by page, experts in small tiles. One thread works,
    since torch lets scalar code finish each thread's share and that code rounds otherwise. Give the model a memory
    (`triax.model.memory`) and a stream of a multiple of 32 tokens.
    """
    if not on:
        yield
        return
    threads, mark = torch.get_num_threads(), _ON.set(True)
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        _ON.reset(mark)


def is_exact() -> bool:
    """Whether the caller asked for results that are the same to the last bit."""
    return _ON.get()
