"""`triax sandbox`: computers for agents, from a shell."""

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from triax.sandbox.backend.remote import RemoteBackend
    from triax.sandbox.protocol import Process, Spec

app = typer.Typer(name="sandbox", help="Computers for agents: pause, resume, fork.", no_args_is_help=True)

URL = "http://127.0.0.1:49980"
FOLDER = Path("runs/sandboxes")
Url = Annotated[str, typer.Option("--url", help="Address of the server.")]
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="File whose first line is an API key.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="A sandbox; `triax sandbox list` shows them.")]
Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND...", help="Program and arguments; after `--` if they have options.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Backend = Annotated[str, typer.Option("--backend", help="auto, qemu, gvisor, namespace, firecracker or process.")]
Unsafe = Annotated[bool, typer.Option("--unsafe", help="Allow the backend `process`, which isolates nothing.")]
Image = Annotated[
    str | None, typer.Option("--image", help="Root filesystem or OCI layout; the backend's own if not given.")
]
Memory = Annotated[int, typer.Option("--memory", min=16, help="Memory in MiB.")]
Internet = Annotated[bool, typer.Option("--internet", help="Let it reach everything; otherwise it reaches nothing.")]
PIECE_BYTES, WAITING_PIECES = 65536, 16
PASSED_ON = {"allow_interspersed_args": False}


@app.command()
def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE] [KEY=VALUE...]", help="Settings, such as `backend=qemu port=0`."),
    ] = None,
) -> None:
    """Serve sandboxes to E2B clients until SIGINT or SIGTERM."""
    from triax.config.sandbox import read
    from triax.sandbox.backend.choose import choose
    from triax.sandbox.server.run import serve as run_server

    server = read(settings or ())

    async def run() -> None:
        backend = await choose(server.backend, server.folder / "machines", unsafe=server.unsafe)
        await run_server(
            server,
            backend,
            lambda serving: print(f"serving sandboxes of `{backend.name}` at {serving.url}", flush=True),
        )

    _finish(run())


@app.command(context_settings=PASSED_ON)
def run(
    command: Command,
    backend: Backend = "auto",
    unsafe: Unsafe = False,
    image: Image = None,
    memory: Memory = 128,
    internet: Internet = False,
    timeout: Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds until it is ended.")] = None,
    interactive: Annotated[bool, typer.Option("-i", help="Pass standard input on.")] = False,
    folder: Annotated[Path, typer.Option("--folder", help="Where its files lie meanwhile.")] = FOLDER,
) -> None:
    """Run one command in a new sandbox, without a server; exit as it does."""
    from triax.sandbox.alone import alone

    spec = _spec(image, memory, internet)

    async def body() -> int:
        async with alone(spec, backend, folder, unsafe=unsafe) as sandbox:
            return await _through(await sandbox.start(command), interactive, timeout)

    raise typer.Exit(_finish(body()))


@app.command("exec", context_settings=PASSED_ON)
def execute(
    id: Id,
    command: Command,
    interactive: Annotated[bool, typer.Option("-i", help="Pass standard input on.")] = False,
    timeout: Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds until it is ended.")] = None,
    url: Url = URL,
    key_file: KeyFile = None,
) -> None:
    """Run a command in a sandbox of a server; exit as it does."""
    if command[0] == "--":  # what stands behind the id is taken as it is
        command = command[1:]

    async def body(remote: "RemoteBackend") -> int:
        machine = await remote.find(id)
        return await _through(await machine.start(command), interactive, timeout)

    raise typer.Exit(_ask(url, key_file, body))


@app.command("list")
def listed(url: Url = URL, key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """List the sandboxes of a server."""
    import json

    async def body(remote: "RemoteBackend") -> list[dict[str, Any]]:
        return await remote.service.every("/v2/sandboxes", {"lost": "true"})

    found = _ask(url, key_file, body)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'ID':<22}{'STATE':<9}{'TEMPLATE':<22}{'ENDS':<26}LABELS")
    for one in found:
        labels = " ".join(f"{name}={value}" for name, value in one.get("metadata", {}).items())
        row = f"{one['sandboxID']:<21} {one['state']:<8} {one['templateID']:<21} {one['endAt']:<25} "
        print(_plain(row + " ".join(filter(None, (one.get("reason"), labels)))))


@app.command()
def create(
    template: Annotated[str, typer.Argument(help="A template or a snapshot of the server.")] = "base",
    timeout: Annotated[int | None, typer.Option("--timeout", min=1, help="Seconds that it lives.")] = None,
    url: Url = URL,
    key_file: KeyFile = None,
) -> None:
    """Make a sandbox on a server and print its id."""
    wish: dict[str, Any] = {"templateID": template} | ({} if timeout is None else {"timeout": timeout})

    async def body(remote: "RemoteBackend") -> dict[str, Any]:
        return await remote.service.ask("POST", "/v2/sandboxes", wish, timeout_s=300.0)

    print(_ask(url, key_file, body)["sandboxID"])


@app.command()
def pause(id: Id, url: Url = URL, key_file: KeyFile = None) -> None:
    """Put a sandbox away."""
    _post(url, key_file, f"{_at(id)}/pause")


@app.command()
def resume(
    id: Id,
    timeout: Annotated[int | None, typer.Option("--timeout", min=1, help="Seconds that it lives from now.")] = None,
    url: Url = URL,
    key_file: KeyFile = None,
) -> None:
    """Bring a sandbox back."""
    _post(url, key_file, f"{_at(id)}/connect", {} if timeout is None else {"timeout": timeout})


@app.command()
def fork(
    id: Id,
    count: Annotated[int, typer.Option("--count", min=1, max=20, help="Copies.")] = 1,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Programs inside draw the same in all copies.")
    ] = False,
    url: Url = URL,
    key_file: KeyFile = None,
) -> None:
    """Split a sandbox; print the id of each copy."""
    from triax.errors import SandboxError

    failed = []
    for copy in _post(url, key_file, f"{_at(id)}/fork", {"count": count, "deterministic": deterministic}):
        if "sandbox" in copy:
            print(copy["sandbox"]["sandboxID"])
        else:
            failed.append(copy["error"]["message"])
    if failed:
        raise SandboxError(f"{len(failed)} of {count} copies failed: {failed[0]}")


@app.command()
def snapshot(
    id: Id,
    name: Annotated[str | None, typer.Option("--name", help="A name that new sandboxes can be made from.")] = None,
    url: Url = URL,
    key_file: KeyFile = None,
) -> None:
    """Keep a sandbox's present; print the snapshot's id."""
    print(_post(url, key_file, f"{_at(id)}/snapshots", {} if name is None else {"name": name})["snapshotID"])


@app.command()
def kill(id: Id, url: Url = URL, key_file: KeyFile = None) -> None:
    """End a sandbox and drop all it held."""

    async def body(remote: "RemoteBackend") -> None:
        await remote.service.ask("DELETE", _at(id))

    _ask(url, key_file, body)


@app.command()
def gc(
    folder: Annotated[Path, typer.Option("--folder", help="The folder of the server that ended.")] = FOLDER,
    backend: Annotated[str, typer.Option("--backend", help="As for the server; `auto`: the one it had.")] = "auto",
    unsafe: Unsafe = False,
    forget: Annotated[bool, typer.Option("--forget", help="Also drop sandboxes that were lost.")] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="Empty the cache of images, templates and programs instead.")
    ] = False,
) -> None:
    """Free what a server that was killed left: its processes, mounts and half-written files."""
    from triax.errors import SandboxError
    from triax.sandbox.alone import clear
    from triax.sandbox.backend.choose import choose
    from triax.sandbox.host import Host
    from triax.sandbox.store import backend_of

    if cache:
        from triax.sandbox.guest.build import clear_cache

        print("\n".join(clear_cache()) or "nothing was left to free")
        return
    if not folder.is_dir():
        raise SandboxError(f"sandboxes {folder}: there is no such folder; name the one of the server that ended")

    async def body() -> list[str]:
        freed = await clear(folder)
        before = backend_of(folder) if backend == "auto" else None
        chosen = await choose(before or backend, folder / "machines", unsafe=unsafe or before is not None)
        host = await Host.open(folder, chosen)
        freed += host.ended + await host.gc(forget_lost=forget)
        await host.close()
        return freed

    freed = _finish(body())
    print("\n".join(freed) if freed else "nothing was left to free")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Tell which backends this machine can run, and what the others lack."""
    import json
    from dataclasses import asdict
    from tempfile import TemporaryDirectory

    from triax.errors import SandboxError
    from triax.sandbox.backend.choose import PLACES, make, tried

    async def body(folder: Path) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for name in PLACES:
            try:
                backend = make(name, folder / name, unsafe=True)
                checks = await backend.checks()
                if all(check.ok for check in checks):
                    checks.append(await tried(backend))
                found[name] = [asdict(check) for check in checks]
            except SandboxError as problem:
                found[name] = [{"name": "module", "ok": False, "found": str(problem), "to_do": "install it"}]
        return found

    with TemporaryDirectory() as folder:
        facts = _finish(body(Path(folder)))
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for name, checks in facts.items():
        print(f"{name:<13}{'ready' if all(check['ok'] for check in checks) else 'cannot run here'}")
        for check in checks:
            print(f"  {'ok  ' if check['ok'] else 'MISS'}  {check['name']}: {check['found']}")
            if not check["ok"] and check["to_do"]:
                print(f"        {check['to_do']}")


@app.command()
def mcp(
    backend: Backend = "auto",
    unsafe: Unsafe = False,
    image: Image = None,
    memory: Memory = 512,
    internet: Internet = False,
    folder: Annotated[Path, typer.Option("--folder", help="Where its files lie meanwhile.")] = FOLDER,
) -> None:
    """Give an agent a sandbox over MCP, on standard input and output."""
    from triax.sandbox.adapter.mcp import server
    from triax.sandbox.alone import alone

    spec = _spec(image, memory, internet)
    server(lambda: alone(spec, backend, folder, unsafe=unsafe)).run("stdio")


def _spec(image: str | None, memory: int, internet: bool) -> "Spec":
    from triax.sandbox.protocol import Network, Resources, Spec

    return Spec(
        image=image,
        resources=Resources(memory_mib=memory),
        network=Network(allow_internet=internet),
        timeout_s=None,
        on_timeout="kill",
    )


def _finish(work: "Coroutine[Any, Any, Any]") -> Any:
    import asyncio

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _ask(url: str, key_file: Path | None, body: Any) -> Any:
    from triax.sandbox.backend.remote import RemoteBackend
    from triax.sandbox.backend.remote_calls import Service

    key = None
    if key_file is not None:
        from triax.sandbox.server.access import read_keys

        key = read_keys(key_file)[0]

    async def run() -> Any:
        service = Service(url, key)
        try:
            return await body(RemoteBackend(service, owner="shell"))
        finally:
            await service.close()

    return _finish(run())


def _at(id: str) -> str:
    from urllib.parse import quote

    return f"/sandboxes/{quote(id, safe='')}"


def _post(url: str, key_file: Path | None, path: str, body: dict[str, Any] | None = None) -> Any:
    async def call(remote: "RemoteBackend") -> Any:
        return await remote.service.ask("POST", path, body or {}, timeout_s=300.0, once=True)

    return _ask(url, key_file, call)


async def _through(process: "Process", interactive: bool, timeout: float | None) -> int:
    """Connect a process with this one's streams and return the exit status that stands for its end."""
    import asyncio
    import os
    import sys
    import threading
    from contextlib import suppress

    from triax.errors import SandboxError

    pieces: asyncio.Queue[bytes] = asyncio.Queue()
    room = threading.Semaphore(WAITING_PIECES)
    loop = asyncio.get_running_loop()

    def read() -> None:
        # not through `sys.stdin`: a thread that waits there for input holds a lock that the end of this program needs
        data = b"begun"
        with suppress(RuntimeError):  # the command is over, and with it the loop
            while data:
                room.acquire()
                try:
                    data = os.read(0, PIECE_BYTES)
                except OSError:  # there is no standard input at all
                    data = b""
                loop.call_soon_threadsafe(pieces.put_nowait, data)

    async def feed() -> None:
        # a daemon, since nothing ends a read from a terminal when the command is over
        threading.Thread(target=read, daemon=True).start()
        with suppress(SandboxError):  # one that reads no more may have much to do; its end tells the rest
            while data := await pieces.get():
                await process.write(data)
                room.release()
            await process.close_stdin()

    feeding = asyncio.create_task(feed()) if interactive else None
    try:
        if not interactive:
            await process.close_stdin()
        async with asyncio.timeout(timeout):
            async for name, data in process.output():
                stream = sys.stdout.buffer if name == "stdout" else sys.stderr.buffer
                stream.write(data)
                stream.flush()
            result = await process.wait()
    except TimeoutError:
        await process.kill(9)
        sys.stderr.write(f"error: ended after its limit of {timeout:g} s\n")
        return 124
    finally:
        if feeding is not None:
            feeding.cancel()
    if result.outcome != "ok":
        sys.stderr.write(f"error: {result.outcome}: {result.detail}\n")
        return 125
    return result.exit_code if result.exit_code is not None else 128 + (result.signal or 0)


def _plain(text: str) -> str:
    """Return a line as a terminal may show it: labels come from clients, and must not steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
