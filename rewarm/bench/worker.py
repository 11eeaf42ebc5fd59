"""A process that runs a random model with some of Rewarm's faster parts.

    python -m rewarm.bench.worker ARCH [MODULE OF rewarm.accel ...]

Each line of its input names a task and a number of tokens; each line of its output is the seconds
that the task took. With `chunks` instead of a module, the delta rule runs in chunks, also on a GPU.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from typing import Any

import rewarm  # noqa: F401  (chooses the BLAS, before mlx)

# isort: split
import mlx.core as mx
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache

from rewarm.accel import delta

from .archs import dtype, random_model, vocabulary
from .figures import milliseconds

WARM_UP = 64
"""Tokens of a first prompt, with which MLX compiles the operations that every length needs."""


def main(arch: str, *parts: str) -> None:
    model = random_model(arch)
    for part in parts:
        if part == "chunks":
            gated_delta.gated_delta_ops = delta.chunked
        elif not importlib.import_module(f"rewarm.accel.{part}").install():
            sys.exit(f"rewarm.accel.{part} does nothing here: another device, or switched off")
    size, caches = vocabulary(arch), list[Any]()
    print(prefill(model, caches, WARM_UP, size) + decode(model, caches, 2), flush=True)
    for line in sys.stdin:
        what, count = line.split()
        if what == "prefill":
            took = prefill(model, caches, int(count), size)
        elif what == "decode":
            took = decode(model, caches, int(count))
        else:
            took = product(int(count))
        print(took, flush=True)


def prefill(model: Any, caches: list[Any], tokens: int, size: int) -> float:
    """Prefill as mlx-lm does: in steps, with the logits of the last token only."""
    step = 512 if mx.default_device() == mx.cpu else 2048
    prompt = mx.random.randint(0, size, (1, tokens))
    caches[:] = make_prompt_cache(model)
    began = time.perf_counter()
    for start in range(0, tokens - 1, step):
        model(prompt[:, start : min(start + step, tokens - 1)], cache=caches)
        mx.eval([cache.state for cache in caches])
    mx.eval(model(prompt[:, -1:], cache=caches))
    return time.perf_counter() - began


def decode(model: Any, caches: list[Any], tokens: int) -> float:
    """Measure the median seconds of a token after the last prompt."""
    token = mx.zeros((1, 1), mx.int32)

    def step() -> None:
        nonlocal token
        token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
        mx.eval(token)

    return statistics.median(milliseconds(step) for _ in range(tokens)) / 1e3


def product(size: int) -> float:
    """Measure the least seconds of a product of two square matrices."""
    a, b = (mx.random.normal((size, size)).astype(dtype()) for _ in range(2))
    mx.eval(a, b)
    return min(milliseconds(lambda: mx.eval(a @ b)) for _ in range(5)) / 1e3


if __name__ == "__main__":
    main(*sys.argv[1:])
