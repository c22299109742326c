"""A real server of sandboxes, listening in this process, for every test that speaks to one."""

import asyncio
import threading
from contextlib import contextmanager

import pytest

from triax.config.sandbox import Server
from triax.sandbox.backend.process import ProcessBackend
from triax.sandbox.server.run import served


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
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


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

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    try:
        if "problem" in result:
            raise result["problem"]
        yield Running(result["serving"].url, result["serving"].plane, result["loop"])
    finally:
        if "serving" in result:
            result["loop"].call_soon_threadsafe(result["stop"].set)
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def serve():
    """Start a server with settings and a backend of one's own, as a context."""
    return running


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server over the process backend, which every machine can run."""
    folder = tmp_path_factory.mktemp("server")
    settings = Server(folder=folder / "state", port=0, backend="process", unsafe=True)
    with running(settings, ProcessBackend(folder / "machines", unsafe=True)) as started:
        yield started
