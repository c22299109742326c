"""A server from its settings to its end: its host, its application, its sweeps, and its two signals."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from triax.config.sandbox import Server as Settings
from triax.errors import SandboxError
from triax.log import logger
from triax.sandbox.host import Host
from triax.sandbox.protocol import Backend
from triax.sandbox.server.access import Access, load_secret, read_keys
from triax.sandbox.server.app import opened
from triax.sandbox.server.catalog import Catalog
from triax.sandbox.server.listen import bound, listen
from triax.sandbox.server.plane import Plane


@dataclass(frozen=True)
class Serving:
    """A server that runs in this process.

    Args:
        url: Where it listens.
        plane: What its routes work on.
    """

    url: str
    plane: Plane


@asynccontextmanager
async def served(settings: Settings, backend: Backend) -> AsyncGenerator[Serving, None]:
    """Serve sandboxes while the block runs; then suspend those that their timeout would suspend.

    Args:
        settings: The server's settings.
        backend: What makes machines.

    Raises:
        SandboxError: The folder is another's, the address is in use, or the keys cannot be read.
    """
    keys = [] if settings.keys is None else read_keys(settings.keys)
    listener = bound(settings.host, settings.port)
    try:
        host = await Host.open(settings.folder, backend)
    except BaseException:
        listener.close()
        raise
    access = Access(keys, load_secret(settings.folder / "secret"))
    plane = Plane(host, settings, access, Catalog(settings.folder / "catalog.json", settings.templates))
    stop, ready = asyncio.Event(), asyncio.Event()
    name, port = listener.getsockname()[:2]
    url = f"{'http' if settings.certificate is None else 'https'}://{f'[{name}]' if ':' in name else name}:{port}"
    try:
        async with opened(plane) as app:
            tasks = [
                asyncio.create_task(
                    listen(app, listener, stop, certificate=settings.certificate, key=settings.key, ready=ready.set)
                ),
                asyncio.create_task(_sweep(plane, settings.sweep_s)),
            ]
            try:
                await plane.warm.start()
                await asyncio.wait([tasks[0], asyncio.create_task(ready.wait())], return_when=asyncio.FIRST_COMPLETED)
                if tasks[0].done():
                    tasks[0].result()
                yield Serving(url, plane)
            finally:
                stop.set()
                tasks[1].cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await host.close()


async def _sweep(plane: Plane, interval_s: float) -> None:
    """End what no sandbox claims, again and again."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            for words in await plane.host.gc():
                logger("sandbox").info("freed: %s", words)
        except (SandboxError, OSError) as problem:
            logger("sandbox").warning("a look for orphans failed: %s", problem)


async def serve(settings: Settings, backend: Backend, announce: Callable[[Serving], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: The server's settings.
        backend: What makes machines.
        announce: Called once the server answers.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        async with served(settings, backend) as serving:
            announce(serving)
            await ended.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)
