"""The memory of the device: how much there is, and how much of it a cache takes by itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from rewarm.accel.device import device_bytes
from rewarm.options import SMALLEST

AUTO_SHARE = 0.4
"""Of the memory that is free once the model is loaded; the rest is for running requests."""


def auto_size() -> int:
    """A share of the memory that is free now that the model is loaded."""
    return max(int((device_bytes() - mx.get_active_memory()) * AUTO_SHARE), 64 * SMALLEST)


def most_buffers() -> int:
    """Half of what the device allows: running requests need buffers as well."""
    limit: Any = dict(mx.device_info()).get("resource_limit", 499_000)
    return int(limit) // 2
