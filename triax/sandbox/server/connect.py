"""The Connect protocol: remote calls as plain HTTP, unary or streamed, in JSON or binary protocol buffers.

A unary call is one HTTP request and one response. A stream is a row of envelopes, each a flag byte and a length of four
bytes before its message; the last one holds the outcome, since the HTTP status was sent long before.

Source: connectrpc.com/docs/protocol.
"""

import asyncio
import json
import struct
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triax.sandbox.server.messages import message_class

STATUS = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}
Kind = Literal["unary", "server", "client"]
"""Who streams: nobody, the server or the client."""
COMPRESSED, END = 1, 2
LARGEST_MESSAGE_BYTES = 16 * 2**20


class Fault(Exception):
    """What a call answers instead of a message.

    Args:
        code: One of the protocol's codes, a key of `STATUS`.
        message: What a person reads.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def body(self) -> dict[str, str]:
        """Return the fault as the protocol writes it."""
        return {"code": self.code, "message": self.message}


@dataclass
class Call:
    """What a handler knows about a call besides its message."""

    headers: Mapping[str, str]
    target: Any
    """What the server resolved the call to, here a sandbox's guest."""
    timeout_s: float | None = None
    """Seconds that the caller waits at most, from when the call began."""
    keepalive_s: float | None = None
    """Seconds of silence after which a stream should show that it lives."""


@dataclass(frozen=True)
class Method:
    """One remote procedure."""

    request: str
    response: str
    handler: Callable[..., Any]
    kind: Kind = "unary"
    """Who streams."""


@dataclass
class Codec:
    """How messages are written, and how errors of reading them are told."""

    name: Literal["json", "proto"]
    streamed: bool
    options: dict[str, Any] = field(default_factory=lambda: {"ignore_unknown_fields": True})

    @classmethod
    def of(cls, content_type: str) -> "Codec | None":
        """Return the codec of a content type, None for one that is not Connect's."""
        kind = content_type.split(";", 1)[0].strip().lower()
        for name in ("json", "proto"):
            if kind in (f"application/{name}", f"application/connect+{name}"):
                return cls(name, "connect+" in kind)
        return None

    @property
    def content_type(self) -> str:
        """The content type that answers carry."""
        return f"application/{'connect+' if self.streamed else ''}{self.name}"

    def read(self, name: str, data: bytes) -> Message:
        """Return the message of type `name` that the bytes hold.

        Raises:
            Fault: They hold none.
        """
        message = message_class(name)()
        try:
            if self.name == "proto":
                message.ParseFromString(data)
            else:
                json_format.Parse(data or b"{}", message, **self.options)
        except (json_format.ParseError, DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise Fault("invalid_argument", f"body is no {name}: {problem}") from None
        return message

    def write(self, message: Message) -> bytes:
        """Return a message's bytes."""
        if self.name == "proto":
            return message.SerializeToString()
        return json_format.MessageToJson(message, indent=None).encode()


class Connect:
    """The ASGI application that carries the calls of some methods.

    Args:
        methods: What is served, by path such as `/process.Process/List`.
        resolve: Finds what a call is aimed at from the scope of its request; may raise a `Fault`.
        explain: Turns an exception of a handler into a `Fault`.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        resolve: Callable[[Request], Awaitable[Any]],
        explain: Callable[[Exception], Fault],
    ) -> None:
        self.methods = dict(methods)
        self.resolve = resolve
        self.explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        codec = Codec.of(request.headers.get("content-type", ""))
        method = self.methods.get(scope["path"])
        if method is None:
            fault = Fault("unimplemented", f"{scope['path'][:200]} is no method of this service")
            await _refusal(fault, 404)(scope, receive, send)
        elif scope["method"] != "POST":
            await Response(status_code=405, headers={"allow": "POST"})(scope, receive, send)
        elif codec is None or codec.streamed != (method.kind != "unary"):
            await Response(status_code=415, headers={"accept-post": _accepted(method)})(scope, receive, send)
        elif method.kind == "unary":
            await (await self._unary(request, method, codec))(scope, receive, send)
        else:
            await self._stream(request, send, method, codec)

    async def _unary(self, request: Request, method: Method, codec: Codec) -> Response:
        try:
            call = _call(request.headers)
            call.target = await self.resolve(request)
            message = codec.read(method.request, await _body(request))
            async with asyncio.timeout(call.timeout_s):
                answer = await method.handler(message, call)
        except TimeoutError:
            return _refusal(Fault("deadline_exceeded", "not done within the time that the caller waits"))
        except Exception as problem:
            return _refusal(self._fault(problem))
        return Response(codec.write(answer), media_type=codec.content_type)

    async def _stream(self, request: Request, send: Send, method: Method, codec: Codec) -> None:
        envelopes: AsyncGenerator[Message, None] | None = None
        try:
            call = _call(request.headers)
            call.target = await self.resolve(request)
            envelopes = _envelopes(request, method.request, codec)
            if method.kind == "client":
                async with asyncio.timeout(call.timeout_s):
                    frames = _whole(codec.write(await method.handler(envelopes, call)))
            else:
                frames = self._frames(method.handler(await _only(envelopes), call), codec, call)
        except ClientDisconnect:
            return
        except TimeoutError:
            frames = _ended(Fault("deadline_exceeded", "not done within the time that the caller waits"))
        except Exception as problem:
            frames = _ended(self._fault(problem))
        finally:
            if envelopes is not None:
                await envelopes.aclose()
        await _deliver(frames, codec, request.receive, send)

    async def _frames(
        self, messages: AsyncGenerator[Message, None], codec: Codec, call: Call
    ) -> AsyncGenerator[bytes, None]:
        fault = None
        deadline = None if call.timeout_s is None else asyncio.get_running_loop().time() + call.timeout_s
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    message = await anext(messages)
                yield _envelope(codec.write(message))
        except StopAsyncIteration:
            pass
        except Exception as problem:
            late = isinstance(problem, TimeoutError) and call.timeout_s is not None
            fault = (
                Fault("deadline_exceeded", f"not done within {call.timeout_s:g} s") if late else self._fault(problem)
            )
        finally:
            await messages.aclose()
        yield _last(fault)

    def _fault(self, problem: Exception) -> Fault:
        return problem if isinstance(problem, Fault) else self.explain(problem)


async def _deliver(frames: AsyncGenerator[bytes, None], codec: Codec, receive: Receive, send: Send) -> None:
    """Send the envelopes of a stream until it ends or nobody listens any more."""
    headers = [(b"content-type", codec.content_type.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def pump() -> None:
        async for frame in frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(pump()), asyncio.create_task(listen())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await frames.aclose()


async def _whole(data: bytes) -> AsyncGenerator[bytes, None]:
    yield _envelope(data)
    yield _last(None)


def _accepted(method: Method) -> str:
    prefix = "" if method.kind == "unary" else "connect+"
    return f"application/{prefix}json, application/{prefix}proto"


def _refusal(fault: Fault, status: int | None = None) -> Response:
    return Response(json.dumps(fault.body()), status_code=status or STATUS[fault.code], media_type="application/json")


def _call(headers: Headers) -> Call:
    return Call(
        headers,
        target=None,
        timeout_s=_number(headers, "connect-timeout-ms", 1e-3, largest=10**10),
        keepalive_s=_number(headers, "keepalive-ping-interval", 1.0, largest=10**6),
    )


def _number(headers: Headers, name: str, scale: float, *, largest: int) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or not 0 < int(text[:12]) < largest:
        raise Fault("invalid_argument", f"{name} is no whole number above 0 and below {largest}; found `{text[:40]}`")
    return int(text) * scale


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        _check_size(len(body))
    encoding = request.headers.get("content-encoding", "identity")
    return bytes(body) if encoding == "identity" else _inflate(encoding, bytes(body))


def _check_size(size: int) -> None:
    if size > LARGEST_MESSAGE_BYTES:
        raise Fault("resource_exhausted", f"message is longer than {LARGEST_MESSAGE_BYTES} bytes; send files to /files")


def _inflate(encoding: str, data: bytes) -> bytes:
    if encoding != "gzip":
        raise Fault("unimplemented", f"compression `{encoding[:40]}` is not known; use gzip or none")
    unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        plain = unpack.decompress(data, LARGEST_MESSAGE_BYTES + 1)
    except zlib.error as problem:
        raise Fault("invalid_argument", f"body is no gzip: {problem}") from None
    _check_size(len(plain))
    return plain


async def _envelopes(request: Request, name: str, codec: Codec) -> AsyncGenerator[Message, None]:
    encoding = request.headers.get("connect-content-encoding", "gzip")
    waiting = bytearray()
    async for chunk in request.stream():
        waiting += chunk
        while len(waiting) >= 5:
            flags, size = struct.unpack(">BI", waiting[:5])
            _check_size(size)
            if len(waiting) < 5 + size:
                break
            data = bytes(waiting[5 : 5 + size])
            del waiting[: 5 + size]
            if flags & END:
                continue
            yield codec.read(name, _inflate(encoding, data) if flags & COMPRESSED else data)
    if waiting:
        raise Fault("invalid_argument", f"body ends within an envelope; found {len(waiting)} bytes more")


async def _only(envelopes: AsyncIterator[Message]) -> Message:
    """Return the one message of a body, read to its end."""
    found: Message | None = None
    async for message in envelopes:
        if found is not None:
            raise Fault("invalid_argument", "body must hold one message; found more")
        found = message
    if found is None:
        raise Fault("invalid_argument", "body must hold one message; found none")
    return found


def _envelope(data: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(data)) + data


def _last(fault: Fault | None) -> bytes:
    return _envelope(json.dumps({"error": fault.body()} if fault else {}).encode(), END)


async def _ended(fault: Fault) -> AsyncGenerator[bytes, None]:
    yield _last(fault)
