"""One server's sandboxes as its clients see them: made from templates, woken by use, with what clients have open."""

import asyncio
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from triax.config.sandbox import Server, Template
from triax.errors import SandboxError
from triax.sandbox.host import Host
from triax.sandbox.protocol import STABLE, Resources, Spec
from triax.sandbox.sandbox import Sandbox
from triax.sandbox.server import schema, wire
from triax.sandbox.server.access import Access
from triax.sandbox.server.admission import Admission
from triax.sandbox.server.catalog import Catalog
from triax.sandbox.server.policy import network_of, refuse_unsupported
from triax.sandbox.server.session import Session
from triax.sandbox.server.warm import Warm, plain
from triax.sandbox.store import Snapshot

MOST_KEYS = 4096
GONE = {"killing": 404, "dead": 404, "lost": 410, "failed": 410}


class Plane:
    """What the routes of a server work on.

    Args:
        host: Owner of this machine's sandboxes.
        settings: The server's settings.
        access: Keys and tokens.
        catalog: Names of templates and snapshots.
    """

    def __init__(self, host: Host, settings: Server, access: Access, catalog: Catalog) -> None:
        self.host = host
        self.settings = settings
        self.access = access
        self.catalog = catalog
        self.warm = Warm(host, settings.templates)
        self.admission = Admission(settings.quotas, self.sandboxes)
        self.started_s = time.time()
        self.counts = {"created": 0, "failed": 0, "refused": 0}
        self._sessions: dict[str, tuple[int, Session]] = {}
        self._asked: dict[str, tuple[schema.Life, asyncio.Future[Sandbox]]] = {}
        self._cpu: dict[str, tuple[float, float]] = {}

    def find(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox that still is one.

        Raises:
            SandboxError: There never was such a one, or it is dead, lost or failed; `status` tells which.
        """
        sandbox = self._get(sandbox_id)
        if sandbox.status in GONE:
            raise SandboxError(
                f"sandbox {sandbox_id}: it is {sandbox.status}; {sandbox.reason or 'it was ended'}; create another",
                "refused" if GONE[sandbox.status] == 404 else "infrastructure",
                status=GONE[sandbox.status],
            )
        return sandbox

    def _get(self, sandbox_id: str) -> Sandbox:
        sandbox = self.host.get(sandbox_id)
        if wire.WARM in sandbox.spec.metadata:  # nobody was told of it
            raise SandboxError(f"sandbox {sandbox_id[:80]!r}: there is none; list what there is", "refused", status=404)
        return sandbox

    async def session(self, sandbox_id: str) -> Session:
        """Return what is open in a running sandbox; one that wakes by traffic is woken.

        Raises:
            SandboxError: The sandbox does not run.
        """
        sandbox = await self._settled(sandbox_id)
        if sandbox.status in ("paused", "suspended") and sandbox.spec.metadata.get(wire.AUTO_RESUME) == "true":
            await self._wake(sandbox)
        if wire.state(sandbox.status) != "running":
            raise SandboxError(f"sandbox {sandbox_id}: it is {sandbox.status}; connect to it first", status=502)
        known = self._sessions.get(sandbox_id)
        if known is not None and known[0] == sandbox.generation:
            return known[1]
        await self.forget(sandbox_id)
        session = Session(sandbox) if known is None else known[1]
        self._sessions[sandbox_id] = (sandbox.generation, session)
        return session

    async def _settled(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox once it can be used or stays what it is: clients are never told of a status in passing."""
        sandbox = self.find(sandbox_id)
        while sandbox.status not in STABLE and not sandbox.is_usable:
            await sandbox.settled()
            sandbox = self.find(sandbox_id)
        return sandbox

    async def _wake(self, sandbox: Sandbox) -> None:
        if sandbox.status == "suspended":
            self.admission.check_resumed(sandbox)
        await sandbox.resume()

    async def forget(self, sandbox_id: str) -> None:
        """Let go of what clients had open in a sandbox, as when its machine ends."""
        known = self._sessions.get(sandbox_id)
        if known is not None:
            await known[1].close()
            if known[1].sandbox.status == "dead":
                self._sessions.pop(sandbox_id, None)

    async def create(self, wanted: schema.NewSandbox | schema.NewColdSandbox, key: str | None = None) -> Sandbox:
        """Make the sandbox that a request describes.

        Args:
            wanted: The request.
            key: What tells a repeated request from a new one; the first one's sandbox answers both.

        Raises:
            SandboxError: It asks for what cannot be, or no machine could be made.
        """
        if key is None:
            return await self._counted(wanted)
        known = self._asked.get(key)
        if known is None:
            known = (wanted, asyncio.ensure_future(self._counted(wanted)))
            self._asked[key] = known
            while len(self._asked) > MOST_KEYS:
                self._asked.pop(next(iter(self._asked)))
        if known[0] != wanted:
            raise SandboxError(
                "Idempotency-Key: it came with another request before; choose a new one", "refused", status=409
            )
        try:
            return self.find((await asyncio.shield(known[1])).id)
        except SandboxError:
            self._asked.pop(key, None)  # it may be tried again
            raise

    async def _counted(self, wanted: schema.NewSandbox | schema.NewColdSandbox) -> Sandbox:
        try:
            sandbox = await self._create(wanted)
        except SandboxError as problem:
            self.counts["refused" if problem.kind == "refused" else "failed"] += 1
            raise
        self.counts["created"] += 1
        return sandbox

    async def _create(self, wanted: schema.NewSandbox | schema.NewColdSandbox) -> Sandbox:
        refuse_unsupported(wanted, self.host.backend)
        if isinstance(wanted, schema.NewColdSandbox):
            template = self._cold(wanted)
            return await self._make(wanted, template, wanted.image)
        kept = self.catalog.find(wanted.template_id)
        if kept is not None:
            sandbox = await self._make(wanted, kept.template, kept.name)
            self.catalog.count(kept)
            return sandbox
        id = self.catalog.snapshot_id(wanted.template_id)
        if not self.host.store.exists(id):
            raise SandboxError(
                f"template or snapshot {wanted.template_id[:80]!r}: there is none; list what there is",
                "refused",
                status=404,
            )
        snapshot = self.host.snapshot(id)
        spec = self._spec(wanted, snapshot.spec.resources, snapshot.spec, wanted.template_id)
        with self.admission.promised(spec.resources):
            return await self.host.create(spec, snapshot=snapshot.id)

    async def _make(self, wanted: schema.Life, template: Template, name: str) -> Sandbox:
        below = plain(template)
        spec = self._spec(wanted, below.resources, below, name)
        with self.admission.promised(spec.resources):
            taken = self.warm.take(name, spec)
            return taken if taken is not None else await self.host.create(spec)

    def sandboxes(self) -> list[Sandbox]:
        """Return the sandboxes that clients made, the oldest first."""
        return [one for one in self.host.sandboxes() if wire.WARM not in one.spec.metadata]

    def _spec(self, wanted: schema.Life, resources: Resources, below: Spec, template: str) -> Spec:
        for name in wanted.metadata:
            if name.startswith(wire.RESERVED):
                raise SandboxError(
                    f"metadata: names that begin with `{wire.RESERVED}` are taken; found `{name}`", "refused"
                )
        labels = wanted.metadata | {wire.TEMPLATE: template}
        if wanted.auto_resume is not None and wanted.auto_resume.enabled:
            labels[wire.AUTO_RESUME] = "true"
        internet = getattr(wanted, "allow_internet_access", None)
        if internet is not None:
            labels[wire.INTERNET] = str(internet).lower()
        if wanted.network.allow_public_traffic is False:
            labels[wire.PRIVATE_PORTS] = "true"
        return dataclasses.replace(
            below,
            resources=resources,
            network=network_of(wanted.network, internet, self.settings, self.host.backend),
            env={**below.env, **wanted.env_vars},
            metadata=labels,
            timeout_s=self.life(wanted.timeout),
            on_timeout=self._on_timeout(wanted.auto_pause),
        )

    def _on_timeout(self, auto_pause: bool | None) -> Literal["suspend", "kill"]:
        if auto_pause is None:  # a client that went away should find its files again
            return "suspend" if self.host.backend.capabilities.suspend else "kill"
        return "suspend" if auto_pause else "kill"

    def life(self, timeout: int | None) -> float:
        """Return the seconds that a sandbox gets for what its client asked.

        Raises:
            SandboxError: It asked for more than this server gives.
        """
        if timeout is None:
            return float(self.settings.timeout_s)
        if timeout > self.settings.longest_timeout_s:
            raise SandboxError(
                f"timeout: this server gives a sandbox {self.settings.longest_timeout_s} s at a time; found {timeout}; "
                "ask for less, and prolong it while you use it",
                "refused",
            )
        return max(float(timeout), 0.001)

    def _cold(self, wanted: schema.NewColdSandbox) -> Template:
        base = self.settings.templates["base"]
        return base.model_copy(
            update={
                "image": self.image(wanted.image),
                "cpus": float(wanted.cpu_count or base.cpus),
                "memory_mib": wanted.memory_mb or base.memory_mib,
                "disk_mib": wanted.disk_size_mb or base.disk_mib,
            }
        )

    def image(self, name: str) -> str:
        """Return an image that a client may use, named by its path or from one of the folders that hold them.

        Raises:
            SandboxError: It is outside the folders that the settings open for this.
        """
        within = []
        for folder in self.settings.images:
            path = (folder / name).resolve()
            if path.is_relative_to(folder.resolve()):
                within.append(str(path))
        there = [path for path in within if Path(path).exists() or Path(path.partition(":")[0]).exists()]
        if within:
            return (there or within)[0]
        raise SandboxError(
            f"image `{name[:200]}`: not below a folder whose images clients may use; found "
            f"{', '.join(map(str, self.settings.images)) or 'no such folder'}; start the server with images=[…]",
            "refused",
            status=403,
        )

    async def connect(self, sandbox_id: str, timeout: int | None, *, shorten: bool = False) -> tuple[Sandbox, bool]:
        """Make a sandbox usable, and prolong its life.

        Args:
            sandbox_id: Which one.
            timeout: Seconds that it lives from now on at least.
            shorten: Whether a running one's life may also become shorter.

        Returns:
            The sandbox, and whether it had to be resumed.
        """
        life = self.life(timeout)
        sandbox = await self._settled(sandbox_id)
        resumed = sandbox.status in ("paused", "suspended")
        if resumed:
            await self._wake(sandbox)
        left = math.inf if sandbox.expires_s is None else sandbox.expires_s - time.time()
        if resumed or shorten or (timeout is not None and life > left):
            await sandbox.set_timeout(life)
        return sandbox, resumed

    async def pause(self, sandbox_id: str, *, memory: bool | None) -> None:
        """Put a sandbox away, so that it costs neither processor nor memory where the backend can do that.

        Args:
            sandbox_id: Which one.
            memory: Whether its processes go on later; a backend that keeps files alone then stops it in place.

        Raises:
            SandboxError: It is paused already (409), or the backend cannot pause as asked.
        """
        sandbox, capabilities = self.find(sandbox_id), self.host.backend.capabilities
        if memory is not False and not capabilities.memory_snapshot:
            await sandbox.pause()
            return
        await sandbox.suspend(keep_memory=memory)
        await self.forget(sandbox_id)

    async def fork(self, sandbox_id: str, wanted: schema.Fork) -> Sequence[Sandbox | SandboxError]:
        """Split a running sandbox; each copy is a sandbox or the error that it met."""
        sandbox, life = self.find(sandbox_id), self.life(wanted.timeout)
        with self.admission.promised(sandbox.spec.resources, wanted.count):
            copies = await sandbox.fork(wanted.count, deterministic=wanted.deterministic)
        for copy in copies:
            if isinstance(copy, Sandbox) and wanted.timeout is not None:
                await copy.set_timeout(life)
        return copies

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox, whatever its status; one that is gone already is an error with status 404."""
        sandbox = self._get(sandbox_id)
        if sandbox.status == "dead":
            raise SandboxError(f"sandbox {sandbox_id}: it is dead already", "refused", status=404)
        await sandbox.kill()
        await self.forget(sandbox_id)
        self._cpu.pop(sandbox_id, None)

    async def prolong(self, sandbox_id: str, seconds: int) -> None:
        """Let a sandbox live at least so many seconds from now."""
        sandbox = self.find(sandbox_id)
        if sandbox.expires_s is not None and sandbox.expires_s < time.time() + seconds:
            await sandbox.set_timeout(self.life(seconds))

    async def set_network(self, sandbox_id: str, wanted: schema.NetworkUpdate) -> None:
        """Replace what a sandbox may reach.

        Raises:
            SandboxError: No backend can do that while a sandbox runs, unless nothing changes.
        """
        sandbox = self.find(sandbox_id)
        if network_of(wanted, wanted.allow_internet_access, self.settings, self.host.backend) != sandbox.spec.network:
            raise SandboxError(
                "network: what a sandbox may reach is settled when it is made; create another with this policy",
                "refused",
                status=501,
            )

    async def snapshot(self, sandbox_id: str, wanted: schema.Snapshot) -> Snapshot:
        """Take a snapshot of a sandbox, which goes on.

        Raises:
            SandboxError: The backend keeps memory with the files or not at all, and something else was asked.
        """
        sandbox, capabilities = self.find(sandbox_id), self.host.backend.capabilities
        if wanted.memory is not None and wanted.memory != capabilities.memory_snapshot:
            kept = "memory and files" if capabilities.memory_snapshot else "files alone"
            raise SandboxError(
                f"snapshot: the backend `{self.host.backend.name}` keeps {kept}; found memory={wanted.memory}; "
                "leave it out",
                "refused",
            )
        if wanted.name is not None and self.catalog.find(wanted.name) is not None:
            raise SandboxError(f"snapshot `{wanted.name}`: a template has this name", "refused", status=409)
        taken = self.host.snapshot(await sandbox.snapshot())
        if wanted.name is not None:
            self.catalog.name_snapshot(wanted.name, taken.id)
        return taken

    async def remove_snapshot(self, snapshot_id: str) -> None:
        """Remove a snapshot and its names."""
        await self.host.remove_snapshot(snapshot_id)
        self.catalog.forget_snapshot(snapshot_id)

    async def usage(self, sandbox_id: str) -> dict[str, Any]:
        """Return what a sandbox uses now, as the wire writes it; what a backend cannot tell counts as 0."""
        sandbox, now = self.find(sandbox_id), time.time()
        used, resources = await sandbox.usage(), sandbox.spec.resources
        cpu_s = used.cpu_s or 0.0
        then, before = self._cpu.get(sandbox_id, (sandbox.created_s, 0.0))
        self._cpu[sandbox_id] = (now, cpu_s)
        return {
            "timestamp": wire.when(now),
            "timestampUnix": int(now),
            "cpuCount": max(1, math.ceil(resources.cpus)),
            "cpuUsedPct": round(100 * max(0.0, cpu_s - before) / max(now - then, 1e-3), 2),
            "memUsed": used.memory_bytes or 0,
            "memTotal": resources.memory_mib * 2**20,
            "memCache": 0,
            "diskUsed": used.disk_bytes or 0,
            "diskTotal": resources.disk_mib * 2**20,
        }

    def sessions(self) -> list[Session]:
        """Return what clients have open."""
        return [session for _, session in self._sessions.values()]

    async def close(self) -> None:
        """Let go of everything that clients have open, and of machines that nobody took."""
        await self.warm.close()
        for sandbox_id in list(self._sessions):
            await self.forget(sandbox_id)
