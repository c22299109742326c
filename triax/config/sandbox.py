"""The server of sandboxes: where it listens, who may use it, what it hands out and how much."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from triax.config.explain import explain
from triax.config.hosts import is_loopback
from triax.config.load import COMMAND_LINE, gather, load
from triax.config.schema import complete
from triax.config.settings import Settings
from triax.errors import ConfigError


class Template(Settings):
    """A named kind of sandbox."""

    image: str | None = None
    """Name of a prepared image, path of a root filesystem or of an OCI layout; none for the backend's own."""
    cpus: PositiveFloat = 1.0
    """Cores."""
    memory_mib: PositiveInt = 128
    """Memory of all processes together."""
    disk_mib: PositiveInt = 512
    """What may be written to the root filesystem."""
    processes: PositiveInt = 256
    """Processes and threads at a time."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of every command."""
    user: str | None = None
    """Who runs commands; none for the backend's choice."""
    cwd: str | None = None
    """Where commands start; none for the user's home."""
    warm: NonNegativeInt = 0
    """Machines that are kept booted and unused, so that a sandbox starts at once."""


class Quotas(Settings):
    """What all sandboxes may take together; those that are suspended count only for the disk."""

    sandboxes: PositiveInt = 64
    """Sandboxes that run or are paused in place."""
    cpus: PositiveFloat | None = None
    """Cores; none for no limit, since cores can be shared."""
    memory_mib: PositiveInt | None = None
    """Memory promised to sandboxes; none for no limit."""
    disk_mib: PositiveInt | None = None
    """Disk promised to sandboxes, the suspended ones too; none for no limit."""


class Server(Settings):
    """One server of sandboxes."""

    folder: Path = Path("runs/sandboxes")
    """What outlives the server: snapshots, suspended sandboxes, its secret."""
    backend: Literal["auto", "qemu", "gvisor", "namespace", "firecracker", "process"] = "auto"
    """How machines are made; `auto` takes the strongest that this machine can run."""
    unsafe: bool = False
    """Allow `process`, which isolates nothing."""
    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback one needs keys."""
    port: int = Field(49980, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    keys: Path | None = None
    """File of API keys, one a line; without it, every local client may use the server."""
    certificate: Path | None = None
    """TLS certificate, with `key`; without it, the server speaks plain HTTP."""
    key: Path | None = None
    """Private key of the certificate."""
    domain: str | None = None
    """Name below which `PORT-ID.` addresses sandboxes, where a name server sends those here."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients reach the server, such as `*.example.org`, besides `localhost`, plain addresses and names
    below `domain`. Without any, a server on a loopback address refuses other names, and one that others can reach takes
    every name."""
    templates: dict[str, Template] = Field(default_factory=lambda: {"base": Template()})
    """Kinds of sandbox by name; clients that name none ask for `base`."""
    images: tuple[Path, ...] = ()
    """Folders whose root filesystems and OCI layouts a client may name by path; none may be named otherwise."""
    quotas: Quotas = Quotas()
    """Limits on all sandboxes together."""
    timeout_s: PositiveInt = 300
    """Life of a sandbox whose client names none."""
    longest_timeout_s: PositiveInt = 86_400
    """Longest life that a client may ask for; asking again prolongs it."""
    internet: bool = False
    """Whether a client may ask for access to everything outside; single destinations are asked for one by one."""
    sweep_s: PositiveFloat = 30.0
    """Seconds between two looks for orphans: processes and mounts that no sandbox claims."""

    @model_validator(mode="after")
    def _is_guarded(self) -> "Server":
        if not is_loopback(self.host) and self.keys is None:
            raise ValueError(
                f"host `{self.host}` can be reached from other machines; name a file of keys, or listen on 127.0.0.1"
            )
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together; found one of them; name both")
        if self.backend == "process" and not self.unsafe:
            raise ValueError("backend `process` isolates nothing; set unsafe = true if that is what you want")
        if "base" not in self.templates:
            raise ValueError("templates has no `base`; name the kind of sandbox that clients get who ask for none")
        return self


def read(words: Sequence[str]) -> Server:
    """Return a server's settings.

    Args:
        words: A TOML file first, if there is one, and settings such as `quotas.sandboxes=10`.

    Raises:
        ConfigError: Every problem, one a line.
    """
    if words and "=" not in words[0]:
        return load(Server, words[0], words[1:]).settings
    tree = gather(words)
    try:
        return Server.model_validate_json(json.dumps(complete(Server, tree), default=str), strict=True)
    except ValidationError as problem:
        raise ConfigError(explain(problem, Server, lambda _: COMMAND_LINE)) from None
