"""Faster ways to compute where MLX is slow (docs/accel.md)."""

import os
import threading

_installing = threading.Lock()
_installed = False


def is_off() -> bool:
    """The user wants mlx-lm and MLX as they come."""
    return os.environ.get("REWARM_ACCEL", "").strip().lower() in ("0", "off")


def state() -> str:
    """One word that says if this process computes with what is in this room."""
    return "off" if is_off() else "on" if _installed else "not yet on"


def install(*, loaded: bool = True) -> None:
    """Put what is faster on this device in the place of mlx-lm's and MLX's functions.

    Some of it replaces functions of single models: call it again after a model is loaded. Call it
    with `loaded=False` before that: the heap is set up last, because weights that are loaded after
    it are slower to decode with.
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
