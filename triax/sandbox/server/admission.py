"""Who may begin: what all sandboxes of a server take together, held against its quotas before another one takes it."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from triax.config.sandbox import Quotas
from triax.errors import SandboxError
from triax.sandbox.protocol import Resources
from triax.sandbox.sandbox import Sandbox


class Admission:
    """What sandboxes take, and what those take that are being made.

    Args:
        quotas: What all may take together.
        sandboxes: Gives the sandboxes that clients made.
    """

    def __init__(self, quotas: Quotas, sandboxes: Callable[[], Sequence[Sandbox]]) -> None:
        self.quotas = quotas
        self._sandboxes = sandboxes
        self._promised: list[Resources] = []

    def live(self) -> Sequence[Sandbox]:
        """Return the sandboxes that have a machine."""
        return [one for one in self._sandboxes() if one.status not in ("dead", "lost", "failed", "suspended")]

    @contextmanager
    def promised(self, wanted: Resources, count: int = 1) -> Generator[None, None, None]:
        """Keep a place for sandboxes that are made within the block: others that ask meanwhile are told of it.

        Raises:
            SandboxError: There is none; kind `refused`, status 429.
        """
        self._check(wanted, count, self._disk() + count * wanted.disk_mib)
        promise = [wanted] * count
        self._promised += promise
        try:
            yield
        finally:
            for one in promise:
                self._promised.remove(one)

    def check_resumed(self, sandbox: Sandbox) -> None:
        """Refuse to bring a suspended sandbox back where no place is left; its disk is counted all the time.

        Raises:
            SandboxError: There is none; kind `refused`, status 429.
        """
        self._check(sandbox.spec.resources, 1, self._disk())

    def _disk(self) -> int:
        kept = [sandbox.spec.resources for sandbox in self._sandboxes() if sandbox.status == "suspended"]
        return sum(one.disk_mib for one in [*self._here(), *kept])

    def _here(self) -> list[Resources]:
        return [sandbox.spec.resources for sandbox in self.live()] + self._promised

    def _check(self, wanted: Resources, count: int, disk_mib: int) -> None:
        quotas, here = self.quotas, self._here()
        sums = [
            ("sandboxes", len(here) + count, quotas.sandboxes),
            ("cpus", sum(one.cpus for one in here) + count * wanted.cpus, quotas.cpus),
            ("memory_mib", sum(one.memory_mib for one in here) + count * wanted.memory_mib, quotas.memory_mib),
            ("disk_mib", disk_mib, quotas.disk_mib),
        ]
        for name, total, limit in sums:
            if limit is not None and total > limit:
                raise SandboxError(
                    f"quota {name}: all sandboxes may have {limit:g}; found {total:g} with what is asked; end some",
                    "refused",
                    status=429,
                )
