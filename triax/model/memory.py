"""Memory that many sequences share: state slots of the KDA layers, latent pages of the MLA layers.

A slot is what all KDA layers hold of one sequence (states and convolution windows), a page what all MLA layers hold of
a few of its tokens. A forward works on them where they lie; who owns which is not decided here.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.config.model import Model
from triax.errors import ConfigError
from triax.kernels.dispatch import mode
from triax.kernels.kda import stepped
from triax.kernels.kda.decode import replay
from triax.kernels.kda.slots import Records, Slots
from triax.model.device import on_device
from triax.model.layout import Layout


@dataclass(frozen=True)
class Arena:
    """All slots and pages; number 0 of each is for padding and never anybody's."""

    state: Float[Tensor, "kda slots H K V"]
    """States, key channel by value channel; fp32 or wider."""
    window: Float[Tensor, "kda slots past C"]
    """Inputs of the short convolutions before the next token."""
    latent: Float[Tensor, "mla pages page L"]
    """Normalised latents with the shared key part behind."""
    has_kernels: bool = False
    """Whether sequences with few new tokens go through the forms of `kernels.kda.decode` and `kernels.mla.decode`."""

    @classmethod
    def empty(
        cls,
        settings: Model,
        num_slots: int,
        num_pages: int,
        page_tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Arena":
        """Return zeros for so many slots and pages beside the reserved ones.

        Args:
            settings: Shape of the decoder.
            num_slots: Sequences and snapshots.
            num_pages: Pages.
            page_tokens: Tokens of a page.
            device: Where they lie.
            dtype: Format of latents and windows; states are fp32 or wider.
        """
        mla = sum(settings.is_mla(layer) for layer in range(settings.num_layers))
        wide, count = torch.promote_types(dtype, torch.float32), settings.num_layers - mla
        state, window, latent = (
            (count, num_slots + 1, 0, 0, 0),
            (count, num_slots + 1, 0, 0),
            (0, num_pages + 1, page_tokens, 1),
        )
        if settings.kda is not None and count:
            heads, dim = settings.kda.num_heads, settings.kda.head_dim
            state = (count, num_slots + 1, heads, dim, dim)
            window = (count, num_slots + 1, settings.kda.conv_kernel - 1, 3 * heads * dim)
        if settings.mla is not None and mla:
            latent = (mla, num_pages + 1, page_tokens, settings.mla.kv_latent_dim + settings.mla.rope_dim)
        return cls(
            _zeros(state, device, wide),
            _zeros(window, device, dtype),
            _zeros(latent, device, dtype),
            torch.device(device).type == "cuda",
        )

    @property
    def num_slots(self) -> int:
        """Slots that can be somebody's: numbers 1 to this."""
        return self.state.shape[1] - 1

    @property
    def num_pages(self) -> int:
        """Pages that can be somebody's: numbers 1 to this."""
        return self.latent.shape[1] - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(part[:, :1].numel() * part.itemsize for part in (self.state, self.window))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.latent[:, :1].numel() * self.latent.itemsize


def _zeros(shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype) -> Tensor:
    if torch.device(device).type != "cpu" or not prod(shape):
        return torch.zeros(shape, device=device, dtype=dtype)
    # memory that the system hands out zeroed, so that what is never used is never touched
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class Drafts(NamedTuple):
    """What one KDA layer keeps of tokens that are tried, until it is known how many of them stay."""

    mixed: Float[Tensor, "T C"]
    """Inputs of the convolution."""
    key: Float[Tensor, "T H K"]
    value: Float[Tensor, "T H V"]
    kept: Float[Tensor, "T H K"]
    beta: Float[Tensor, "T H"]


@dataclass
class KdaSlots:
    """One KDA layer's part of a memory."""

    state: Float[Tensor, "slots H K V"]
    window: Float[Tensor, "slots past C"]
    memory: "Memory"
    drafts: Drafts | Records | None = None
    """Of the rows that are not kept, once the layer has run; with kernels of all early rows."""


@dataclass
class MlaPages:
    """One MLA layer's part of a memory."""

    latent: Float[Tensor, "pages page L"]
    memory: "Memory"

    def append(self, latent: Float[Tensor, "T L"]) -> None:
        """Write the new tokens' latents where their sequences continue."""
        self.latent.view(-1, latent.shape[1])[self.memory.places] = latent.detach().to(self.latent.dtype)

    def seen(self, first: int, totals: Layout) -> Float[Tensor, "S L"]:
        """Return all latents of the sequences from `first` on, laid end to end.

        Args:
            first: Number of the first sequence.
            totals: Latents that each has.
        """
        device, page = self.latent.device, self.latent.shape[1]
        place, row = totals.positions(device=device), totals.sequence(device) + first
        return self.latent.view(-1, self.latent.shape[2])[self.memory.tables[row, place // page] * page + place % page]


class Part(NamedTuple):
    """One sequence's share of a forward."""

    slot: int
    """Where its states are."""
    pages: Sequence[int]
    """Where its latents are, covering all its tokens after this forward."""
    position: int
    """Tokens that slot and pages hold before."""
    length: int
    """Tokens that this forward adds."""
    is_kept: bool = True
    """Whether they are final; else the slot stays as it is until `Memory.accept` says how many of them are."""
    real: int | None = None
    """With kernels: how many of them are no padding; None is all."""


class Memory:
    """What a decoder continues in one forward: a slot and a page table for each sequence of the layout.

    Args:
        arena: Where everything is.
        parts: Sequences in the order of the stream: those that decode or try drafts, then those that prefill. With
            kernels the early ones have the same length, and where one of them is not kept, none is.
        num_early: How many of them decode or try drafts.
        num_pads: Tokens of padding at the end of the stream.
    """

    seen: Int[Tensor, "N W"]
    """With kernels: latents that each token of the early rows sees, 0 for padding."""

    def __init__(self, arena: Arena, parts: Sequence[Part], num_early: int, num_pads: int = 0) -> None:
        assert all(part.is_kept for part in parts[num_early:]), "only early rows try drafts"
        self.arena, self.parts, self.num_early, self.num_pads = arena, tuple(parts), num_early, num_pads
        is_invariant = mode() == "batch_invariant"
        self.has_kernels = arena.has_kernels and not is_invariant
        """Whether early sequences go through kernels, all with the same number of tokens."""
        self.num_stepwise = len(parts) if is_invariant else num_early
        """The first so many sequences advance token by token, the others in chunks."""
        every = [*parts, Part(0, (0,), 0, num_pads)] if num_pads else [*parts]
        self.layout = Layout.of([part.length for part in every])
        self.early = self.layout.starts[num_early]
        """Tokens of the first sequences."""
        self.lengths = [part.position for part in every]
        device, page = arena.latent.device, arena.latent.shape[2]
        columns = max((len(part.pages) for part in every), default=1)
        self.slots = on_device([part.slot for part in every], device)
        tables = [page for part in every for page in (*part.pages, *[0] * (columns - len(part.pages)))]
        self.tables = on_device(tables, device).view(len(every), columns)
        self.positions = self.layout.positions(self.lengths, device)
        if any(part.real is not None and part.real < part.length for part in parts):
            most = on_device([len(part.pages) * page - 1 for part in every], device)
            self.positions = torch.minimum(self.positions, most[self.layout.sequence(device)])
        if num_pads:  # all of it goes to the first place of the reserved page
            self.positions = self.positions.clone()
            self.positions[self.layout.num_tokens - num_pads :] = 0
        row = self.layout.sequence(device)
        self.places = self.tables[row, self.positions // page] * page + self.positions % page
        if self.has_kernels and num_early:
            self.seen = (self.positions[: self.early] + 1).view(num_early, -1).int()
            if self.seen.shape[1] > 1:  # padding sees nothing and is written where nobody reads
                real = on_device([part.real or part.length for part in parts[:num_early]], device)
                is_pad = torch.arange(self.seen.shape[1], device=device) >= real[:, None]
                self.seen.masked_fill_(is_pad, 0)
                self.places[: self.early].masked_fill_(is_pad.flatten(), 0)
            self.tables, self.slots = self.tables.int(), self.slots.int()
        self.layers: list[KdaSlots | MlaPages] = []

    @classmethod
    def of(cls, settings: Model, arena: Arena, parts: Sequence[Part], num_early: int, num_pads: int = 0) -> "Memory":
        """Return a memory with one entry a layer of the decoder."""
        return cls(arena, parts, num_early, num_pads)._with_layers(settings)

    @classmethod
    def still(
        cls,
        settings: Model,
        arena: Arena,
        slots: Int[Tensor, " N"],
        positions: Int[Tensor, " N"],
        tables: Int[Tensor, "N columns"],
    ) -> "Memory":
        """Return a memory of rows with one token each, all of whose numbers are read from tensors: for CUDA graphs.

        Args:
            settings: Shape of the decoder.
            arena: Where everything is.
            slots: Slot of each row; 0 is padding.
            positions: Tokens that each row has before.
            tables: Pages of each row.
        """
        memory = cls.__new__(cls)
        count, page = len(slots), arena.latent.shape[2]
        memory.arena, memory.parts, memory.num_pads = arena, (), 0
        memory.num_early = memory.num_stepwise = memory.early = count
        memory.has_kernels = arena.has_kernels
        memory.layout, memory.lengths = Layout.of([1] * count), []
        memory.slots, memory.tables, memory.positions = slots, tables, positions
        column = (positions // page).long()[:, None]
        memory.places = tables.gather(1, column).squeeze(-1).long() * page + positions % page
        memory.seen = torch.where(slots > 0, positions + 1, 0).int()[:, None]
        memory.layers = []
        return memory._with_layers(settings)

    def _with_layers(self, settings: Model) -> "Memory":
        kda, mla, arena = itertools.count(), itertools.count(), self.arena
        for layer in range(settings.num_layers):
            if settings.is_mla(layer):
                self.layers.append(MlaPages(arena.latent[next(mla)], self))
            else:
                i = next(kda)
                self.layers.append(KdaSlots(arena.state[i], arena.window[i], self))
        return self

    def check(self, layout: Layout) -> None:
        """Refuse another layout than the one that this memory was made for.

        Raises:
            ConfigError: They differ.
        """
        if layout != self.layout:
            raise ConfigError(
                f"model.memory: the layout must be the memory's own; found {layout.lengths} for "
                f"{self.layout.lengths}; pass `memory.layout`"
            )

    def advance(self, layout: Layout) -> None:
        """Nothing to count: how far each sequence is belongs to whoever owns its slot and pages."""

    def accept(self, counts: Sequence[int]) -> None:
        """Write the first tokens of what was tried into the slots, token by token as decoding would have.

        Args:
            counts: Tokens that stay, for each part that is not kept, in order.
        """
        tried = [n for n, part in enumerate(self.parts) if not part.is_kept]
        assert len(counts) == len(tried)
        if self.has_kernels:
            accepted = on_device(counts, self.slots.device)
            for layer in self.layers:
                if isinstance(layer, KdaSlots):
                    assert isinstance(layer.drafts, Records)
                    replay(layer.drafts, accepted, Slots(layer.state, layer.window), self.slots[: len(tried)])
            return
        chosen = [(n, count) for n, count in zip(tried, counts, strict=True) if count]
        if not chosen:
            return
        slots = self.slots[[n for n, _ in chosen]]
        firsts = [self.layout.starts[n] for n, _ in chosen]
        for layer in self.layers:
            if isinstance(layer, KdaSlots):
                assert isinstance(layer.drafts, Drafts)
                _accept(layer, layer.drafts, slots, firsts, [count for _, count in chosen])


def _accept(layer: KdaSlots, drafts: Drafts, slots: Tensor, firsts: list[int], counts: list[int]) -> None:
    past = layer.window.shape[1]
    state, window = layer.state[slots], layer.window[slots]  # of the few rows that try drafts
    for depth in range(max(counts)):
        rows = [n for n, count in enumerate(counts) if count > depth]
        token = on_device([firsts[n] + depth for n in rows], slots.device)
        some = state[rows]
        stepped.write(drafts.key[token], drafts.value[token], drafts.kept[token], drafts.beta[token], some)
        state[rows] = some
    layer.state[slots] = state
    for n, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        seen = torch.cat([window[n], drafts.mixed[first : first + count].to(window.dtype)])
        layer.window[slots[n]] = seen[len(seen) - past :]
