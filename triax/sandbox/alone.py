"""One sandbox without a server: made, used and gone, with the folder that it needed."""

import asyncio
import shutil
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.choose import choose, make
from triax.sandbox.host import Host
from triax.sandbox.protocol import Spec
from triax.sandbox.sandbox import Sandbox

STATE, MACHINES, BACKEND = "state", "machines", "backend"


@asynccontextmanager
async def alone(spec: Spec, backend: str, folder: Path, *, unsafe: bool = False) -> AsyncGenerator[Sandbox, None]:
    """Give a sandbox for the block; nothing is left of it.

    Args:
        spec: The sandbox that is wanted.
        backend: How it is made; `auto` for the strongest that this host can run.
        folder: Where a folder for it is made.
        unsafe: Allow the backend `process`, which isolates nothing.

    Raises:
        SandboxError: It cannot be made.
    """
    own = folder / f"alone-{uuid.uuid4().hex[:12]}"
    chosen = await choose(backend, own / MACHINES, unsafe=unsafe)
    host = await Host.open(own / STATE, chosen)
    try:
        (own / BACKEND).write_text(chosen.name)
        sandbox = await host.create(spec)
        try:
            yield sandbox
        finally:
            await asyncio.shield(sandbox.kill())
    finally:
        await host.close(keep=False)
        shutil.rmtree(own, ignore_errors=True)


async def clear(folder: Path) -> list[str]:
    """End what sandboxes without a server left when their process was killed; return what was ended, in words."""
    freed = []
    for own in sorted(folder.glob("alone-*")):
        try:
            host = await Host.open(own / STATE, make((own / BACKEND).read_text(), own / MACHINES, unsafe=True))
        except (SandboxError, OSError):
            continue  # it is in use, or was never one
        lost = [sandbox.id for sandbox in host.sandboxes()]
        await host.close(keep=False)
        shutil.rmtree(own, ignore_errors=True)
        freed += [f"sandbox {id}, which was run without a server" for id in lost]
    return freed
