"""Who may do what: keys of the control plane, and the token that opens one sandbox's data plane."""

import base64
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

from starlette.datastructures import Headers, QueryParams

from triax.errors import SandboxError
from triax.sandbox.server.connect import Fault

ENVD_PORT = 49983
"""The port that stands for a sandbox's data plane; any other is one that a program inside listens on."""

_HOST = re.compile(r"(?P<port>\d{1,5})-(?P<id>[a-z0-9][a-z0-9_-]{0,63})\.", re.IGNORECASE)


def load_secret(path: Path) -> bytes:
    """Return the server's secret, made on the first call and readable by its owner alone."""
    try:
        return bytes.fromhex(path.read_text().strip())
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        secret = secrets.token_bytes(32)
        with os.fdopen(descriptor, "w") as file:
            file.write(secret.hex())
        return secret


def read_keys(path: Path) -> list[str]:
    """Return the API keys of a file, one a line; empty lines and those that begin with `#` are none.

    Raises:
        SandboxError: The file cannot be read or holds no key.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as problem:
        raise SandboxError(f"keys {path}: cannot be read; found `{problem}`; write one key a line", "refused") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SandboxError(f"keys {path}: holds no key; write one a line", "refused")
    return keys


class Access:
    """Keys and tokens of one server.

    Args:
        keys: API keys that open the control plane; without any, everyone may use it.
        secret: What the tokens are derived from; they survive a restart with it.
    """

    def __init__(self, keys: Collection[str], secret: bytes) -> None:
        self._keys = [key.encode() for key in keys]
        self._secret = secret

    def is_open(self, headers: Headers) -> bool:
        """Whether a request to the control plane carries a known key."""
        if not self._keys:
            return True
        bearer = headers.get("authorization", "")
        given = headers.get("x-api-key") or (bearer[7:] if bearer.lower().startswith("bearer ") else "")
        # every key is compared, so that time tells nothing about them
        return any([hmac.compare_digest(given.encode(), key) for key in self._keys])

    def token(self, sandbox_id: str, purpose: Literal["envd", "traffic"] = "envd") -> str:
        """Return the token that opens a sandbox's data plane, or the ports that it exposes."""
        return hmac.new(self._secret, f"{purpose}:{sandbox_id}".encode(), hashlib.sha256).hexdigest()[:40]

    def check_token(self, sandbox_id: str, given: str | None, purpose: Literal["envd", "traffic"] = "envd") -> None:
        """Refuse a request without the sandbox's token.

        Raises:
            Fault: The token is absent or another's.
        """
        if not hmac.compare_digest((given or "").encode(), self.token(sandbox_id, purpose).encode()):
            header = "X-Access-Token" if purpose == "envd" else "E2B-Traffic-Access-Token"
            found = "another" if given else "none"
            raise Fault(
                "unauthenticated", f"header {header} must carry the token of sandbox {sandbox_id}; found {found}"
            )

    def signed(self, ids: Iterable[str], query: QueryParams, operation: Literal["read", "write"]) -> str | None:
        """Return which of the sandboxes a signed address of a file belongs to, None for none.

        Args:
            ids: The sandboxes that it may be.
            query: `path`, `username`, `signature` and `signature_expiration` of the address.
            operation: What is wanted.

        Raises:
            Fault: The address is no longer valid.
        """
        given, expires = query.get("signature", ""), query.get("signature_expiration")
        words = [query.get("path", ""), operation, query.get("username", "")]
        for sandbox_id in ids:
            text = ":".join([*words, self.token(sandbox_id), *([] if expires is None else [expires])])
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            if hmac.compare_digest(given.encode(), f"v1_{digest}".encode()):
                if expires is not None and not (expires.isdigit() and time.time() <= int(expires)):
                    raise Fault("unauthenticated", f"this signed address was valid until {expires} only")
                return sandbox_id
        return None


def aim(headers: Headers) -> tuple[str, int] | None:
    """Return the sandbox and the port that a request names by header or host, None for the control plane."""
    sandbox_id = headers.get("e2b-sandbox-id")
    if sandbox_id is not None:
        port = headers.get("e2b-sandbox-port", str(ENVD_PORT))
        return sandbox_id, int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
    host = _HOST.match(headers.get("host", ""))
    return (host["id"], int(host["port"])) if host else None
