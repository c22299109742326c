"""Firecracker's interface: its requests as plain values, held to its own published description. Untested on a real one.

No machine of ours could run Firecracker, so this says what would be asked of it and refuses to pretend more: the
backend starts nothing yet.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from triax.errors import SandboxError
from triax.sandbox.protocol import Capabilities, Check, Machine, Spec

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One call of Firecracker's interface.

    Args:
        method: HTTP method.
        path: Path, with ids filled in.
        body: What is sent, as JSON.
    """

    method: Literal["GET", "PUT", "PATCH"]
    path: str
    body: Mapping[str, Any]


def boot_requests(spec: Spec, kernel: Path, root: Path, channel: Path) -> list[Request]:
    """Return what starts a machine.

    Args:
        spec: The machine.
        kernel: An uncompressed kernel.
        root: Its root file system, as a disk image.
        channel: Socket on the host that reaches the agent inside.
    """
    own = spec.resources
    return [
        Request(
            "PUT",
            "/machine-config",
            {"vcpu_count": max(1, round(own.cpus)), "mem_size_mib": own.memory_mib, "track_dirty_pages": True},
        ),
        Request(
            "PUT",
            "/boot-source",
            {"kernel_image_path": str(kernel), "boot_args": "console=ttyS0 reboot=k panic=1 pci=off"},
        ),
        Request(
            "PUT",
            "/drives/root",
            {"drive_id": "root", "path_on_host": str(root), "is_root_device": True, "is_read_only": False},
        ),
        Request("PUT", "/vsock", {"guest_cid": 3, "uds_path": str(channel)}),
        Request("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]


def pause_request(*, paused: bool) -> Request:
    """Return what stops a machine in place, or lets it go on."""
    return Request("PATCH", "/vm", {"state": "Paused" if paused else "Resumed"})


def snapshot_request(folder: Path, *, incremental: bool) -> Request:
    """Return what writes the memory of a machine that is paused."""
    paths = {"snapshot_path": str(folder / "state"), "mem_file_path": str(folder / "memory")}
    return Request("PUT", "/snapshot/create", {"snapshot_type": "Diff" if incremental else "Full", **paths})


def restore_request(folder: Path) -> Request:
    """Return what starts a fresh process from a snapshot's folder."""
    memory = {"backend_type": "File", "backend_path": str(folder / "memory")}
    body = {"snapshot_path": str(folder / "state"), "mem_backend": memory, "resume_vm": True}
    return Request("PUT", "/snapshot/load", body)


class Description:
    """Firecracker's own description of its interface, `src/firecracker/swagger/firecracker.yaml` of its repository.

    Args:
        tree: The description, read.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree

    @classmethod
    def read(cls, path: Path) -> "Description":
        """Read the description, as YAML or JSON.

        Raises:
            SandboxError: It cannot be read; kind `refused`.
        """
        try:
            text = path.read_text()
            if path.suffix == ".json":
                return cls(json.loads(text))
            import yaml  # pyrefly: ignore[untyped-import]

            return cls(yaml.safe_load(text))
        except (OSError, ValueError, ImportError) as error:
            raise SandboxError(f"description {path}: cannot be read; {error}; convert it to JSON", "refused") from error

    def check(self, request: Request) -> None:
        """Hold a request to the description.

        Raises:
            SandboxError: There is no such call, or its body is none that it takes; kind `refused`.
        """
        call = self._call(request)
        bodies = [one["schema"] for one in call.get("parameters", ()) if one.get("in") == "body"]
        if not bodies:
            raise SandboxError(f"{request.method} {request.path}: takes no body", "refused")
        self._hold(bodies[0], request.body, f"{request.method} {request.path}")

    def check_answer(self, request: Request, status: int, body: Any) -> None:
        """Hold an answer to the description.

        Raises:
            SandboxError: The call has no such answer; kind `infrastructure`.
        """
        answers = self._call(request).get("responses", {})
        answer = answers.get(status, answers.get(str(status), answers.get("default")))
        if answer is None:
            raise SandboxError(f"{request.method} {request.path}: answers nothing with status {status}")
        if "schema" in answer:
            try:
                self._hold(answer["schema"], body, f"answer to {request.method} {request.path}")
            except SandboxError as error:
                raise SandboxError(str(error)) from error

    def _call(self, request: Request) -> Mapping[str, Any]:
        for pattern, calls in self.tree["paths"].items():
            parts, asked = pattern.split("/"), request.path.split("/")
            fits = len(parts) == len(asked) and all(
                a == b or a.startswith("{") for a, b in zip(parts, asked, strict=True)
            )
            if fits and request.method.lower() in calls:
                return calls[request.method.lower()]
        raise SandboxError(f"{request.method} {request.path}: is no call of Firecracker", "refused")

    def _hold(self, schema: Mapping[str, Any], value: Any, where: str) -> None:
        if "$ref" in schema:
            schema = self.tree["definitions"][schema["$ref"].rpartition("/")[2]]
        kind = schema.get("type", "object" if "properties" in schema else None)
        wrong = kind in TYPES and (
            not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
        )
        if wrong or value not in schema.get("enum", (value,)):
            raise SandboxError(f"{where}: is no {schema.get('enum', kind)}; found `{value!r}`", "refused")
        if isinstance(value, Mapping):
            known = schema.get("properties", {})
            for name in schema.get("required", ()):
                if name not in value:
                    raise SandboxError(f"{where}: lacks `{name}`", "refused")
            for name, inner in value.items():
                if known and name not in known:
                    raise SandboxError(f"{where}: knows no `{name}`; known are {', '.join(known)}", "refused")
                self._hold(known.get(name, {}), inner, f"{where}.{name}")
        elif isinstance(value, list | tuple):
            for inner in value:
                self._hold(schema.get("items", {}), inner, f"{where}[]")


async def send(socket: Path, request: Request, description: Description | None = None) -> Any:
    """Send a request to a Firecracker process and return its answer, both held to the description if there is one.

    Raises:
        SandboxError: Nobody listens, or the answer says that it failed.
    """
    if description is not None:
        description.check(request)
    body = json.dumps(dict(request.body)).encode()
    head = f"{request.method} {request.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
    except OSError as error:
        raise SandboxError(f"firecracker {socket}: nobody listens; {error.strerror}") from error
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        first, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
        status = int(first.split()[1])
        lengths = [line.split(b":")[1] for line in rest.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        text = await reader.readexactly(int(lengths[0])) if lengths else b""
    except (asyncio.IncompleteReadError, ValueError, IndexError) as error:
        raise SandboxError(f"firecracker {socket}: its answer broke off") from error
    finally:
        writer.close()
    answer = json.loads(text) if text else None
    if description is not None:
        description.check_answer(request, status, answer)
    if status >= 400:
        said = answer.get("fault_message", "") if isinstance(answer, dict) else ""
        raise SandboxError(f"firecracker: {request.method} {request.path} failed with {status}; {said[:300]}")
    return answer


class FirecrackerBackend:
    """Firecracker, as far as it can be written without one: it tells what is missing, and starts nothing.

    Args:
        root: Where its machines' files would lie.
    """

    name = "firecracker"
    capabilities = Capabilities()

    def __init__(self, root: Path) -> None:
        self.root = root

    async def create(self, spec: Spec, id: str) -> Machine:
        """Refuse: nothing here was ever tried on a real Firecracker."""
        raise _untested()

    async def restore(
        self, folder: Path, spec: Spec, id: str, generation: int, *, deterministic: bool = False
    ) -> Machine:
        """Refuse, as `create` does."""
        raise _untested()

    async def reap(self, live: frozenset[str]) -> list[str]:
        """Find nothing: it starts nothing."""
        return []

    async def checks(self) -> list[Check]:
        """Look for the program and the device, and say that machines are not made yet."""
        path = shutil.which("firecracker")
        is_there = os.access("/dev/kvm", os.R_OK | os.W_OK)
        return [
            Check("firecracker", path is not None, path or "not found", "" if path else "put its binary on the PATH"),
            Check(
                "/dev/kvm", is_there, "it opens" if is_there else "it does not open", "" if is_there else "enable KVM"
            ),
            Check(
                "machines",
                False,
                "only its requests are written, untested",
                "use `qemu`, which uses KVM where it works",
            ),
        ]


def _untested() -> SandboxError:
    return SandboxError(
        "backend firecracker: makes no machines yet, since nothing here could be tried on one; use `qemu`, which uses "
        "KVM where a guest really boots on it",
        "refused",
        status=501,
    )
