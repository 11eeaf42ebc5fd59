"""Faster ways to compute where MLX is slow (docs/accel.md)."""

import os
import threading

_installing = threading.Lock()
_installed = False


def is_off() -> bool:
    """True where the user wants mlx-lm and MLX without changes."""
    return os.environ.get("REWARM_ACCEL", "").strip().lower() in ("0", "off")


def state() -> str:
    """Say in a word if this process computes with this package."""
    return "off" if is_off() else "on" if _installed else "not yet on"


def install(*, loaded: bool = True) -> None:
    """Replace functions of mlx-lm and MLX with ones that are faster on this device.

    Some of these belong to single models: call this again after a model is loaded. Before that,
    call it with `loaded=False`: the heap is set up last, because decoding is slower with weights
    that are loaded after it.
    """
    from . import cpu, cuda_attention, cuda_convolution, delta, heap, scans

    global _installed
    with _installing:
        _installed = True
        delta.install()
        cpu.install()
        cuda_attention.install()
        cuda_convolution.install()
        scans.install()
        if loaded:
            heap.install()
