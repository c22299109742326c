"""Connections between a guest and the world, carried by its agent: ports that are exposed, and a proxy for egress.

The guest has no network card. What it may reach it reaches through an HTTP proxy on its own loopback whose other end is
here, where names are resolved and every destination is held against the rules.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from triax.errors import SandboxError
from triax.sandbox.guest.channel import AgentRefusal, Channel, Stream
from triax.sandbox.guest.wire import Kind, number
from triax.sandbox.protocol import Network

PROXY_PORT = 3128
HEAD_LIMIT = 64 * 1024
CONNECT_S = 20.0
HEAD_S = 60.0

TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""What gateways between the two versions of IP take for an address of version 4 (RFC 6052)."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Rules:
    """What a guest may reach.

    Args:
        network: As the specification says it.

    Raises:
        SandboxError: A destination is no address, network or host name.
    """

    def __init__(self, network: Network) -> None:
        self.everything = network.allow_internet
        self.networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self.names: list[str] = []
        for wanted in network.allow_out:
            try:
                self.networks.append(ipaddress.ip_network(wanted, strict=False))
            except ValueError:
                name = wanted.lower().rstrip(".")
                plain = name.removeprefix("*.").replace("-", "").replace(".", "").replace("_", "")
                if not plain.isalnum() or not plain.isascii():
                    raise SandboxError(
                        f"network.allow_out {wanted!r}: is no address, no network and no host name; "
                        "write one such as `10.0.0.0/8`, `example.org` or `*.example.org`",
                        "refused",
                    ) from None
                self.names.append(name)

    def allow(self, name: str, address: Address) -> bool:
        """Tell whether a destination may be reached, by the name it was asked for and the address that name has."""
        if any(address in network for network in self.networks if network.version == address.version):
            return True
        # a name that points into the host's own networks would lead past every rule
        if not _is_public(address):
            return False
        name = name.lower().rstrip(".")
        listed = any(name == wanted or (wanted.startswith("*.") and name.endswith(wanted[1:])) for wanted in self.names)
        return self.everything or listed


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:  # a gateway would carry it there
            return _is_public(inner)
    return address.is_global and not (address.is_multicast or address.is_reserved)


class Egress:
    """The proxy's end on the host; each connection of the guest is one stream.

    Args:
        network: What may be reached.
    """

    def __init__(self, network: Network) -> None:
        self.rules = Rules(network)
        self._deeds: set[asyncio.Task[None]] = set()

    def variables(self) -> dict[str, str]:
        """Return what tells programs in the guest about the proxy."""
        proxy = f"http://127.0.0.1:{PROXY_PORT}"
        found = {name: proxy for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")}
        return found | {"no_proxy": "localhost,127.0.0.1", "NO_PROXY": "localhost,127.0.0.1"}

    def serve(self, stream: Stream) -> None:
        """Take a connection that the guest opened."""
        _keep(self._deeds, self._serve(stream))

    def close(self) -> None:
        """End all connections."""
        for deed in list(self._deeds):
            deed.cancel()

    async def _serve(self, stream: Stream) -> None:
        try:
            head, rest = await asyncio.wait_for(_head(stream), HEAD_S)
            method, target, version, fields = _parse(head)
            if method == "CONNECT":
                host, _, port = target.rpartition(":")
                reader, writer = await self._connect(host.strip("[]"), int(port))
                await stream.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                parts = urlsplit(target)
                if parts.scheme != "http" or not parts.hostname:
                    raise _Refused(400, "the proxy takes http:// addresses and CONNECT")
                reader, writer = await self._connect(parts.hostname, parts.port or 80)
                path = parts._replace(scheme="", netloc="").geturl() or "/"
                # one request a connection: what follows on it was not held against the rules
                kept = [line for line in fields if not line.lower().startswith((b"proxy-", b"connection:"))]
                lines = [f"{method} {path} {version}".encode("latin-1"), *kept, b"Connection: close", b"", b""]
                writer.write(b"\r\n".join(lines))
            writer.write(rest)
            await _relay(stream, reader, writer)
        except _Refused as refused:
            text = f"{refused}\n".encode()
            answer = f"HTTP/1.1 {refused.code} refused\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
            with suppress(SandboxError):
                await stream.write(answer.encode() + text)
                stream.finish()
        except (OSError, ValueError, SandboxError, AgentRefusal):
            pass  # the guest spoke no HTTP, or one side broke off; there is nobody to tell
        finally:
            stream.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise _Refused(502, f"{host} has no address") from None
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        allowed = [address for address in addresses if self.rules.allow(host, address)]
        if not allowed:
            raise _Refused(403, f"{host} is not among what this sandbox may reach")
        for address in allowed:  # the address that was checked, not the name again
            with suppress(OSError, TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(str(address), port), CONNECT_S)
        raise _Refused(502, f"{host} port {port} does not answer")


class _Refused(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


async def _head(stream: Stream) -> tuple[bytes, bytes]:
    data = bytearray()
    while b"\r\n\r\n" not in data:
        piece = await stream.next()
        if piece is None or len(data) > HEAD_LIMIT:
            raise ValueError("no request")
        data += piece[1]
    head, _, rest = bytes(data).partition(b"\r\n\r\n")
    return head, rest


def _parse(head: bytes) -> tuple[str, str, str, list[bytes]]:
    first, *fields = head.split(b"\r\n")
    method, target, version = first.decode("latin-1").split(" ")
    return method, target, version, fields


async def _relay(stream: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def inward() -> None:
        while data := await reader.read(65536):
            await stream.write(data)
        stream.finish()

    async def outward() -> None:
        while (piece := await stream.next()) is not None:
            writer.write(piece[1])
            await writer.drain()
        with suppress(OSError):
            if writer.can_write_eof():
                writer.write_eof()

    both = asyncio.gather(inward(), outward())
    try:
        # either side may say first that it sends no more; only when the guest's end is gone is nothing left to do
        await asyncio.wait({both, stream.ended}, return_when=asyncio.FIRST_COMPLETED)
        if both.done():
            both.result()
    finally:
        both.cancel()
        with suppress(asyncio.CancelledError, OSError, SandboxError):
            await both
        writer.close()


def _keep(deeds: "set[asyncio.Task[None]]", what: "Coroutine[Any, Any, None]") -> None:
    deed = asyncio.ensure_future(what)
    deeds.add(deed)
    deed.add_done_callback(deeds.discard)


class Exposed:
    """A port of the host that leads to one inside; `await Exposed.open(...)` makes it."""

    def __init__(self, channel: Callable[[], Channel], port: int) -> None:
        self._channel = channel
        self._port = port
        self._server: asyncio.Server | None = None
        self._deeds: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, channel: Callable[[], Channel], port: int) -> "Exposed":
        """Listen on a free port of the host's loopback."""
        exposed = cls(channel, port)
        exposed._server = await asyncio.start_server(exposed._take, "127.0.0.1", 0)
        return exposed

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        for deed in list(self._deeds):
            deed.cancel()

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _keep(self._deeds, self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream: Stream | None = None
        try:
            stream = self._channel().open_stream(Kind.CONNECT, number(self._port))
            await stream.started
            await _relay(stream, reader, writer)
        except (OSError, SandboxError, AgentRefusal):
            pass  # nobody listens inside: the caller sees its connection closed
        finally:
            if stream is not None:
                stream.close()
            writer.close()
