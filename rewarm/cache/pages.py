"""New memory for large arrays on a Linux CPU: in large pages, and filled once.

MLX has no array that is not filled, and the system hands memory out in pages of 4 KB, each at a
cost: for a copy of many megabytes that is most of its time. `mx.load` reads into memory that it has
just been given, so a file that reads nothing leaves it as it is; and before that it can be asked
for in large pages.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

LARGE = 2 << 20
"""Bytes of a large page."""
MADV_HUGEPAGE = 14

NAMES = {
    "bool_": "BOOL",
    "complex64": "C64",
    **{f"{kind}int{n}": f"{kind or 'i'}{n}".upper() for kind in ("", "u") for n in (8, 16, 32, 64)},
    **{f"float{n}": f"F{n}" for n in (16, 32)},
    "bfloat16": "BF16",
}
"""As safetensors files call them."""


class Form(NamedTuple):
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


def available() -> bool:
    return sys.platform == "linux" and mx.default_device() == mx.cpu


def unfilled(forms: Mapping[str, Form]) -> dict[str, mx.array]:
    """Arrays with whatever was in memory before: whoever asks fills all of them.

    Where that cannot be had they are of zeros, which only takes longer."""
    names = {name: _name(form.dtype) for name, form in forms.items()}
    if not available() or None in names.values() or not all(f.nbytes for f in forms.values()):
        made = {name: mx.zeros(form.shape, form.dtype) for name, form in forms.items()}
        mx.eval(made)
        return made
    header, at = {}, 0
    for name, (shape, _) in forms.items():
        stop = at + forms[name].nbytes
        place = [at, stop]
        header[name] = {"dtype": names[name], "shape": list(shape), "data_offsets": place}
        at = stop
    text = json.dumps(header).encode()
    source: Any = _Nothing(len(text).to_bytes(8, "little") + text, at)
    return cast("dict[str, mx.array]", mx.load(source, format="safetensors"))


def numbers(array: mx.array) -> npt.NDArray[Any]:
    """The memory of an array that is evaluated, as numpy sees it."""
    if array.dtype == mx.bfloat16:  # numpy has no such numbers
        array = array.view(mx.uint16)
    return np.asarray(array)


class _Nothing:
    """A safetensors file whose header is followed by bytes that are never written."""

    closed = False

    def __init__(self, header: bytes, rest: int) -> None:
        self._header = header
        self._size = len(header) + rest
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, into: memoryview) -> int:
        if self._at < len(self._header):
            into[:] = self._header[self._at : self._at + len(into)]
        elif len(into) >= 2 * LARGE:
            _advise(np.frombuffer(into, np.uint8))
        self._at += len(into)
        return len(into)


def _name(dtype: mx.Dtype) -> str | None:
    return _names().get(dtype)


@cache
def _names() -> dict[mx.Dtype, str]:
    return {getattr(mx, name): stored for name, stored in NAMES.items()}


def _advise(memory: npt.NDArray[Any]) -> None:
    """A wish: where it is not granted, the pages are small."""
    first = -(-memory.ctypes.data // LARGE) * LARGE
    last = (memory.ctypes.data + memory.nbytes) // LARGE * LARGE
    if last > first:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_HUGEPAGE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
