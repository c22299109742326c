"""What this machine offers, without torch: cores, memory, disk, and whether thread settings fit them."""

import ctypes
import os
import platform
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

EXTRAS = {
    "data": ("datasets", "pyarrow"),
    "video": ("av",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "serve": ("fastapi", "uvicorn", "zmq", "msgspec", "httpx", "aiohttp"),
    "grammar": ("xgrammar",),
    "sandbox": ("fastapi", "hypercorn", "h2", "httpx"),
    "gpu": ("cuda",),
    "dev": ("pytest", "hypothesis", "ruff", "transformers"),
    "docs": ("zensical",),
}
"""Packages that each extra of the installation brings."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra: into the checkout that runs, or beside the installed package."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    return f"pip install 'triax[{extra}]'"


def wait_passively() -> None:
    """Let compute threads sleep while they wait for work; call it before torch is imported.

    By default they spin, and threads that spin on cores that another program wants make a step many times slower. What
    the user has set stays. It holds for the whole process and those that it starts, so only programs call this.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def waits_passively() -> bool:
    """Return whether compute threads of this process sleep while they wait for work."""
    return os.environ.get("OMP_WAIT_POLICY", "").strip().upper() == "PASSIVE"


def cores() -> int:
    """Return how many cores this process may use: its affinity and its container's quota, not the whole machine."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        allowed = min(allowed, max(1, round(int(quota) / int(period))))
    return allowed


def memory_bytes() -> tuple[int, int]:
    """Return total and available memory, the container's limit taken into account; zeros where unknown."""
    rows = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(rows.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit() and 0 < int(limit) < total:
        total, free = int(limit), min(free, int(limit) - int(used))
    return total, free


def free_disk_bytes(folder: Path) -> int:
    """Return the free space where a folder lies, or would lie."""
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(there).free


def extras() -> dict[str, bool]:
    """Return which extras of the installation are there."""
    return {name: all(find_spec(package) for package in packages) for name, packages in EXTRAS.items()}


def thread_warnings(num_threads: int, num_cores: int) -> list[str]:
    """Return what is wrong with the number of compute threads, with what to do.

    Args:
        num_threads: Threads that torch uses; it may have cut down what the environment asks for.
        num_cores: Cores that this process may use.
    """
    asked = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    where = f" (set by {', '.join(f'{name}={value}' for name, value in asked.items())})" if asked else ""
    policy = os.environ.get("OMP_WAIT_POLICY", "").strip()
    if policy and not waits_passively():
        return [
            f"threads: they spin while they wait (set by OMP_WAIT_POLICY={policy}), which costs dearly beside other "
            "programs; set OMP_WAIT_POLICY=PASSIVE, or leave it out"
        ]
    most = max([num_threads, *(int(value) for value in asked.values() if value.isdigit())])
    if most > num_cores:
        return [
            f"threads: {most} compute threads{where} for {num_cores} cores are slower, not faster; "
            f"set OMP_NUM_THREADS={num_cores}"
        ]
    return []


@cache
def has_bf16() -> bool:
    """Return whether the processor multiplies bf16 numbers itself; without that, training multiplies them as fp32."""
    if platform.system() != "Linux":
        return platform.machine() == "arm64"
    return "bf16" in _text("/proc/cpuinfo")  # avx512_bf16 and amx_bf16 on x86, bf16 on ARM


def keep_freed_memory() -> bool:
    """Let the C library keep the memory of freed tensors for the next ones; return whether it could be told to.

    glibc gives large freed blocks back to the kernel at once, and faulting them in again costs a training step on a CPU
    about a fifth of its time. It holds for the whole process, so only programs call this, never the library.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or platform.libc_ver()[0] != "glibc":
        return False
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    return bool(library.mallopt(trim_threshold, 2**31 - 1) and library.mallopt(mmap_threshold, 2**25))


def precision_warnings(precision: str, *, on_cpu: bool) -> list[str]:
    """Return what is wrong with a run's number format on this machine, with what to do."""
    if precision == "bf16" and on_cpu and not has_bf16():
        return [
            "train.precision: this processor has no bf16 instructions: products are rounded like bf16 but computed in "
            "fp32, so nothing is gained; set train.precision=fp32"
        ]
    return []


def system() -> str:
    """Return the operating system and the processor's kind."""
    return f"{platform.system()} {platform.release()}, {platform.machine()}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
