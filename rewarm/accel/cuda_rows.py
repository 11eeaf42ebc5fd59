"""Join rows of many segments in one launch on CUDA (docs/accel.md).

MLX's concatenation launches a kernel for each span. On a long path that takes more time than the
copying itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import is_off
from .device import is_cuda
from .launch import Launch, agree, kernel

MOST_SPANS = 256
"""The number of spans that a kernel takes. It is always the same: another number would need another
kernel, and to compile one takes longer than a thousand restores."""
MOST_RESULTS = 128
"""The most arrays that a kernel makes: its parameters have room for some 500 addresses."""
ROWS = 256
"""The number of rows that a block copies."""
UNITS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}

SOURCE = """
    using Unit = UNIT;
    __shared__ const Unit* from[PARTS];
    __shared__ Unit* into[RESULTS];
    __shared__ int begins[PARTS + 1];  // the row of a result where a part begins
    __shared__ int firsts[PARTS];      // its first row in its segment
    __shared__ int lengths[PARTS];     // rows of its segment
    const int parts = plan[0], total = plan[1];
    if (threadIdx.x == 0) { POINTERS }
    for (int i = threadIdx.x; i < parts; i += blockDim.x) {
        begins[i] = plan[2 + 3 * i];
        firsts[i] = plan[3 + 3 * i];
        lengths[i] = plan[4 + 3 * i];
    }
    if (threadIdx.x == 0) begins[parts] = plan[2 + 3 * parts];
    __syncthreads();
    const int* const head = plan + 3 + 3 * parts + 3 * blockIdx.y;
    const int lane = threadIdx.x % LANES;
    Unit* const to = into[head[0]] + (long long)head[1] * total * WIDTH;
    const int last = min(total, (int)(blockIdx.x + 1) * ROWS);
    int part = 0;
    for (int row = blockIdx.x * ROWS + threadIdx.x / LANES; row < last; row += 256 / LANES) {
        while (part < parts && begins[part + 1] <= row) ++part;
        const Unit* its = nullptr;
        if (part < parts)
            its = from[part] + ((long long)head[2] * lengths[part] + firsts[part] + row -
                                begins[part]) * WIDTH;
        for (int i = lane; i < WIDTH; i += LANES)
            to[(long long)row * WIDTH + i] = its == nullptr ? Unit() : its[i];
    }
"""


class RowSpan(NamedTuple):
    """The rows from `start` to `stop` of an array (1, heads, tokens, width)."""

    array: mx.array
    start: int
    stop: int


class Heads(NamedTuple):
    """The heads of an array that make a result."""

    first: int
    number: int


class RowsVariant(NamedTuple):
    """The properties for which the kernel is compiled and checked once."""

    dtype: mx.Dtype
    width: int
    results: int


def fits(array: mx.array, results: int) -> bool:
    """True where the kernel can make so many arrays from spans of arrays like this one."""
    if not is_cuda() or is_off():
        return False
    numbers = {MOST_RESULTS} if results > MOST_RESULTS else set()
    numbers.add(results % MOST_RESULTS or MOST_RESULTS)
    return all(agrees(RowsVariant(array.dtype, array.shape[3], number)) for number in numbers)


@functools.cache
def agrees(variant: RowsVariant) -> bool:
    """Try the kernel on a few rows, and return true where it agrees with MLX's concatenation."""
    array = mx.random.randint(0, 100, (1, 3, 300, variant.width), key=mx.random.key(0))
    array = array.astype(variant.dtype)
    spans = [RowSpan(array, 3, 300), RowSpan(array, 0, 1), RowSpan(array, 7, 250)]
    whole = mx.concatenate([a[:, 1:3, i:j] for a, i, j in spans], axis=2)
    whole = mx.pad(whole, [(0, 0), (0, 0), (0, 5), (0, 0)])
    return agree(
        "rows are joined span by span",
        lambda: joined(spans, [Heads(1, 2)] * variant.results, 5),
        lambda: [whole] * variant.results,
    )


def joined(spans: Sequence[RowSpan], results: Sequence[Heads], zeros: int) -> list[mx.array]:
    """Make an array for each result: its heads over all spans in order, then rows of zeros."""
    if len(spans) > MOST_SPANS:
        runs = [spans[at : at + MOST_SPANS] for at in range(0, len(spans), MOST_SPANS)]
        ends = [0] * (len(runs) - 1) + [zeros]
        made = [joined(run, results, end) for run, end in zip(runs, ends, strict=True)]
        return [mx.concatenate(list(each), axis=2) for each in zip(*made, strict=True)]
    found: list[mx.array] = []
    for at in range(0, len(results), MOST_RESULTS):
        found += _launched(spans, results[at : at + MOST_RESULTS], zeros)
    return found


def _launched(spans: Sequence[RowSpan], results: Sequence[Heads], zeros: int) -> list[mx.array]:
    array = spans[0].array
    width, dtype = array.shape[3], array.dtype
    unit = next(size for size in UNITS if width * dtype.size % size == 0)
    units = width * dtype.size // unit
    arrays = [span.array for span in spans] + [array] * (MOST_SPANS - len(spans))
    at, plan = 0, []
    for span in spans:
        plan += [at, span.start, span.array.shape[2]]
        at += span.stop - span.start
    total = at + zeros
    heads = [(i, j, h.first + j) for i, h in enumerate(results) for j in range(h.number)]
    table = np.array([len(spans), total, *plan, at, *(n for head in heads for n in head)], np.int32)
    return list(
        _kernel(len(results), UNITS[unit])(
            inputs=[*arrays, mx.array(table)],
            template=[
                *(("T", dtype), ("PARTS", MOST_SPANS), ("RESULTS", len(results))),
                *(("WIDTH", units), ("LANES", min(256, 1 << (units - 1).bit_length()))),
                ("ROWS", ROWS),
            ],
            grid=(-(-total // ROWS) * 256, len(heads), 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(1, h.number, total, width) for h in results],
            output_dtypes=[dtype] * len(results),
        )
    )


@functools.cache
def _kernel(results: int, unit: str) -> Launch:
    inputs = [f"s{i}" for i in range(MOST_SPANS)]
    outputs = [f"r{i}" for i in range(results)]
    pointers = [f"from[{i}] = (const Unit*){name};" for i, name in enumerate(inputs)]
    pointers += [f"into[{i}] = (Unit*){name};" for i, name in enumerate(outputs)]
    source = SOURCE.replace("POINTERS", " ".join(pointers)).replace("UNIT", unit)
    return kernel("rows", [*inputs, "plan"], outputs, source)
