"""A process that owns sandboxes and does what it is told, one line of JSON at a time, until it is killed."""

import asyncio
import json
import sys
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.choose import make
from triax.sandbox.host import Host
from triax.sandbox.protocol import Resources, Spec

SPEC = Spec(resources=Resources(memory_mib=96, disk_mib=32, processes=64), timeout_s=None)


def tell(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def act(host, order):
    what, id = order["what"], order.get("id")
    if what == "create":
        return (await host.create(SPEC if host.backend.name != "process" else Spec(timeout_s=None), id=id)).id
    if what == "list":
        return {one.id: [one.status, one.reason] for one in host.sandboxes()}
    if what == "gc":
        return await host.gc()
    if what == "snapshots":
        return [one.id for one in host.store.snapshots()]
    if what == "from":
        return (await host.create(snapshot=order["snapshot"], id=id)).id
    sandbox = host.get(id)
    if what == "write":
        return await sandbox.write(order["path"], order["text"].encode())
    if what == "read":
        return (await sandbox.read(order["path"])).decode()
    if what == "exec":
        result = await sandbox.exec(order["command"], timeout_s=20.0)
        return [result.outcome, result.exit_code, result.stdout.decode()]
    if what == "start":
        await sandbox.start(order["command"])
        return None
    if what == "fork":
        return [one.id if not isinstance(one, SandboxError) else str(one) for one in await sandbox.fork(1)]
    return await getattr(sandbox, what)()


async def main(root, name):
    backend = make(name, root / "machines", unsafe=True)
    host = await Host.open(root, backend)
    loop = asyncio.get_running_loop()
    tell({"ready": True})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            answer = {"ok": await act(host, json.loads(line))}
        except SandboxError as error:
            answer = {"error": str(error), "kind": error.kind, "status": error.status}
        tell(answer)
    await host.close()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
