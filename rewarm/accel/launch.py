"""Make CUDA kernels, and check them before they are first used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from .replacement import warn_once

Launch = Callable[..., Sequence[mx.array]]

CHECKED = 37
"""Tokens of the check before first use: several tiles, of which the last one is not full."""
FLOATS = (mx.float32, mx.bfloat16, mx.float16)
TOLERANCE = 1e-2
"""The relative error that the check allows: products may be TF32, outputs bfloat16."""


def kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    source: str,
    header: str = "",
    **options: Any,
) -> Launch:
    """Make a kernel, which MLX compiles when it is first used."""
    # MLX finds what it has compiled by its name, so another source needs another name.
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    made = mx.fast.cuda_kernel(
        name=f"rewarm_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        header=header,
        source=source,
        **options,
    )
    return cast(Launch, made)


def agree(
    otherwise: str, ours: Callable[[], Sequence[mx.array]], theirs: Callable[[], Sequence[mx.array]]
) -> bool:
    """Run a kernel and MLX's own operations, and return true where the results agree.

    Where the kernel does not compile, run or agree, one line in the log says so, and says what
    happens `otherwise`. MLX compiles a kernel only when its result is needed. In a request that
    would be too late to compute it in another way.
    """
    try:
        for found, expected in zip(ours(), theirs(), strict=True):
            found, expected = found.astype(mx.float32), expected.astype(mx.float32)
            off = float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected))
            if not off <= TOLERANCE:
                raise ValueError(f"its result is {off:.1e} off")
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:300]  # a compiler's list of errors is long
        warn_once(otherwise, f"the CUDA kernel is no use here: {why}")
        return False
    return True
