"""The service `process.Process`: commands and terminals of a sandbox, over Connect."""

import asyncio
import base64
import binascii
import contextlib
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from triax.sandbox.protocol import Result
from triax.sandbox.server.connect import Call, Fault, Kind, Method
from triax.sandbox.server.messages import message
from triax.sandbox.server.session import Event, Running, Session

PREFIX = "/process.Process/"
PUT_AWAY = ("pausing", "paused", "suspending", "suspended", "resuming", "killing", "dead")
"""Statuses in which a command breaks off by what a client or a time limit asked for, not by a fault of the sandbox."""


def methods() -> dict[str, Method]:
    """Return the methods of the service by path; each expects a `Session` as the call's target."""
    table: dict[str, tuple[Callable[..., Any], Kind]] = {
        "List": (_list, "unary"),
        "Start": (_start, "server"),
        "Connect": (_connect, "server"),
        "Update": (_update, "unary"),
        "SendInput": (_send_input, "unary"),
        "StreamInput": (_stream_input, "client"),
        "SendSignal": (_send_signal, "unary"),
        "CloseStdin": (_close_stdin, "unary"),
    }
    return {
        PREFIX + name: Method(f"process.{name}Request", f"process.{name}Response", handler, kind)
        for name, (handler, kind) in table.items()
    }


def user_of(headers: Mapping[str, str]) -> str | None:
    """Return the user that a request's basic authorisation names, None for the sandbox's own.

    Raises:
        Fault: The header is there but holds no name.
    """
    text = headers.get("authorization", "")
    if not text.lower().startswith("basic "):
        return None
    try:
        name = base64.b64decode(text[6:].strip(), validate=True).decode().split(":", 1)[0]
    except (binascii.Error, UnicodeDecodeError):
        raise Fault("unauthenticated", "authorization is no base64 of `user:`") from None
    if any(ord(letter) < 33 for letter in name):
        raise Fault("unauthenticated", f"authorization names no user; found {name[:40]!r}")
    return name or None


def check_text(what: str, *texts: str) -> None:
    """Refuse text that no system call can carry.

    Raises:
        Fault: One of the texts holds NUL.
    """
    for text in texts:
        if "\0" in text:
            raise Fault("invalid_argument", f"{what} must not hold NUL; found {text[:40]!r}")


async def _list(request: Any, call: Call) -> Any:
    session: Session = call.target
    await session.rejoined()
    return message(
        "process.ListResponse",
        processes=[
            message(
                "process.ProcessInfo",
                pid=running.pid,
                config=message("process.ProcessConfig", **running.config),
                **({} if running.tag is None else {"tag": running.tag}),
            )
            for running in session.processes.values()
            if not running.is_over
        ],
    )


async def _start(request: Any, call: Call) -> AsyncGenerator[Any, None]:
    running = await start(request, call)
    async for event in _tell("process.StartResponse", running, call):
        yield event


async def start(request: Any, call: Call) -> Running:
    """Start what a `process.StartRequest` describes in the call's session.

    Raises:
        Fault: The request cannot be carried out.
    """
    session: Session = call.target
    config = request.process
    if not config.cmd:
        raise Fault("invalid_argument", "process.cmd must name a program; found nothing")
    check_text("a command, its arguments, environment and folder", config.cmd, *config.args, config.cwd)
    check_text("an environment variable", *config.envs.keys(), *config.envs.values())
    for name in config.envs:
        if not name or "=" in name:
            raise Fault(
                "invalid_argument", f"name of an environment variable is empty or holds `=`; found {name[:40]!r}"
            )
    size = request.pty.size if request.HasField("pty") else None
    program = config.cmd if config.cmd != "/bin/bash" else await session.shell()
    process = await session.sandbox.start(
        [program, *config.args],
        env=dict(config.envs),
        cwd=config.cwd or None,
        user=user_of(call.headers),
        terminal=None if size is None else (size.rows or 24, size.cols or 80),
    )
    known = {"cmd": config.cmd, "args": list(config.args), "envs": dict(config.envs)}
    if config.HasField("cwd"):
        known["cwd"] = config.cwd
    running = Running(
        process,
        known,
        tag=request.tag if request.HasField("tag") else None,
        has_terminal=size is not None,
        note_end=session.sandbox.note_end,
        limit_s=call.timeout_s,
    )
    session.add(running)
    if request.HasField("stdin") and not request.stdin and size is None:
        with contextlib.suppress(Exception):  # a command this short may be over already
            await process.close_stdin()
    return running


async def _connect(request: Any, call: Call) -> AsyncGenerator[Any, None]:
    running = await call.target.find(request.process)
    async for event in _tell("process.ConnectResponse", running, call):
        yield event


async def _tell(name: str, running: Running, call: Call) -> AsyncGenerator[Any, None]:
    def response(**fields: Any) -> Any:
        return message(name, event=message("process.ProcessEvent", **fields))

    events = running.listen(call.keepalive_s)
    first = asyncio.ensure_future(anext(events))  # listens from here on: nothing written after the start is missed
    try:
        await asyncio.sleep(0)
        yield response(start=message("process.ProcessEvent.StartEvent", pid=running.pid))
        event = await first
        while True:
            if event is None:
                yield response(keepalive=message("process.ProcessEvent.KeepAlive"))
            else:
                yield response(**_fields(event, running, call.target.sandbox))
            event = await anext(events)
    except StopAsyncIteration:
        return
    finally:
        if not first.done():
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await events.aclose()


def _fields(event: Event, running: Running, sandbox: Any) -> dict[str, Any]:
    if isinstance(event, Result):
        if event.outcome == "infrastructure" and sandbox.status in PUT_AWAY:
            raise Fault(
                "unavailable",
                f"sandbox {sandbox.id} was put away or ended while the command ran: it is {sandbox.status}",
            )
        return {"end": _end(event)}
    name, chunk = event
    return {"data": message("process.ProcessEvent.DataEvent", **{"pty" if running.has_terminal else name: chunk})}


def _end(result: Result) -> Any:
    """Say how a process ended; what was no ending of its own is a fault, never an exit code."""
    if result.outcome == "timeout":
        raise Fault("deadline_exceeded", result.detail or "the command ran past its limit and was killed")
    if result.outcome in ("infrastructure", "refused"):
        raise Fault("internal" if result.outcome == "infrastructure" else "invalid_argument", result.detail)
    if result.outcome == "out_of_memory":
        code, status = result.exit_code or -1, "out of memory"
    elif result.signal is not None:
        code, status = -1, f"signal: {(signal.strsignal(result.signal) or str(result.signal)).lower()}"
    else:
        code, status = result.exit_code or 0, f"exit status {result.exit_code or 0}"
    return message(
        "process.ProcessEvent.EndEvent",
        exit_code=code,
        exited=result.signal is None,
        status=status,
        **({"error": result.detail or status} if code else {}),
    )


async def _update(request: Any, call: Call) -> Any:
    running = await call.target.find(request.process)
    if request.HasField("pty"):
        if not running.has_terminal:
            raise Fault("failed_precondition", f"process {running.pid} has no terminal to resize")
        await running.process.resize(request.pty.size.rows, request.pty.size.cols)
    return message("process.UpdateResponse")


async def _send_input(request: Any, call: Call) -> Any:
    await _write(await call.target.find(request.process), request.input)
    return message("process.SendInputResponse")


async def _stream_input(requests: AsyncIterator[Any], call: Call) -> Any:
    running = None
    async for request in requests:
        kind = request.WhichOneof("event")
        if kind == "start":
            running = await call.target.find(request.start.process)
        elif kind == "data":
            if running is None:
                raise Fault("invalid_argument", "a stream of input must begin with `start`; found `data`")
            await _write(running, request.data.input)
    return message("process.StreamInputResponse")


async def _write(running: Running, given: Any) -> None:
    kind = given.WhichOneof("input")
    if kind is None:
        raise Fault("invalid_argument", "input must be `stdin` or `pty`; found neither")
    if (kind == "pty") != running.has_terminal:
        found = "a terminal" if running.has_terminal else "no terminal"
        raise Fault("invalid_argument", f"process {running.pid} has {found}; found input for `{kind}`")
    await running.process.write(getattr(given, kind))


async def _send_signal(request: Any, call: Call) -> Any:
    if request.signal not in (signal.SIGTERM, signal.SIGKILL):
        raise Fault("invalid_argument", f"signal must be SIGTERM or SIGKILL; found number {request.signal}")
    await (await call.target.find(request.process)).process.kill(request.signal)
    return message("process.SendSignalResponse")


async def _close_stdin(request: Any, call: Call) -> Any:
    running = await call.target.find(request.process)
    if running.has_terminal:
        raise Fault("failed_precondition", f"process {running.pid} has a terminal; write the character EOT to it")
    await running.process.close_stdin()
    return message("process.CloseStdinResponse")
