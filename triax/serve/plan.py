"""What the scheduler asks of the runner in one step, and what comes back; plain data, without torch.

The order within a step: copies `before` (first all that leave the device, then the others), `clear`, the rows, copies
`after`. Copies `beside` touch nothing that the rest of the step touches and may run at any time before the result.
A plan may be made while the plan before it still runs; plans always run in the order of their numbers.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from triax.serve.request import MediaItem, TokenInfo

Kind = Literal["page", "slot"]
"""The MLA latents of `page_tokens` tokens in all layers; KDA states and windows of one sequence in all layers."""
Place = Literal["device", "host"]

PENDING = -1
"""In `Row.tokens`: the token that the sequence's row in the step before samples; not yet known when planning ahead."""
PADDING = 0
"""The slot and the page that padding rows use; never anybody's."""


class Copy(NamedTuple):
    """All bytes of one page or slot go to another place."""

    kind: Kind
    source: Place
    source_index: int
    target: Place
    target_index: int


class Row(NamedTuple):
    """One sequence's part of a step."""

    sequence: int
    """The scheduler's number of the sequence."""
    tokens: tuple[int, ...]
    """What to compute now; in a decode row planned ahead, `PENDING`."""
    position: int
    """Tokens that are already in slot and pages when the row starts."""
    slot: int
    """Private slot: read at the start, and after the step (and its acceptance) exact at the new position."""
    pages: tuple[int, ...]
    """Page table, covering at least position + len(tokens); token t lies in `pages[t // page_tokens]`."""
    kind: Literal["prefill", "decode", "verify"]
    samples: bool
    """Whether the last token's logits give a new token."""
    drafts: int = 0
    """The last so many tokens are unverified; the first is known."""
    media: tuple[MediaItem, ...] = ()
    """Items with slot tokens among these tokens; an item may begin before them or end after them."""


class Plan(NamedTuple):
    """One step."""

    step: int
    before: tuple[Copy, ...] = ()
    """Restores and write-backs; all land before a row runs."""
    clear: tuple[int, ...] = ()
    """Slots to fill with zeros after `before`: those of sequences that start at position 0."""
    rows: tuple[Row, ...] = ()
    """Decode and verify rows first, then prefill rows; never two of one sequence."""
    after: tuple[Copy, ...] = ()
    """Snapshots of private slots, taken once all rows are done."""
    beside: tuple[Copy, ...] = ()
    """Prefetches for sequences that wait."""
    decode_tokens: int = 0
    """Tokens of decode and verify rows."""
    prefill_tokens: int = 0
    """Tokens of prefill rows."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run: neither rows nor copies."""
        return not (self.rows or self.before or self.after or self.beside)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row gave."""

    tokens: tuple[int, ...] = ()
    """New tokens: none for a row that does not sample, one for decode, accepted drafts and one more for verify."""
    infos: tuple[TokenInfo, ...] = ()
    """One for each new token where asked for."""
    prompt: tuple[TokenInfo, ...] = ()
    """With `score_prompt`: tokens after this row's tokens, as far as they are the prompt's."""
    is_valid: bool = True
    """False where logits were no distribution: the sequence ends and nothing of this row is kept."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, once all of it (copies too) is done."""

    rows: tuple[RowResult, ...]
    """One for each row of the plan, in its order."""
