"""Steps under way: launched, on a GPU still running while the next one is planned, and waited for once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from triax.serve.plan import Row, RowResult, StepResult
from triax.serve.request import Request, TokenInfo
from triax.serve.sampler import Draw, infos
from triax.serve.structure import Guide


@dataclass
class Live:
    """What the runner knows of a sequence."""

    request: Request
    answer: list[int] = field(default_factory=list)
    ahead: int = 0
    """Tokens that steps under way will draw."""
    guide: Guide | None = None
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """Encoded pictures by their digest."""


@runtime_checkable
class Keeper(Protocol):
    """What a step asks of the runner that launched it."""

    sequences: dict[int, Live]

    def kept(
        self, row: Row, drawn: list[int], fine: list[bool], logits: Float[Tensor, "K V"] | None, draws: Sequence[Draw]
    ) -> list[int]:
        """Return a row's new tokens."""
        ...


class Flight:
    """A step that has been launched; its result is waited for once and then known."""

    def __init__(
        self,
        keeper: Keeper,
        rows: tuple[Row, ...],
        token: Tensor | None = None,
        is_valid: Tensor | None = None,
        said: Tensor | None = None,
        tops: Sequence[int | None] = (),
        prompts: Mapping[int, tuple[TokenInfo, ...]] | None = None,
        logprob: Tensor | None = None,
    ) -> None:
        self.keeper, self.rows, self.token, self.is_valid, self.said = keeper, rows, token, is_valid, said
        self.tops, self.prompts, self.logprob = tops, prompts or {}, logprob
        self.draws: Sequence[Draw] = ()
        self._landed: list[Tensor] | None = None
        self._event: torch.cuda.Event | None = None
        self._result: StepResult | None = None

    def depart(self) -> None:
        """Send the tokens on their way to the host."""
        if self.token is not None and self.token.is_cuda and self._result is None:
            parts = [part for part in (self.token, self.is_valid, self.logprob) if part is not None]
            self._landed = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
            for part, place in zip(parts, self._landed, strict=True):
                place.copy_(part, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepResult:
        """Wait for the tokens and return what each row gave."""
        if self._result is None:
            self._result = StepResult(tuple(self._results()))
        return self._result

    def _results(self) -> list[RowResult]:
        drawn: list[int] = []
        fine: list[bool] = []
        logprobs: list[float] = []
        if self._landed is not None and self._event is not None:
            self._event.synchronize()
            drawn, fine, *rest = (part.tolist() for part in self._landed)
            logprobs = rest[0] if rest else []
        elif self.token is not None and self.is_valid is not None:
            drawn, fine = self.token.tolist(), self.is_valid.tolist()
        results: list[RowResult] = []
        reports: list[tuple[int, int, int]] = []  # row of logits, token, alternatives
        owners: list[tuple[int, int]] = []
        first = 0
        for n, row in enumerate(self.rows):
            if not row.samples:
                results.append(RowResult(prompt=self.prompts.get(n, ())))
                continue
            span = slice(first, first + row.drafts + 1)
            said = None if self.said is None else self.said[span]
            tokens = self.keeper.kept(row, drawn[span], fine[span], said, self.draws[span])
            live = self.keeper.sequences.get(row.sequence)
            if live is not None:  # else it has ended meanwhile
                live.ahead -= not row.drafts
                live.answer += tokens
                if live.guide is not None:
                    live.guide.push(tokens)
            top = self.tops[first] if self.tops else None
            known: tuple[TokenInfo, ...] = ()
            if top is not None and logprobs:
                known = tuple(TokenInfo(token, logprobs[first]) for token in tokens)
            elif top is not None:
                reports += [(first + i, token, top) for i, token in enumerate(tokens)]
                owners.append((n, len(tokens)))
            results.append(RowResult(tuple(tokens), known, self.prompts.get(n, ()), bool(tokens)))
            first += row.drafts + 1
        if reports and self.said is not None:
            places, tokens, tops = (list(column) for column in zip(*reports, strict=True))
            table = iter(infos(self.said[torch.tensor(places, device=self.said.device)], tokens, tops))
            for n, count in owners:
                results[n] = replace(results[n], infos=tuple(next(table) for _ in range(count)))
        self.said, self.draws = None, ()
        return results
