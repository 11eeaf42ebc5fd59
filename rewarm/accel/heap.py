"""The C library's memory on a Linux CPU: what one step frees is there for the next (docs/accel.md).

MLX keeps no buffers on a CPU. It asks the C library for each, which hands much of what is freed
back to the system at once, and the system clears every page before it gives it out again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import mlx.core as mx

from . import is_off

# glibc's numbers for what can be set. Setting one ends its guessing of both.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT = 256 << 20
"""Bytes that are free at the end of the heap before any goes back to the system."""
APART = 32 << 20
"""Bytes from which an allocation is the system's own and goes back with it: the most that glibc
would come to by itself."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def install() -> bool:
    """Says whether it is so: with glibc on a Linux CPU, unless the environment has its own say."""
    if is_off() or sys.platform != "linux" or mx.default_device() != mx.cpu:
        return False
    if any(name in os.environ for name in SETTINGS):
        return False
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    return all(mallopt(*pair) for pair in ((M_MMAP_THRESHOLD, APART), (M_TRIM_THRESHOLD, KEPT)))


def give_back() -> None:
    """What is free goes to the system now: buffers that MLX keeps, and the C library's memory."""
    mx.clear_cache()
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of it, where it is the C library."""
    if sys.platform != "linux":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
