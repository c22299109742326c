"""An engine's prefixes on disk: under names that only the same weights and the same bytes have."""

import time
from pathlib import Path

from triax.config.serve import Serve
from triax.model.decoder import Decoder
from triax.serve.arena import Store
from triax.serve.cache.disk import Disk
from triax.serve.cache.manager import Manager
from triax.serve.weights import fingerprint

SAVED_WHEN_IDLE = 4  # snapshots written in one idle step


class Saved:
    """The folder of the settings, if they name one, and any other on request.

    Args:
        settings: Of the engine.
        model: Whose prefixes they are.
        manager: What is known of them.
        store: Where their bytes lie.
    """

    def __init__(self, settings: Serve, model: Decoder, manager: Manager, store: Store) -> None:
        self._settings, self._model, self._manager, self._store = settings, model, manager, store
        self._disk: Disk | None = None
        self._saved_s = time.monotonic()
        self.open()

    def open(self) -> None:
        """Take in what the folder holds of these weights; call it again when they have changed."""
        disk = self._settings.cache.disk
        if disk is not None:
            if self._disk is not None:
                self._disk.close()
            self._disk = Disk(disk.path, self._identity(), disk.memory_bytes)
            self._disk.load(self._manager, self._store)

    def _identity(self) -> str:
        arena, settings = self._store.device, self._settings
        layout = f"{settings.cache.page_tokens} {arena.state.dtype} {arena.latent.dtype} {arena.latent.device.type}"
        return f"{fingerprint(self._model)} {layout} {settings.is_deterministic}"

    def save_some(self, *, is_idle: bool) -> int:
        """Write a few snapshots where nothing else is to be done, else one from time to time; returns how many."""
        disk, settings = self._disk, self._settings.cache.disk
        if disk is None or settings is None or not self._manager.unsaved:
            return 0
        now = time.monotonic()
        if not is_idle and now - self._saved_s < settings.save_s:
            return 0
        self._saved_s = now
        return disk.save(self._manager, self._store, SAVED_WHEN_IDLE if is_idle else 1)

    def close(self) -> None:
        """Write the rest and let others use the folder."""
        if self._disk is not None:
            self._disk.save(self._manager, self._store)
            self._disk.close()
            self._disk = None

    def save_to(self, folder: Path) -> int:
        """Write all known prefixes into a folder and return how many snapshots that are."""
        disk = Disk(folder, self._identity(), 1 << 62)
        try:
            return disk.save(self._manager, self._store)
        finally:
            disk.close()

    def load_from(self, folder: Path) -> int:
        """Take in prefixes of the same weights from a folder and return how many snapshots that are."""
        disk = Disk(folder, self._identity(), 1 << 62)
        try:
            return disk.load(self._manager, self._store)
        finally:
            disk.close()
