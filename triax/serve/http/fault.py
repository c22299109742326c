"""What goes wrong with a request, as the API's error object with the right status."""

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from triax.errors import TriaxError
from triax.log import logger
from triax.serve.http.schema import UNSUPPORTED
from triax.serve.link import EngineAbsent, EngineLost, Refusal

PLACE = re.compile(r"([a-z_]+(?:[.\[][\w.\[\]]*)?): ")
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
MEMBERS = {"str", "int", "float", "bool", "dict", "list"}
"""What the schema calls the members of a union; no field is called so."""
CLIENTS_FAULT = ("ConfigError", "DataError", "CapacityError", "UnsupportedError", "CheckpointError", "SchemaError")
log = logger("serve")


class Fault(TriaxError):
    """An answer that is an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def tree(self) -> dict[str, Any]:
        """Return the error object."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        words = (str(self), self.param)  # what they quote may be half of a character
        message, param = (text and text.encode("utf-8", "backslashreplace").decode() for text in words)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the whole answer."""
        return JSONResponse(self.tree(), self.status, headers=dict(self.headers or {}))


def refuse(message: str, param: str | None = None, code: str | None = None) -> Fault:
    """Return the fault of a request that cannot be answered; the message begins with the field's name."""
    place = PLACE.match(message)
    return Fault(400, message, param=param or (place[1] if place else None), code=code)


def fault_of(problem: TriaxError) -> Fault:
    """Return any failure as a fault."""
    if isinstance(problem, Fault):
        return problem
    if isinstance(problem, Refusal):
        if problem.kind in CLIENTS_FAULT:
            code = "context_length_exceeded" if problem.kind == "CapacityError" else None
            return refuse(str(problem), code=code)
        return Fault(500, str(problem), code="engine_error")
    if isinstance(problem, EngineLost):
        return Fault(503, str(problem), code="engine_lost", headers={"Retry-After": "2"})
    if isinstance(problem, EngineAbsent):
        return Fault(503, str(problem), code="engine_not_ready", headers={"Retry-After": "2"})
    return refuse(str(problem))


def validation_fault(problem: RequestValidationError) -> Fault:
    """Return what the schema says about a body, its first problem in words."""
    errors = problem.errors()
    # of a union every member complains; the deepest place is the one that was meant
    first = max(errors, key=lambda error: len(error["loc"])) if len({e["loc"][:2] for e in errors}) == 1 else errors[0]
    names = [part for part in first["loc"] if part != "body"]
    param = ""
    for name in names:
        if isinstance(name, int):
            param += f"[{name}]"
        elif re.fullmatch(r"[a-z_]+", name) and name not in MEMBERS:
            param += f".{name}" if param else name
    if first["type"] == "json_invalid":
        return Fault(400, f"body: not JSON; found {first.get('ctx', {}).get('error', 'damage')}; send a JSON object")
    if first["type"] == "extra_forbidden" and param in UNSUPPORTED:
        message = f"{param}: is not supported here; {UNSUPPORTED[param]}"
        return Fault(400, message, param=param, code="unsupported_parameter")
    if first["type"] == "extra_forbidden":
        message = f"{param}: not a parameter of this endpoint; found `{names[-1]}`; leave it out"
        return Fault(400, message, param=param or str(names[-1]), code="unknown_parameter")
    if first["type"] == "missing":
        where = param or "body"
        return Fault(400, f"{where}: is missing; found none; give it", param=where, code="missing_required_parameter")
    found = repr(first.get("input"))
    found = found if len(found) <= 80 else f"{found[:77]}..."
    text = first["msg"][:1].lower() + first["msg"][1:]
    return Fault(400, f"{param or 'body'}: {text}; found `{found}`; correct it", param=param or None)


def install(app: FastAPI) -> None:
    """Let every failure of an app leave as an error object."""

    async def of_triax(_: Request, problem: Exception) -> JSONResponse:
        assert isinstance(problem, TriaxError)
        return fault_of(problem).response()

    async def of_schema(_: Request, problem: Exception) -> JSONResponse:
        assert isinstance(problem, RequestValidationError)
        return validation_fault(problem).response()

    async def of_route(request: Request, problem: Exception) -> JSONResponse:
        assert isinstance(problem, HTTPException)
        told = {
            400: "body: not JSON; found text that does not parse; send a JSON object",
            404: f"path: nothing is here; found `{request.url.path}`; see /openapi.json",
            405: f"method: not allowed here; found `{request.method}`; see /openapi.json",
        }
        message = told.get(problem.status_code, f"request: {problem.detail}")
        return Fault(problem.status_code, message, headers=problem.headers).response()

    async def of_us(_: Request, problem: Exception) -> JSONResponse:
        log.error("server: a fault of its own; the request gets status 500", exc_info=problem)
        return Fault(500, "server: a fault of its own; see its log; report it", code="internal_error").response()

    app.add_exception_handler(TriaxError, of_triax)
    app.add_exception_handler(RequestValidationError, of_schema)
    app.add_exception_handler(HTTPException, of_route)
    app.add_exception_handler(Exception, of_us)
