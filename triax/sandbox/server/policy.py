"""What a sandbox may be and reach, from what its client asked and what the server allows."""

import ipaddress

from triax.config.sandbox import Server
from triax.errors import SandboxError
from triax.sandbox.protocol import Backend, Network
from triax.sandbox.server import schema

EVERYWHERE = ("0.0.0.0/0", "::/0")


def refuse_unsupported(wanted: schema.Life, backend: Backend) -> None:
    """Refuse what no sandbox of this server has.

    Raises:
        SandboxError: The client asked for such a thing; the message names it.
    """
    for name in ("mcp", "iam", "volume_mounts", "custom_extension_params", "attached_drives", "extra_boot_args"):
        if getattr(wanted, name, None):
            raise SandboxError(f"{name}: not supported by this server; leave it out", "refused")
    if wanted.auto_pause is not False and not wanted.auto_pause_memory and backend.capabilities.memory_snapshot:
        raise SandboxError(
            "autoPauseMemory: a paused sandbox keeps its memory here; found false; leave it out", "refused"
        )


def network_of(wanted: schema.Network, internet: bool | None, settings: Server, backend: Backend) -> Network:
    """Return the egress policy for what a client asked; without a word, nothing may be reached.

    Raises:
        SandboxError: The policy cannot be kept here.
    """
    for name in ("egress_proxy", "rules", "mask_request_host", "https_ports", "dns_servers"):
        if getattr(wanted, name):
            raise SandboxError(f"network.{name}: not supported by this server; leave it out", "refused")
    denied = [entry for entry in wanted.deny_out if entry not in EVERYWHERE]
    if denied:
        raise SandboxError(
            f"network.denyOut: all that is not allowed is denied; found `{denied[0]}`; name what may be reached",
            "refused",
        )
    everything = internet is True or any(entry in EVERYWHERE for entry in wanted.allow_out)
    if everything and wanted.deny_out:
        everything = False  # what is allowed by name wins, the rest is denied
    if everything and not settings.internet:
        raise SandboxError(
            "network: this server lets no sandbox reach everything; name single destinations in allowOut, or start "
            "it with internet=true",
            "refused",
            status=403,
        )
    destinations = tuple(entry for entry in wanted.allow_out if entry not in EVERYWHERE)
    for entry in destinations:
        _check_destination(entry)
    if destinations and not everything and not backend.capabilities.network_policy:
        raise SandboxError(
            f"network.allowOut: the backend `{backend.name}` cannot allow single destinations", "refused"
        )
    return Network(allow_out=destinations, allow_internet=everything)


def _check_destination(entry: str) -> None:
    try:
        ipaddress.ip_network(entry, strict=False)
        return
    except ValueError:
        labels = entry.removeprefix("*.").rstrip(".").split(".")
    if not all(label.replace("-", "").replace("_", "").isalnum() and len(label) < 64 for label in labels):
        raise SandboxError(f"network.allowOut: neither address, network nor host name; found `{entry[:80]}`", "refused")
