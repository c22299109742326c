"""Sandboxes on gVisor: a kernel in user space between the task and the host's, with memory that can be put away."""

from triax.sandbox.backend.gvisor.backend import GvisorBackend

__all__ = ["GvisorBackend"]
