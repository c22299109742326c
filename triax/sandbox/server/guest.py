"""The data plane: what clients say to one sandbox, and what programs inside it serve."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from triax.errors import SandboxError
from triax.sandbox.server import files, processes, transfer, wire
from triax.sandbox.server.access import ENVD_PORT
from triax.sandbox.server.connect import STATUS, Connect, Fault
from triax.sandbox.server.faults import explain
from triax.sandbox.server.plane import Plane
from triax.sandbox.server.session import Session

HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
OURS = {"e2b-sandbox-id", "e2b-sandbox-port", "e2b-traffic-access-token", "x-access-token", "x-api-key"}


class Guest:
    """The ASGI application of all sandboxes' data planes.

    Args:
        plane: What finds the sandboxes.
        client: Reaches programs that listen inside.
    """

    def __init__(self, plane: Plane, client: httpx.AsyncClient) -> None:
        self.plane = plane
        self._client = client
        self._connect = Connect(processes.methods() | files.methods(), self._resolve, explain)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; the scope's `triax.aim` names sandbox and port."""
        sandbox_id, port = scope["triax.aim"]
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003, "reason": "web sockets are not forwarded"})
            return
        if port == ENVD_PORT and scope["path"].startswith(("/process.", "/filesystem.")):
            await self._connect(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request, sandbox_id, port)
        except (Fault, SandboxError) as problem:
            response = self._refusal(problem, sandbox_id)
        await response(scope, receive, send)

    async def _answer(self, request: Request, sandbox_id: str, port: int) -> Response:
        if port != ENVD_PORT:
            return await self._forward(request, sandbox_id, port)
        route = (request.method, request.url.path)
        if route == ("GET", "/health"):
            session = await self.plane.session(sandbox_id)
            if session.sandbox.broken:
                return wire.problem(503, f"sandbox {sandbox_id}: {session.sandbox.broken}")
            return Response(status_code=204)
        session = await self._open(request, sandbox_id)
        if route == ("GET", "/files"):
            return await transfer.download(request, session)
        if route == ("POST", "/files"):
            return await transfer.upload(request, session)
        if route == ("GET", "/metrics"):
            return JSONResponse(await self._metrics(sandbox_id))
        if route == ("GET", "/envs"):
            return JSONResponse(dict(session.sandbox.spec.env))
        return wire.problem(404, f"{request.method} {request.url.path[:200]}: no such route of a sandbox")

    async def _open(self, request: Request, sandbox_id: str) -> Session:
        self.plane.find(sandbox_id)  # an unknown sandbox is told so, whatever the token
        if "triax.signed" not in request.scope:
            self.plane.access.check_token(sandbox_id, request.headers.get("x-access-token"))
        return await self.plane.session(sandbox_id)

    async def _resolve(self, request: Request) -> Session:
        try:
            return await self._open(request, request.scope["triax.aim"][0])
        except SandboxError as problem:
            if problem.status in (404, 410, 502):
                raise Fault("unavailable", _not_found(request.scope["triax.aim"][0], problem)) from None
            raise

    def _refusal(self, problem: Exception, sandbox_id: str) -> Response:
        if isinstance(problem, SandboxError) and problem.status in (404, 410, 502) and sandbox_id in str(problem):
            return wire.problem(502, _not_found(sandbox_id, problem))
        if isinstance(problem, SandboxError):
            return wire.problem(problem.status, str(problem), f"sandbox_{problem.kind}")
        fault = explain(problem)
        return wire.problem(STATUS[fault.code], fault.message)

    async def _metrics(self, sandbox_id: str) -> dict[str, Any]:
        usage = await self.plane.usage(sandbox_id)
        return {
            "ts": usage["timestampUnix"],
            "cpu_count": usage["cpuCount"],
            "cpu_used_pct": usage["cpuUsedPct"],
            "mem_total": usage["memTotal"],
            "mem_used": usage["memUsed"],
            "mem_cache": usage["memCache"],
            "disk_used": usage["diskUsed"],
            "disk_total": usage["diskTotal"],
        }

    async def _forward(self, request: Request, sandbox_id: str, port: int) -> Response:
        sandbox = self.plane.find(sandbox_id)
        if sandbox.spec.metadata.get(wire.PRIVATE_PORTS) == "true":
            self.plane.access.check_token(sandbox_id, request.headers.get("e2b-traffic-access-token"), "traffic")
        if not 0 < port < 65536:
            raise Fault("invalid_argument", "E2B-Sandbox-Port must be a port from 1 to 65535")
        session = await self.plane.session(sandbox_id)
        host, outside = await session.sandbox.expose(port)
        url = httpx.URL(f"http://{host}:{outside}", raw_path=request.scope["raw_path"] + _query(request))
        headers = [(k, v) for k, v in request.headers.items() if k not in HOP_BY_HOP and k not in OURS]
        body = request.stream() if _has_body(request) else None
        outgoing = self._client.build_request(request.method, url, headers=headers, content=body)
        try:
            answer = await self._client.send(outgoing, stream=True)
        except httpx.TransportError:
            return wire.problem(502, f"sandbox {sandbox_id}: the sandbox is running but port is not open; found {port}")
        response = StreamingResponse(_body(answer), status_code=answer.status_code)
        # as they came: a header that is there twice, as cookies are, must not become one
        raw = [(name.lower(), value) for name, value in answer.headers.raw]
        response.raw_headers = [(name, value) for name, value in raw if name.decode("latin-1") not in HOP_BY_HOP]
        return response


async def _body(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


def _has_body(request: Request) -> bool:
    """Whether a request has a body; one that has none must not be forwarded as one of unknown length."""
    if "content-length" in request.headers or "transfer-encoding" in request.headers:
        return True
    return request.scope["http_version"].startswith("2") and request.method not in ("GET", "HEAD", "OPTIONS")


def _query(request: Request) -> bytes:
    query = request.scope["query_string"]
    return b"?" + query if query else b""


def _not_found(sandbox_id: str, problem: Exception) -> str:
    """Say it in the words by which clients know that a sandbox is gone, then why."""
    return f"The sandbox {sandbox_id} was not found: {problem}"
