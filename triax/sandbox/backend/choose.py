"""Which backend makes the machines: the one that was named, or the strongest that this host can run."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from triax.errors import SandboxError
from triax.machine import install_command
from triax.sandbox.protocol import Backend, Check, Spec

PLACES = {
    "qemu": "triax.sandbox.backend.qemu:QemuBackend",
    "gvisor": "triax.sandbox.backend.gvisor:GvisorBackend",
    "namespace": "triax.sandbox.backend.namespace:NamespaceBackend",
    "firecracker": "triax.sandbox.backend.firecracker:FirecrackerBackend",
    "process": "triax.sandbox.backend.process:ProcessBackend",
}
"""Module and class of each backend, imported only when it is wanted."""

TRIAL_S = 30.0
STRONGEST_FIRST = ("qemu", "gvisor", "namespace")


def make(name: str, root: Path, *, unsafe: bool = False) -> Backend:
    """Return a backend by its name, whether this host can run it or not.

    Args:
        name: A key of `PLACES`.
        root: Where the files of its machines lie; on the file system that snapshots lie on.
        unsafe: For `process`: that it isolates nothing is wanted.

    Raises:
        SandboxError: There is no such backend, or it needs what is not installed; kind `refused`.
    """
    if name not in PLACES:
        raise SandboxError(f"backend `{name}`: not known; choose one of {', '.join(PLACES)}", "refused")
    module, _, kind = PLACES[name].partition(":")
    try:
        backend = cast(Callable[..., Backend], getattr(import_module(module), kind))
    except ModuleNotFoundError as problem:
        raise SandboxError(
            f"backend `{name}`: needs the module `{problem.name}`; install it with `{install_command('sandbox')}`",
            "refused",
        ) from problem
    root = root.absolute()  # machines run elsewhere
    return backend(root, unsafe=unsafe) if name == "process" else backend(root)


async def choose(name: str, root: Path, *, unsafe: bool = False) -> Backend:
    """Return a backend that this host can run.

    Args:
        name: A key of `PLACES`, or `auto` for the strongest of qemu, gvisor and namespace.
        root: Where the files of its machines lie.
        unsafe: For `process`: that it isolates nothing is wanted.

    Raises:
        SandboxError: It, or none of them, can run here; the message names what is missing.
    """
    missing = []
    for one in STRONGEST_FIRST if name == "auto" else (name,):
        try:
            backend = make(one, root, unsafe=unsafe)
        except SandboxError:
            if name != "auto":
                raise
            continue
        failed = [check for check in await backend.checks() if not check.ok]
        if not failed:
            return backend
        missing.append(f"{one} lacks {told(failed[0])}")
    raise SandboxError(f"backend `{name}`: cannot run here; {'; '.join(missing)}", "refused")


async def tried(backend: Backend) -> Check:
    """Make a machine, kill a command in it, and run another: what only a real machine can tell.

    Args:
        backend: One whose checks all passed.
    """
    name = "a command after one that was killed"
    try:
        machine = await backend.create(Spec(), f"doctor-{os.urandom(4).hex()}")
        try:
            for argv, limit_s in (
                (["true"], TRIAL_S),
                (["sleep", "60"], 0.2),
                (["true"], TRIAL_S),
                (["true"], TRIAL_S),
            ):
                result = await machine.exec(argv, timeout_s=limit_s)
                if limit_s == TRIAL_S and (result.outcome != "ok" or result.exit_code != 0):
                    end = f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
                    found = f"`true` ended with {result.outcome}, {end} {result.detail}".strip()
                    return Check(name, False, found, "take another backend, or for qemu another guest kernel")
        finally:
            await machine.kill()
    except SandboxError as problem:
        return Check(name, False, str(problem), "see what was found")
    return Check(name, True, "it runs")


def told(check: Check) -> str:
    """Return a failed check in words."""
    return f"{check.name} (found {check.found}; {check.to_do})"
