"""`triax doctor`: what this machine can do, and what that means."""

from pathlib import Path
from typing import Annotated, Any

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Tell what this machine can do."""
    import json

    facts = examine()
    print(json.dumps(facts, indent=1) if as_json else _render(facts))


def examine() -> dict[str, Any]:
    """Return the facts: versions, devices, cores, memory, disk, threads, extras, and what follows from them."""
    import platform
    from importlib.util import find_spec

    import torch

    import triax
    from triax import machine

    total, free = machine.memory_bytes()
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "triax": triax.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": machine.system(),
        "devices": [{"name": d.name, "memory_bytes": d.total_memory} for d in devices],
        "cores": machine.cores(),
        "threads": torch.get_num_threads(),
        "waiting_threads": "sleep" if machine.waits_passively() else "spin",
        "bf16": machine.has_bf16(),
        "memory_bytes": total,
        "free_memory_bytes": free,
        "free_disk_bytes": machine.free_disk_bytes(Path("runs")),
        "triton": find_spec("triton") is not None,
        "extras": machine.extras(),
    }
    return facts | {"warnings": _warnings(facts), "means": _meaning(facts)}


def _warnings(facts: dict[str, Any]) -> list[str]:
    from triax.machine import thread_warnings

    found = thread_warnings(facts["threads"], facts["cores"])
    if 0 < facts["free_memory_bytes"] < 3e9:
        found.append("memory: less than 3 GB are free, and `triax train tiny` wants about that much; close something")
    if facts["free_disk_bytes"] < 1e9:
        found.append("disk: less than 1 GB is free below runs/; checkpoints need room")
    return found


def _meaning(facts: dict[str, Any]) -> list[str]:
    from triax.machine import install_command

    if facts["devices"]:
        memory = max(device["memory_bytes"] for device in facts["devices"])
        lines = [f"`triax train` runs on the GPU (train.device=auto); {memory / 1e9:.0f} GB hold about "]
        # weights, gradients and two moments in fp32 take 16 bytes a parameter; half the memory is left to activations
        lines[0] += f"{memory / 2 / 16 / 1e9:.1f} billion trained parameters"
    else:
        lines = ["no GPU: `triax train tiny` learns real text here in minutes, `small` in hours"]
    if not facts["bf16"] and not facts["devices"]:
        lines.append("no bf16 instructions: train with train.precision=fp32; bf16 would round more and run no faster")
    if facts["threads"] < facts["cores"]:
        lines.append(f"{facts['threads']} of {facts['cores']} cores compute; OMP_NUM_THREADS={facts['cores']} uses all")
    useless = ("dev", "docs") if facts["devices"] else ("dev", "docs", "gpu")
    missing = [name for name, there in facts["extras"].items() if not there and name not in useless]
    if missing:
        lines.append(f"not installed: {', '.join(missing)}; each comes with `{install_command('NAME')}` if you want it")
    return lines


def _render(facts: dict[str, Any]) -> str:
    devices = ", ".join(f"{d['name']} ({d['memory_bytes'] / 1e9:.0f} GB)" for d in facts["devices"]) or "cpu only"
    rows = [
        ("triax", facts["triax"]),
        ("python", facts["python"]),
        ("torch", facts["torch"]),
        ("system", facts["system"]),
        ("devices", devices),
        (
            "cores",
            f"{facts['cores']}, {facts['threads']} compute threads, which {facts['waiting_threads']} while they wait",
        ),
        ("memory", f"{facts['memory_bytes'] / 1e9:.1f} GB, {facts['free_memory_bytes'] / 1e9:.1f} GB free"),
        ("disk", f"{facts['free_disk_bytes'] / 1e9:.1f} GB free"),
        ("triton", "installed" if facts["triton"] else "not installed (only GPU kernels need it)"),
        ("extras", ", ".join(name for name, there in facts["extras"].items() if there) or "none"),
    ]
    lines = [f"{name:<10}{value}" for name, value in rows]
    lines += [f"warning: {text}" for text in facts["warnings"]]
    return "\n".join([*lines, "", *facts["means"]])
