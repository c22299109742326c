"""Bodies of the control plane's requests; an option that this server cannot honour is refused, never ignored."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

Text = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")]
Texts = Annotated[dict[Word, Text], Field(max_length=256)]
Seconds = Annotated[int, Field(ge=0, le=30 * 86400)]
LARGEST_BODY_BYTES = 2**20


class Body(BaseModel):
    """A request's body; names on the wire are in camel case."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class AutoResume(Body):
    """Whether traffic wakes a paused sandbox."""

    enabled: bool = False


class Network(Body):
    """What a sandbox may reach, and who may reach its ports."""

    allow_public_traffic: bool | None = None
    allow_out: tuple[Text, ...] = ()
    deny_out: tuple[Text, ...] = ()
    dns_servers: tuple[Text, ...] | None = None
    egress_proxy: Mapping[str, Any] | None = None
    mask_request_host: Text | None = None
    https_ports: tuple[int, ...] | None = None
    rules: Mapping[str, Any] | None = None


class NetworkUpdate(Network):
    """A new network policy; what it leaves out is cleared."""

    allow_internet_access: bool | None = Field(None, alias="allow_internet_access")


class Life(Body):
    """What every way to create a sandbox takes."""

    timeout: Seconds | None = None
    auto_pause: bool | None = None
    """What the timeout does: put the sandbox away, or end it; none puts it away where that can be done."""
    auto_pause_memory: bool = True
    auto_resume: AutoResume | None = None
    secure: bool | None = None
    """Accepted for old clients: every sandbox's data plane asks for its token here."""
    network: Network = Network()
    metadata: Texts = Field(default_factory=dict)
    env_vars: Texts = Field(default_factory=dict)
    volume_mounts: tuple[Mapping[str, Any], ...] = ()
    custom_extension_params: Mapping[str, Any] = Field(default_factory=dict)


class NewSandbox(Life):
    """A sandbox from a template or a snapshot."""

    template_id: Text = Field(alias="templateID", min_length=1)
    allow_internet_access: bool | None = Field(None, alias="allow_internet_access")
    mcp: Mapping[str, Any] | None = None
    iam: Mapping[str, Any] | None = None


class NewColdSandbox(Life):
    """A sandbox straight from an image."""

    image: Text = Field(min_length=1)
    allow_internet_access: bool | None = None
    cpu_count: int | None = Field(None, ge=1, le=1024)
    memory_mb: int | None = Field(None, alias="memoryMB", ge=16, le=2**22)
    disk_size_mb: int | None = Field(None, alias="diskSizeMB", ge=1, le=2**26)
    attached_drives: tuple[Mapping[str, Any], ...] = ()
    extra_boot_args: Text | None = None


class Pause(Body):
    """How a sandbox is put away."""

    memory: bool | None = None
    require_healthy_guest: bool = False


class Connect(Body):
    """A sandbox that somebody wants to use, paused or not."""

    timeout: Seconds | None = None
    memory: bool = True
    auto_pause: bool | None = None


class Timeout(Body):
    """Seconds from now until the sandbox's end of life."""

    timeout: Seconds


class Refresh(Body):
    """Seconds that the sandbox lives at least, from now."""

    duration: Annotated[int, Field(ge=0, le=3600)] = 0


class Fork(Body):
    """Copies of a running sandbox."""

    timeout: Seconds | None = None
    count: Annotated[int, Field(ge=1, le=20)] = 1
    deterministic: bool = False
    """Do not tell programs inside that they are copies: their own generators go on alike in all of them."""


class Snapshot(Body):
    """A snapshot of a sandbox that goes on."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._:/-]{0,127}$")] | None = None
    memory: bool | None = None


class NewTemplate(Body):
    """A named way to create sandboxes."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}(:[a-zA-Z0-9._-]+)?$")]
    tags: tuple[Word, ...] = ()
    cpu_count: int | None = Field(None, ge=1, le=1024)
    memory_mb: int | None = Field(None, alias="memoryMB", ge=16, le=2**22)
    image: Text | None = None
