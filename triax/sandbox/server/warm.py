"""Machines that are kept booted for the next clients of a template."""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from triax.config.sandbox import Template
from triax.errors import SandboxError
from triax.log import logger
from triax.sandbox.host import Host
from triax.sandbox.protocol import Resources, Spec
from triax.sandbox.sandbox import Sandbox
from triax.sandbox.server import wire

CALM_S = 2.0
"""Seconds before the next try, after a machine could not be made."""
LOOK_S = 5.0


def plain(template: Template) -> Spec:
    """Return the sandbox that a template makes for a client that asks for nothing more."""
    return Spec(
        image=template.image,
        resources=Resources(template.cpus, template.memory_mib, template.disk_mib, template.processes),
        env=template.env,
        user=template.user,
        cwd=template.cwd,
    )


class Warm:
    """Booted machines by template, made again as they are taken; they come on top of the quotas.

    Args:
        host: Owner of the sandboxes.
        templates: Those whose `warm` is above 0 are kept.
    """

    def __init__(self, host: Host, templates: Mapping[str, Template]) -> None:
        self.host = host
        self.templates = {name: template for name, template in templates.items() if template.warm}
        self._ready: dict[str, deque[Sandbox]] = {name: deque() for name in self.templates}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to make machines; what an earlier server had made ahead is dropped."""
        for sandbox in self.host.sandboxes():
            if wire.WARM in sandbox.spec.metadata:
                with suppress(SandboxError):
                    await sandbox.kill()
        self._task = asyncio.create_task(self._run())

    def count(self) -> int:
        """Return how many machines wait for a client."""
        return sum(len(ready) for ready in self._ready.values())

    def take(self, template: str, spec: Spec) -> Sandbox | None:
        """Return a machine that is now the one of a client, None if it must be made.

        Args:
            template: Name of the template.
            spec: What the client asked for.
        """
        ready = self._ready.get(template, deque())
        while ready:
            sandbox = ready.popleft()
            self._news.set()
            if sandbox.status != "running":
                continue
            try:
                sandbox.dedicate(spec)
            except SandboxError:
                ready.append(sandbox)  # it fits those who ask for nothing special
                return None
            return sandbox
        return None

    async def close(self) -> None:
        """End the machines that nobody took."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for ready in self._ready.values():
            while ready:
                with suppress(SandboxError):
                    await ready.popleft().kill()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            for name, template in self.templates.items():
                ready = self._ready[name]
                for sandbox in [one for one in ready if one.status != "running"]:
                    ready.remove(sandbox)
                while len(ready) < template.warm:
                    if not await self._add(name, template):
                        break
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    async def _add(self, name: str, template: Template) -> bool:
        labels = {wire.TEMPLATE: name, wire.WARM: name}
        spec = plain(template)
        made = Spec(spec.image, spec.resources, spec.network, spec.env, labels, None, "kill", spec.user, spec.cwd)
        try:
            self._ready[name].append(await self.host.create(made))
        except SandboxError as problem:
            logger("sandbox").warning("no machine of template %s could be made ahead: %s", name, problem)
            await asyncio.sleep(CALM_S)
            return False
        return True
