"""Tokens being generated: a request on its way through the scheduler."""

from dataclasses import dataclass, field

from triax.serve.cache.manager import Holding
from triax.serve.cache.prefix import keys_of
from triax.serve.request import MediaItem, Request


@dataclass(eq=False, slots=True)
class Sequence:
    """One request with what it has so far."""

    number: int
    """Order of arrival; what rows name."""
    request: Request
    class_name: str
    """Class whose share it draws on."""
    arrival_s: float
    """The clock when it came."""
    tokens: list[int]
    """Prompt and answer, as far as they are known."""
    keys: list[int]
    """The tokens as keys of the tree; the same list where there are no pictures."""
    target: int = 0
    """Tokens to compute before the next one can be drawn."""
    planned: int = 0
    """Tokens computed once the plans in flight are done."""
    ahead: int = 0
    """Tokens that plans in flight will draw, as far as their number is certain."""
    in_flight: int = 0
    """Plans under way that have a row of it."""
    last_step: int = -1
    """Step of its latest row."""
    is_uncertain: bool = False
    """Whether a plan in flight gives it a number of tokens that is not known."""
    is_closing: bool = False
    """Whether it has ended and only waits for its plans in flight."""
    is_parking: bool = False
    """Whether it gives its memory back after its plans in flight and waits again."""
    keeps: bool = True
    """Whether what it computed may serve others, once it ends."""
    holding: Holding | None = None
    """Its memory while it runs."""
    scored: int = 0
    """With `score_prompt`: prompt tokens whose rows have come back; rows after a preemption may repeat some."""
    cached_tokens: int | None = None
    """Prompt tokens that were restored when it first ran; None before."""
    matched_tokens: int = 0
    """Prompt tokens whose latents were known when it first ran."""
    refusals: int = 0
    """Plans that had no room for it while it was first of its class."""
    leader: "Sequence | None" = None
    """A running sequence whose prompt begins as this one does, and is about to leave a snapshot."""
    leader_place: int = 0
    """Position of that snapshot."""
    preemptions: int = 0
    failures: int = 0
    """Failed steps that it had a part in."""
    drafted: int = 0
    """Drafts that were verified."""
    accepted: int = 0
    """Drafts that were right."""
    order: tuple[int, int] = field(init=False)
    """Whom it follows: by priority, then by arrival."""

    @classmethod
    def of(cls, number: int, request: Request, class_name: str, arrival_s: float) -> "Sequence":
        """Return a request as a sequence without memory."""
        tokens = list(request.tokens)
        keys = keys_of(request.tokens, request.media) if request.media else tokens
        return cls(number, request, class_name, arrival_s, tokens, keys)

    def __post_init__(self) -> None:
        self.order = (self.request.priority, self.number)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.tokens)

    @property
    def num_left(self) -> int:
        """Tokens that may still be drawn beyond those in flight."""
        return self.request.max_tokens - self.num_generated - self.ahead

    def append(self, tokens: tuple[int, ...]) -> None:
        """Add drawn tokens."""
        self.tokens.extend(tokens)
        if self.keys is not self.tokens:
            self.keys.extend(tokens)

    def media_between(self, start: int, end: int) -> tuple[MediaItem, ...]:
        """Return the pictures with slot tokens from `start` up to `end`."""
        items = self.request.media
        return tuple(m for m in items if m.start < end and start < m.start + m.length) if items else ()
