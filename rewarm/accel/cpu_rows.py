"""Join rows of many segments on a CPU by several threads, in large pages on Linux.

MLX copies in one thread, which gets new memory too slowly. It also fills every array that it makes.
The system hands memory out in pages of 4 KB, each at a cost: for a copy of many megabytes, that is
most of the time. `mx.load` reads a file into new memory. So a file object that reads nothing leaves
this memory as it is, and can ask for large pages.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .cuda_rows import Heads, RowSpan

WORTH_A_THREAD = 1 << 20
"""Bytes from which arrays are joined by several threads."""

LARGE = 2 << 20
"""Bytes of a large page."""
MADV_HUGEPAGE = 14


def fits(spans: Sequence[RowSpan], results: Sequence[Heads]) -> bool:
    """True where several threads take less time than MLX."""
    if mx.default_device() != mx.cpu or len(results) < 2:
        return False
    width, dtype = spans[0].array.shape[3], spans[0].array.dtype
    rows = sum(span.stop - span.start for span in spans) * sum(heads.number for heads in results)
    return rows * width * dtype.size >= WORTH_A_THREAD


def joined(spans: Sequence[RowSpan], results: Sequence[Heads], zeros: int) -> list[mx.array]:
    """Make an array for each result: its heads over all spans in order, then rows of zeros."""
    tokens = sum(span.stop - span.start for span in spans)
    width, dtype = spans[0].array.shape[3], spans[0].array.dtype
    # numpy has no numbers of bfloat16, and copies bytes.
    sources = [np.asarray(span.array.view(mx.uint8)) for span in spans]

    def copied(heads: Heads) -> mx.array:
        array = unfilled(1, heads.number, tokens + zeros, width * dtype.size)
        into, at = np.asarray(array), 0
        for source, (_, start, stop) in zip(sources, spans, strict=True):
            rows = source[:, heads.first : heads.first + heads.number, start:stop]
            into[:, :, at : at + stop - start] = rows
            at += stop - start
        into[:, :, at:] = 0
        array = array.view(dtype)
        mx.eval(array)  # in this thread: an operation belongs to the thread that made it
        return array

    return list(_joiners().map(copied, results))


@cache
def _joiners() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), "rewarm-join")


def available() -> bool:
    return sys.platform == "linux" and mx.default_device() == mx.cpu


def unfilled(*shape: int) -> mx.array:
    """Return an array of bytes that may have any values. The caller fills all of them."""
    size = int(np.prod(shape))
    if not available() or not size:
        return mx.zeros(shape, mx.uint8)
    about = {"bytes": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}
    text = json.dumps(about).encode()
    source: Any = _Nothing(len(text).to_bytes(8, "little") + text, size)
    loaded: Any = mx.load(source, format="safetensors")
    array: mx.array = loaded["bytes"]
    return array


class _Nothing(io.BytesIO):
    """A safetensors file whose header is followed by bytes that are never written."""

    def __init__(self, header: bytes, rest: int) -> None:
        super().__init__(header)
        self._header = len(header)
        self._size = len(header) + rest

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            return super().seek(self._size + offset)
        return super().seek(offset, whence)

    def readinto(self, into: Any) -> int:
        if self.tell() < self._header:
            return super().readinto(into)
        if len(into) >= 2 * LARGE:
            _advise(np.frombuffer(into, np.uint8))
        super().seek(len(into), os.SEEK_CUR)
        return len(into)


def _advise(memory: npt.NDArray[Any]) -> None:
    """Ask for large pages. Where the system declines, the pages are small."""
    first = -(-memory.ctypes.data // LARGE) * LARGE
    last = (memory.ctypes.data + memory.nbytes) // LARGE * LARGE
    if last > first:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_HUGEPAGE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
