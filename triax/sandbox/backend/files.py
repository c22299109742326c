"""The files of a machine whose tree the host reaches: every call of them, off the loop."""

import asyncio
from abc import ABC, abstractmethod

from triax.sandbox.backend.tree import Tree
from triax.sandbox.protocol import Entry


class ReachedFiles(ABC):
    """What a machine does with files, by way of `files_at`."""

    @abstractmethod
    def files_at(self, *paths: str) -> Tree:
        """Return the tree that paths lie in.

        Raises:
            SandboxError: They cannot be reached now, or not at all.
        """

    async def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a file."""
        return await asyncio.to_thread(self.files_at(path).read, path, offset, limit)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Replace a file."""
        await asyncio.to_thread(self.files_at(path).write, path, data, mode)

    async def list(self, path: str) -> list[Entry]:
        """Return what a folder holds."""
        return await asyncio.to_thread(self.files_at(path).list, path)

    async def stat(self, path: str) -> Entry:
        """Return one entry."""
        return await asyncio.to_thread(self.files_at(path).stat, path)

    async def remove(self, path: str) -> None:
        """Remove a file or folder."""
        await asyncio.to_thread(self.files_at(path).remove, path)

    async def rename(self, source: str, destination: str) -> None:
        """Move a file or folder."""
        await asyncio.to_thread(self.files_at(source, destination).rename, source, destination)

    async def make_directory(self, path: str) -> None:
        """Make a folder and those above it."""
        await asyncio.to_thread(self.files_at(path).make_directory, path)
