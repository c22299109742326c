"""Virtual machines that pause, are put away, come back and split, with KVM where a guest boots on it and without."""

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.owned import LABEL, labelled, signal_all
from triax.sandbox.backend.qemu import disk, snapshot
from triax.sandbox.backend.qemu.egress import Rules
from triax.sandbox.backend.qemu.ground import Accelerator, Ground
from triax.sandbox.backend.qemu.launch import PROGRAM, Emulator, Hardware, state_pipe
from triax.sandbox.backend.qemu.machine import QemuMachine
from triax.sandbox.backend.qemu.memory import PAGE, region
from triax.sandbox.backend.qemu.parts import Parts
from triax.sandbox.backend.qemu.saving import join_memory, save
from triax.sandbox.guest.build import cache_folder
from triax.sandbox.guest.channel import Channel
from triax.sandbox.guest.wire import Kind
from triax.sandbox.image import base as base_image
from triax.sandbox.protocol import Capabilities, Check, Spec

LEAST_MEMORY_MIB = 96  # below, the kernel leaves nothing for a command
BOOT_S = 90.0
FIRST_S = 20.0
SETTLE_S = 5.0
LOOK_S = 0.2
CALM = 5
PROBES, PROBE_S = 2, 0.1
BUSY = 0.1  # of a processor; a guest that only keeps time uses less
REAP_S = 10.0  # from SIGKILL to the end of a process
FLAT_BYTES = 16 * 2**20  # more changed memory than this is joined with its base before several copies map it


class QemuBackend:
    """Virtual machines under QEMU; every machine starts from a template that was booted once.

    Args:
        root: Where the folders of its machines lie; on the file system of the snapshots, files are shared by links.
        cache: Where kernels, images and templates are kept; none for the user's cache folder.
        package: A Debian package with the guest's kernel; none to fetch one.
        accelerator: `auto` uses KVM where a guest really boots on it, and emulation elsewhere.
    """

    name = "qemu"
    capabilities = Capabilities(
        memory_snapshot=True,
        incremental_snapshot=True,
        disk_snapshot=True,
        fork_running=True,
        suspend=True,
        network_policy=True,
        terminals=True,
        expose=True,
        oci_images=True,
        attach=True,
    )

    def __init__(
        self,
        root: Path,
        *,
        cache: Path | None = None,
        package: Path | None = None,
        accelerator: Accelerator = "auto",
    ) -> None:
        self.root = Path(root).absolute()
        self.cache = (cache or cache_folder()).absolute()
        self.ground = Ground(self.cache, package, accelerator)
        self._splitting: set[str] = set()

    async def create(self, spec: Spec, id: str) -> QemuMachine:
        """Start a machine from the template of its image and size, which is booted first if there is none.

        Raises:
            SandboxError: The wish cannot be met, or the guest does not boot.
        """
        _refuse_what_cannot_be(spec)
        return await self.restore(await self.template(spec), spec, id, 0)

    async def template(self, spec: Spec) -> Path:
        """Return the folder of a booted machine of this image and size, booting it if there is none."""
        fit, hardware = await self.ground.offers(spec)
        image = await asyncio.to_thread(base_image, spec.image, spec.resources.disk_mib, self.cache)
        key = hashlib.sha256(
            json.dumps([repr(fit), repr(hardware), hardware.words(), image.name]).encode()
        ).hexdigest()[:24]
        folder = self.cache / f"template-{key}"
        if (folder / snapshot.MANIFEST).exists():
            return folder
        async with _held(self.cache / f"template-{key}.lock"):
            if (folder / snapshot.MANIFEST).exists():
                return folder
            for left in self.cache.glob(f".template-{key}.*"):  # by a process that was killed while it held the lock
                await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
            fresh = self.cache / f".template-{key}.{os.getpid()}"
            fresh.mkdir()
            try:
                machine = await self.boot(spec, f"template-{key}-{os.getpid()}", hardware, image)
                try:
                    await _settle(machine)
                    await save(machine, fresh, fit, goes_on=False, flat=True)
                finally:
                    await machine.kill()
                fresh.rename(folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        return folder

    async def boot(
        self, spec: Spec, id: str, hardware: Hardware | None = None, image: Path | None = None
    ) -> QemuMachine:
        """Start a machine from its kernel, without a template.

        Raises:
            SandboxError: The guest does not boot; the message has what its kernel said last.
        """
        if hardware is None:
            _, hardware = await self.ground.offers(spec)
        if image is None:
            image = await asyncio.to_thread(base_image, spec.image, spec.resources.disk_mib, self.cache)
        parts = self._parts(id)
        try:
            disk.link(image, parts.base)
            parts.disk_bytes = image.stat().st_size
            with parts.memory.open("xb") as file:
                file.truncate(hardware.memory_mib * 2**20)
            emulator = await self._start(hardware, parts, id, None, console=True)
        except BaseException:
            shutil.rmtree(parts.folder, ignore_errors=True)
            raise
        machine = QemuMachine(self, spec, id, 0, parts, emulator)
        try:
            await emulator.channel.ask(Kind.PING, Kind.PONG, within_s=BOOT_S)
            await machine.greet()
        except BaseException as problem:
            said = emulator.last_words()
            await machine.kill()
            if isinstance(problem, SandboxError):
                raise SandboxError(f"image {spec.image!r}: does not boot; {problem}; {said}") from None
            raise
        return machine

    async def restore(
        self, folder: Path, spec: Spec, id: str, generation: int, *, deterministic: bool = False
    ) -> QemuMachine:
        """Start a machine that goes on where a snapshot was taken.

        Raises:
            SandboxError: The snapshot is damaged or does not fit this host or the wish.
        """
        _refuse_what_cannot_be(spec)
        saved = await asyncio.to_thread(snapshot.read, folder)
        fit, hardware = await self.ground.offers(spec)
        snapshot.check_fit(folder.name, saved.fit, fit)
        state = await asyncio.to_thread(snapshot.state_of, folder, saved)
        pages = await asyncio.to_thread(snapshot.pages_of, folder, saved)
        begun = time.monotonic()
        parts = self._parts(id)
        emulator: Emulator | None = None
        read_end, write_end = state_pipe(state)
        try:
            disk.link(folder / "memory", parts.memory)
            disk.link(folder / "disk.ext4", parts.base)
            parts.disk_bytes = saved.disk_bytes
            if len(saved.layers) > disk.MOST_LAYERS:
                joined = parts.new_layer()
                below = [folder / name for name in saved.layers]
                await asyncio.to_thread(disk.flatten, below, parts.base, parts.disk_bytes, joined)
                parts.layers.append(joined)
            else:
                for name in saved.layers:
                    layer = parts.new_layer()
                    disk.link(folder / name, layer)
                    parts.layers.append(layer)
            if parts.memory.stat().st_size != hardware.memory_mib * 2**20:
                raise SandboxError(f"snapshot {folder.name}: its memory is cut short; it is damaged, use another")
            if not pages:
                os.write(write_end, state)
            emulator = await self._start(hardware, parts, id, read_end)
            if pages:
                # it waits for its state: until then its memory is ours to fill
                where = region(emulator.process.pid, parts.memory)
                for one in pages:
                    await asyncio.to_thread(one.put_into, where)
                os.write(write_end, state)
            os.close(write_end)
            write_end = -1
            await emulator.runs()
            machine = QemuMachine(self, spec, id, generation, parts, emulator)
            machine.started_s = time.monotonic() - begun
            await machine.greet(deterministic=deterministic)
            return machine
        except BaseException as problem:
            said = ""
            if emulator is not None:
                said = f"; {emulator.last_words()}"
                await emulator.end()
            shutil.rmtree(parts.folder, ignore_errors=True)
            if isinstance(problem, SandboxError):
                raise SandboxError(f"{problem}{said}", problem.kind, status=problem.status) from None
            if isinstance(problem, OSError):
                raise SandboxError(f"snapshot {folder.name}: cannot be restored; {problem}{said}") from None
            raise
        finally:
            for end in (read_end, write_end):
                if end >= 0:
                    os.close(end)

    async def save(self, machine: QemuMachine, folder: Path, *, parent: Path | None, goes_on: bool) -> None:
        """Write a snapshot of a machine; see `saving.save`."""
        fit, _ = await self.ground.offers(machine.spec)
        await save(machine, folder, fit, parent=parent, goes_on=goes_on)

    async def split(
        self, machine: QemuMachine, ids: Sequence[str], *, deterministic: bool = False
    ) -> list[QemuMachine | SandboxError]:
        """Start copies of a running machine.

        Raises:
            SandboxError: The source could not be frozen or saved; it runs on.
        """
        folder = self.root / f".fork-{machine.id}-{os.urandom(4).hex()}"
        try:
            folder.mkdir(parents=True)
        except OSError as problem:
            words = f"fork of {machine.id}: no folder for it; {problem.strerror}; free some disk"
            raise SandboxError(words, status=507) from None
        self._splitting.add(folder.name)
        try:
            fit, _ = await self.ground.offers(machine.spec)
            await save(machine, folder, fit, goes_on=True, durable=False)
            if len(ids) > 1 and (folder / "pages-0.bin").stat().st_size > FLAT_BYTES:
                await asyncio.to_thread(join_memory, folder)
            room = asyncio.Semaphore(max(2, os.cpu_count() or 1))
            generation = machine.generation + 1

            async def copy(id: str) -> QemuMachine | SandboxError:
                async with room:
                    try:
                        return await self.restore(folder, machine.spec, id, generation, deterministic=deterministic)
                    except SandboxError as problem:
                        return problem

            return list(await asyncio.gather(*(copy(id) for id in ids)))
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            self._splitting.discard(folder.name)

    async def reap(self, live: frozenset[str]) -> list[str]:
        """End processes and remove folders of machines that nobody owns any more."""
        ended = []
        names = set(os.listdir(self.root)) if self.root.is_dir() else set()
        for name in sorted(names - live - self._splitting):
            if name.startswith("."):
                shutil.rmtree(self.root / name, ignore_errors=True)
                continue
            label = str(self.root / name)
            count = signal_all(LABEL, label, signal.SIGKILL)
            give_up = time.monotonic() + REAP_S
            while count and labelled(LABEL, label) and time.monotonic() < give_up:
                await asyncio.sleep(0.01)
            shutil.rmtree(self.root / name, ignore_errors=True)
            ended.append(f"qemu machine {name}: {count} processes and its folder")
        return ended

    async def checks(self) -> list[Check]:
        """Tell what is here of what it needs, and which accelerator it uses."""
        wanted = {
            PROGRAM: "qemu-system-x86",
            "qemu-img": "qemu-utils",
            "gcc": "gcc libc6-dev",
            "busybox": "busybox-static",
            "dpkg-deb": "dpkg",
            "setpriv": "util-linux",
        }
        found = []
        for program, package in wanted.items():
            path = shutil.which(program)
            found.append(
                Check(program, path is not None, path or "nothing", "" if path else f"apt-get install {package}")
            )
        maker = shutil.which("mkfs.ext4", path=os.defpath + ":/usr/sbin:/sbin")
        found.append(Check("mkfs.ext4", bool(maker), maker or "nothing", "" if maker else "apt-get install e2fsprogs"))
        if all(check.ok for check in found):
            try:
                fit, _ = await self.ground.offers(Spec())
                words = "a guest boots on KVM" if fit.accelerator == "kvm" else "no guest boots on KVM here; emulation"
                words = f"{self.ground.kernel}, {fit.accelerator}: {words}"
                found.append(Check("guest kernel and accelerator", True, words))
            except SandboxError as problem:
                found.append(Check("guest kernel and accelerator", False, str(problem), "see what was found"))
        return found

    def _parts(self, id: str) -> Parts:
        folder = self.root / id
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise SandboxError(
                f"qemu machine {id}: there is one already; choose another id", "refused", status=409
            ) from (None)
        except OSError as problem:
            raise SandboxError(f"qemu machine {id}: no folder for it; {problem}; free some disk") from None
        return Parts(folder, folder / "memory", folder / "disk.ext4")

    async def _start(
        self, hardware: Hardware, parts: Parts, id: str, state: int | None, *, console: bool = False
    ) -> Emulator:
        layer = parts.new_layer()
        disk.make_layer(layer, parts.disk_bytes)
        parts.layers.append(layer)
        return await Emulator.start(
            hardware,
            memory=parts.memory,
            disk=disk.chain(parts.base, parts.layers),
            folder=parts.folder,
            label=str(self.root / id),
            channel=Channel(),
            state=state,
            console=console,
        )


async def _settle(machine: QemuMachine) -> None:
    """Let a guest do what it does once, then wait until it does nothing: else each copy would begin with it.

    Raises:
        SandboxError: A command that was ended takes those after it along, as in kernels with a faulty `cgroup.kill`.
    """
    for _ in range(PROBES):
        await machine.exec(["sleep", "60"], timeout_s=PROBE_S)
        after = await machine.exec(["true"], timeout_s=FIRST_S)
        if after.signal == signal.SIGKILL and after.outcome != "timeout":
            raise SandboxError(
                f"guest kernel {machine.backend.ground.kernel}: after a command was killed the next one dies too; "
                "give `package` another kernel"
            )
    for command in (["/bin/sh", "-c", "ls -lL /bin /usr/bin; exec true"], ["true"], ["sync"]):
        await machine.exec(command, timeout_s=FIRST_S)  # an image may hold programs that never end
    give_up = time.monotonic() + SETTLE_S
    calm = 0
    while calm < CALM and time.monotonic() < give_up:
        before = machine.emulator.cpu_s()
        await asyncio.sleep(LOOK_S)
        calm = calm + 1 if machine.emulator.cpu_s() - before <= BUSY * LOOK_S else 0


def _refuse_what_cannot_be(spec: Spec) -> None:
    if spec.resources.memory_mib < LEAST_MEMORY_MIB:
        raise SandboxError(
            f"memory_mib `{spec.resources.memory_mib}`: a virtual machine needs {LEAST_MEMORY_MIB} for its kernel; "
            "raise it, or use the namespace backend",
            "refused",
        )
    if spec.resources.memory_mib * 2**20 % PAGE or spec.resources.cpus > 64:
        raise SandboxError(f"resources {spec.resources}: more than a virtual machine can have; lower them", "refused")
    Rules(spec.network)


@asynccontextmanager
async def _held(path: Path) -> AsyncGenerator[None]:
    """Hold a lock file among processes without stopping the loop."""
    file = path.open("w")
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.02)
        yield
    finally:
        file.close()
