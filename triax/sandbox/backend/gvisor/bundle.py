"""What a gVisor kernel is started with: its configuration, the relay, and what it finds on its disk."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from triax.errors import SandboxError
from triax.sandbox.backend.layout import PATH
from triax.sandbox.guest.build import cache_folder, compiled
from triax.sandbox.protocol import Spec

HELD = "gvisor.json"
SOURCE = Path(__file__).with_name("relay.c")
# what a container usually may do; none of it reaches the host's kernel
ALLOWED = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"]
ALLOWED += ["CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_SETFCAP"]


def configuration(spec: Spec, id: str, relay: Path) -> dict[str, object]:
    """Return what `runsc` is told of a machine, in the form of the Open Container Initiative.

    Args:
        spec: The sandbox.
        id: Its host name.
        relay: What `relay` gives.

    Source: OCI runtime specification, version 1.0.
    """
    sets = dict.fromkeys(("bounding", "effective", "inheritable", "permitted"), ALLOWED)
    shown = [{"destination": "/usr", "type": "bind", "source": "/usr", "options": ["ro", "bind"]}]
    if spec.image is not None:
        shown = []
    limit = spec.resources.memory_mib * 2**20
    return {
        "ociVersion": "1.0.0",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [f"/run/triax/{relay.name}", "first"],
            "env": [f"PATH={PATH}"],
            "cwd": "/",
            "capabilities": sets,
            "noNewPrivileges": False,
            "rlimits": [{"type": "RLIMIT_DATA", "hard": limit, "soft": limit}],
        },
        "root": {"path": "/mnt/root" if spec.image else "/mnt", "readonly": False},
        "hostname": id,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            *shown,
            {"destination": "/run/triax", "type": "bind", "source": str(relay.parent), "options": ["ro", "bind"]},
        ],
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }


def held(folder: Path) -> dict[str, Any]:
    """Return what was written beside a snapshot's memory.

    Raises:
        SandboxError: It is no snapshot of gVisor's.
    """
    try:
        told = json.loads((folder / HELD).read_text())
        return {name: told[name] for name in ("image", "resources", "version", "relay")}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise SandboxError(
            f"snapshot {folder.name}: is no snapshot of a gvisor sandbox, or of an older version; {problem!r}; make it "
            "anew",
            "refused",
            status=409,
        ) from None


def relay(name: str | None = None) -> Path:
    """Return the relay, compiled when it is first needed, in a folder of its own: that folder is shown inside.

    Args:
        name: Folder of the one that a snapshot's memory goes on in; none for that of this version.

    Raises:
        SandboxError: This host has no C compiler, or no longer that relay.
    """
    if name is not None:
        kept = cache_folder() / Path(name).name / "relay"
        if not kept.exists():
            raise SandboxError(
                f"snapshot: was taken with the helper program `{name}`, which is not in {cache_folder()}; put it back "
                "there, or create the sandbox anew",
                "refused",
                status=409,
            )
        return kept
    built = compiled([SOURCE], "relay", cache_folder())
    folder = built.with_name(f"{built.name}.shown")
    shown = folder / "relay"
    if not shown.exists():
        folder.mkdir(exist_ok=True, mode=0o755)
        busybox = shutil.which("busybox")
        for name in ("ls", "stat", "dir") if busybox else ():
            with suppress(FileExistsError):
                (folder / name).symlink_to("busybox")
        if busybox:
            shutil.copy2(busybox, folder / "busybox")
        with suppress(FileExistsError):  # every machine has a file of its own there
            (folder / "generation").symlink_to("/etc/triax/generation")
        draft = folder / f".relay-{os.getpid()}"
        shutil.copy2(built, draft)
        draft.replace(shown)
    return shown


def extra(image: str | None) -> dict[str, str | bytes | None]:
    """Return what its disk has beside what every empty disk has; `image` is what lies below, if anything."""
    below = "upper/" if image else ""
    return {f"{below}tmp/.keep": b"", f"{below}run/triax/": None}


def resources(spec: Spec) -> dict[str, float]:
    """Return the resources that written memory depends on."""
    own = spec.resources
    return {"cpus": own.cpus, "memory_mib": own.memory_mib, "disk_mib": own.disk_mib, "processes": own.processes}


def is_kernel(pid: int) -> bool:
    """Tell whether a process of the host is a gVisor kernel."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(16).startswith(b"runsc-sandbox")
    except OSError:
        return False
