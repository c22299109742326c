"""Running the server: a socket, an engine process, and an orderly end."""

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from triax import errors
from triax.config.serve import Serve
from triax.errors import CheckpointError, ConfigError, TriaxError
from triax.log import logger
from triax.serve.http.app import make_app
from triax.serve.http.connection import HTTP, most_connections, tell_briefly
from triax.serve.http.face import Face
from triax.serve.http.model import check_settings, open_tokenizer
from triax.serve.link import MAKER, Link
from triax.serve.process import settle

KEEP_ALIVE_S = 75
log = logger("serve")


class Server(uvicorn.Server):
    """Uvicorn that lets running requests finish before it ends."""

    def __init__(self, config: uvicorn.Config, face: Face) -> None:
        super().__init__(config)
        self.face = face
        self._loop = asyncio.get_running_loop()
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: the first one drains, the second one ends what still runs, whose clients are told so."""
        if self.face.is_draining:
            self._loop.call_soon_threadsafe(self.face.link.end)
        self.face.is_draining = True
        self._loop.call_soon_threadsafe(self.drain, signal.Signals(sig).name)

    def drain(self, reason: str) -> None:
        """Take no more requests, and end once those that run are answered or their time is over."""
        if self._drain is None:
            self.face.is_draining = True
            self._drain = asyncio.create_task(self._wait(reason))

    async def _wait(self, reason: str) -> None:
        link, limit = self.face.link, self.face.settings.http.drain_s
        log.info("server: got %s; waits up to %g s for %d running requests", reason, limit, link.num_active)
        end = self._loop.time() + limit
        while link.num_active and self._loop.time() < end:
            await asyncio.sleep(0.05)
        if link.num_active:
            log.warning("server: %d requests are not done after %g s; they are ended", link.num_active, limit)
        await link.stop()
        await asyncio.sleep(0.05)  # what the requests were told leaves before the connections are closed
        self.should_exit = True


def run(
    source: Path, settings: Serve, maker: str = MAKER, say: Callable[[str], None] = lambda text: log.info("%s", text)
) -> None:
    """Serve a checkpoint until a signal comes.

    Args:
        source: Folder of the weights.
        settings: Of engine and server.
        maker: What makes the engine in its process: `module:name` or `file.py:name`.
        say: Takes what a person should know, such as the address.

    Raises:
        ConfigError: The address cannot be listened on.
        CheckpointError: The folder holds no tokenizer, or the engine cannot be started or kept alive.
    """
    check_settings(settings)
    tokenizer = open_tokenizer(source)
    listener = listen(settings.http.host, settings.http.port)
    host, port = listener.getsockname()[:2]
    say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port} while the model is being loaded")
    with listener:
        asyncio.run(_serve(Face(Link(source, settings, maker), tokenizer, settings), listener, say))


async def _serve(face: Face, listener: socket.socket, say: Callable[[str], None]) -> None:
    config = uvicorn.Config(
        make_app(face),
        http=HTTP,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        limit_concurrency=most_connections(),
    )
    asyncio.get_running_loop().set_exception_handler(tell_briefly)
    server = Server(config, face)
    link = face.link
    link.start()
    watcher = asyncio.create_task(_watch(server, say))
    try:
        await server.serve(sockets=[listener])
    finally:
        watcher.cancel()
        failed = link.status == "failed"
        await link.stop()
    if failed:
        kind = getattr(errors, link.failure_kind, CheckpointError)
        raise (kind if issubclass(kind, TriaxError) and kind is not errors.SandboxError else CheckpointError)(
            link.failure
        )


async def _watch(server: Server, say: Callable[[str], None]) -> None:
    """Say how the engine is, and end the server when it cannot be started."""
    link = server.face.link
    while True:
        await link.has_changed.wait()
        link.has_changed.clear()
        if link.status == "ready":
            settle()
            model = server.face.model
            say(f"ready: model `{model.name}`, {model.context} tokens of context, chat format {model.format}")
        elif link.status == "failed":
            server.should_exit = True
            return


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: The address is not ours, or taken.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as problem:
        raise ConfigError(
            f"http.port: cannot listen on {host} port {port}; found {problem.strerror or problem}; choose another"
        ) from None
    listener.setblocking(False)
    return listener
