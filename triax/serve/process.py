"""The engine's own process: takes requests from a socket, steps the engine, sends its updates.

Run by the API process as `python -m triax.serve.process ADDRESS PID`, with its own number; it ends when told to, when a
step fails, and when the API process is gone.
"""

import gc
import importlib
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq

from triax.config.serve import Serve
from triax.errors import ConfigError, TriaxError, UnsupportedError
from triax.log import logger
from triax.machine import wait_passively
from triax.serve import wire
from triax.serve.forms import Forms
from triax.serve.request import Request

log = logger("serve")
IDLE_MS = 500
"""Longest sleep: how soon an orphan notices that it is one."""
GRAMMAR_MS = 5
"""Longest sleep while a grammar is being made."""

Report = Callable[[str, float], None]
"""Takes a stage of loading and its share of the whole."""


class Host:
    """Owns an engine and answers for it on a socket.

    Args:
        socket: Connected to the API process.
        engine: Anything with the face of `triax.serve.engine.Engine`.
        parent: Process without which there is nothing to do.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", engine: Any, parent: int) -> None:
        self.socket, self.engine, self._parent = socket, engine, parent
        self.forms = Forms(getattr(engine, "guides", None))
        self.is_stopping = False

    def run(self) -> None:
        """Serve until told to stop or orphaned."""
        was_busy = has_rest = False
        while not self.is_stopping and os.getppid() == self._parent:
            has_work = self.engine.has_work or has_rest
            self._take(0 if has_work else GRAMMAR_MS if self.forms.is_busy else IDLE_MS)
            if self.forms.is_busy:
                self._admit()
            if self.engine.has_work:
                was_busy = True
                if updates := self.engine.step():
                    self.send(wire.News(updates))
            elif was_busy:
                was_busy, has_rest = False, True
                self._check()
            elif has_rest:
                has_rest = self.engine.rest()

    def _check(self) -> None:
        """Compare the books while nothing runs: a leak is a line of the log today, not an outage next week."""
        try:
            self.engine.check_invariants()
        except TriaxError as problem:
            log.error("%s", problem)

    def _admit(self) -> None:
        """Let requests go on whose grammars have been made."""
        if late := self.forms.late():
            self.send(wire.News(late))
        for request, problem in self.forms.take():
            self._add(request, problem)

    def _add(self, request: Request, problem: TriaxError | None = None) -> None:
        try:
            if problem is not None:
                raise problem
            self.engine.add(request)
        except TriaxError as found:
            self.send(wire.Refused(request.id, type(found).__name__, str(found)))

    def send(self, message: wire.Up) -> None:
        """Send one message."""
        self.socket.send(wire.encode(message))

    def _take(self, wait_ms: int) -> None:
        """Act on all that has come; wait for the first only."""
        while self.socket.poll(wait_ms):
            self._act(wire.decode_down(self.socket.recv()))
            wait_ms = 0

    def _act(self, message: wire.Down) -> None:
        match message:
            case wire.Add(request):
                if not self.forms.hold(request):
                    self._add(request)
            case wire.Abort(id_):
                if not self.forms.drop(id_):
                    self.engine.abort(id_)
            case wire.Ask(number, task, arguments):
                try:
                    self.send(wire.Answer(number, self._do(task, arguments)))
                except TriaxError as problem:
                    self.send(wire.Answer(number, None, type(problem).__name__, str(problem)))
            case wire.Stop():
                self.is_stopping = True

    def _do(self, task: wire.Task, arguments: dict[str, str]) -> Any:
        engine = self.engine
        if task == "pause":
            if arguments["mode"] == "abort" and (ended := self.forms.abort()):
                self.send(wire.News(ended))
            return engine.pause(arguments["mode"])
        if task == "resume":
            return engine.resume()
        if task == "metrics":
            return engine.metrics()
        if task == "cache":
            return engine.cache_report()
        version = engine.update_weights(weights_from(arguments))
        if "version" in arguments:  # a process before this one had counted so far
            engine.weight_version = version = int(arguments["version"])
        return {"weight_version": version}


def weights_from(arguments: dict[str, str]) -> Any:
    """Return what `Engine.update_weights` takes: a folder, or tensors that lie in shared memory.

    Shared memory holds one safetensors file, so names, dtypes and shapes travel with the bytes.

    Raises:
        ConfigError: There is no such segment, or it holds something else.
    """
    if "path" in arguments:
        return Path(arguments["path"])
    name = arguments["shared_memory"]
    segment = Path("/dev/shm") / name
    if Path(name).name != name or not segment.is_file():
        raise ConfigError(
            f"shared_memory: no such segment; found `{name}`; write one safetensors file to /dev/shm and name it"
        )
    from safetensors.torch import load_file

    try:
        return load_file(segment)
    except Exception as problem:  # the library raises its own kind, without a base
        raise ConfigError(
            f"shared_memory `{name}`: not a safetensors file; found {problem}; write it with safetensors"
        ) from None


def facts_of(engine: Any, settings: Serve) -> wire.Facts:
    """Return what the API process must know about an engine."""
    model = engine.model.settings
    context = min(settings.context or model.context_len, model.context_len)
    if pages := engine.metrics().get("pages"):
        context = min(context, int(pages) * settings.cache.page_tokens)
    if model.vision is None:
        return wire.Facts(model.vocab_size, context, engine.weight_version)
    vision = model.vision
    return wire.Facts(model.vocab_size, context, engine.weight_version, vision.slot_token, vision.patch, vision.merge)


def find(maker: str) -> Callable[[Path, Serve, Report], Any]:
    """Return the function that `module:name` or `file.py:name` stands for.

    Raises:
        ConfigError: There is none.
    """
    place, _, name = maker.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        return getattr(module, name)
    except (ImportError, OSError, AttributeError, ValueError) as problem:
        raise ConfigError(
            f"engine `{maker}`: cannot be imported; found {problem}; give module:name or file.py:name"
        ) from None


@contextmanager
def ending_with(parent: int) -> Iterator[None]:
    """End this process soon after its parent while a block runs that takes minutes and asks nobody, as loading does."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(IDLE_MS / 1000):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def settle() -> None:
    """Spare streams the collector's pauses: what is there now stays and is never looked at, young things less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def main(address: str, parent: int) -> int:
    """Connect, load the model, serve until the parent is gone or says so. Returns the exit status."""
    wait_passively()
    for kind in (signal.SIGINT, signal.SIGTERM):  # the API process decides when to end
        signal.signal(kind, signal.SIG_IGN)
    logging.basicConfig(format="engine: %(message)s")
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.connect(address)

        def send(message: wire.Up) -> None:
            socket.send(wire.encode(message))

        while not socket.poll(IDLE_MS):
            if os.getppid() != parent:  # it died before it could say anything
                return 1
        order = wire.decode_down(socket.recv())
        assert isinstance(order, wire.Open)
        settings = Serve.model_validate_json(order.settings)
        try:
            with ending_with(parent):
                engine = find(order.maker)(
                    Path(order.source), settings, lambda stage, share: send(wire.Loading(stage, share))
                )
        except TriaxError as problem:
            send(wire.Broken(type(problem).__name__, str(problem)))
            return 1
        settle()
        send(wire.Ready(facts_of(engine, settings)))
        host = Host(socket, engine, parent)
        try:
            host.run()
        finally:
            host.forms.close()
            if callable(close := getattr(engine, "close", None)):
                close()
    return 0


def engine_of(folder: Path, settings: Serve, report: Report) -> Any:
    """Make the engine of a checkpoint: the default of `Open.maker`."""
    report("libraries", 0.0)
    from triax.serve.open import open_engine

    report("weights", 0.2)
    engine = open_engine(folder, settings.device, settings)
    with suppress(UnsupportedError):  # it takes seconds, which no stream should have to wait for later
        engine.guides.warm()
    return engine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
