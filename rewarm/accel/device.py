"""The device that models run on, and how much memory there is."""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx


def is_cuda() -> bool:
    return mx.default_device() != mx.cpu and mx.cuda.is_available()


def device_bytes() -> int:
    """Return the memory of the device that models run on."""
    info: dict[str, Any] = dict(mx.device_info())
    # Metal has the first name, CUDA the second; a CPU has neither.
    total = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return machine_bytes() if total is None or mx.default_device() == mx.cpu else int(total)


def machine_bytes() -> int:
    """Return the memory of the machine, or the limit on this process where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            total = min(total, int(limit.read()))
    except (OSError, ValueError):
        pass  # no limit on this process
    return int(total)


def device_buffers() -> int:
    """Return the number of buffers that the device allows."""
    return int(dict[str, Any](mx.device_info()).get("resource_limit", 499_000))


def allocated(nbytes: int) -> int:
    """Return the bytes that MLX's allocator takes for an array. A GPU's are rounded up."""
    if mx.default_device() == mx.cpu or not nbytes:
        return nbytes
    page = 16384
    if nbytes < page:
        return 1 << (nbytes - 1).bit_length()
    return -(-nbytes // page) * page
