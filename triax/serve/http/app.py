"""The whole server as one ASGI application."""

from importlib.resources import files

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

import triax
from triax.serve.http import admin, chat, completions, fault, responses, tokens
from triax.serve.http.face import Face
from triax.serve.http.limits import Gate

PAGE = files("triax.serve") / "page" / "index.html"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page talks to its own server and to nobody else."""


def make_app(face: Face) -> FastAPI:
    """Return the application."""
    app = FastAPI(title="triax", version=triax.__version__, redoc_url=None, docs_url=None)
    for room in (chat, completions, responses, tokens, admin):
        app.include_router(room.router(face))

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    fault.install(app)
    app.add_middleware(Gate, settings=face.settings.http, count=face.meter.count)
    if face.settings.http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(face.settings.http.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.openapi = lambda: _described(app)
    return app


def _described(app: FastAPI) -> dict[str, object]:
    """Return the description with our own error status: what does not fit the schema gets 400, not 422."""
    if app.openapi_schema is None:
        tree = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in tree["paths"].values():
            for operation in path.values():
                operation.get("responses", {}).pop("422", None)
        app.openapi_schema = tree
    return app.openapi_schema
