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
