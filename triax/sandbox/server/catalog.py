"""Names that outlive the server: templates that clients made, and what they called their snapshots."""

import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from triax.config.sandbox import Template
from triax.errors import SandboxError


@dataclass
class Kept:
    """A template and how it was used.

    Args:
        id: What clients address it by, besides its name.
        name: Its name.
        template: What sandboxes it makes.
        created_s: When it was made, seconds since 1970.
        spawned: Sandboxes made from it.
        last_spawned_s: When the last one was; none for never.
        is_configured: Whether the server's settings hold it; such a one cannot be deleted.
    """

    id: str
    name: str
    template: Template
    created_s: float = field(default_factory=time.time)
    spawned: int = 0
    last_spawned_s: float | None = None
    is_configured: bool = False


class Catalog:
    """Templates and names of snapshots, in one file that is replaced as a whole.

    Args:
        path: The file.
        configured: Templates of the server's settings, which win over kept ones of the same name.
    """

    def __init__(self, path: Path, configured: Mapping[str, Template]) -> None:
        self.path = path
        tree = self._read()
        self.snapshot_names: dict[str, str] = tree["snapshots"]
        kept = [
            Kept(**one | {"template": Template.model_validate(one["template"])})
            for one in tree["templates"]
            if one["name"] not in configured
        ]
        kept += [Kept(name, name, template, is_configured=True) for name, template in configured.items()]
        self._templates = {one.id: one for one in kept}

    def templates(self) -> list[Kept]:
        """Return all templates, the oldest first."""
        return sorted(self._templates.values(), key=lambda one: one.created_s)

    def find(self, id_or_name: str) -> Kept | None:
        """Return a template by id or name, with or without a tag such as `:latest`; None if there is none."""
        plain = id_or_name.removesuffix(":latest").removesuffix(":default")
        for one in self._templates.values():
            if plain in (one.id, one.name):
                return one
        return None

    def add(self, name: str, template: Template) -> Kept:
        """Keep a template.

        Raises:
            SandboxError: The name is taken.
        """
        if self.find(name) is not None or name in self.snapshot_names:
            raise SandboxError(
                f"template `{name}`: the name is taken; choose another, or delete it first", "refused", status=409
            )
        kept = Kept(secrets.token_hex(10), name, template)
        self._templates[kept.id] = kept
        self._write()
        return kept

    def remove(self, kept: Kept) -> None:
        """Forget a template; sandboxes made from it stay.

        Raises:
            SandboxError: The server's settings hold it.
        """
        if kept.is_configured:
            raise SandboxError(
                f"template `{kept.name}`: it belongs to the server's settings; remove it there", "refused", status=403
            )
        del self._templates[kept.id]
        self._write()

    def count(self, kept: Kept) -> None:
        """Note that a sandbox was made from a template; the file learns of it with the next change."""
        kept.spawned += 1
        kept.last_spawned_s = time.time()

    def name_snapshot(self, name: str, snapshot_id: str) -> None:
        """Let a name stand for a snapshot from now on, also if it stood for another."""
        if self.find(name) is not None:
            raise SandboxError(f"snapshot `{name}`: a template has this name; choose another", "refused", status=409)
        self.snapshot_names[name] = snapshot_id
        self._write()

    def names_of(self, snapshot_id: str) -> list[str]:
        """Return the names of a snapshot."""
        return sorted(name for name, known in self.snapshot_names.items() if known == snapshot_id)

    def snapshot_id(self, id_or_name: str) -> str:
        """Return the id that a name stands for; what is no name is an id already."""
        plain = id_or_name.removesuffix(":latest").removesuffix(":default")
        return self.snapshot_names.get(id_or_name) or self.snapshot_names.get(plain) or plain

    def forget_snapshot(self, snapshot_id: str) -> None:
        """Drop the names of a snapshot that is gone."""
        for name in self.names_of(snapshot_id):
            del self.snapshot_names[name]
        self._write()

    def _read(self) -> dict:
        try:
            tree = json.loads(self.path.read_text())
            return {"templates": list(tree["templates"]), "snapshots": dict(tree["snapshots"])}
        except FileNotFoundError:
            return {"templates": [], "snapshots": {}}
        except (ValueError, KeyError, TypeError) as problem:
            raise SandboxError(
                f"{self.path}: not a catalog of sandboxes; found `{problem}`; move it away, and templates and names of "
                "snapshots start anew"
            ) from None

    def _write(self) -> None:
        kept = [
            asdict(one) | {"template": one.template.model_dump()}
            for one in self._templates.values()
            if not one.is_configured
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        with beside.open("w") as file:
            json.dump({"templates": kept, "snapshots": self.snapshot_names}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
