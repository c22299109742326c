"""Decode steps as CUDA graphs: one for each number of rows and of pages, recorded when it is first needed."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.config.serve import Serve
from triax.kernels.draw import Drawn, Ways, draw
from triax.model.decoder import Decoder
from triax.model.memory import Memory
from triax.serve.arena import Store
from triax.serve.plan import PADDING, PENDING

ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
HEAD = 9  # numbers of a row before its pages: see `_stage`
AHEAD = 3  # steps whose inputs may be on their way to the device at once


class Line(NamedTuple):
    """One row of a step."""

    token: int
    """Or `PENDING`."""
    slot: int
    position: int
    """Tokens before."""
    pages: Sequence[int]
    way: tuple[float, int, float, float, float] = (0.0, 0, 1.0, 0.0, 0.0)
    """Temperature, top-k, top-p, min-p and the number that decides."""


@dataclass
class Graph:
    """One recorded step; its tensors are overwritten by the next run of any graph."""

    graph: torch.cuda.CUDAGraph
    inputs: Int[Tensor, " numbers"]
    drawn: Drawn
    logits: Float[Tensor, "N V"]


class Graphs:
    """Records and runs steps of one token a row.

    Rows beyond the ones given are padding: they have the reserved slot and page, and write to nobody's memory. The
    numbers of a step reach the device in one copy, and token, slot, table and way of choosing are read there, so that
    nothing of an earlier step is baked in.

    Args:
        model: The decoder, in evaluation mode when a step runs.
        store: Where states and latents lie.
        vocab_size: Tokens that the tokenizer has.
        unsaid: Tokens that are never chosen.
        most_rows: Rows of the largest step.
    """

    latest: Int[Tensor, " slots"]
    """The newest token of each slot; the runner's."""

    def __init__(self, model: Decoder, store: Store, vocab_size: int, unsaid: Tensor, most_rows: int) -> None:
        self.model, self.store, self.vocab_size = model, store, vocab_size
        self.barred = None
        if len(unsaid):
            self.barred = torch.zeros(vocab_size, dtype=torch.bool, device=unsaid.device).index_fill(0, unsaid, True)
        self.rows = [count for count in ROWS if count < most_rows] + [most_rows]
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._staging: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def run(self, lines: Sequence[Line]) -> Graph:
        """Start one step; its results are on the device when the stream comes there."""
        count = self.rows[bisect_left(self.rows, len(lines))]
        columns = 1 << (max(len(line.pages) for line in lines) - 1).bit_length()
        key = (count, max(8, columns))
        if key not in self._graphs:
            self._graphs[key] = self._record(*key)
        graph = self._graphs[key]
        graph.inputs.copy_(self._stage(lines, *key), non_blocking=True)
        self._staging[self._turn][1].record()
        graph.graph.replay()
        return graph

    def _stage(self, lines: Sequence[Line], count: int, columns: int) -> Tensor:
        """Return the numbers of a step in pinned memory that no copy reads any more."""
        self._turn = (self._turn + 1) % AHEAD
        size = count * (HEAD + columns)
        while len(self._staging) <= self._turn:
            self._staging.append((torch.zeros(0, dtype=torch.int32), torch.cuda.Event()))
        buffer, event = self._staging[self._turn]
        event.synchronize()
        if len(buffer) < size:
            buffer = torch.zeros(size, dtype=torch.int32, pin_memory=True)
            self._staging[self._turn] = (buffer, event)
        numbers = buffer[:size].numpy()
        numbers[:] = PADDING
        decimals, doubles = numbers.view(np.float32), numbers[: 2 * count].view(np.float64)
        for row, (token, slot, position, pages, (temperature, top_k, top_p, min_p, uniform)) in enumerate(lines):
            doubles[row], numbers[3 * count + row] = uniform, top_k
            for place, number in ((2, temperature), (4, top_p), (5, min_p)):
                decimals[place * count + row] = number
            for place, number in ((6, token), (7, slot), (8, position)):
                numbers[place * count + row] = number
            first = HEAD * count + row * columns
            numbers[first : first + len(pages)] = pages[:columns]
        return buffer[:size]

    @torch.no_grad()
    def _record(self, count: int, columns: int) -> Graph:
        device = self.model.embed.weight.device
        inputs = torch.zeros(count * (HEAD + columns), dtype=torch.int32, device=device)  # all padding while recorded
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(inputs, count, columns)
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            drawn, logits = self._step(inputs, count, columns)
        return Graph(graph, inputs, drawn, logits)

    def _step(self, inputs: Int[Tensor, " numbers"], count: int, columns: int) -> tuple[Drawn, Tensor]:
        sizes = [2 * count, *[count] * (HEAD - 2), count * columns]
        halves, temperature, top_k, top_p, min_p, given, slots, positions, table = inputs.split(sizes)
        tokens = torch.where(given == PENDING, self.latest[slots], given.long())
        tables = table.view(count, columns)
        memory = Memory.still(self.model.settings, self.store.device, slots, positions, tables)
        hidden = self.model(tokens, memory.layout, memory)
        logits = self.model.logits(hidden).float()[:, : self.vocab_size]
        temperature, top_p, min_p = (part.view(torch.float32) for part in (temperature, top_p, min_p))
        drawn = draw(logits, self.barred, Ways(temperature, top_k, top_p, min_p, halves.view(torch.float64)))
        self.latest[slots] = drawn.token
        return drawn, logits


def graphs_of(
    model: Decoder, store: Store, settings: Serve, most_rows: int, vocab_size: int, unsaid: Sequence[int]
) -> Graphs | None:
    """Return what runs an engine's decode steps as graphs; None on a processor, or where the settings want none.

    Args:
        model: The decoder.
        store: Where states and latents lie.
        settings: Of the engine.
        most_rows: Rows of the largest step.
        vocab_size: Tokens that the tokenizer has.
        unsaid: Tokens that are never chosen.
    """
    device = model.embed.weight.device
    if device.type != "cuda" or not settings.has_graphs or settings.is_deterministic:
        return None
    return Graphs(model, store, vocab_size, torch.tensor(unsaid, dtype=torch.long, device=device), most_rows)
