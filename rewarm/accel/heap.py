"""Have the C library keep memory that one step frees for the next one (docs/accel.md).

MLX keeps no buffers on a CPU. It asks the C library for each one. The C library gives much of the
freed memory back to the system at once, and the system clears every page before it is used again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import mlx.core as mx

from . import is_off

# glibc's numbers for two of its settings. It adjusts both by itself until one of them is set.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT = 256 << 20
"""Bytes that may be free at the end of the heap before they go back to the system."""
APART = 32 << 20
"""Bytes from which an allocation gets pages of its own, which go back to the system when it is
freed. glibc by itself would adjust this up to the same number."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables of the environment by which users set the same."""


def install() -> bool:
    """Set glibc up on a Linux CPU, unless the environment does; return true where it is set."""
    if is_off() or sys.platform != "linux" or mx.default_device() != mx.cpu:
        return False
    if any(name in os.environ for name in SETTINGS):
        return False
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    return all(mallopt(*pair) for pair in ((M_MMAP_THRESHOLD, APART), (M_TRIM_THRESHOLD, KEPT)))


def give_back() -> None:
    """Give free memory back to the system: buffers that MLX keeps, and the C library's heap."""
    mx.clear_cache()
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc, or None where the C library is another one."""
    if sys.platform != "linux":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
