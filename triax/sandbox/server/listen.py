"""Listening: HTTP/1.1 and HTTP/2 on one port, in plain text or with TLS."""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

from hypercorn.asyncio import serve
from hypercorn.config import Config
from hypercorn.typing import Framework
from starlette.types import ASGIApp

from triax.errors import SandboxError

log = logging.getLogger("triax.sandbox.server")

IDLE_S = 600
"""Seconds that an unused connection stays open; clients pool them for some minutes."""
GRACE_S = 2.0
"""Seconds that open streams have to end once the server stops."""


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: Address to listen on.
        port: Port, 0 for a free one.

    Raises:
        SandboxError: The address is in use or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as problem:
        listener.close()
        raise SandboxError(
            f"server: cannot listen on {host} port {port}; found `{problem.strerror}`; choose another with port=0",
            "refused",
        ) from None
    listener.listen(1024)
    listener.setblocking(False)
    return listener


async def listen(
    app: ASGIApp,
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serve an application until `stop` is set.

    Args:
        app: What answers.
        listener: A bound socket, which this call takes over.
        stop: Ends the serving; open streams are cut after `GRACE_S` seconds.
        certificate: TLS certificate.
        key: Its private key.
        ready: Called once connections are taken.
    """
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.accesslog = None
    config.errorlog = log
    config.keep_alive_timeout = IDLE_S
    config.keep_alive_max_requests = 2**31  # an end in the middle of a pool's life breaks the request that meets it
    config.graceful_timeout = GRACE_S
    config.h2_max_concurrent_streams = 256
    if certificate is not None:
        config.certfile, config.keyfile = str(certificate), str(key)

    async def until() -> None:
        if ready is not None:
            ready()
        await stop.wait()

    await serve(cast(Framework, app), config, shutdown_trigger=until)
