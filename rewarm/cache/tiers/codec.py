"""Turn payloads into named numpy arrays, and back.

JSON describes the form of the arrays. The caller checks that a form fits the model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..payload import ArraySlot, PackedState, Packing, Rows, RowShape, Segment
from .base import Sealed

WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
PLAIN = ("bool_", "complex64", "float16", "float32", "float64", *WHOLE)
DTYPES: dict[str, mx.Dtype] = {name.rstrip("_"): getattr(mx, name) for name in (*PLAIN, "bfloat16")}
NAMES = {str(dtype): name for name, dtype in DTYPES.items()}

Form = dict[str, Any]
"""A description of the arrays of a payload, as JSON can hold it."""


@dataclass(frozen=True)
class StoredArray:
    """An array of a payload, as a tier has written it down."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Received(Sealed):
    """Arrays that a payload is read into, and that memory then keeps without a copy.

    A tier need not use them. Other arrays are copied once more."""

    def __init__(self, arrays: Iterable[StoredArray]) -> None:
        super().__init__()
        self.made: dict[str, mx.array] = {}
        on_cpu = mx.default_device() == mx.cpu
        for each in arrays:
            if on_cpu and each.name[:1].isdigit() and 0 not in each.shape:
                self.made[each.name] = mx.zeros(each.shape, DTYPES[each.dtype.name])
            else:
                self[each.name] = np.empty(each.shape, each.dtype)
        mx.eval(self.made)  # all at once: each evaluation waits for MLX's thread
        self.update((name, np.asarray(array)) for name, array in self.made.items())


def pack_rows(rows: Rows) -> tuple[Sealed, Form]:
    arrays = {
        f"{i}.{j}": _to_numpy(array)
        for i, segment in enumerate(rows.segments)
        for j, array in enumerate(segment.arrays)
    }
    packing = rows.packing
    return arrays, {
        "shapes": [[s.heads, s.width, NAMES[str(s.dtype)]] for s in packing.shapes],
        "counts": list(packing.counts),
        "segments": [[s.start, s.stop] for s in rows.segments],
        "dtypes": [NAMES[str(a.dtype)] for a in rows.segments[0].arrays],
    }


def unpack_rows(arrays: Sealed, form: Form) -> Rows:
    """Make rows of arrays. Raises where the arrays are not what the form says."""
    shapes = tuple(RowShape(h, w, DTYPES[name]) for h, w, name in form["shapes"])
    packing = Packing(shapes, tuple(form["counts"]))
    segments = []
    for i, (start, stop) in enumerate(form["segments"]):
        found = [_taken(arrays, f"{i}.{j}", dtype) for j, dtype in enumerate(form["dtypes"])]
        segments.append(Segment(start, stop, tuple(found)))
        segments[-1].check(packing)
    mx.eval([s.arrays for s in segments])
    return Rows(packing, tuple(segments))


def pack_state(state: PackedState) -> tuple[Sealed, Form]:
    arrays = {str(i): _to_numpy(array) for i, array in enumerate(state.arrays)}
    dtypes = [NAMES[str(a.dtype)] for a in state.arrays]
    return arrays, {"skeleton": _described(state.skeleton), "dtypes": dtypes}


def unpack_state(arrays: Sealed, form: Form) -> PackedState:
    found = tuple(_taken(arrays, str(i), dtype) for i, dtype in enumerate(form["dtypes"]))
    mx.eval(found)
    return PackedState(_restored(form["skeleton"]), found)


def _taken(arrays: Sealed, name: str, dtype: str) -> mx.array:
    """Return an array of MLX, of the dtype that it was packed with."""
    made = arrays.made.get(name) if isinstance(arrays, Received) else None
    found = made if made is not None else mx.array(arrays[name])
    return found.view(mx.bfloat16) if dtype == "bfloat16" else found


def _to_numpy(array: mx.array) -> npt.NDArray[Any]:
    if array.dtype == mx.bfloat16:  # numpy has no such numbers
        array = array.view(mx.uint16)
    return np.asarray(array)


def _described(item: Any) -> Any:
    """Describe a value for JSON. Containers name their type: JSON has no tuples or number keys."""
    if isinstance(item, ArraySlot):
        return ["slot", item.group, item.start, list(item.shape)]
    if isinstance(item, dict):
        return ["dict", [[_described(k), _described(v)] for k, v in item.items()]]
    if isinstance(item, (list, tuple)):
        return [type(item).__name__, [_described(part) for part in item]]
    return item


def _restored(item: Any) -> Any:
    if not isinstance(item, list):
        return item
    if item[0] == "slot":
        return ArraySlot(item[1], item[2], tuple(item[3]))
    if item[0] == "dict":
        return {_restored(key): _restored(value) for key, value in item[1]}
    parts = [_restored(part) for part in item[1]]
    return tuple(parts) if item[0] == "tuple" else parts
