"""The API process's end of the engine: starts its process, carries requests to it, restarts it when it dies."""

import asyncio
import fcntl
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.asyncio
from msgspec.structs import replace

from triax.config.serve import Serve
from triax.errors import TriaxError
from triax.log import logger
from triax.serve import wire
from triax.serve.request import Request, Update

MAKER = "triax.serve.process:engine_of"
PATIENCE = 5
"""Deaths without a request answered in between after which the server gives up."""
LONGEST_PAUSE_S = 30.0
SIGN_OF_LIFE_S = 10.0
"""Longest silence towards a client that waits."""
AGAIN = -1
"""Number of the question by which a new process gets the weights of the one before it."""
SOCKETS = "triax-serve-"
"""What the names of folders begin with that hold the socket of an engine."""
YOUNG_S = 10.0
"""Seconds in which a folder of sockets is not swept."""
STOP_S = 30.0
"""Seconds that the engine gets to save what outlives it."""

Status = Literal["loading", "ready", "restarting", "failed", "stopped"]
log = logger("serve")


def sweep() -> None:
    """Remove folders of sockets that servers left which were killed: a live server holds a lock on its own."""
    for path in Path(tempfile.gettempdir()).glob(f"{SOCKETS}*"):
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone
            continue
        try:
            is_young = time.time() - os.fstat(folder).st_mtime < YOUNG_S  # its server may be about to lock it
            if os.fstat(folder).st_uid == os.getuid() and not is_young:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # a live server's
            pass
        finally:
            os.close(folder)


class EngineLost(TriaxError):
    """The engine's process ended under a request."""


class EngineAbsent(TriaxError):
    """The engine is not there yet, or not any more."""


class Refusal(TriaxError):
    """The engine does not take a request, or cannot do what it was asked; `kind` is its error's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Mailbox:
    """Updates of some requests that nobody has read yet; a slow reader finds them together."""

    def __init__(self) -> None:
        self.news: list[tuple[str, Update]] = []
        self.failure: TriaxError | None = None
        self.is_new = asyncio.Event()

    def put(self, update: Update) -> None:
        """Add an update."""
        self.news.append((update.id, update))
        self.is_new.set()

    def fail(self, failure: TriaxError) -> None:
        """End with an error once the updates before it are read."""
        self.failure = failure
        self.is_new.set()

    async def take(self) -> list[tuple[str, Update]]:
        """Wait for news and return all of it; nothing where none came for a while."""
        try:
            async with asyncio.timeout(SIGN_OF_LIFE_S):
                await self.is_new.wait()
        except TimeoutError:
            return []
        self.is_new.clear()
        news, self.news = self.news, []
        if not news and self.failure is not None:
            raise self.failure
        if self.failure is not None:
            self.is_new.set()
        return news


class Link:
    """One engine process at a time, and the requests that it works on.

    Args:
        source: Folder of the weights.
        settings: Of engine and server.
        maker: What makes the engine there: `module:name` or `file.py:name`.
    """

    def __init__(self, source: Path, settings: Serve, maker: str = MAKER) -> None:
        self.source, self.settings, self.maker = source, settings, maker
        self.status: Status = "loading"
        self.stage, self.share = "starting", 0.0
        self.facts: wire.Facts | None = None
        self.failure = ""
        """Why the engine cannot run, where `status` is `failed`."""
        self.failure_kind = ""
        self.num_deaths = 0
        self.lack = ""
        """Why a new process does not have the weights that the one before it was given; then it answers nobody."""
        self.has_changed = asyncio.Event()
        """Set whenever `status` changes."""
        self.waiting: set[str] = set()
        """Requests that have no token yet."""
        self.is_open = asyncio.Event()
        """Whether requests go on to the engine; else they wait here."""
        self.is_open.set()
        self._boxes: dict[str, Mailbox] = {}
        self._running: set[str] = set()  # in the engine; what it has told may still wait for a slow reader
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=SOCKETS)
        self._lock = os.open(self._folder.name, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._task: asyncio.Task[None] | None = None
        self._vain = 0
        self._given: dict[str, str] | None = None
        self._version = 0

    @property
    def num_active(self) -> int:
        """Requests that are not over."""
        return len(self._boxes | dict.fromkeys(self.waiting))

    @property
    def pid(self) -> int | None:
        """Process of the engine."""
        return self._process.pid if self._process is not None else None

    @property
    def is_frozen(self) -> bool:
        """Whether the engine's process is there but has been stopped (SIGSTOP, a debugger): then nobody is served."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # it is not there, or this system does not tell
            return False
        return text.rpartition(")")[2].split()[0] in ("T", "t")

    def start(self) -> None:
        """Begin to start the engine; `status` tells how far it is."""
        self._task = asyncio.create_task(self._supervise())

    def end(self) -> None:
        """End the engine now, saved or not, and every request with it."""
        self._change("stopped")
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Let the engine save what outlives it, and end it; requests that still run fail."""
        was_ready = self.status == "ready"
        self._change("stopped")
        if self._process is not None and self._process.returncode is None:
            with suppress(TriaxError):
                self._send(wire.Stop())
            try:
                if not was_ready:  # it would read the message only once it has loaded
                    raise TimeoutError
                await asyncio.wait_for(asyncio.shield(self._process.wait()), STOP_S)
            except TimeoutError:
                self._process.kill()
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task
        self._context.destroy(linger=0)
        self._folder.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def updates(self, requests: Sequence[Request]) -> AsyncGenerator[list[tuple[str, Update]], None]:
        """Run requests and yield their updates, as many at a time as have come; leaving early ends them.

        An empty list is a sign of life.

        Raises:
            EngineAbsent: There is no engine that takes requests.
            EngineLost: It ended under these.
            Refusal: It does not take one of them; the others are ended too.
        """
        box = Mailbox()
        unfinished: set[str] = set()
        self.waiting |= {request.id for request in requests}
        try:
            while not self.is_open.is_set():
                try:
                    async with asyncio.timeout(SIGN_OF_LIFE_S):
                        await self.is_open.wait()
                except TimeoutError:
                    yield []
            for request in requests:
                self._send(wire.Add(request))
                self._boxes[request.id] = box
                self._running.add(request.id)
                unfinished.add(request.id)
            while unfinished:
                news = await box.take()
                unfinished -= {id_ for id_, update in news if update.finish_reason is not None}
                yield news
        finally:
            for request in requests:
                self._boxes.pop(request.id, None)
                self._running.discard(request.id)
                self.waiting.discard(request.id)
            for id_ in unfinished:
                self.abort(id_)

    def abort(self, request_id: str) -> None:
        """End one of some requests that run together; its last update comes as that of any other."""
        with suppress(TriaxError):
            self._send(wire.Abort(request_id))

    async def pause(self, mode: Literal["abort", "wait", "keep"], timeout_s: float) -> None:
        """Hold new requests back here; end those that run, wait for them, or freeze them where they are.

        Raises:
            EngineAbsent: There is no engine.
            TimeoutError: Those that run do not end in time.
        """
        was_open = self.is_open.is_set()
        self.is_open.clear()
        try:
            if mode == "abort":
                await self.ask("pause", timeout_s, mode="abort")
            if mode == "wait":
                await self.ask("resume", timeout_s)  # what an earlier pause has frozen would never end
            if mode != "keep":
                async with asyncio.timeout(timeout_s):
                    while self._running:
                        await asyncio.sleep(0.01)
            await self.ask("pause", timeout_s, mode="keep")
        except BaseException:
            if was_open:  # who asked was told that nothing is paused
                self.is_open.set()
            raise

    async def resume(self, timeout_s: float) -> None:
        """Let all requests go on."""
        await self.ask("resume", timeout_s)
        self.is_open.set()

    async def update_weights(self, timeout_s: float, **given: str) -> int:
        """Give the engine other weights, which a process after this one gets too; returns their version.

        Args:
            timeout_s: How long it may take.
            given: `path` of a checkpoint, or the name of a segment as `shared_memory`.

        Raises:
            EngineAbsent: There is no engine.
            EngineLost: It ended meanwhile.
            Refusal: They do not fit; the old ones stay.
            TimeoutError: It did not answer in time.
        """
        if self.lack:
            given = {**given, "version": str(self._version + 1)}
        told = await self.ask("update_weights", timeout_s, **given)
        self._given, self._version, self.lack = given, told["weight_version"], ""
        if self.facts is not None:
            self.facts = replace(self.facts, weight_version=self._version)
        return self._version

    async def ask(self, task: wire.Task, timeout_s: float, **arguments: str) -> Any:
        """Ask the engine and return its answer.

        Raises:
            EngineAbsent: There is none.
            EngineLost: It ended meanwhile.
            Refusal: It cannot do that.
            TimeoutError: It did not answer in time.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(wire.Ask(number, task, arguments))
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            self._asked.pop(number, None)

    def _send(self, message: wire.Down) -> None:
        if self.status == "stopped" and not isinstance(message, wire.Stop | wire.Abort):
            raise EngineAbsent("server: is stopping; found no engine that takes requests; ask another server")
        if self._socket is None or self.status in ("loading", "restarting", "failed"):
            raise EngineAbsent(f"server: the engine is {self.status}; found {self.stage}; send the request again later")
        if self.lack and isinstance(message, wire.Add):
            raise EngineAbsent(f"server: the engine lacks its weights; {self.lack}; call /admin/update_weights")
        self._socket.send(wire.encode(message))  # never blocks: the queue has no limit of its own

    def _change(self, status: Status) -> None:
        if self.status != "stopped":
            self.status = status
        self.has_changed.set()

    async def _supervise(self) -> None:
        for number in itertools.count():
            await self._live(number)
            if self.status in ("stopped", "failed"):
                return
            self._vain += 1
            if self._vain >= PATIENCE:
                self._fail("EngineLost", f"engine: ended {PATIENCE} times in a row; found {self.stage}; see its output")
                return
            self._change("restarting")
            if self._vain > 1:
                await asyncio.sleep(min(2.0 ** (self._vain - 2), LONGEST_PAUSE_S))

    async def _live(self, number: int) -> None:
        """Run one process from start to end."""
        address = f"ipc://{self._folder.name}/{number}"
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "triax.serve.process", address, str(os.getpid())), stdin=asyncio.subprocess.DEVNULL
        )
        self._process, self._socket = process, socket
        order = wire.Open(str(self.source), self.settings.model_dump_json(), self.maker)
        socket.send(wire.encode(order))  # not waited for: one that dies before it connects never takes it
        reader = asyncio.create_task(self._read(socket))
        status = await process.wait()
        with suppress(asyncio.CancelledError):
            reader.cancel()
            await reader
        while await socket.poll(0):
            self._take(wire.decode_up(await socket.recv()))
        self._socket = None
        socket.close()
        self._lose(status)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._take(wire.decode_up(await socket.recv()))

    def _take(self, message: wire.Up) -> None:
        match message:
            case wire.News(updates):
                self._vain = 0
                self._running.difference_update([update.id for update in updates if update.finish_reason is not None])
                for update in updates:
                    if (box := self._boxes.get(update.id)) is not None:
                        self.waiting.discard(update.id)
                        box.put(update)
            case wire.Loading(stage, share):
                self.stage, self.share = stage, share
            case wire.Ready(facts):
                self.facts, self.stage, self.share = facts, "ready", 1.0
                if self._given is None or self._socket is None:
                    self._change("ready")
                else:
                    self.stage = "weights of the latest update"
                    given = self._given | {"version": str(self._version)}
                    self._socket.send(wire.encode(wire.Ask(AGAIN, "update_weights", given)))
            case wire.Answer(number, _, _, text) if number == AGAIN:
                self.lack, self.stage = text, "ready"
                if self.facts is not None and not text:
                    self.facts = replace(self.facts, weight_version=self._version)
                self._change("ready")
            case wire.Refused(id_, kind, text):
                self._running.discard(id_)
                if (box := self._boxes.get(id_)) is not None:
                    box.fail(Refusal(kind, text))
            case wire.Answer(number, value, kind, text):
                answer = self._asked.pop(number, None)
                if answer is not None and not answer.done():
                    if kind:
                        answer.set_exception(Refusal(kind, text))
                    else:
                        answer.set_result(value)
            case wire.Broken(kind, text):
                self._fail(kind, text)

    def _fail(self, kind: str, message: str) -> None:
        self.failure, self.failure_kind = message, kind
        self._change("failed")

    def _lose(self, status: int) -> None:
        """Tell everybody who waits that the process is gone."""
        found = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit status {status}"
        self.stage, self.share = f"the engine's process ended with {found}", 0.0
        if self.status not in ("stopped", "failed"):
            self.num_deaths += 1
            log.error("engine: its process ended; found %s; it is started again", found)
        if self.status == "stopped":
            lost: TriaxError = EngineAbsent("server: is shutting down; send the request again to another server")
        else:
            lost = EngineLost(
                f"engine: its process ended; found {found}; the server restarts it: send the request again"
            )
        self._running.clear()
        for box in set(self._boxes.values()):
            box.fail(lost)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(lost)
        self._asked.clear()
