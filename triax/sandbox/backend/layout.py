"""What a namespace sandbox finds around it: folders, users, variables, and what of the host it sees."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.command import variables
from triax.sandbox.guest.build import cache_folder
from triax.sandbox.image import tree
from triax.sandbox.protocol import Spec

USER = "user"
USER_NUMBER = 1000
HOME = "/home/user"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

PASSWD = f"""root:x:0:0:root:/root:/bin/sh
{USER}:x:{USER_NUMBER}:{USER_NUMBER}:{USER}:{HOME}:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/false
"""
GROUPS = f"root:x:0:\n{USER}:x:{USER_NUMBER}:\nnogroup:x:65534:\n"

# of the host's own settings only what its programs need to run: no users, no keys, no names of machines
COPIED = ("ld.so.cache", "localtime", "alternatives")
SHOWN = ("etc/ssl/certs",)
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
WRITABLE = ("home", "tmp", "root", "etc", "opt", "srv", "var", "var/tmp", "var/lib", "usr", "usr/local", "run")


@cache
def skeleton(image: str | None) -> dict[str, str | bytes | None]:
    """Return what an empty disk begins with: a root of its own, or what is laid over an image's."""
    if image is None:
        links = {name: f"->{os.readlink(f'/{name}')}" for name in MERGED if os.path.islink(f"/{name}")}
        plain = {f"{name}/": None for name in MERGED if os.path.isdir(f"/{name}") and name not in links}
        return {
            **dict.fromkeys(("home/user/", "root/", "tmp/", "var/tmp/", "var/log/", "run/", "opt/", "usr/", "mnt/")),
            **dict.fromkeys(("proc/", "dev/", "srv/")),
            **links,
            **plain,
            "etc/passwd": PASSWD,
            "etc/group": GROUPS,
            "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
            "etc/resolv.conf": "",
            **{f"{name}/": None for name in SHOWN},
            **_copied(),
        }
    over: dict[str, str | bytes | None] = {"root/": None, "work/": None, "upper/home/user/": None, "upper/tmp/": None}
    over["upper/root/"] = None
    for name in WRITABLE:
        place = Path(image) / name
        # where an image has a symlink, a folder over it would hide what it leads to
        if place.is_dir() and not any((Path(image) / part).is_symlink() for part in _parts(name)):
            over[f"upper/{name}/"] = None
    return over


def bubblewrap(spec: Spec, id: str, host: int, first: int, filtering: int | None) -> list[str]:
    """Return the command that enters the sandbox.

    Args:
        spec: The sandbox.
        id: Its host name.
        host: Descriptor of its first process's socket.
        first: Descriptor of the program of its first process.
        filtering: Descriptor of the filter of system calls; none for no filter.
    """
    root = "/mnt/root" if spec.image else "/mnt"
    argv = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    argv += ["--as-pid-1", "--cap-drop", "ALL", "--uid", str(USER_NUMBER), "--gid", str(USER_NUMBER), "--hostname", id]
    argv += ["--bind", root, "/"]
    if spec.image is None:
        argv += ["--ro-bind", "/usr", "/usr"]
        for name in MERGED:
            if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
                argv += ["--ro-bind", f"/{name}", f"/{name}"]
        for name in SHOWN:
            argv += ["--ro-bind-try", f"/{name}", f"/{name}"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--perms", "0555", "--ro-bind-data", str(first), "/dev/init"]
    if filtering is not None:
        argv += ["--seccomp", str(filtering)]
    return [*argv, "--clearenv", "--chdir", "/", "/dev/init", str(host)]


def variables_of(spec: Spec, id: str, generation: int) -> dict[str, str]:
    """Return what every command finds in its variables."""
    own = {"PATH": PATH, "HOME": HOME, "USER": USER, "LOGNAME": USER, "LANG": "C.UTF-8", "TERM": "xterm-256color"}
    return own | {"TRIAX_SANDBOX": id, "TRIAX_GENERATION": str(generation)} | variables(spec.env)


def placed(spec: Spec) -> Spec:
    """Return the sandbox with the folder of its image, which is unpacked once if it is an OCI image.

    Raises:
        SandboxError: There is no such image, or its name is none that a mount takes; kind `refused`.
    """
    if spec.image is None:
        return spec
    folder = tree(spec.image, cache_folder())
    if any(sign in str(folder) for sign in ':,\\"'):
        raise SandboxError(f'image {spec.image!r}: a name with `:`, `,`, `\\` or `"` cannot be mounted', "refused")
    return replace(spec, image=str(folder))


def _copied() -> dict[str, str | bytes | None]:
    found: dict[str, str | bytes | None] = {}
    for name in COPIED:
        place = Path("/etc") / name
        for path in sorted(place.iterdir()) if place.is_dir() else [place]:
            inside = str(path.relative_to("/"))
            if path.is_symlink() and path.readlink().is_absolute():
                found[inside] = f"->{path.readlink()}"
            elif path.is_file():
                found[inside] = path.read_bytes()
    return found


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]
