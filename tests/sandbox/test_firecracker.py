"""Firecracker's requests against a description of the form that it publishes; a real one is not at hand."""

import asyncio
import json
from pathlib import Path

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.firecracker import (
    Description,
    FirecrackerBackend,
    Request,
    boot_requests,
    pause_request,
    restore_request,
    send,
    snapshot_request,
)
from triax.sandbox.protocol import Spec


def call(name, answer=204):
    return {
        "parameters": [{"name": "body", "in": "body", "schema": {"$ref": f"#/definitions/{name}"}}],
        "responses": {answer: {"description": "done"}, "default": {"schema": {"$ref": "#/definitions/Error"}}},
    }


TEXT = {"type": "string"}
TREE = {
    "paths": {
        "/vm": {"patch": call("Vm")},
        "/drives/{drive_id}": {"put": call("Drive")},
    },
    "definitions": {
        "Vm": {
            "type": "object",
            "required": ["state"],
            "properties": {"state": {**TEXT, "enum": ["Paused", "Resumed"]}},
        },
        "Drive": {
            "type": "object",
            "required": ["drive_id", "is_root_device"],
            "properties": {
                "drive_id": TEXT,
                "path_on_host": TEXT,
                "is_root_device": {"type": "boolean"},
                "is_read_only": {"type": "boolean"},
            },
        },
        "Error": {"type": "object", "properties": {"fault_message": TEXT}},
    },
}


def test_requests_are_held_to_the_description(tmp_path):
    path = tmp_path / "firecracker.json"
    path.write_text(json.dumps(TREE))
    description = Description.read(path)
    description.check(pause_request(paused=True))
    for request in boot_requests(Spec(), Path("/kernel"), Path("/root.img"), Path("/channel")):
        if request.path == "/drives/root":
            description.check(request)
    for body, word in [({"state": "Stopped"}, "Stopped"), ({}, "lacks"), ({"state": "Paused", "x": 1}, "knows no")]:
        with pytest.raises(SandboxError, match=word):
            description.check(Request("PATCH", "/vm", body))
    for request in (snapshot_request(tmp_path, incremental=True), restore_request(tmp_path)):
        with pytest.raises(SandboxError, match="no call"):
            description.check(request)
    with pytest.raises(SandboxError, match="cannot be read"):
        Description.read(tmp_path / "missing.json")


def test_answers_that_fail_are_told_with_what_was_said(tmp_path):
    async def run():
        fault = b'{"fault_message": "no way"}'
        refused = b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(fault) + fault
        said = iter([b"HTTP/1.1 204 No Content\r\n\r\n", refused])

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(next(said))
            await writer.drain()
            writer.close()

        async with await asyncio.start_unix_server(answer, tmp_path / "api"):
            await send(tmp_path / "api", pause_request(paused=True), Description(TREE))
            with pytest.raises(SandboxError, match="no way") as caught:
                await send(tmp_path / "api", pause_request(paused=False))
            assert caught.value.kind == "infrastructure"
        with pytest.raises(SandboxError, match="nobody listens"):
            await send(tmp_path / "nothing", pause_request(paused=True))

    asyncio.run(run())


def test_the_backend_says_that_it_makes_no_machines(tmp_path):
    async def run():
        backend = FirecrackerBackend(tmp_path)
        with pytest.raises(SandboxError, match="no machines yet") as caught:
            await backend.create(Spec(), "one")
        assert caught.value.kind == "refused"
        assert not all(check.ok for check in await backend.checks())

    asyncio.run(run())
