"""What Rewarm makes faster where MLX is slow."""

import functools
import logging
import os

log = logging.getLogger("rewarm")


def is_off() -> bool:
    """Whether mlx-lm and MLX are to be left as they come."""
    return os.environ.get("REWARM_ACCEL", "").strip().lower() in ("0", "off")


@functools.cache
def say_once(what: str, why: str) -> None:
    log.warning("%s: not the mlx-lm that is known: %s", what, why)


def install(*, loaded: bool = True) -> None:
    """In this process, where it is faster on the device at hand (docs/accel.md).

    Some of it is for single models, and waits for them: to be called again once one is loaded.
    """
    from rewarm.accel import cpu, cuda_attention, cuda_convolution, delta, heap, scans

    delta.install()
    cpu.install()
    cuda_attention.install()
    cuda_convolution.install()
    scans.install()
    if loaded:
        heap.install()
