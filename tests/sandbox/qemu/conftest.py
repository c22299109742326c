"""Real virtual machines for every test; a host that cannot run them says what it lacks."""

import asyncio
import shutil
from contextlib import asynccontextmanager
from functools import wraps

import pytest

from triax.sandbox.backend.qemu import QemuBackend
from triax.sandbox.protocol import Spec

NEEDED = ("qemu-system-x86_64", "qemu-img", "gcc", "busybox", "dpkg-deb")


class Lab:
    """A backend and the machines that a test made with it, all ended with the test."""

    def __init__(self, folder):
        self.folder = folder
        self.backend = QemuBackend(folder / "machines")
        self.machines = []

    async def create(self, id="source", **spec):
        machine = await self.backend.create(Spec(**spec), id)
        self.machines.append(machine)
        return machine

    async def restore(self, folder, id, generation=1, **spec):
        machine = await self.backend.restore(folder, Spec(**spec), id, generation)
        self.machines.append(machine)
        return machine

    async def fork(self, machine, *ids, **more):
        children = await machine.fork(ids, **more)
        self.machines += [child for child in children if not isinstance(child, Exception)]
        return children

    def new_folder(self, name):
        folder = self.folder / name
        folder.mkdir()
        return folder


@asynccontextmanager
async def opened(folder):
    lab = Lab(folder)
    try:
        yield lab
    finally:
        for machine in lab.machines:
            await machine.kill()


@pytest.fixture
def in_lab(tmp_path):
    """Run a coroutine with a lab of its own, in a loop of its own."""
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing:
        pytest.skip(f"this host lacks {', '.join(missing)}: run tools/system-packages.sh sandbox")

    def run(test):
        @wraps(test)
        async def whole():
            async with opened(tmp_path) as lab:
                return await test(lab)

        return asyncio.run(whole())

    return run


async def text(machine, command, **more):
    """Run a command that must succeed; return what it wrote."""
    result = await machine.exec(command, **more)
    assert result.outcome == "ok", result
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


@pytest.fixture(scope="session")
def said():
    return text
