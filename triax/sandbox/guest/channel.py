"""The host's end of the channel to a guest's agent: requests, answers and the streams between them.

Nothing that comes out of a guest is trusted: a frame that the agent would not send ends the channel, not the host.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Literal

from triax.errors import SandboxError
from triax.sandbox.guest.wire import BODY_LIMIT, CHUNK, HEAD, OWN_STREAMS, WINDOW, Kind, frame, number

Name = Literal["stdout", "stderr"]


class AgentRefusal(Exception):
    """The agent could not do what was asked; `code` is an error number of Linux."""

    def __init__(self, code: int, step: str) -> None:
        super().__init__(f"{step}: error {code}")
        self.code = code
        self.step = step


class Stream:
    """Bytes to and from one process or connection of the guest."""

    def __init__(self, channel: "Channel", id: int) -> None:
        self.channel = channel
        self.id = id
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[tuple[int, int, bool]] = loop.create_future()
        for future in (self.started, self.ended):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.half_closed = False
        self.finished = False
        self._writing = asyncio.Lock()  # what two send at once arrives one after the other
        self._pieces: deque[tuple[Name, bytes]] = deque()
        self._news = asyncio.Event()
        self._granted = WINDOW
        self._room = WINDOW
        self._may_send = asyncio.Event()
        self._may_send.set()

    def take(self) -> tuple[Name, bytes] | None:
        """Return what came next, if anything did, and let the guest send as much again."""
        if not self._pieces:
            return None
        name, data = self._pieces.popleft()
        if not self.ended.done():
            self._granted += len(data)
            self.channel.send(Kind.CREDIT, self.id, number(len(data)))
        return name, data

    async def next(self) -> tuple[Name, bytes] | None:
        """Wait for what comes next; none once all was taken and no more comes."""
        while True:
            piece = self.take()
            if piece is not None:
                return piece
            if self.ended.done() or self.half_closed:
                return None
            self._news.clear()
            await self._news.wait()

    async def write(self, data: bytes) -> bool:
        """Send bytes; waits while the guest does not take them.

        Returns:
            Whether all were sent; otherwise the stream ended or was finished before.

        Raises:
            SandboxError: The channel is gone.
        """
        view = memoryview(data)
        async with self._writing:
            while view:
                self.channel.check()
                if self.ended.done() or self.finished:
                    return False
                part = view[: min(self._room, CHUNK)]
                if not part or not self.channel.writable.is_set():
                    self._may_send.clear() if not part else None
                    await (self.channel.writable if part else self._may_send).wait()
                    continue
                self._room -= len(part)
                self.channel.send(Kind.DATA, self.id, bytes(part))
                view = view[len(part) :]
        return True

    def finish(self) -> None:
        """Say that no more bytes come; the agent drops what came after this, so that a write in progress gives up."""
        if not self.ended.done() and not self.finished:
            self.channel.send(Kind.END, self.id)
        self.finished = True
        self._may_send.set()

    def close(self) -> None:
        """Let go of it: a connection ends, a process goes on unheard."""
        if not self.ended.done():
            self.channel.send(Kind.CLOSE, self.id)
            self.end((0, 0, False))

    def on_data(self, name: Name, data: bytes) -> None:
        """Keep what the guest sent."""
        self._granted -= len(data)
        if self._granted < 0:
            raise ValueError("a stream sent more than it was granted")
        self._pieces.append((name, data))
        self._news.set()

    def on_end(self) -> None:
        """Note that the guest sends no more; it may still be sent to."""
        self.half_closed = True
        self._news.set()

    def on_credit(self, size: int) -> None:
        """Note that the guest takes more."""
        self._room = min(WINDOW, self._room + size)
        self._may_send.set()

    def end(self, how: tuple[int, int, bool] | Exception) -> None:
        """Note its end: exit code, signal and whether memory ran out, or why it never ran."""
        self.channel.streams.pop(self.id, None)
        for future in (self.started, self.ended):
            if future.done():
                continue
            if isinstance(how, Exception):
                future.set_exception(how)
            elif future is self.ended:
                self.ended.set_result(how)
            else:
                self.started.set_exception(AgentRefusal(0, "ended"))
        self._news.set()
        self._may_send.set()


class Channel(asyncio.Protocol):
    """One connection to one agent; `await Channel.open(socket)` makes it.

    Args:
        on_open: Called with each stream that the guest opens; none refuses them.

    Attributes:
        streams: Streams in use, by number.
        writable: Set while the connection takes more.
        lost: Why the channel ended, once it has.
    """

    def __init__(self, on_open: Callable[[Stream], None] | None = None) -> None:
        self.streams: dict[int, Stream] = {}
        self.writable = asyncio.Event()
        self.writable.set()
        self.lost: str | None = None
        self.on_open = on_open
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._answers: dict[Kind, deque[asyncio.Future[bytes]]] = {}
        self._next = 0
        self._waiting: list[bytes] | None = None

    @classmethod
    async def open(cls, end: socket.socket, on_open: Callable[[Stream], None] | None = None) -> "Channel":
        """Take over a connected socket."""
        channel = cls(on_open)
        end.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=end)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Cut what came into frames and hand them on."""
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEAD.size:
                size, kind, stream = HEAD.unpack_from(self._buffer, at)
                if size > BODY_LIMIT:
                    raise ValueError(f"a frame of {size} bytes")
                if len(self._buffer) - at < HEAD.size + size:
                    break
                body = bytes(self._buffer[at + HEAD.size : at + HEAD.size + size])
                at += HEAD.size + size
                self._handle(Kind(kind), stream, body)
        except (ValueError, struct.error, KeyError) as problem:
            self.end(f"the agent answered out of step: {problem}")
            return
        del self._buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the machine is gone."""
        self.end(f"the machine is gone: {exc}" if exc else "the machine is gone")

    def pause_writing(self) -> None:
        """Let senders wait."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self.writable.set()

    def end(self, why: str) -> None:
        """End the channel and everything on it."""
        if self.lost is None:
            self.lost = why
        self.writable.set()
        problem = SandboxError(f"guest: {self.lost}; create or restore the sandbox anew")
        for stream in list(self.streams.values()):
            stream.end(problem)
        for futures in self._answers.values():
            for future in futures:
                if not future.done():
                    future.set_exception(problem)
            futures.clear()
        if self._transport is not None:
            self._transport.abort()

    def check(self) -> None:
        """Raise if the channel is gone.

        Raises:
            SandboxError: It is.
        """
        if self.lost is not None:
            raise SandboxError(f"guest: {self.lost}; create or restore the sandbox anew")

    def send(self, kind: Kind, stream: int = 0, body: bytes = b"") -> None:
        """Send a frame, or keep it while the channel is held."""
        if self.lost is not None:
            return
        if self._waiting is not None:
            self._waiting.append(frame(kind, stream, body))
        elif self._transport is not None:
            self._transport.write(frame(kind, stream, body))

    async def ask(self, kind: Kind, answer: Kind, body: bytes = b"", *, within_s: float) -> bytes:
        """Send a request to the agent itself and wait for its answer.

        Raises:
            SandboxError: No answer came in time, or the channel is gone.
        """
        self.check()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers.setdefault(answer, deque()).append(future)
        self.send(kind, 0, body)
        try:
            return await asyncio.wait_for(future, within_s)
        except TimeoutError:
            raise SandboxError(
                f"guest: its agent gave no answer to `{kind.name.lower()}` in {within_s:g} s; "
                "the guest is stuck or has no processor time; kill the sandbox or try again"
            ) from None

    async def freeze(self, within_s: float) -> None:
        """Stop everything in the guest between two frames; until `thaw` or `release` nothing is sent.

        Raises:
            SandboxError: The agent gave no answer in time; the guest runs on.
        """
        asked = asyncio.ensure_future(self.ask(Kind.FREEZE, Kind.FROZEN, within_s=within_s))
        await asyncio.sleep(0)
        self._waiting = []
        try:
            await asked
        except BaseException:
            await self.thaw(within_s=1.0, quietly=True)
            raise

    async def thaw(self, within_s: float = 10.0, *, quietly: bool = False) -> None:
        """Let everything in the guest go on, and send what waited."""
        waiting, self._waiting = self._waiting or [], None
        try:
            await self.ask(Kind.THAW, Kind.THAWED, within_s=within_s)
        except SandboxError:
            if not quietly:
                raise
        finally:
            if self._transport is not None and self.lost is None:
                self._transport.writelines(waiting)

    def open_stream(self, kind: Kind, body: bytes) -> Stream:
        """Begin a stream by a request; its `started` tells whether the agent could.

        Raises:
            SandboxError: The channel is gone.
        """
        self.check()
        self._next += 1
        stream = self.streams[self._next] = Stream(self, self._next)
        self.send(kind, stream.id, body)
        return stream

    def _handle(self, kind: Kind, id: int, body: bytes) -> None:
        if kind in (Kind.READY, Kind.FROZEN, Kind.THAWED, Kind.PONG):
            futures = self._answers.get(kind)
            if futures:
                future = futures.popleft()
                if not future.done():
                    future.set_result(body)
            return
        if kind is Kind.OPEN:
            if id & OWN_STREAMS == 0 or id in self.streams or len(self.streams) > 4096:
                raise ValueError("a stream that cannot be")
            stream = self.streams[id] = Stream(self, id)
            if self.on_open is None:
                stream.close()
            else:
                stream.started.set_result(0)
                self.on_open(stream)
            return
        stream = self.streams.get(id)
        if stream is None:
            return  # it was closed while this was on its way
        if kind in (Kind.OUT, Kind.DATA):
            stream.on_data("stdout", body)
        elif kind is Kind.ERR:
            stream.on_data("stderr", body)
        elif kind is Kind.CREDIT:
            stream.on_credit(struct.unpack("<I", body)[0])
        elif kind is Kind.STARTED:
            if not stream.started.done():
                stream.started.set_result(struct.unpack("<I", body)[0] if body else 0)
        elif kind is Kind.EXIT:
            code, signal, killed = struct.unpack("<III", body)
            stream.end((code & 0xFF, signal & 0x7F, bool(killed)))
        elif kind is Kind.END:
            stream.on_end()
        elif kind is Kind.FAILED:
            code = struct.unpack_from("<I", body)[0]
            stream.end(AgentRefusal(code, body[4:].decode(errors="replace")))
        else:
            raise ValueError(f"a frame of kind {kind.name}")
