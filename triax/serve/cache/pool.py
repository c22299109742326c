"""Numbers of equal pieces of memory, counted by how many hold each."""


class Pool:
    """Hands out numbers from `first` to `size` - 1; a number is free again when its last holder drops it.

    Args:
        size: Pieces of memory there are.
        first: First number to hand out; those before it belong to nobody.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first
        self.holders = [0] * size
        self._free = list(range(size - 1, first - 1, -1))

    @property
    def num_free(self) -> int:
        """Pieces that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pieces that somebody holds."""
        return self.size - self.first - len(self._free)

    def free(self) -> list[int]:
        """Return the numbers that nobody holds."""
        return list(self._free)

    def take(self) -> int | None:
        """Return a free number, held once; None if there is none."""
        if not self._free:
            return None
        index = self._free.pop()
        self.holders[index] = 1
        return index

    def share(self, index: int) -> int:
        """Count one more holder."""
        assert self.holders[index] > 0, f"page or slot {index} is free and cannot be shared"
        self.holders[index] += 1
        return index

    def drop(self, index: int) -> None:
        """Count one holder less."""
        assert self.holders[index] > 0, f"page or slot {index} is free and cannot be dropped"
        self.holders[index] -= 1
        if not self.holders[index]:
            self._free.append(index)
