"""What `/metrics` and `/nodes` tell of a server."""

import os
import shutil
import time
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

import triax
from triax import machine
from triax.sandbox.server.plane import Plane

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Collector:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def collect(self) -> list[Metric]:
        plane = self.plane
        statuses = GaugeMetricFamily("triax_sandboxes", "Sandboxes by status.", labels=["status"])
        counts: dict[str, int] = {"running": 0, "paused": 0, "suspended": 0, "lost": 0, "failed": 0}
        for sandbox in plane.sandboxes():
            counts[sandbox.status] = counts.get(sandbox.status, 0) + 1
        for status, count in counts.items():
            statuses.add_metric([status], count)
        live = [sandbox.spec.resources for sandbox in plane.admission.live()]
        created = CounterMetricFamily("triax_sandbox_creations", "Sandboxes asked for, by outcome.", labels=["outcome"])
        for outcome, count in plane.counts.items():
            created.add_metric([outcome], count)
        operations = CounterMetricFamily(
            "triax_sandbox_operations", "Operations on sandboxes, by outcome.", labels=["operation", "outcome"]
        )
        for (operation, outcome), count in plane.host.counts.items():
            operations.add_metric([operation, outcome], count)
        seconds = CounterMetricFamily(
            "triax_sandbox_operation_seconds", "Time that operations took together.", labels=["operation"]
        )
        for operation, spent in plane.host.seconds.items():
            seconds.add_metric([operation], spent)
        processes = sum(session.open_processes for session in plane.sessions())
        return [
            statuses,
            created,
            operations,
            seconds,
            GaugeMetricFamily("triax_sandbox_cpus", "Cores promised to live sandboxes.", sum(one.cpus for one in live)),
            GaugeMetricFamily(
                "triax_sandbox_memory_bytes",
                "Memory promised to live sandboxes.",
                sum(one.memory_mib for one in live) * 2**20,
            ),
            GaugeMetricFamily("triax_sandbox_snapshots", "Snapshots kept.", len(plane.host.snapshots())),
            GaugeMetricFamily("triax_sandbox_processes", "Processes that clients may talk to.", processes),
            GaugeMetricFamily("triax_sandbox_warm", "Booted machines that no client has yet.", plane.warm.count()),
            GaugeMetricFamily("triax_sandbox_server_start_seconds", "When the server started.", plane.started_s),
        ]


def exposition(plane: Plane) -> bytes:
    """Return a server's figures in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(plane))
    return generate_latest(registry)


def node(plane: Plane) -> dict[str, Any]:
    """Return this machine as a cluster's list of nodes shows one."""
    total, free = machine.memory_bytes()
    disk = shutil.disk_usage(plane.settings.folder if plane.settings.folder.exists() else ".")
    here = [one.spec.resources for one in plane.admission.live()]
    paused = [one.spec.resources for one in plane.sandboxes() if one.status in ("paused", "suspended")]
    facts = os.uname()
    return {
        "id": facts.nodename,
        "serviceInstanceID": f"{os.getpid()}-{int(plane.started_s)}",
        "clusterID": "local",
        "status": "ready",
        "version": triax.__version__,
        "commit": "",
        "sandboxCount": sum(one.status == "running" for one in plane.sandboxes()),
        "sandboxStartingCount": len(plane.host.starting),
        "sandboxPausedCount": len(paused),
        "createSuccesses": plane.counts["created"],
        "createFails": plane.counts["failed"],
        "metrics": {
            "allocatedCPU": round(sum(one.cpus for one in here)),
            "cpuPercent": min(100, round(100 * os.getloadavg()[0] / machine.cores())),
            "cpuCount": machine.cores(),
            "allocatedMemoryBytes": sum(one.memory_mib for one in here) * 2**20,
            "memoryUsedBytes": total - free,
            "memoryTotalBytes": total,
            "pausedAllocatedCPU": round(sum(one.cpus for one in paused)),
            "pausedAllocatedMemoryBytes": sum(one.memory_mib for one in paused) * 2**20,
            "disks": [
                {
                    "mountPoint": str(plane.settings.folder),
                    "device": "",
                    "filesystemType": "",
                    "usedBytes": disk.used,
                    "totalBytes": disk.total,
                }
            ],
        },
        "machineInfo": {
            "cpuFamily": "",
            "cpuModel": "",
            "cpuModelName": machine.system(),
            "cpuArchitecture": facts.machine,
        },
        "uptimeSeconds": round(time.time() - plane.started_s),
    }
