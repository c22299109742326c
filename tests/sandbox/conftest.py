"""Real machines of the light backends, and a real server of sandboxes that listens in this process."""

import asyncio
import importlib.util
import inspect
import sys
import threading
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from triax.config.sandbox import Server
from triax.errors import SandboxError
from triax.sandbox.backend.choose import make
from triax.sandbox.backend.process import ProcessBackend
from triax.sandbox.host import Host
from triax.sandbox.protocol import Resources, Spec
from triax.sandbox.server.run import served

LIGHT = ["process", "namespace", "gvisor"]
KERNELS = ["namespace", "gvisor"]
SMALL = Resources(memory_mib=96, disk_mib=48, processes=64)


class Running:
    """A server in a thread of its own, and how to reach it."""

    def __init__(self, url, plane, loop):
        self.url = url
        self.plane = plane
        self.loop = loop

    @property
    def options(self):
        """What the stock SDK is given to speak to this server and no other."""
        return {"api_key": "any", "api_url": self.url, "sandbox_url": self.url}

    def call(self, coroutine):
        """Run something in the server's own loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(200)


@contextmanager
def running(settings, backend):
    ready, result = threading.Event(), {}

    async def live():
        result["loop"], result["stop"] = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with served(settings, backend) as serving:
                result["serving"] = serving
                ready.set()
                await result["stop"].wait()
        except BaseException as problem:
            result["problem"] = problem
            raise
        finally:
            ready.set()

    def run():
        try:
            asyncio.run(live())
        except BaseException as problem:
            result["problem"] = problem

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(200)
    try:
        if "problem" in result:
            raise result["problem"]
        yield Running(result["serving"].url, result["serving"].plane, result["loop"])
    finally:
        if "serving" in result:
            result["loop"].call_soon_threadsafe(result["stop"].set)
        thread.join(200)
        assert not thread.is_alive()
    if "problem" in result:
        raise result["problem"]


class Kept:
    """A server that the tests of a file share; after one that failed, which may have left anything, it is replaced."""

    def __init__(self, open_one):
        self.open_one, self.running, self.stack = open_one, None, ExitStack()

    def lend(self, item):
        """Lend it to one test."""
        if self.running is None:
            self.running = self.stack.enter_context(self.open_one())
        yield self.running
        if item.has_failed:
            self.end()

    def end(self):
        self.running = None
        self.stack.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.has_failed = report.failed or (call.when != "setup" and item.has_failed)
    return report


async def comes(look):
    """Ask until the answer is true, and return it; the limit is there to end what hangs, and claims no speed."""
    async with asyncio.timeout(120):
        while True:
            found = look()
            if found := await found if inspect.isawaitable(found) else found:
                return found
            await asyncio.sleep(0.02)


async def written(reader, path):
    """Return what a file of a sandbox or machine holds, nothing where there is none yet."""
    try:
        return await reader.read(path)
    except SandboxError as error:
        if error.status != 404:
            raise
        return b""


async def grown(reader, path):
    """Wait until a file is written to: whoever does that lives."""
    first = await written(reader, path)
    return await comes(lambda: _changed(reader, path, first))


async def _changed(reader, path, first):
    now = await written(reader, path)
    return now if now != first else b""


@pytest.fixture(scope="session")
def until():
    return comes


@pytest.fixture(scope="session")
def content():
    return written


@pytest.fixture(scope="session")
def grows():
    return grown


@pytest.fixture(scope="session")
def brittle():
    """Load the backend that breaks where told: test folders are no packages."""
    name = "sandbox_brittle"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("brittle.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def serve():
    """Start a server with settings and a backend of one's own, as a context."""
    return running


@pytest.fixture(scope="module")
def kept_server(tmp_path_factory):
    def opened():
        folder = tmp_path_factory.mktemp("server")
        settings = Server(folder=folder / "state", port=0, backend="process", unsafe=True)
        return running(settings, ProcessBackend(folder / "machines", unsafe=True))

    kept = Kept(opened)
    yield kept
    kept.end()


@pytest.fixture
def server(kept_server, request):
    """A server over the process backend, which every machine can run."""
    yield from kept_server.lend(request.node)


def lacking(name):
    if name == "process":
        return None

    async def checked():
        return [check for check in await make(name, Path("/tmp/checks")).checks() if not check.ok]

    missing = asyncio.run(checked())
    return f"{name} needs {missing[0].name}: {missing[0].found}; {missing[0].to_do}" if missing else None


@pytest.fixture
def available():
    """Tell why this machine cannot run a backend; none if it can."""
    return lacking


@pytest.fixture(params=LIGHT)
def light(request):
    """Name each light backend that this machine can run."""
    if reason := lacking(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=KERNELS)
def kernel(request):
    """Name each light backend that isolates and that this machine can run."""
    if reason := lacking(request.param):
        pytest.skip(reason)
    return request.param


@asynccontextmanager
async def hosted(name, root):
    backend = make(name, root / "machines", unsafe=True)
    host = await Host.open(root, backend)
    try:
        yield host
    finally:
        for sandbox in host.sandboxes():
            await sandbox.kill()
        await host.close()
        assert await backend.reap(frozenset()) == [], "something was left of a machine that was ended"


@pytest.fixture
def hosting():
    """Own machines of a backend for as long as a block takes, and hold it to leaving nothing."""
    return hosted


@pytest.fixture
def started():
    """Start a small sandbox on a host."""

    async def start(host, **more):
        name = host.backend.name
        return await host.create(Spec(resources=SMALL, **more) if name != "process" else Spec(**more))

    return start


LISTENER = """
trap 'echo again >> /tmp/draws' USR1
echo $$ > /tmp/pid
echo first > /tmp/draws
while :; do sleep 0.1; done
"""
HOOK = b"""#!/bin/sh
echo $TRIAX_GENERATION >> /tmp/told
kill -USR1 $(cat /tmp/pid)
"""


async def listens(machine):
    """Start a process that reseeds on a signal, and the hook that sends it whenever the machine is another."""
    await machine.write("/etc/triax/restore.d/reseed", HOOK, 0o755)
    await machine.write("/etc/triax/restore.d/hangs", b"#!/bin/sh\nexec sleep 1000\n", 0o755)
    await machine.write("/etc/triax/restore.d/.hidden", b"#!/bin/sh\necho hidden >> /tmp/told\n", 0o755)
    await machine.start(["/bin/sh", "-c", LISTENER])
    await comes(lambda: written(machine, "/tmp/draws"))
    return machine


async def draws(machine):
    """Return the number that it was told, what its hook was told, and how often its live process drew."""
    result = await machine.exec("cat /run/triax/generation; echo :; cat /tmp/told; echo :; cat /tmp/draws")
    return [part.split() for part in result.stdout.decode().split(":")]


@pytest.fixture(scope="session")
def renewal():
    """A live process that reseeds where the machine is another, and how to ask what it did."""
    return listens, draws
