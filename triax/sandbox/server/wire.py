"""How the control plane writes down sandboxes, snapshots, templates and errors."""

import math
from datetime import UTC, datetime
from typing import Any

from starlette.responses import JSONResponse

from triax.errors import SandboxError
from triax.sandbox.protocol import Spec, Status

ENVD_VERSION = "0.6.4"
"""What clients derive the data plane's features from: input streams, raw uploads, entries within watch events."""

CLIENT_ID = "triax"
RESERVED = "triax."
"""Labels that begin so are the server's own; clients neither set nor see them."""
TEMPLATE, AUTO_RESUME, INTERNET = f"{RESERVED}template", f"{RESERVED}auto_resume", f"{RESERVED}internet"
PRIVATE_PORTS = f"{RESERVED}private_ports"
WARM = f"{RESERVED}warm"
"""Marks a machine that was made ahead and has no client yet."""

STATES: dict[Status, str] = {
    "creating": "running",
    "running": "running",
    "snapshotting": "running",
    "forking": "running",
    "pausing": "running",
    "suspending": "running",
    "paused": "paused",
    "suspended": "paused",
    "resuming": "paused",
}
"""The two states that the wire knows, for every status that is listed; what is dead, lost or failed is not."""

BROKEN: tuple[Status, ...] = ("lost", "failed")
"""Statuses that are listed, under their own names, only to who asks for them."""


def state(status: Status) -> str:
    """Return the state that a list shows for a status."""
    return STATES.get(status, status)


def problem(status: int, message: str, error_code: str | None = None) -> JSONResponse:
    """Return an error as every route answers it."""
    body: dict[str, Any] = {"code": status, "message": message}
    if error_code is not None:
        body["error_code"] = error_code
    return JSONResponse(body, status_code=status)


def refusal(fault: SandboxError) -> JSONResponse:
    """Return the answer that a failed operation gets; who is at fault stays readable in `error_code`."""
    response = problem(fault.status, str(fault), f"sandbox_{fault.kind}")
    if fault.status in (429, 503):
        response.headers["retry-after"] = "1"
    return response


def when(seconds: float) -> str:
    """Return a time since 1970 as text; a life without end gets the year 9999."""
    if not math.isfinite(seconds):
        return "9999-12-31T23:59:59Z"
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def metadata(spec: Spec) -> dict[str, str]:
    """Return a sandbox's labels as its client set them."""
    return {name: value for name, value in spec.metadata.items() if not name.startswith(RESERVED)}


def started(sandbox: Any, token: str, traffic_token: str | None, domain: str | None) -> dict[str, Any]:
    """Return what a client learns when it gets a sandbox."""
    return {
        "templateID": sandbox.spec.metadata.get(TEMPLATE, "base"),
        "sandboxID": sandbox.id,
        "clientID": CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": token,
        "trafficAccessToken": traffic_token,
        "domain": domain,
    }


def listed(sandbox: Any) -> dict[str, Any]:
    """Return a sandbox as lists show it."""
    resources = sandbox.spec.resources
    end = math.inf if sandbox.expires_s is None else sandbox.expires_s
    return {
        "templateID": sandbox.spec.metadata.get(TEMPLATE, "base"),
        "sandboxID": sandbox.id,
        "clientID": CLIENT_ID,
        "startedAt": when(sandbox.created_s),
        "endAt": when(end),
        "cpuCount": max(1, math.ceil(resources.cpus)),
        "memoryMB": resources.memory_mib,
        "diskSizeMB": resources.disk_mib,
        "state": state(sandbox.status),
        "envdVersion": ENVD_VERSION,
        "metadata": metadata(sandbox.spec),
        **({"reason": sandbox.reason} if sandbox.status in BROKEN else {}),
    }


def detailed(sandbox: Any, token: str, domain: str | None) -> dict[str, Any]:
    """Return all that the control plane tells of a sandbox; `status` is finer than the wire's two states."""
    spec, network = sandbox.spec, sandbox.spec.network
    asked = spec.metadata.get(INTERNET)
    return {
        **listed(sandbox),
        "envdAccessToken": token,
        "allowInternetAccess": None if asked is None else asked == "true",
        "domain": domain,
        "network": {
            "allowOut": list(network.allow_out),
            "allowPublicTraffic": spec.metadata.get(PRIVATE_PORTS) != "true",
        },
        "lifecycle": {
            "onTimeout": "pause" if spec.on_timeout == "suspend" else "kill",
            "autoResume": spec.metadata.get(AUTO_RESUME) == "true",
        },
        "status": sandbox.status,
        "generation": sandbox.generation,
        "backend": sandbox.backend,
    }
