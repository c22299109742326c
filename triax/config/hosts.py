"""Which `Host` headers a server that listens on loopback answers.

A web page may have its own name resolve to 127.0.0.1 and then reads what a local server answers (DNS rebinding). The
browser still sends the page's name in `Host`, so a server that takes only local names is out of its reach.
"""

import ipaddress
from collections.abc import Sequence


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a server that listens on an address or name."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.rstrip(".").lower() == "localhost"


def is_allowed(header: str, listens_on: str, allowed: Sequence[str] = ()) -> bool:
    """Whether a server answers to a name.

    Args:
        header: The request's `Host`, with or without a port.
        listens_on: Address that the server listens on; where others reach it and no names are given, every name is
            taken.
        allowed: Further names; `*.example.org` stands for all below one, `*` for every name.
    """
    if not allowed and not is_loopback(listens_on):
        return True
    name = _name(header)
    if name in (listens_on.lower(), "localhost") or name.endswith(".localhost"):
        return True
    for one in allowed:
        pattern = _name(one)
        if pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:])):
            return True
    try:
        ipaddress.ip_address(name)  # no name at all: nothing can be made to resolve to it
    except ValueError:
        return False
    return True


def _name(header: str) -> str:
    """Return a host without its port, brackets and final dot, in small letters."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    name, colon, port = header.rpartition(":")
    if colon and ":" not in name and port.isdigit():
        header = name
    return header.rstrip(".")
