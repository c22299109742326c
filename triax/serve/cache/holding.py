"""What one running sequence has in memory."""

from dataclasses import dataclass, field

from triax.serve.cache.prefix import Node


@dataclass(eq=False, slots=True)
class Holding:
    """What one running sequence has in memory: private slot, page table, position, and its place in the tree."""

    number: int
    keys: list[int]
    """Its tokens as keys of the tree; the sequence appends to it."""
    salt: str
    epoch: int
    """Of the tree when it was admitted; nothing goes from one epoch to another."""
    slot: int
    pages: list[int]
    node: Node
    """Deepest whole page that it has found or published; pinned."""
    published: int
    """Whole pages down to there."""
    position: int
    """Tokens in slot and pages, once the steps that were committed are done."""
    cached: int
    """Tokens that were restored."""
    matched: int
    """Tokens whose latents were known."""
    deepest: int
    """Position of the deepest snapshot of this very prefix."""
    places: list[int] = field(default_factory=list)
    """Positions after which to take a snapshot, in order."""
    tail: Node | None = None
    """Partly filled page that it has published; pinned."""
    is_void: bool = False
    """Whether its memory is not to be trusted."""
    _table: tuple[int, ...] | None = None

    @property
    def table(self) -> tuple[int, ...]:
        """The page table."""
        if self._table is None:
            self._table = tuple(self.pages)
        return self._table

    def set_page(self, index: int, page: int) -> None:
        """Put another page with the same latents into the table."""
        self.pages[index], self._table = page, None

    def extend(self, pages: list[int]) -> None:
        """Add pages at the table's end."""
        self.pages += pages
        self._table = None
