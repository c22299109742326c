"""What a client of the data plane is told when something goes wrong."""

from triax.errors import SandboxError
from triax.sandbox.server.connect import Fault

CODES = {
    400: "invalid_argument",
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    409: "failed_precondition",
    410: "unavailable",
    413: "resource_exhausted",
    429: "resource_exhausted",
    499: "canceled",
    500: "internal",
    501: "unimplemented",
    502: "unavailable",
    503: "unavailable",
    504: "deadline_exceeded",
    507: "resource_exhausted",
}


def explain(problem: Exception) -> Fault:
    """Return what a client is told about an exception; what nobody foresaw is called internal."""
    if isinstance(problem, Fault):
        return problem
    if isinstance(problem, SandboxError):
        return Fault(CODES.get(problem.status, "internal"), str(problem))
    if isinstance(problem, TimeoutError):
        return Fault("deadline_exceeded", str(problem) or "not done in time")
    return Fault("internal", f"the server failed: {type(problem).__name__}: {problem}")
