"""Whether a guest really boots on KVM: the only honest way to know is to boot one."""

import asyncio
import shutil
import tempfile
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.qemu import disk
from triax.sandbox.backend.qemu.launch import Emulator, Hardware
from triax.sandbox.guest.channel import Channel
from triax.sandbox.guest.wire import Kind
from triax.sandbox.image import base as base_image

PATIENCE_S = 8.0  # a guest on KVM answers in well under one second


async def boots(hardware: Hardware, cache: Path) -> bool:
    """Boot a small guest and wait for its agent; devices that exist and hang, or lack features, give no."""
    folder = Path(tempfile.mkdtemp(prefix=".probe-", dir=cache))
    emulator: Emulator | None = None
    try:
        image = await asyncio.to_thread(base_image, None, 16, cache)
        memory, layer = folder / "memory", folder / "layer.qcow2"
        with memory.open("xb") as file:
            file.truncate(hardware.memory_mib * 2**20)
        disk.make_layer(layer, image.stat().st_size)
        emulator = await Emulator.start(
            hardware,
            memory=memory,
            disk=disk.chain(image, [layer]),
            folder=folder,
            label=str(folder),
            channel=Channel(),
        )
        await emulator.channel.ask(Kind.PING, Kind.PONG, within_s=PATIENCE_S)
        return True
    except SandboxError:
        return False
    finally:
        if emulator is not None:
            await emulator.end()
        shutil.rmtree(folder, ignore_errors=True)
