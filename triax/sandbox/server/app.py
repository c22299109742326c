"""The server as one application: control plane, data planes, health and figures, told apart by header and host."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import triax
from triax.config.hosts import is_allowed, is_loopback
from triax.errors import SandboxError
from triax.sandbox.server import control, metrics, wire
from triax.sandbox.server.access import ENVD_PORT, aim
from triax.sandbox.server.connect import STATUS, Fault
from triax.sandbox.server.guest import Guest
from triax.sandbox.server.plane import Plane
from triax.sandbox.server.schema import LARGEST_BODY_BYTES

log = logging.getLogger("triax.sandbox.server")

LARGEST_DRAIN_BYTES = 16 * 2**20
OPEN_PATHS = {"/health"}
"""Routes of the control plane that ask for no key."""


class Server:
    """The ASGI application of a server of sandboxes.

    Args:
        plane: What it serves.
    """

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5), trust_env=False)
        self._guest = Guest(plane, self._client)
        self._control = _control(plane)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._control(scope, receive, send)
            return
        if scope["type"] == "http":
            request = _Drained(receive, send, has_body=scope["method"] not in ("GET", "HEAD"))
            receive, send = request.receive, request.send
        headers = Headers(scope=scope)
        aimed = aim(headers)
        try:
            self._check_host(headers)
            if aimed is None and scope["type"] == "http" and scope["path"] == "/files":
                aimed = self._signed(scope)
            if aimed is not None:
                scope["triax.aim"] = aimed
                await self._guest(scope, receive, send)
            elif scope["type"] == "http":
                await self._guarded(scope, headers, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1003})
        except Fault as fault:
            if scope["type"] != "http":
                await send({"type": "websocket.close", "code": 1008, "reason": fault.message[:120]})
            else:
                await wire.problem(STATUS[fault.code], fault.message)(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """Refuse a page elsewhere whose name resolves to this machine; its browser tells that name."""
        settings, name = self.plane.settings, headers.get("host", "localhost")
        known = settings.allowed_hosts
        if settings.domain is not None and (known or is_loopback(settings.host)):
            known += (settings.domain, f"*.{settings.domain}")
        if not is_allowed(name, settings.host, known):
            words = f"host: this server does not answer to `{name[:200]}`; ask `localhost`, or name it in allowed_hosts"
            raise Fault("permission_denied", words)

    def _signed(self, scope: Scope) -> tuple[str, int] | None:
        query = QueryParams(scope["query_string"])
        if "signature" not in query:
            return None
        ids = [sandbox.id for sandbox in self.plane.sandboxes()]
        found = self.plane.access.signed(ids, query, "read" if scope["method"] == "GET" else "write")
        if found is None:
            raise Fault("unauthenticated", "the signature fits no sandbox and file of this server")
        scope["triax.signed"] = True
        return found, ENVD_PORT

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS and not self.plane.access.is_open(headers):
            response = wire.problem(401, "X-API-Key: not a key of this server; send one that it was started with")
            await response(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > LARGEST_BODY_BYTES:
                raise HTTPException(413, f"a body may have {LARGEST_BODY_BYTES} bytes here")
            return message

        await self._control(scope, limited, send)

    async def close(self) -> None:
        """Let go of connections and of what clients have open; the host and its sandboxes stay."""
        await self.plane.close()
        await self._client.aclose()


class _Drained:
    """A request whose body is read to its end before an answer of one piece begins, and before any ends.

    A refusal needs no body, but HTTP/1.1 closes a connection on which one was left unread, just as the client sends
    its next request over it; and a client that sees an answer begin while it still sends may let go of the connection.
    """

    def __init__(self, receive: Receive, send: Send, *, has_body: bool = True) -> None:
        self._receive = receive
        self._send = send
        self._has_body = has_body
        self._read = asyncio.Event()
        self._start: Message | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._read.set()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._has_body and not self._read.is_set():
            self._start = message  # the next message tells whether the answer is one piece
            return
        if message["type"] == "http.response.body" and not message.get("more_body", False) and not self._read.is_set():
            await self._drain()
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
        await self._send(message)

    async def _drain(self) -> None:
        """Read what is left; who streams an answer listens too, and may take the last piece before we do."""
        left, read = LARGEST_DRAIN_BYTES, asyncio.ensure_future(self._read.wait())
        try:
            while not self._read.is_set() and left > 0:
                piece = asyncio.ensure_future(self.receive())
                try:
                    await asyncio.wait([piece, read], return_when=asyncio.FIRST_COMPLETED)
                    if piece.done():
                        left -= len(piece.result().get("body", b""))
                finally:
                    piece.cancel()
        finally:
            read.cancel()


def _control(plane: Plane) -> ASGIApp:
    app = FastAPI(
        title="triax sandboxes", version=triax.__version__, docs_url=None, redoc_url=None, exception_handlers=_HANDLERS
    )
    app.state.plane = plane
    app.include_router(control.router)

    @app.get("/health", status_code=204)
    async def health() -> Response:
        """Tell that the server answers."""
        return Response(status_code=204)

    @app.get("/metrics")
    async def figures() -> Response:
        """Tell the server's figures, for Prometheus."""
        return Response(metrics.exposition(plane), media_type=metrics.CONTENT_TYPE)

    @app.get("/nodes")
    async def nodes() -> list[dict[str, Any]]:
        """List the machines of the cluster: this one."""
        return [metrics.node(plane)]

    @app.get("/nodes/{node_id}")
    async def node(node_id: str) -> dict[str, Any]:
        """Tell about one machine of the cluster."""
        found = metrics.node(plane)
        if found["id"] != node_id:
            raise SandboxError(f"node `{node_id[:200]}`: not known here", "refused", status=404)
        return found

    return app


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, SandboxError)
    return wire.refusal(problem)


async def _malformed(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestValidationError)
    first = problem.errors()[0]
    if first["type"] == "json_invalid":
        return wire.problem(400, f"body: is no JSON; {first.get('ctx', {}).get('error', first['msg'])}")
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    place = "".join(letter if letter.isprintable() else "?" for letter in place)
    found = json.dumps(first.get("input"), default=str)[:200]
    return wire.problem(400, f"{place or 'body'}: {first['msg']}; found {found}")


async def _http(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    return wire.problem(problem.status_code, problem.detail)


async def _unforeseen(request: Request, problem: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=problem)
    return wire.problem(500, f"the server failed: {type(problem).__name__}", "internal_server_error")


_HANDLERS: dict[Any, Any] = {
    SandboxError: _refused,
    RequestValidationError: _malformed,
    HTTPException: _http,
    Exception: _unforeseen,
}


@asynccontextmanager
async def opened(plane: Plane) -> AsyncGenerator[Server, None]:
    """Give the application of a plane, and close it at the end."""
    server = Server(plane)
    try:
        yield server
    finally:
        await server.close()
