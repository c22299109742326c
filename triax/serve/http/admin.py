"""Looking in and steering: `/health`, `/metrics`, `/v1/cache`, and `/admin/…` behind its own key."""

from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.responses import Response

from triax.errors import TriaxError
from triax.serve.http.face import FAULTS, Face, StrictRoute
from triax.serve.http.fault import Fault, refuse
from triax.serve.http.schema import PauseRequest, UpdateWeightsRequest

T = TypeVar("T")
SCRAPE_S = 2.0
"""Seconds that the engine gets to tell its figures; without them the server tells its own."""
TASK_S = 600.0

CLOSED = {403: {"description": "No admin key is set, so these endpoints are closed."}}


def router(face: Face) -> APIRouter:
    """Return the endpoints."""
    routes = APIRouter(route_class=StrictRoute, tags=["operate"])
    link = face.link

    async def in_time(work: Awaitable[T]) -> T:
        try:
            return await work
        except TimeoutError:
            raise Fault(504, "engine: is not done in time; found it still at work; ask again", code="slow") from None

    @routes.get("/health", responses={503: {"description": "Not ready; the body says how far loading is."}})
    async def health() -> JSONResponse:
        """Tell whether requests are answered, or how far loading is."""
        status = "draining" if face.is_draining else "ok" if link.status == "ready" else link.status
        if status == "ok" and link.lack:
            status = "lacks weights"
        if status == "ok" and link.is_frozen:
            status = "engine stopped"
        told = {
            "status": status,
            "stage": link.stage,
            "progress": round(link.share, 4),
            "engine_restarts": link.num_deaths,
        }
        if link.facts is not None:
            told["weight_version"] = link.facts.weight_version
        is_fine = told["status"] == "ok"
        return JSONResponse(told, 200 if is_fine else 503, headers={} if is_fine else {"Retry-After": "2"})

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return all figures in the form of Prometheus."""
        try:
            engine = await link.ask("metrics", SCRAPE_S)
        except (TriaxError, TimeoutError):
            engine = {}
        return Response(face.meter.text(engine), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/v1/cache", responses=FAULTS)
    async def cache() -> Any:
        """Tell what the caches hold."""
        return await in_time(link.ask("cache", 30.0))

    @routes.post("/admin/pause", responses=FAULTS | CLOSED)
    async def pause(body: PauseRequest) -> dict[str, Any]:
        """Stop stepping: requests that run are ended, finished first, or kept as they are."""
        await in_time(link.pause(body.mode, TASK_S))
        return {"status": "paused", "mode": body.mode}

    @routes.post("/admin/resume", responses=FAULTS | CLOSED)
    async def resume() -> dict[str, Any]:
        """Step again."""
        await in_time(link.resume(TASK_S))
        return {"status": "running"}

    @routes.post("/admin/update_weights", responses=FAULTS | CLOSED)
    async def update_weights(body: UpdateWeightsRequest) -> dict[str, Any]:
        """Take new weights; cached prefixes of the old ones are not used again."""
        given = body.model_dump(exclude_none=True)
        if len(given) != 1:
            raise refuse(f"path: give either path or shared_memory; found {len(given)}; correct it")
        return {"weight_version": await in_time(link.update_weights(TASK_S, **given))}

    return routes
