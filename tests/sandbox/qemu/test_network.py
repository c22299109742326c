import asyncio

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.qemu.egress import Rules
from triax.sandbox.protocol import Network

WEB = b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"


async def answer(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(WEB)
    await writer.drain()
    writer.close()


async def fetched(port, path="/", host="127.0.0.1"):
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def test_nothing_is_reached_unless_allowed(in_lab, said):
    async def test(lab):
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        machine = await lab.create()
        assert await said(machine, "ls /sys/class/net") == "lo"
        for host in ("127.0.0.1", "10.0.2.2", "169.254.169.254", "1.1.1.1"):
            result = await machine.exec(f"wget -T 3 -q -O - http://{host}:{port}/", timeout_s=10)
            assert result.exit_code != 0, result
        server.close()
        await server.wait_closed()

    in_lab(test)


def test_a_listed_address_is_reached_through_the_proxy_and_no_other(in_lab, said):
    async def test(lab):
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        machine = await lab.create(network=Network(allow_out=("127.0.0.1/32", "example.org")))
        # the guest's own loopback is never the host's: ask the proxy by hand
        ask = "printf 'GET http://{0}:{1}/ HTTP/1.1\\r\\n\\r\\n' | nc 127.0.0.1 3128"
        assert (await said(machine, ask.format("127.0.0.1", port))).endswith("hello")
        assert "403" in await said(machine, ask.format("127.0.0.2", port))
        tunnel = f"printf 'CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\nGET / HTTP/1.0\\r\\n\\r\\n' | nc 127.0.0.1 3128"
        assert (await said(machine, tunnel)).endswith("hello")
        assert "http://127.0.0.1:3128" in await said(machine, "echo $https_proxy")
        (child,) = await lab.fork(machine, "child")
        assert (await said(child, ask.format("127.0.0.1", port))).endswith("hello")
        await machine.exec("printf 'nonsense\\r\\n\\r\\n' | nc -w 2 127.0.0.1 3128", timeout_s=10)
        assert await machine.is_alive()
        server.close()
        await server.wait_closed()

    in_lab(test)


def test_rules_hold_names_and_the_addresses_they_have():
    from ipaddress import ip_address

    rules = Rules(Network(allow_out=("10.1.0.0/16", "example.org", "*.example.net")))
    assert rules.allow("anything", ip_address("10.1.2.3"))
    assert not rules.allow("anything", ip_address("10.2.2.3"))
    assert rules.allow("Example.org.", ip_address("93.184.216.34"))
    assert rules.allow("a.b.example.net", ip_address("93.184.216.34"))
    assert not rules.allow("example.net", ip_address("93.184.216.34"))
    assert not rules.allow("evil-example.org", ip_address("93.184.216.34"))
    # a listed name that points into the host's own networks leads nowhere
    plain = ("127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "192.168.0.1", "224.0.0.1", "ff02::1")
    for inner in (*plain, "::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::a9fe:a9fe", "2002:a00:1::1"):
        assert not rules.allow("example.org", ip_address(inner))
        assert not Rules(Network(allow_internet=True)).allow("x", ip_address(inner))
    assert Rules(Network(allow_internet=True)).allow("x", ip_address("1.1.1.1"))
    assert Rules(Network(allow_internet=True)).allow("x", ip_address("64:ff9b::101:101"))
    with pytest.raises(SandboxError, match="no host name"):
        Rules(Network(allow_out=("no name",)))


def test_an_exposed_port_leads_inside_and_survives_many_connections(in_lab, until):
    async def test(lab):
        machine = await lab.create()
        await machine.write("/www/index.html", b"inside" * 10000)
        await machine.start(["httpd", "-f", "-p", "8000", "-h", "/www"])
        host, port = await machine.expose(8000)
        await until(lambda: fetched(port))
        assert host == "127.0.0.1"
        for _ in range(3):
            assert (await fetched(port)).endswith(b"inside" * 10000)
        pages = await asyncio.gather(*(fetched(port) for _ in range(5)))
        assert all(page.endswith(b"inside" * 10000) for page in pages)
        assert await machine.expose(8000) == (host, port)
        _, nobody = await machine.expose(8001)
        assert await fetched(nobody) == b""

    in_lab(test)


def test_connections_of_an_older_generation_are_not_used_again(in_lab, until):
    async def test(lab):
        machine = await lab.create()
        await machine.write("/www/index.html", b"inside")
        await machine.start(["httpd", "-f", "-p", "8000", "-h", "/www"])
        _, port = await machine.expose(8000)
        await until(lambda: fetched(port))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)  # opened, and never asked anything
        assert (await fetched(port)).endswith(b"inside")
        for cycle in range(3):
            folder = lab.new_folder(f"cycle{cycle}")
            await machine.suspend(folder)
            assert await asyncio.wait_for(reader.read(), 60) == b""
            machine = await lab.restore(folder, "source", cycle + 1)
            _, port = await machine.expose(8000)
            assert (await asyncio.wait_for(fetched(port), 60)).endswith(b"inside")
        writer.close()

    in_lab(test)
