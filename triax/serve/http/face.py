"""What all endpoints share: the engine's link, the model behind it, and who may come in now."""

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from anyio import CapacityLimiter, to_thread
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triax.config.serve import Serve
from triax.data.chat.message import parse_json
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import TriaxError
from triax.serve.http.answer import unless_gone
from triax.serve.http.fault import Fault, fault_of
from triax.serve.http.metrics import Meter
from triax.serve.http.model import Model, open_model
from triax.serve.link import SIGN_OF_LIFE_S, EngineAbsent, Link

T = TypeVar("T")
LARGE = 1 << 16
"""Bytes of a body above which it is rendered in a thread, so that others do not wait for it."""
MOST_UNPACKING = 2
"""Requests whose pictures are unpacked at once; each may take a gigabyte for a moment."""
LONGEST_RETRY_S = 60

BREAKS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}
"""What JSON may hold as it is, but clients that read a stream by lines take for the end of one."""


class Face:
    """The server behind its endpoints.

    Args:
        link: To the engine.
        tokenizer: Of its model.
        settings: Of engine and server.
    """

    def __init__(self, link: Link, tokenizer: Tokenizer | KimiTokenizer, settings: Serve) -> None:
        self.link, self.tokenizer, self.settings = link, tokenizer, settings
        self.meter = Meter(link)
        self.is_draining = False
        self.started = int(time.time())
        self._model: Model | None = None
        self._ends: deque[float] = deque(maxlen=64)
        self._unpacking = CapacityLimiter(MOST_UNPACKING)

    @property
    def model(self) -> Model:
        """The model that answers.

        Raises:
            EngineAbsent: It is still being loaded for the first time.
        """
        if self._model is None:
            if self.link.facts is None:
                raise EngineAbsent(
                    f"server: the model is being loaded; found stage `{self.link.stage}` at {self.link.share:.0%}; "
                    "ask /health until it is there"
                )
            self._model = open_model(self.link.source, self.tokenizer, self.link.facts, self.settings)
        return self._model

    def admit(self, name: str, num_choices: int = 1) -> Model:
        """Return the model if a request may come in now.

        Raises:
            Fault: It is not served under this name, too many wait, or the server is about to stop.
            EngineAbsent: There is no engine.
        """
        if self.is_draining:
            raise Fault(
                503,
                "server: is stopping; found a new request; send it to another server",
                code="server_stopping",
                headers={"Retry-After": "5", "Connection": "close"},
            )
        model = self.check_name(name)
        limit, waiting = self.settings.http.max_queue, len(self.link.waiting)
        if num_choices > limit:
            raise Fault(
                400, f"n: asks for more than can wait; found {num_choices} choices, a queue of {limit}; ask for fewer"
            )
        if waiting + num_choices > limit:
            raise self._full(waiting)
        return model

    def _full(self, waiting: int) -> Fault:
        limit, wait = self.settings.http.max_queue, self._wait_s(waiting)
        return Fault(
            429,
            f"server: too many requests wait; found {waiting} in a queue of {limit}; try again in {wait} s",
            code="queue_full",
            headers={"Retry-After": str(wait)},
        )

    def check_name(self, name: str) -> Model:
        """Return the model if this is its name.

        Raises:
            Fault: It is not.
        """
        model = self.model
        if name != model.name:
            raise Fault(
                404,
                f"model: not served here; found `{name[:80]}`; use `{model.name}`",
                param="model",
                code="model_not_found",
            )
        return model

    def note_end(self) -> None:
        """Remember that a request has ended: how fast they do decides when to come again."""
        self._ends.append(time.monotonic())

    def _wait_s(self, waiting: int) -> int:
        if len(self._ends) < 2:
            return 1
        per_s = len(self._ends) / max(time.monotonic() - self._ends[0], 1e-3)
        return max(1, min(LONGEST_RETRY_S, round(waiting / per_s)))

    async def prepare(self, request: HttpRequest, work: Callable[[], T]) -> T:
        """Do work that takes long for a large body, or one with pictures, beside everything else."""
        body = await request.body()
        if b"image_url" in body:  # a small file may unpack to a gigabyte
            if (waiting := self._unpacking.statistics().tasks_waiting) >= self.settings.http.max_queue:
                raise self._full(waiting)
            return await to_thread.run_sync(work, limiter=self._unpacking)
        if len(body) < LARGE:
            return work()
        return await to_thread.run_sync(work)

    async def stream(self, request: HttpRequest, chunks: AsyncGenerator[bytes, None]) -> Response:
        """Answer with a stream of events; what fails before the first one is an ordinary error."""
        first = await unless_gone(request, anext(chunks))
        return Events(_with_faults(first, chunks))


async def _with_faults(first: bytes, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield all chunks, and signs of life between empty ones; a failure on the way is the last of them.

    An engine at work is no sign of life for a client: tokens may come that tell it nothing for minutes.
    """
    told = time.monotonic()
    async with aclosing(chunks):
        if first:
            yield first
        try:
            async for chunk in chunks:
                if chunk:
                    yield chunk
                elif time.monotonic() - told < SIGN_OF_LIFE_S:
                    continue
                else:
                    yield SIGN_OF_LIFE
                told = time.monotonic()
        except TriaxError as problem:
            yield event(fault_of(problem).tree())


class Events(StreamingResponse):
    """A stream of server-sent events that ends its source when the client goes."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        async with aclosing(self._chunks):
            await super().__call__(scope, receive, send)


def event(tree: object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + dumps(tree) + b"\n\n"


def dumps(tree: Any) -> bytes:
    """Return a tree as JSON in one line, whatever a reader takes for the end of one."""
    text = msgspec.json.encode(tree)
    for character, escape in BREAKS.items():
        text = text.replace(character, escape)
    return text


SIGN_OF_LIFE = b": the engine is at work\n\n"
DONE = b"data: [DONE]\n\n"


class StrictRoute(APIRoute):
    """Reads bodies as JSON in the strict sense: no NaN, no endless nesting, no other content type."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """Return the handler with a stricter reader before it."""
        handle = super().get_route_handler()

        async def strict(request: HttpRequest) -> Response:
            if self.body_field is not None:
                kind = request.headers.get("content-type", "")
                if kind.partition(";")[0].strip().lower() != "application/json":
                    raise Fault(  # a page of another origin could send any other kind without asking first
                        415, f"content-type: must be application/json; found `{kind[:80]}`; send that header"
                    )
                try:
                    data = await request.body()
                except ClientDisconnect:
                    raise Fault(499, "body: did not come; found a closed connection; nothing to do") from None
                try:
                    request._json = parse_json(data.decode())
                except ValueError as problem:
                    raise Fault(400, f"body: not JSON; found a problem: {problem}; send a JSON object") from None
            try:
                return await handle(request)
            except RecursionError:  # the reader takes deeper trees than those who go through them
                raise Fault(400, "body: nested too deeply; found more levels than can be read; flatten it") from None

        return strict


FAULTS: dict[int | str, dict[str, Any]] = {
    400: {"description": "Something in the request is wrong; the error says what and what to do."},
    401: {"description": "No key, or a wrong one."},
    404: {"description": "No such model."},
    408: {"description": "The body did not come."},
    413: {"description": "The body is too large."},
    415: {"description": "The body is said to be something else than JSON."},
    429: {"description": "Too many requests; `Retry-After` says when to come again."},
    503: {"description": "The model is being loaded, the engine is being restarted, or the server is stopping."},
}

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream`, as events.", "content": {"text/event-stream": {}}}
} | FAULTS
