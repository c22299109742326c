"""Virtual machines under QEMU that pause, are put away, come back and split into copies."""

from triax.sandbox.backend.qemu.backend import QemuBackend

__all__ = ["QemuBackend"]
