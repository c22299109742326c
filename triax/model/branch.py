"""Work beside other work: in a step that is being recorded on a GPU, what does not wait for it may run at once."""

from contextlib import nullcontext
from functools import lru_cache

import torch
from jaxtyping import Shaped
from torch import Tensor


class Branch:
    """What is computed inside `with` may run beside what follows, until `join`; elsewhere than in a recording in turn.

    Args:
        given: What the branch reads; it must be kept until `join`.
    """

    def __init__(self, given: Shaped[Tensor, "..."]) -> None:
        is_recorded = given.is_cuda and torch.cuda.is_current_stream_capturing()
        self._stream = _stream(given.device) if is_recorded else None
        self._context = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        self._has_begun = False

    def __enter__(self) -> "Branch":
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._has_begun = True
        self._context.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self._context.__exit__(*problem)

    def join(self) -> None:
        """Let what follows wait for the branch."""
        if self._stream is not None and self._has_begun:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
