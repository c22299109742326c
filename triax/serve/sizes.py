"""How many pages and slots the memory of a machine holds."""

import os

import torch

from triax.config.model import Model
from triax.config.serve import Serve
from triax.errors import ConfigError
from triax.model.memory import Arena
from triax.serve.cache.tiers import Sizes

CPU_BYTES = 1 << 30  # of a processor's memory, unless the settings say how many pages and slots
MOST_SNAPSHOTS = 1024  # where nothing else bounds the slots


def sizes_of(model: Model, settings: Serve, device: torch.device, dtype: torch.dtype) -> Sizes:
    """Return pages and slots, the reserved ones included, for a model whose weights already lie on the device.

    Raises:
        ConfigError: There is no room for a single sequence.
    """
    cache = settings.cache
    one = Arena.empty(model, 1, 1, cache.page_tokens, "meta", dtype)
    budget = _budget(settings, device)
    slots = cache.slots + 1 if cache.slots else 0
    if not slots:
        most = settings.scheduling.max_running + MOST_SNAPSHOTS + 1
        share = budget * cache.slot_share if one.page_bytes else budget
        slots = min(most, int(share // one.slot_bytes)) if one.slot_bytes else most
    pages = cache.pages + 1 if cache.pages else 0
    if not pages:
        left = budget - slots * one.slot_bytes
        most = 1 + settings.scheduling.max_running * -(-model.context_len // cache.page_tokens)
        pages = min(most, int(left // one.page_bytes)) if one.page_bytes else most
    if slots < 2 or pages < 2:
        raise ConfigError(
            f"cache: no sequence fits; found {budget / 2**30:.2f} GiB for {max(0, slots - 1)} slots of "
            f"{one.slot_bytes} bytes and {max(0, pages - 1)} pages of {one.page_bytes}; raise cache.memory_share, or "
            "use a device with more memory"
        )
    host_slots = host_pages = 0
    if cache.host is not None:
        host_slots = int(cache.host.memory_bytes * cache.host.slot_share) // max(1, one.slot_bytes)
        host_pages = (cache.host.memory_bytes - host_slots * one.slot_bytes) // max(1, one.page_bytes)
        host_slots, host_pages = min(host_slots, 1 << 20), min(host_pages, 1 << 24)
    return Sizes(pages, slots, host_pages, host_slots)


def _budget(settings: Serve, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * settings.cache.memory_share) - (total - free))
    return min(CPU_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
