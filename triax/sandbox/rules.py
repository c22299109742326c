"""Which operation is taken in which status, and what to do about one that is refused."""

from triax.errors import SandboxError
from triax.sandbox.protocol import Status

WHAT_TO_DO: dict[Status, str] = {
    "creating": "wait until it runs",
    "running": "it runs already",
    "pausing": "wait until it is paused",
    "paused": "resume it first",
    "suspending": "wait until it is suspended",
    "suspended": "resume it first",
    "resuming": "wait until it runs",
    "snapshotting": "wait until the snapshot is taken",
    "forking": "wait until the copies are made",
    "killing": "create another",
    "dead": "create another",
    "lost": "create another, or start one from a snapshot",
    "failed": "create another, or start one from a snapshot",
}

USABLE: tuple[Status, ...] = ("running", "snapshotting", "forking")
"""Statuses in which commands and files are served; in the last two they may wait a moment."""

ALLOWED: dict[str, tuple[Status, ...]] = {
    "use": USABLE,
    "pause": ("running",),
    "resume": ("paused", "suspended"),
    "suspend": ("running", "paused"),
    "snapshot": ("running", "paused", "suspended"),
    "fork": ("running", "paused", "suspended"),
    "set_timeout": ("running", "paused", "suspended", "snapshotting", "forking"),
    "kill": ("running", "paused", "suspended", "dead", "lost", "failed"),
}
"""Which operation is taken in which status; all others are refused with HTTP status 409 and change nothing.

`kill` during another operation waits for its end.
"""


def allow(operation: str, id: str, status: Status, reason: str) -> None:
    """Refuse an operation that a status does not take.

    Args:
        operation: A key of `ALLOWED`.
        id: Whose operation it is.
        status: Where that sandbox is in its life.
        reason: Why it is there, in words; may be empty.

    Raises:
        SandboxError: It is not taken; kind `refused`, status 409.
    """
    if status not in ALLOWED[operation]:
        why = f" ({reason})" if reason else ""
        raise SandboxError(
            f"sandbox {id}: cannot {operation.replace('_', ' ')} now; it is `{status}`{why}; {WHAT_TO_DO[status]}",
            "refused",
            status=409,
        )
