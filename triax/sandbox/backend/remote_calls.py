"""Calls to an E2B-compatible service: its control plane in JSON, its data plane in Connect, with patience for both."""

import asyncio
import json
import random
import struct
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from triax.errors import SandboxError
from triax.log import logger

ENVD_PORT = 49983
PATIENCE = 8
"""Times that a call is made at most, when the service is busy or cannot be reached."""
KNOCKS = 4
"""Times that a connection is tried at most."""
LONGEST_WAIT_S = 5.0
BUSY = {429, 502, 503, 504}
END = 2
STATUS_OF_CODE = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 409,
    "unimplemented": 501,
    "unavailable": 503,
    "unauthenticated": 401,
}


def failure(status: int, message: str) -> SandboxError:
    """Return the error that an answer of the service amounts to; what it refuses is the caller's, all else its own."""
    if status in (401, 403):
        return SandboxError(f"{message}; found HTTP {status}; check the key", "infrastructure", status=status)
    if status in (400, 404, 405, 409, 413, 415, 422, 501):
        return SandboxError(message, "refused", status=status)
    return SandboxError(message, "timeout" if status == 504 else "infrastructure", status=status)


class Service:
    """One E2B-compatible service.

    Args:
        url: Its control plane, such as `http://127.0.0.1:49980`.
        key: An API key; none for a service that asks for none.
        sandbox_url: Its data plane where that is one address for all sandboxes; none for `PORT-ID.DOMAIN`.
        patience_s: Seconds before the first repetition of a call; they double with each.
    """

    def __init__(
        self, url: str, key: str | None = None, *, sandbox_url: str | None = None, patience_s: float = 0.1
    ) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise SandboxError(
                f"url {url[:200]!r}: is no address of a service; give one such as `http://127.0.0.1:49980`", "refused"
            )
        self.sandbox_url = None if sandbox_url is None else sandbox_url.rstrip("/")
        self.patience_s = patience_s
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(60, connect=10), limits=httpx.Limits(max_connections=None), trust_env=False
        )
        self._headers = {} if key is None else {"X-API-Key": key}

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        once: bool = False,
    ) -> Any:
        """Call the control plane, again while it is busy, and return the JSON that it answers.

        Args:
            method: HTTP's verb.
            path: Such as `/sandboxes`.
            body: What is sent as JSON.
            query: What stands behind the question mark.
            headers: More of them.
            timeout_s: Seconds that one call may take.
            once: Do not repeat a call that may have been carried out.

        Raises:
            SandboxError: It refused, failed, or could not be reached.
        """
        answer = await self._call(method, path, body, query, headers, timeout_s, once)
        return answer.json() if answer.content else None

    async def every(self, path: str, query: Mapping[str, str] | None = None) -> list[Any]:
        """Return all that a list of the control plane holds, however many pages it has.

        Raises:
            SandboxError: It refused, failed, or could not be reached.
        """
        found: list[Any] = []
        asked = {"limit": "100"} | dict(query or {})
        while True:
            answer = await self._call("GET", path, None, asked, None, 120.0, False)
            found += answer.json()
            if not answer.headers.get("x-next-token"):
                return found
            asked["nextToken"] = answer.headers["x-next-token"]

    async def _call(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        timeout_s: float,
        once: bool,
    ) -> httpx.Response:
        answer = await self._patiently(
            lambda: self._client.request(
                method,
                self.url + path,
                json=body,
                params=dict(query or {}),
                headers={**self._headers, **(headers or {})},
                timeout=timeout_s,
            ),
            f"{method} {path}",
            once,
        )
        if answer.is_success:
            return answer
        raise failure(answer.status_code, f"{self.url}{path}: {_message(answer)}")

    async def _patiently(self, call: Any, what: str, once: bool) -> httpx.Response:
        for attempt in range(PATIENCE):
            last = attempt + 1 == PATIENCE
            try:
                answer = await call()
            except (httpx.ConnectError, httpx.ConnectTimeout) as problem:
                if attempt + 1 == KNOCKS:
                    raise SandboxError(
                        f"{self.url}: cannot be reached; found `{type(problem).__name__}`; is the service running?",
                        status=503,
                    ) from problem
            except httpx.TransportError as problem:
                if last or once:
                    raise SandboxError(
                        f"{self.url}: {what} broke off; found `{type(problem).__name__}`; it may have been carried out",
                        status=503,
                    ) from problem
            else:
                if last or answer.status_code not in BUSY:
                    return answer
            wait = min(LONGEST_WAIT_S, self.patience_s * 2**attempt) * (0.5 + random.random() / 2)
            logger("sandbox").debug("%s of %s is repeated in %.2f s", what, self.url, wait)
            await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def address(self, id: str, domain: str | None) -> str:
        """Return where a sandbox's data plane is."""
        if self.sandbox_url is not None:
            return self.sandbox_url
        if not domain:
            return self.url  # one server for both planes, which tells them apart by the header
        return f"https://{ENVD_PORT}-{id}.{domain}"


class Guest:
    """The data plane of one sandbox.

    Args:
        service: The service.
        id: The sandbox.
        base: Address of its data plane.
        token: What opens it.
    """

    def __init__(self, service: Service, id: str, base: str, token: str | None) -> None:
        self.service = service
        self.id = id
        self.base = base
        self._headers = {"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": str(ENVD_PORT)}
        if token is not None:
            self._headers["X-Access-Token"] = token

    def _with(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        return {**self._headers, **(headers or {})}

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> httpx.Response:
        """Make a plain HTTP request and return a successful answer.

        Raises:
            SandboxError: It was refused, failed, or the sandbox could not be reached.
        """
        answer = await self.service._patiently(
            lambda: self.service._client.request(
                method, self.base + path, params=dict(query or {}), headers=self._with(headers), content=content
            ),
            f"{method} {path}",
            False,
        )
        if answer.is_success:
            return answer
        raise failure(answer.status_code, _of(self.id, _message(answer)))

    async def call(
        self, method: str, body: Mapping[str, Any], *, user: str | None = None, repeat: bool = True
    ) -> dict[str, Any]:
        """Make a unary call such as `filesystem.Filesystem/Stat` and return its message.

        Raises:
            SandboxError: What the call failed with.
        """
        answer = await self.service._patiently(
            lambda: self.service._client.post(
                f"{self.base}/{method}", json=body, headers=self._with(authorization(user))
            ),
            method,
            not repeat,
        )
        if answer.is_success:
            return answer.json()
        raise _fault(answer.status_code, answer.content, self.id)

    async def stream(
        self,
        method: str,
        body: Mapping[str, Any],
        *,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Make a call whose answer is a stream, and give its messages.

        Args:
            method: Such as `process.Process/Start`.
            body: The message that it begins with.
            user: Who acts inside the sandbox.
            timeout_s: Seconds after which the service ends the stream and what it stands for.

        Raises:
            SandboxError: What the stream ended with; kind `timeout` after `timeout_s`.
        """
        headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        headers |= authorization(user)
        if timeout_s is not None:
            headers["Connect-Timeout-Ms"] = str(max(1, round(timeout_s * 1000)))
        sent = json.dumps(body).encode()
        limit = httpx.Timeout(None, connect=10)
        try:
            async with self.service._client.stream(
                "POST",
                f"{self.base}/{method}",
                content=struct.pack(">BI", 0, len(sent)) + sent,
                headers=self._with(headers),
                timeout=limit,
            ) as answer:
                if not answer.is_success:
                    raise _fault(answer.status_code, await answer.aread(), self.id)
                async for message in _messages(answer, self.id):
                    yield message
        except httpx.TransportError as problem:
            raise SandboxError(
                f"sandbox {self.id}: the connection broke off during {method}; found `{type(problem).__name__}`",
                status=503,
            ) from problem


async def _messages(answer: httpx.Response, id: str) -> AsyncGenerator[dict[str, Any], None]:
    waiting = bytearray()
    async for chunk in answer.aiter_raw():
        waiting += chunk
        while len(waiting) >= 5:
            flags, size = struct.unpack(">BI", waiting[:5])
            if len(waiting) < 5 + size:
                break
            message = json.loads(bytes(waiting[5 : 5 + size]))
            del waiting[: 5 + size]
            if flags & END:
                error = message.get("error")
                if error:
                    raise _failed(error, id)
                return
            yield message
    raise SandboxError(f"sandbox {id}: the stream ended without a word; the service may have stopped", status=503)


def authorization(user: str | None) -> dict[str, str]:
    """Return the header that says who acts inside the sandbox, none for its own choice."""
    return {} if user is None else {"Authorization": httpx.BasicAuth(user, "")._auth_header}


def _fault(status: int, content: bytes, id: str) -> SandboxError:
    try:
        error = json.loads(content)
        if isinstance(error, dict) and isinstance(error.get("code"), str):
            return _failed(error, id)
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace")[:300]
    return failure(status, _of(id, message or f"HTTP {status}"))


def _failed(error: Mapping[str, Any], id: str) -> SandboxError:
    status = STATUS_OF_CODE.get(str(error.get("code")), 500)
    return failure(status, _of(id, str(error.get("message") or error.get("code"))))


def _of(id: str, message: str) -> str:
    """Return a message that names its sandbox once, without the words by which stock clients know what is gone."""
    about = f"sandbox {id}: "
    return about + message.removeprefix(f"The sandbox {id} was not found: ").removeprefix(about)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300] or f"HTTP {answer.status_code}"
