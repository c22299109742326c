"""Machines of any E2B-compatible service: AgentENV, E2B, or a server of ours on another machine."""

import asyncio
import json
import posixpath
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from triax.errors import SandboxError
from triax.sandbox.backend.remote_calls import Guest, Service
from triax.sandbox.backend.remote_process import RemoteProcess, feed
from triax.sandbox.command import variables, words
from triax.sandbox.protocol import (
    OUTPUT_LIMIT,
    Capabilities,
    Check,
    Entry,
    Machine,
    Process,
    Result,
    Spec,
    Usage,
)

OWNER, LABEL = "owner", "label"
"""Names of the metadata by which the service's sandboxes are known to be ours, and which."""

REFERENCE = "remote.json"
LONGEST_LIFE_S = 86_400
GRACE_S = 15.0
"""Seconds that the service may take beyond a command's limit to say that the limit was met."""

_KINDS: dict[str, Literal["file", "directory", "symlink", "other"]] = {
    "FILE_TYPE_FILE": "file",
    "FILE_TYPE_DIRECTORY": "directory",
    "FILE_TYPE_SYMLINK": "symlink",
}
FULL = Capabilities(
    memory_snapshot=True,
    disk_snapshot=True,
    fork_running=True,
    suspend=True,
    network_policy=True,
    terminals=True,
    oci_images=True,
)
"""What E2B and AgentENV can do, as seen from outside."""


class RemoteBackend:
    """Machines that a service makes and keeps; here only their addresses are held.

    The service's own time limit is set long and prolonged with use: the owner's limit decides.

    Args:
        service: The service.
        owner: A name under which this owner's sandboxes are found again; the service keeps it with each.
        template: What a spec without an image is made from.
        capabilities: What the service can do; what it cannot it refuses itself.
    """

    name = "remote"

    def __init__(
        self,
        service: Service,
        *,
        owner: str,
        template: str = "base",
        capabilities: Capabilities = FULL,
    ) -> None:
        self.service = service
        self.owner = owner
        self.template = template
        self.capabilities = capabilities

    async def create(self, spec: Spec, id: str) -> "RemoteMachine":
        """Have a sandbox made from the template that the spec's image names."""
        return await self._make(spec, id, spec.image or self.template, 0)

    async def find(self, id: str) -> "RemoteMachine":
        """Return a machine for a sandbox that the service has already.

        Raises:
            SandboxError: It has none with this id.
        """
        told = await self.service.ask("GET", f"/sandboxes/{quote(id, safe='')}")
        return self._known(told, Spec(), int(told.get("generation", 0)))

    async def restore(
        self, folder: Path, spec: Spec, id: str, generation: int, *, deterministic: bool = False
    ) -> "RemoteMachine":
        """Have a sandbox made from a snapshot that the service keeps."""
        return await self._make(spec, id, _snapshot_of(folder), generation)

    async def _make(self, spec: Spec, id: str, template: str, generation: int) -> "RemoteMachine":
        limits = {
            "allow_internet_access": spec.network.allow_internet,
            "network": {"allowOut": list(spec.network.allow_out)} if spec.network.allow_out else {},
        }
        wish = {
            "templateID": template,
            "timeout": LONGEST_LIFE_S,
            "autoPause": True,
            "metadata": {**spec.metadata, OWNER: self.owner, LABEL: id},
            "envVars": dict(spec.env),
            **limits,
        }
        key = {"Idempotency-Key": f"{self.owner}-{id}-{generation}".lower().replace("_", "-")}
        told = await self.service.ask("POST", "/v2/sandboxes", wish, headers=key, timeout_s=300.0)
        return self._known(told, spec, generation)

    def _known(self, told: Mapping[str, Any], spec: Spec, generation: int) -> "RemoteMachine":
        id = str(told["sandboxID"])
        address = self.service.address(id, told.get("domain"))
        return RemoteMachine(self, Guest(self.service, id, address, told.get("envdAccessToken")), spec, generation)

    async def reap(self, live: frozenset[str]) -> list[str]:
        """End this owner's sandboxes whose label is not `live`."""
        ended = []
        for one in await self.service.every("/v2/sandboxes", {"metadata": f"{OWNER}={self.owner}"}):
            if one.get("metadata", {}).get(LABEL) not in live:
                await self.service.ask("DELETE", f"/sandboxes/{one['sandboxID']}")
                ended.append(f"sandbox {one['sandboxID']} of {self.service.url}")
        return ended

    async def checks(self) -> list[Check]:
        """Return whether the service answers, and takes the key."""
        try:
            await self.service.ask("GET", "/v2/sandboxes", query={"limit": "1"})
        except SandboxError as problem:
            return [Check("service", False, str(problem), f"start the service at {self.service.url}, or give its key")]
        return [Check("service", True, f"{self.service.url} answers")]


class RemoteMachine:
    """One sandbox of the service.

    Args:
        backend: Where it came from.
        guest: Its data plane.
        spec: What was asked for.
        generation: How often it was restored or forked from.
    """

    def __init__(self, backend: RemoteBackend, guest: Guest, spec: Spec, generation: int) -> None:
        self.backend = backend
        self.guest = guest
        self.spec = spec
        self.generation = generation
        self._ended = False

    async def exec(
        self,
        argv: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> Result:
        """Run a command to its end; a limit is the service's to keep, and ours if it does not."""
        started = time.monotonic()
        process = RemoteProcess(self.guest, user or self.spec.user, waiting_bytes=None)
        await process.begin(self._wish(argv, env, cwd, bool(stdin)), timeout_s)
        kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        truncated = False
        feeding = asyncio.create_task(feed(process, stdin)) if stdin else None
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + GRACE_S):
                async for name, data in process.output():
                    room = max(0, output_limit - len(kept[name]))
                    kept[name] += data[:room]
                    truncated |= len(data) > room
                ended = await process.wait()
        except TimeoutError:
            with suppress(SandboxError):
                await process.kill(9)
            ended = Result("timeout", detail=f"ended after its limit of {timeout_s:g} s")
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await asyncio.shield(process.kill(9))
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
            await process.close()
        return Result(
            ended.outcome,
            ended.exit_code,
            ended.signal,
            bytes(kept["stdout"]),
            bytes(kept["stderr"]),
            truncated,
            time.monotonic() - started,
            ended.detail,
        )

    async def start(
        self,
        argv: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> "Process":
        """Start a process that lives on."""
        wish = self._wish(argv, env, cwd, True)
        if terminal is not None:
            wish["pty"] = {"size": {"rows": terminal[0], "cols": terminal[1]}}
        process = RemoteProcess(self.guest, user or self.spec.user, has_terminal=terminal is not None)
        await process.begin(wish, None)
        return process

    def _wish(
        self, argv: Sequence[str] | str, env: Mapping[str, str] | None, cwd: str | None, stdin: bool
    ) -> dict[str, Any]:
        if self._ended:
            raise SandboxError(f"sandbox {self.guest.id}: has ended; create another")
        program, *arguments = words(argv)
        config: dict[str, Any] = {"cmd": program, "args": arguments, "envs": variables(env)}
        if cwd or self.spec.cwd:
            config["cwd"] = cwd or self.spec.cwd
        return {"process": config, "stdin": stdin}

    async def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a file; a service that knows no ranges sends it whole."""
        if limit == 0:
            return b""
        headers = {}
        if offset or limit is not None:
            headers["Range"] = f"bytes={offset}-{'' if limit is None else offset + limit - 1}"
        answer = await self.guest.send("GET", "/files", query=self._query(path), headers=headers)
        if answer.status_code == 206 or not headers:
            return answer.content
        return answer.content[offset : None if limit is None else offset + limit]

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Replace a file."""
        headers = {"Content-Type": "application/octet-stream"}
        await self.guest.send("POST", "/files", query=self._query(path), headers=headers, content=data)
        if mode != 0o644:
            await self.exec(["chmod", f"{mode:o}", path])

    def _query(self, path: str) -> dict[str, str]:
        return {"path": path} if self.spec.user is None else {"path": path, "username": self.spec.user}

    async def list(self, path: str) -> "list[Entry]":  # pyrefly: ignore
        """Return what a folder holds, by name."""
        told = await self._filesystem("ListDir", path=path, depth=1)
        return sorted((_entry(one) for one in told.get("entries", [])), key=lambda entry: entry.path)

    async def stat(self, path: str) -> Entry:
        """Return one entry."""
        return _entry((await self._filesystem("Stat", path=path))["entry"])

    async def remove(self, path: str) -> None:
        """Remove a file or folder."""
        await self._filesystem("Remove", path=path)

    async def rename(self, source: str, destination: str) -> None:
        """Move a file or folder."""
        await self._filesystem("Move", source=source, destination=destination)

    async def make_directory(self, path: str) -> None:
        """Make a folder and those above it."""
        try:
            await self._filesystem("MakeDir", path=path)
        except SandboxError as problem:
            if problem.status != 409:
                raise

    async def _filesystem(self, method: str, **fields: Any) -> dict[str, Any]:
        return await self.guest.call(f"filesystem.Filesystem/{method}", fields, user=self.spec.user)

    async def expose(self, port: int) -> tuple[str, int]:
        """Refuse: the service forwards by header or name, not by a port of its own."""
        raise SandboxError("expose: a remote service gives no port; use its addresses", "refused", status=501)

    async def pause(self) -> None:
        """Have the service put it away; where it is kept is the service's matter."""
        await self.backend.service.ask("POST", f"/sandboxes/{self.guest.id}/pause", {}, timeout_s=300.0)

    async def resume(self) -> None:
        """Have the service bring it back."""
        told = await self.backend.service.ask(
            "POST", f"/sandboxes/{self.guest.id}/connect", {"timeout": LONGEST_LIFE_S}, timeout_s=300
        )
        self.guest = self.backend._known(told, self.spec, self.generation).guest

    async def suspend(self, folder: Path) -> None:
        """Have a snapshot taken, note its name in the folder, and end the machine."""
        await self.snapshot(folder)
        await self.kill()

    async def snapshot(self, folder: Path, parent: Path | None = None) -> None:
        """Have a snapshot taken, and note its name in the folder; one that is paused may be woken for it."""
        try:
            told = await self._snapshot()
        except SandboxError as problem:
            if problem.status != 409:
                raise
            await self.resume()
            told = await self._snapshot()
            await self.pause()
        note = {"service": self.backend.service.url, "snapshot": told["snapshotID"]}
        await asyncio.to_thread((folder / REFERENCE).write_text, json.dumps(note))

    async def _snapshot(self) -> dict[str, Any]:
        path = f"/sandboxes/{self.guest.id}/snapshots"
        return await self.backend.service.ask("POST", path, {}, timeout_s=300.0, once=True)

    async def fork(self, ids: Sequence[str], *, deterministic: bool = False) -> "Sequence[Machine | SandboxError]":
        """Have it split; the service says for each copy how it went."""
        told = await self.backend.service.ask(
            "POST",
            f"/sandboxes/{self.guest.id}/fork",
            {"count": len(ids), "timeout": LONGEST_LIFE_S, **({"deterministic": True} if deterministic else {})},
            timeout_s=300.0,
            once=True,
        )
        copies: list[Machine | SandboxError] = []
        for _, one in zip(ids, told, strict=True):
            if "sandbox" in one:
                copies.append(self.backend._known(one["sandbox"], self.spec, self.generation + 1))
            else:
                error = one.get("error", {})
                copies.append(SandboxError(str(error.get("message", "a copy failed")), status=error.get("code")))
        return copies

    async def kill(self) -> None:
        """Have it ended; one that is gone already is fine."""
        self._ended = True
        with suppress(SandboxError):
            await self.backend.service.ask("DELETE", f"/sandboxes/{self.guest.id}")

    async def is_alive(self) -> bool:
        """Tell whether the service knows it."""
        if self._ended:
            return False
        try:
            await self.backend.service.ask("GET", f"/sandboxes/{self.guest.id}", timeout_s=5.0)
        except SandboxError as problem:
            return problem.status not in (404, 410)
        return True

    async def usage(self) -> Usage:
        """Return what the service says that it uses."""
        told = await self.backend.service.ask("GET", f"/sandboxes/{self.guest.id}/metrics")
        if not told:
            return Usage()
        return Usage(memory_bytes=int(told[-1]["memUsed"]), disk_bytes=int(told[-1]["diskUsed"]))


def _entry(told: Mapping[str, Any]) -> Entry:
    modified = str(told.get("modifiedTime", "1970-01-01T00:00:00Z"))
    whole, _, fraction = modified.rstrip("Z").partition(".")
    kind = "FILE_TYPE_SYMLINK" if told.get("isSymlink") else str(told.get("type", ""))
    return Entry(
        path=posixpath.normpath(str(told["path"])),
        kind=_KINDS.get(kind, "other"),
        size=int(told.get("size", 0)),
        mode=int(told.get("mode", 0)) & 0o7777,
        modified_s=datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}"),
        target=told.get("symlinkTarget"),
    )


def _snapshot_of(folder: Path) -> str:
    try:
        return str(json.loads((folder / REFERENCE).read_text())["snapshot"])
    except (OSError, ValueError, KeyError) as problem:
        raise SandboxError(f"snapshot {folder}: names none of a service; found `{problem}`", "refused") from None
