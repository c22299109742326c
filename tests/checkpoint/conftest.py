"""Miniatures of the released checkpoints, and a witness of what reaches the disk in which order."""

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def miniature():
    """The module `miniature.py` beside this file."""
    spec = importlib.util.spec_from_file_location("miniature", Path(__file__).parent / "miniature.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Disk:
    """What was synced and renamed: after a power cut only what was synced before its rename is sure to be there."""

    def __init__(self):
        self.synced = {}
        self.renamed = []
        self.unsafe = []

    def sync(self, path):
        self.synced[path] = self.state(path)
        self.renamed = [(old, new) for old, new in self.renamed if new.parent != path]

    @staticmethod
    def state(path):
        return None if path.is_dir() else (path.stat().st_size, path.stat().st_mtime_ns)

    def rename(self, old, new):
        if new.name.endswith(".tmp"):
            return  # on its way to be deleted
        inside = [old, *old.rglob("*")] if old.is_dir() else [old]
        for path in inside:
            if path not in self.synced or self.synced[path] != self.state(path):
                self.unsafe.append(f"{path} was renamed as {new.name} and not synced before")
        self.renamed.append((old, new))

    def check(self):
        """Whether all that was renamed lies safely under its name."""
        assert not self.unsafe
        assert not self.renamed, "the folder was not synced after the last rename"


@pytest.fixture
def disk(monkeypatch):
    """Watch syncs and renames of this process."""
    seen = Disk()
    sync, rename, replace = os.fsync, os.rename, os.replace

    def watched_sync(handle):
        sync(handle)
        number = handle if isinstance(handle, int) else handle.fileno()
        seen.sync(Path(os.readlink(f"/proc/self/fd/{number}")))

    def watched(act):
        def move(old, new, **options):
            seen.rename(Path(old), Path(new))
            act(old, new, **options)

        return move

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "rename", watched(rename))
    monkeypatch.setattr(os, "replace", watched(replace))
    return seen
