"""What the CUDA kernels have in common."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

log = logging.getLogger("rewarm")

Launch = Callable[..., Sequence[mx.array]]

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
TOLERANCE = 1e-2
"""Of the check before first use: products may be TF32, outputs bfloat16."""

_said: set[str] = set()


def kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    source: str,
    header: str = "",
    **options: Any,
) -> Launch:
    """A kernel that MLX compiles when it is first used."""
    # MLX knows what it compiled by its name: another source needs another one.
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
    """Whether a kernel compiles, runs, and gives what MLX's operations do; one line if not.

    MLX compiles it only when the result is wanted: too late, in a request, to go another way.
    """
    try:
        for found, expected in zip(ours(), theirs(), strict=True):
            found, expected = found.astype(mx.float32), expected.astype(mx.float32)
            off = float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected))
            if not off <= TOLERANCE:
                raise ValueError(f"its result is {off:.1e} off")
    except (RuntimeError, ValueError) as error:
        if otherwise not in _said:
            why = " ".join(str(error).split())[:300]  # a compiler's list of errors is long
            log.warning("%s: the CUDA kernel is no use here: %s", otherwise, why)
        _said.add(otherwise)
        return False
    return True
