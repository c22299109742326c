"""Where states and latents lie: on the device, and in host memory behind it; every piece is copied as a whole."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from triax.config.model import Model
from triax.model.device import on_device
from triax.model.memory import Arena
from triax.serve.cache.tiers import Sizes
from triax.serve.plan import Copy, Kind, Place


class Store:
    """The tensors of both places.

    Args:
        settings: Shape of the decoder.
        sizes: Pages and slots of each place, the reserved ones included.
        page_tokens: Tokens of a page.
        device: Where the model runs.
        dtype: Format of latents and windows.
    """

    def __init__(
        self, settings: Model, sizes: Sizes, page_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device = Arena.empty(settings, sizes.slots - 1, sizes.pages - 1, page_tokens, device, dtype)
        host = Arena.empty(settings, sizes.host_slots - 1, sizes.host_pages - 1, page_tokens, "cpu", dtype)
        is_pinned = device.type == "cuda" and sizes.host_pages + sizes.host_slots > 0
        if is_pinned:
            host = Arena(host.state.pin_memory(), host.window.pin_memory(), host.latent.pin_memory())
        self.host = host

    def _parts(self, kind: Kind, place: Place) -> tuple[Tensor, ...]:
        arena = self.device if place == "device" else self.host
        return (arena.latent,) if kind == "page" else (arena.state, arena.window)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy in the order given; neighbours of one direction go together."""
        for (kind, source, target), some in groupby(copies, key=lambda one: (one.kind, one.source, one.target)):
            pairs = [(one.source_index, one.target_index) for one in some]
            read, write = zip(*pairs, strict=True)
            for here, there in zip(self._parts(kind, source), self._parts(kind, target), strict=True):
                if here.is_cuda == there.is_cuda:
                    there[:, on_device(write, there.device)] = here[:, on_device(read, here.device)]
                else:  # one at a time, so that what crosses the bus is never held twice
                    for one, other in pairs:
                        there[:, other].copy_(here[:, one], non_blocking=True)
        if self.device.latent.is_cuda and self.host.latent.numel() + self.host.state.numel():
            torch.cuda.current_stream(self.device.latent.device).synchronize()

    def clear(self, slots: Sequence[int]) -> None:
        """Fill slots with zeros: sequences begin there."""
        self._fill("slot", slots, 0.0)

    def poison(self, kind: Kind, indices: Sequence[int]) -> None:
        """Fill what belongs to nobody with NaN: whoever reads it shows."""
        self._fill(kind, indices, float("nan"))

    def _fill(self, kind: Kind, indices: Sequence[int], value: float) -> None:
        if indices:
            for part in self._parts(kind, "device"):
                part[:, on_device(indices, part.device)] = value

    def read(self, kind: Kind, place: Place, index: int) -> bytes:
        """Return the bytes of one piece: for a slot all states, then all windows; layer after layer."""
        pieces = [part[:, index].contiguous().cpu() for part in self._parts(kind, place)]
        return b"".join(piece.view(torch.uint8).numpy().tobytes() for piece in pieces if piece.numel())

    def write(self, kind: Kind, place: Place, index: int, data: bytes) -> None:
        """Put the bytes of one piece where they belong; the inverse of `read`."""
        content, first = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0), 0
        for part in self._parts(kind, place):
            size = part[:, :1].numel() * part.itemsize
            part[:, index] = content[first : first + size].view(part.dtype).view(part[:, 0].shape).to(part.device)
            first += size

    def piece_bytes(self, kind: Kind) -> int:
        """Return the bytes of one piece."""
        return self.device.page_bytes if kind == "page" else self.device.slot_bytes
