"""Who may ask, how often and how much: keys, rates and sizes, before a request is read."""

import asyncio
import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triax.config.hosts import is_allowed
from triax.config.serve import Http
from triax.serve.http.fault import Fault

OPEN = ("/", "/health", "/metrics", "/openapi.json", "/favicon.ico")
"""Paths that need no key and count towards no rate."""
ADMIN = "/admin/"
BODY_S = 60.0
"""Longest wait for the next piece of a body."""
STALL_S = 120.0
"""Longest wait for a client to read on; what it did not read is dropped with its connection."""
MAX_CALLERS = 10_000


class Rates:
    """A bucket of requests for each caller: a minute's worth at most, refilled evenly.

    Args:
        per_minute: Requests a minute.
        clock: Gives seconds; it only goes forward.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self.clock = per_minute, clock
        self.size = max(1.0, per_minute)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> float:
        """Count a request; returns the seconds to wait where there are too many, else 0."""
        now = self.clock()
        left, then = self._buckets.get(caller, (self.size, now))
        left = min(self.size, left + (now - then) * self.per_minute / 60)
        wait = 0.0 if left >= 1 else (1 - left) * 60 / self.per_minute
        self._buckets[caller] = (left if wait else left - 1, now)
        self._buckets.move_to_end(caller)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return wait


class Gate:
    """ASGI middleware: refuses what may not pass and cuts off what is too large or too slow."""

    def __init__(self, app: ASGIApp, settings: Http, count: Callable[[Scope, int], None]) -> None:
        self.app, self.settings, self.count = app, settings, count
        self.rates = Rates(settings.requests_per_minute) if settings.requests_per_minute else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def send_in_time(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                self.count(scope, message["status"])
            async with asyncio.timeout(STALL_S):
                await send(message)

        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            self._check(scope, headers)
            await self.app(scope, _bounded(receive, self.settings.max_body_bytes), send_in_time)
        except Fault as fault:
            if has_begun:
                raise
            await fault.response()(scope, receive, send_in_time)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        self._check_host(headers)
        path: str = scope["path"]
        if path not in OPEN and scope["method"] != "OPTIONS":
            key = _bearer(headers)
            if path.startswith(ADMIN):
                self._check_admin(key)
            else:
                self._check_key(key)
                self._check_rate(key, scope)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.settings.max_body_bytes:
            raise _too_large(int(length), self.settings.max_body_bytes)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuse a page elsewhere whose name resolves to this machine; its browser tells that name."""
        name = headers.get(b"host", b"localhost").decode("latin-1")
        if not is_allowed(name, self.settings.host, self.settings.allowed_hosts):
            raise Fault(
                403,
                f"host: this server does not answer to `{name[:200]}`; ask `localhost`, or name it in "
                "http.allowed_hosts",
                code="host_not_allowed",
            )

    def _check_key(self, key: str) -> None:
        if self.settings.api_keys and not _is_one_of(key, self.settings.api_keys):
            found = "a key that is not known" if key else "none"
            raise Fault(
                401,
                f"authorization: a key is needed; found {found}; send the header `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_admin(self, key: str) -> None:
        if not self.settings.admin_keys:
            raise Fault(
                403, "admin: these endpoints are closed; found no admin key; set http.admin_keys", code="admin_closed"
            )
        if not _is_one_of(key, self.settings.admin_keys):
            raise Fault(
                401,
                "authorization: an admin key is needed; found none that fits; send `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_rate(self, key: str, scope: Scope) -> None:
        if self.rates is None:
            return
        client = scope.get("client")
        caller = hashlib.sha256(key.encode()).hexdigest() if self.settings.api_keys else client[0] if client else ""
        if wait := self.rates.take(caller):
            raise Fault(
                429,
                f"rate: too many requests; found more than {self.settings.requests_per_minute:g} a minute; "
                f"wait {math.ceil(wait)} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(math.ceil(wait))},
            )


def _bounded(receive: Receive, limit: int) -> Receive:
    """Return a `receive` that raises on a body past the limit, and on one that stops coming."""
    seen = 0
    is_whole = False

    async def receive_some() -> Message:
        nonlocal seen, is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout(BODY_S):
                message = await receive()
        except TimeoutError:
            raise Fault(408, f"body: does not come; found nothing for {BODY_S:g} s; send it again") from None
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if seen > limit:
                raise _too_large(seen, limit)
        return message

    return receive_some


def _too_large(found: int, limit: int) -> Fault:
    return Fault(
        413,
        f"body: too large; found {found} bytes; send at most {limit}, or raise http.max_body_bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _bearer(headers: dict[bytes, bytes]) -> str:
    kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _is_one_of(key: str, keys: Sequence[str]) -> bool:
    """Compare with every key, in a time that does not tell how much of one was right."""
    return any([hmac.compare_digest(key.encode(), known.encode()) for known in keys])
