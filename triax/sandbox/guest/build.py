"""From sources to what a guest starts with: the agent, compiled once, and the archive that the kernel unpacks."""

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from triax.errors import SandboxError

HERE = Path(__file__).parent
SIGNED = b"~Module signature appended~\n"
FLAGS = ("-std=gnu11", "-Os", "-static", "-s")


def cache_folder() -> Path:
    """Return where built things are kept: `$XDG_CACHE_HOME/triax/sandbox`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triax" / "sandbox"


NEEDED_LATER = ("relay-", "kernel-", "initramfs-", "clock-")
"""What sandboxes that were put away may need to come back: their memory goes on in these very files."""


DRAFT_S = 3600.0


def clear_cache() -> list[str]:
    """Empty the cache; what is missing then is built or fetched again when a machine needs it.

    What a running machine uses stays, and what one that was put away may need.

    Returns:
        What was removed, in words.
    """
    folder, removed = cache_folder(), []
    used = _used_paths()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(NEEDED_LATER) or path.suffix == ".lock" or str(path) in used:
            continue
        if path.name.startswith(".") and time.time() - path.lstat().st_mtime < DRAFT_S:
            continue  # somebody builds it at this moment
        size = sum(each.lstat().st_blocks * 512 for each in (path, *path.rglob("*")))
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        removed.append(f"{path}, {size / 2**20:.1f} MiB")
    return removed


def _used_paths() -> str:
    """Return what every process of this host mounted and was started with."""
    parts = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("mountinfo", "cmdline"):
            with suppress(OSError):  # it has ended, or is another user's
                parts.append((process / name).read_bytes())
    return b"\n".join(parts).decode(errors="surrogateescape")


@contextmanager
def appearing(path: Path) -> Generator[Path]:
    """Give a name to write to, which becomes `path` in one step if nothing fails; another's result is as good."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fresh = folder / path.name
        yield fresh
        os.replace(fresh, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compiled(sources: list[Path], name: str, cache: Path) -> Path:
    """Compile C sources into one static program, unless these very sources were compiled before.

    Raises:
        SandboxError: There is no C compiler, or it refused.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SandboxError(
            "guest: no C compiler for the agent; found neither `gcc` nor `cc`; run `apt-get install gcc libc6-dev`"
        )
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    program = cache / f"{name}-{digest.hexdigest()[:16]}"
    if program.exists():
        return program
    with appearing(program) as fresh:
        units = [str(source) for source in sources if source.suffix == ".c"]
        done = subprocess.run([compiler, *FLAGS, "-o", str(fresh), *units], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SandboxError(f"guest: `{compiler}` could not compile the {name}; it said: {done.stderr[-2000:]}")
    return program


def agent(cache: Path) -> Path:
    """Return the compiled guest agent."""
    return compiled(sorted(HERE.joinpath("agent").glob("*.[ch]")), "agent", cache)


def clock_khz(cache: Path) -> int:
    """Return the rate of this host's time stamp counter in kHz, measured once a boot of the host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    kept = cache / f"clock-{boot}"
    if not kept.exists():
        program = compiled([HERE / "clock.c"], "clock", cache)
        with appearing(kept) as fresh:
            fresh.write_text(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
    return int(kept.read_text())


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return an initial file system in the form `newc`: the files, all executable, and the folders they lie in."""
    folders = sorted({name.rsplit("/", 1)[0] for name in files if "/" in name} | {"dev"})
    entries = [(name, 0o40755, b"", (0, 0)) for name in folders]
    entries.append(("dev/console", 0o20600, b"", (5, 1)))
    entries += [(name, 0o100755, data, (0, 0)) for name, data in files.items()]
    entries.append(("TRAILER!!!", 0, b"", (0, 0)))
    parts = []
    for place, (name, mode, data, device) in enumerate(entries, start=1):
        fields = (place, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        parts += [head, bytes(-len(head) % 4), data, bytes(-len(data) % 4)]
    return b"".join(parts)


def unsigned(module: bytes) -> bytes:
    """Return a kernel module without its signature, which a guest would spend its start on checking."""
    if not module.endswith(SIGNED):
        return module
    (size,) = struct.unpack(">I", module[-len(SIGNED) - 4 : -len(SIGNED)])
    return module[: -len(SIGNED) - 12 - size]


def initramfs(modules: Mapping[str, Path], cache: Path) -> Path:
    """Return an archive with the agent as `/init` and kernel modules, by name, in `/modules`."""
    files = {"init": agent(cache).read_bytes()}
    files |= {f"modules/{name}.ko": unsigned(path.read_bytes()) for name, path in modules.items()}
    whole = archive(files)
    path = cache / f"initramfs-{hashlib.sha256(whole).hexdigest()[:16]}"
    if not path.exists():
        with appearing(path) as fresh:
            fresh.write_bytes(whole)
    return path
