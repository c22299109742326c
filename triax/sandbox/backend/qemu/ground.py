"""What this host offers its virtual machines: emulator, kernel, accelerator, clock."""

import asyncio
import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from triax.errors import SandboxError
from triax.sandbox.backend.qemu import probe, snapshot
from triax.sandbox.backend.qemu.launch import MACHINE, PROCESSOR, PROGRAM, Hardware
from triax.sandbox.guest.build import clock_khz, initramfs
from triax.sandbox.guest.kernel import kernel
from triax.sandbox.guest.wire import PROTOCOL
from triax.sandbox.protocol import Spec

Accelerator = Literal["auto", "kvm", "tcg"]


class Ground:
    """Finds out once, when the first machine asks.

    Args:
        cache: Where kernels and what is built are kept.
        package: A Debian package with the guest's kernel; none to fetch one.
        accelerator: `auto` uses KVM where a guest really boots on it, and emulation elsewhere.

    Attributes:
        kernel: Version of the guest's kernel, once it was looked for.
    """

    def __init__(self, cache: Path, package: Path | None, accelerator: Accelerator) -> None:
        self.cache = cache
        self.kernel = "unknown"
        self._package = package
        self._accelerator = accelerator
        self._found: tuple[snapshot.Fit, Hardware] | None = None
        self._finding = asyncio.Lock()

    async def offers(self, spec: Spec) -> tuple[snapshot.Fit, Hardware]:
        """Return what a machine of some size is made of here.

        Raises:
            SandboxError: Something is missing; the message says how to get it.
        """
        async with self._finding:
            if self._found is None or not self._found[1].kernel.exists():  # the cache may be emptied at any time
                self._found = await self._find()
        fit, hardware = self._found
        size = {"memory_mib": spec.resources.memory_mib, "cpus": max(1, -int(-spec.resources.cpus // 1))}
        return replace(fit, **size), replace(hardware, **size)

    async def _find(self) -> tuple[snapshot.Fit, Hardware]:
        version = await _version()
        self.cache.mkdir(parents=True, exist_ok=True)
        ready = await asyncio.to_thread(kernel, self.cache, self._package)
        self.kernel = ready.version
        archive = await asyncio.to_thread(initramfs, ready.modules, self.cache)
        rate = await asyncio.to_thread(clock_khz, self.cache)
        fit = snapshot.Fit(version, "tcg", MACHINE, PROCESSOR, rate, 0, 0, PROTOCOL)
        hardware = Hardware("tcg", 0, 0, rate, ready.image, archive)
        if self._accelerator == "kvm" or (self._accelerator == "auto" and await self._boots_on_kvm(fit, hardware)):
            fit = replace(fit, accelerator="kvm", processor=_processor())
            hardware = replace(hardware, accelerator="kvm")
        return fit, hardware

    async def _boots_on_kvm(self, fit: snapshot.Fit, hardware: Hardware) -> bool:
        """Boot a guest on KVM; the answer is kept until the host, QEMU or the kernel change."""
        if not os.access("/dev/kvm", os.R_OK | os.W_OK):
            return False
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        key = hashlib.sha256(json.dumps([boot, repr(fit), repr(hardware)]).encode()).hexdigest()[:16]
        kept = self.cache / f"kvm-{key}"
        if not kept.exists():
            answer = await probe.boots(replace(hardware, accelerator="kvm", memory_mib=256, cpus=1), self.cache)
            kept.write_text("yes" if answer else "no")
        return kept.read_text() == "yes"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


async def _version() -> str:
    program = shutil.which(PROGRAM)
    if program is None:
        raise SandboxError(f"qemu: found no `{PROGRAM}`; run `apt-get install qemu-system-x86 qemu-utils`")
    asked = await asyncio.create_subprocess_exec(program, "-version", stdout=asyncio.subprocess.PIPE)
    said, _ = await asked.communicate()
    return said.decode(errors="replace").splitlines()[0].removeprefix("QEMU emulator version ").strip()
