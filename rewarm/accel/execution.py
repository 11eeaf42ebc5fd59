"""Describe what executes a model: versions, the kind of device, and the kernels of this package."""

from __future__ import annotations

import functools
import os
import platform
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import xxhash

from . import blas, state


def execution(*, exact: bool, chunk: int) -> str:
    """Describe what executes a model: versions, and the kind of device.

    In `exact` it also covers whatever changes the bits of a result on this device.
    """
    cpu = mx.default_device() == mx.cpu
    parts: list[object] = [
        f"mlx {getattr(mx, '__version__', 'unknown')}",
        f"mlx-lm {mlx_lm.__version__}",
        _kernels_digest(),
        "cpu" if cpu else "metal" if mx.metal.is_available() else "cuda",
    ]
    if exact:
        parts += ["exact", chunk, state(), platform.machine()]
        parts += [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("MLX_")]
        if cpu:
            compiler = shutil.which("g++") or ""
            parts += [blas.settings(), os.path.realpath(compiler) if compiler else "no compiler"]
        else:
            device = dict(mx.device_info())
            parts += [device.get("device_name"), device.get("architecture"), platform.release()]
    return "\n".join(str(part) for part in parts)


@functools.cache
def _kernels_digest() -> str:
    """Digest the files that replace parts of MLX and mlx-lm."""
    digest = xxhash.xxh3_128()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
