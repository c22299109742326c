"""The control plane: sandboxes, snapshots and templates over HTTP, as E2B and AgentENV spell them.

Source: E2B's and AgentENV's OpenAPI files (e2b-dev/infra spec/openapi.yml, kvcache-ai/AgentENV src/api/openapi.yml).
"""

import urllib.parse
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.responses import JSONResponse

from triax.config.sandbox import Template
from triax.errors import SandboxError
from triax.sandbox.sandbox import Sandbox
from triax.sandbox.server import schema, wire
from triax.sandbox.server.catalog import Kept
from triax.sandbox.server.plane import Plane
from triax.sandbox.store import Snapshot

LONGEST_PAGE = 100


def plane(request: Request) -> Plane:
    """Return the plane of the server that a request came to."""
    return request.app.state.plane


Here = Annotated[Plane, Depends(plane)]
Limit = Annotated[int, Query(ge=1, le=LONGEST_PAGE)]
Key = Annotated[str | None, Header(pattern=r"^[a-z0-9-]{1,255}$")]
router = APIRouter()


def _started(here: Plane, sandbox: Sandbox) -> dict[str, Any]:
    private = sandbox.spec.metadata.get(wire.PRIVATE_PORTS) == "true"
    traffic = here.access.token(sandbox.id, "traffic") if private else None
    return wire.started(sandbox, here.access.token(sandbox.id), traffic, here.settings.domain)


@router.post("/sandboxes", status_code=201)
@router.post("/v2/sandboxes", status_code=201)
async def create(body: schema.NewSandbox, here: Here, idempotency_key: Key = None) -> dict[str, Any]:
    """Make a sandbox from a template or a snapshot."""
    return _started(here, await here.create(body, idempotency_key))


@router.post("/sandboxes-cold", status_code=201)
async def create_cold(body: schema.NewColdSandbox, here: Here, idempotency_key: Key = None) -> dict[str, Any]:
    """Make a sandbox straight from an image."""
    return _started(here, await here.create(body, idempotency_key))


@router.get("/sandboxes")
async def running(here: Here, metadata: str | None = None) -> list[dict[str, Any]]:
    """List the sandboxes that run."""
    found = _matching(here, metadata, ["running"])
    return [wire.listed(sandbox) for sandbox in found]


@router.get("/v2/sandboxes")
async def sandboxes(
    here: Here,
    metadata: str | None = None,
    state: str | None = None,
    order: Literal["asc", "desc"] = "desc",
    started_after: Annotated[datetime | None, Query(alias="startedAfter")] = None,
    template: str | None = None,
    limit: Limit = LONGEST_PAGE,
    next_token: Annotated[str | None, Query(alias="nextToken")] = None,
    lost: bool = False,
) -> JSONResponse:
    """List sandboxes page by page; with `lost`, which E2B does not have, also those that are lost or failed."""
    states = state.split(",") if state else ["running", "paused"]
    if not set(states) <= {"running", "paused"}:
        raise SandboxError(f"state: `running` and `paused` can be asked for; found `{state}`", "refused")
    found = _matching(here, metadata, [*states, *(wire.BROKEN if lost else ())])
    if started_after is not None:
        found = [one for one in found if one.created_s >= started_after.timestamp()]
    if template is not None:
        found = [one for one in found if one.spec.metadata.get(wire.TEMPLATE) == template]
    rows = [((one.created_s, one.id), wire.listed(one)) for one in found]
    response = _page(rows, limit, next_token, newest_first=order == "desc")
    if "running" in states:
        response.headers["x-total-running"] = str(sum(wire.state(one.status) == "running" for one in found))
    return response


def _matching(here: Plane, metadata: str | None, states: Sequence[str]) -> list[Sandbox]:
    wanted = {
        urllib.parse.unquote(name): urllib.parse.unquote(value)
        for name, value in urllib.parse.parse_qsl(metadata or "", keep_blank_values=True)
    }
    return [
        one
        for one in here.sandboxes()
        if wire.state(one.status) in states and wanted.items() <= wire.metadata(one.spec).items()
    ]


def _page(
    rows: Sequence[tuple[tuple[float, str], dict[str, Any]]], limit: int, after: str | None, *, newest_first: bool
) -> JSONResponse:
    """Answer with the rows behind the place, a time and an id, where the last page ended; its row may be gone."""
    rows = sorted(rows, key=lambda row: row[0], reverse=newest_first)
    if after is not None:
        text, _, id = after.partition("~")
        try:
            end = float(text), id
        except ValueError:
            raise SandboxError(
                f"nextToken: is none of this server; found `{after[:80]}`; list from the start", "refused"
            ) from None
        rows = [row for row in rows if (row[0] < end if newest_first else row[0] > end)]
    response = JSONResponse([row for _, row in rows[:limit]])
    if len(rows) > limit:
        (when, id), _ = rows[limit - 1]
        response.headers["x-next-token"] = f"{when!r}~{id}"
    return response


@router.get("/sandboxes/metrics")
async def usages(here: Here, sandbox_ids: str = "") -> dict[str, Any]:
    """Tell what some sandboxes use now."""
    ids = [one for one in sandbox_ids.split(",") if one]
    if not 0 < len(ids) <= LONGEST_PAGE:
        raise SandboxError(f"sandbox_ids: 1 to {LONGEST_PAGE} ids are taken at a time; found {len(ids)}", "refused")
    return {"sandboxes": {one: await here.usage(one) for one in ids}}


@router.get("/sandboxes/{sandbox_id}")
async def one(sandbox_id: str, here: Here) -> dict[str, Any]:
    """Tell everything about one sandbox."""
    return wire.detailed(here.find(sandbox_id), here.access.token(sandbox_id), here.settings.domain)


@router.delete("/sandboxes/{sandbox_id}", status_code=204)
async def kill(sandbox_id: str, here: Here) -> Response:
    """End a sandbox and drop all it held, whatever its status."""
    await here.kill(sandbox_id)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/pause", status_code=204)
async def pause(sandbox_id: str, here: Here, body: schema.Pause | None = None) -> Response:
    """Put a sandbox away."""
    await here.pause(sandbox_id, memory=body.memory if body else None)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/resume", status_code=201)
async def resume(sandbox_id: str, here: Here, body: schema.Connect | None = None) -> dict[str, Any]:
    """Bring a paused sandbox back; one that runs is a conflict."""
    sandbox = here.find(sandbox_id)
    if sandbox.status == "running":
        raise SandboxError(f"sandbox {sandbox_id}: it runs already; connect to it instead", "refused", status=409)
    return _started(here, await _connected(here, sandbox_id, body))


@router.post("/sandboxes/{sandbox_id}/connect")
@router.post("/v2/sandboxes/{sandbox_id}/connect")
async def connect(sandbox_id: str, here: Here, body: schema.Connect | None = None) -> JSONResponse:
    """Use a sandbox, which is resumed if it is paused; its life is only prolonged."""
    before = here.find(sandbox_id).status
    sandbox = await _connected(here, sandbox_id, body)
    return JSONResponse(_started(here, sandbox), status_code=200 if before == "running" else 201)


async def _connected(here: Plane, sandbox_id: str, body: schema.Connect | None) -> Sandbox:
    body = body or schema.Connect()
    capabilities = here.host.backend.capabilities
    if not body.memory and capabilities.memory_snapshot and here.find(sandbox_id).status != "running":
        raise SandboxError(
            "memory: a paused sandbox comes back with its memory here; found false; leave it out", "refused"
        )
    sandbox, _ = await here.connect(sandbox_id, body.timeout)
    return sandbox


@router.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
async def set_timeout(sandbox_id: str, body: schema.Timeout, here: Here) -> Response:
    """Set the seconds that a sandbox lives from now on."""
    await here.find(sandbox_id).set_timeout(here.life(body.timeout))
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/refreshes", status_code=204)
async def refresh(sandbox_id: str, here: Here, body: schema.Refresh | None = None) -> Response:
    """Prolong a sandbox's life."""
    await here.prolong(sandbox_id, body.duration if body else 0)
    return Response(status_code=204)


@router.put("/sandboxes/{sandbox_id}/network", status_code=204)
async def set_network(sandbox_id: str, body: schema.NetworkUpdate, here: Here) -> Response:
    """Replace what a sandbox may reach."""
    await here.set_network(sandbox_id, body)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/fork", status_code=201)
async def fork(sandbox_id: str, here: Here, body: schema.Fork | None = None) -> list[dict[str, Any]]:
    """Split a running sandbox; each copy starts or fails by itself."""
    copies = await here.fork(sandbox_id, body or schema.Fork())
    return [
        {"error": {"code": copy.status, "message": str(copy), "error_code": f"sandbox_{copy.kind}"}}
        if isinstance(copy, SandboxError)
        else {"sandbox": _started(here, copy)}
        for copy in copies
    ]


@router.get("/sandboxes/{sandbox_id}/metrics")
async def usage(sandbox_id: str, here: Here) -> list[dict[str, Any]]:
    """Tell what a sandbox uses now; there is no history."""
    return [await here.usage(sandbox_id)]


@router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201)
async def snapshot(sandbox_id: str, here: Here, body: schema.Snapshot | None = None) -> dict[str, Any]:
    """Keep a sandbox's present as a snapshot that new ones can start from."""
    return _snapshot(here, await here.snapshot(sandbox_id, body or schema.Snapshot()))


@router.get("/snapshots")
async def snapshots(
    here: Here,
    sandbox_id: Annotated[str | None, Query(alias="sandboxID")] = None,
    name: str | None = None,
    limit: Limit = LONGEST_PAGE,
    next_token: Annotated[str | None, Query(alias="nextToken")] = None,
) -> JSONResponse:
    """List snapshots, the newest first."""
    found = here.host.snapshots()
    if sandbox_id is not None:
        found = [one for one in found if one.source == sandbox_id]
    if name is not None:
        found = [one for one in found if one.id == here.catalog.snapshot_id(name)]
    rows = [((one.created_s, one.id), _snapshot(here, one)) for one in found]
    return _page(rows, limit, next_token, newest_first=True)


def _snapshot(here: Plane, kept: Snapshot) -> dict[str, Any]:
    resources = kept.spec.resources
    return {
        "snapshotID": kept.id,
        "names": here.catalog.names_of(kept.id),
        "cpuCount": max(1, round(resources.cpus)),
        "memoryMB": resources.memory_mib,
        "diskSizeMB": resources.disk_mib,
        "createdAt": wire.when(kept.created_s),
        "updatedAt": wire.when(kept.created_s),
    }


@router.get("/templates")
async def templates(here: Here) -> list[dict[str, Any]]:
    """List templates."""
    return [_template(here, kept) for kept in here.catalog.templates()]


@router.get("/v2/templates")
async def templates_by_page(
    here: Here,
    limit: Limit = LONGEST_PAGE,
    next_token: Annotated[str | None, Query(alias="nextToken")] = None,
) -> JSONResponse:
    """List templates page by page."""
    rows = [((kept.created_s, kept.id), _template(here, kept)) for kept in here.catalog.templates()]
    return _page(rows, limit, next_token, newest_first=False)


@router.post("/v3/templates", status_code=202)
async def add_template(body: schema.NewTemplate, here: Here) -> dict[str, Any]:
    """Name a way to create sandboxes: the template `base`, or an image, with other resources."""
    base = here.settings.templates["base"]
    changes = {
        "image": base.image if body.image is None else here.image(body.image),
        "cpus": float(body.cpu_count or base.cpus),
        "memory_mib": body.memory_mb or base.memory_mib,
    }
    kept = here.catalog.add(body.name.partition(":")[0], Template.model_validate(base.model_dump() | changes))
    return {
        "templateID": kept.id,
        "buildID": kept.id,
        "public": False,
        "aliases": [kept.name],
        "names": [kept.name],
        "tags": list(body.tags) or ["latest"],
    }


@router.get("/templates/aliases/{alias}")
async def template_by_name(alias: str, here: Here) -> dict[str, Any]:
    """Tell which template has a name."""
    return {"templateID": _kept(here, alias).id, "public": False}


@router.get("/templates/{template_id}")
async def template(template_id: str, here: Here) -> dict[str, Any]:
    """Tell everything about one template."""
    return _template(here, _kept(here, template_id)) | {"builds": []}


@router.delete("/templates/{template_id:path}", status_code=204)
async def remove_template(template_id: str, here: Here) -> Response:
    """Delete a template or, since clients see one as the other, a snapshot."""
    kept = here.catalog.find(template_id)
    if kept is not None:
        here.catalog.remove(kept)
    else:
        await here.remove_snapshot(here.catalog.snapshot_id(template_id))
    return Response(status_code=204)


def _kept(here: Plane, id_or_name: str) -> Kept:
    kept = here.catalog.find(id_or_name)
    if kept is None:
        raise SandboxError(f"template `{id_or_name[:200]}`: not known here", "refused", status=404)
    return kept


def _template(here: Plane, kept: Kept) -> dict[str, Any]:
    template = kept.template
    return {
        "templateID": kept.id,
        "buildID": kept.id,
        "cpuCount": max(1, round(template.cpus)),
        "memoryMB": template.memory_mib,
        "diskSizeMB": template.disk_mib,
        "public": False,
        "aliases": [kept.name],
        "names": [kept.name],
        "createdAt": wire.when(kept.created_s),
        "updatedAt": wire.when(kept.created_s),
        "createdBy": None,
        "lastSpawnedAt": None if kept.last_spawned_s is None else wire.when(kept.last_spawned_s),
        "spawnCount": kept.spawned,
        "buildCount": 1,
        "envdVersion": wire.ENVD_VERSION,
        "buildStatus": "ready",
    }
