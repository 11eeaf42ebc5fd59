"""What Rewarm makes faster where MLX is slow."""

import os
import threading

_installing = threading.Lock()
_installed = False


def is_off() -> bool:
    """Whether mlx-lm and MLX are to be left as they come."""
    return os.environ.get("REWARM_ACCEL", "").strip().lower() in ("0", "off")


def state() -> str:
    """Whether what computes in this process is ours or as it comes, in a word."""
    return "off" if is_off() else "on" if _installed else "not yet on"


def install(*, loaded: bool = True) -> None:
    """In this process, where it is faster on the device at hand (docs/accel.md).

    Some of it is for single models, and waits for them: to be called again once one is loaded.
    Before that, with `loaded=False`: weights decode faster from where MLX puts them by itself.
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
