"""Payloads as named numpy arrays, and back.

How they lie is described in JSON, in an array of its own. What comes back is checked by whoever
uses it: a form that does not fit the model is a miss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...payload import PackedState, Packing, Rows, RowShape, Segment, Slot
from .files import Arrays, Entry, blank

DESCRIPTION = "description"
WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
PLAIN = ("bool_", "complex64", "float16", "float32", "float64", *WHOLE)
DTYPES: dict[str, mx.Dtype] = {name.rstrip("_"): getattr(mx, name) for name in (*PLAIN, "bfloat16")}
NAMES = {str(dtype): name for name, dtype in DTYPES.items()}


def pack_rows(rows: Rows) -> Arrays:
    arrays: Arrays = {}
    for i, segment in enumerate(rows.segments):
        for j, array in enumerate(segment.arrays):
            arrays[f"{i}.{j}"] = _to_numpy(array)
    packing = rows.packing
    arrays[DESCRIPTION] = _text(
        {
            "shapes": [[s.heads, s.width, NAMES[str(s.dtype)]] for s in packing.shapes],
            "counts": list(packing.counts),
            "segments": [[s.start, s.stop] for s in rows.segments],
            "dtypes": [NAMES[str(a.dtype)] for a in rows.segments[0].arrays],
        }
    )
    return arrays


class Receiver:
    """MLX arrays for a file to be read into: what is read is what is kept."""

    def __init__(self) -> None:
        self._made: dict[str, mx.array] = {}
        self._on_cpu = mx.default_device() == mx.cpu

    def new(self, entries: Sequence[Entry]) -> Arrays:
        arrays = blank([e for e in entries if not self._is_filled(e)])
        for entry in filter(self._is_filled, entries):
            self._made[entry.name] = mx.zeros(entry.shape, DTYPES[entry.dtype.name])
        mx.eval(self._made)  # at once: each evaluation is a way to MLX's thread and back
        arrays |= {name: np.asarray(array) for name, array in self._made.items()}
        return {entry.name: arrays[entry.name] for entry in entries}

    def _is_filled(self, entry: Entry) -> bool:
        return self._on_cpu and entry.name != DESCRIPTION and entry.nbytes > 0

    def taken(self, arrays: Arrays, name: str, dtype: str) -> mx.array:
        """An array that was read, as it was written."""
        found = self._made[name] if name in self._made else mx.array(arrays[name])
        return found.view(mx.bfloat16) if dtype == "bfloat16" else found


def unpack_rows(arrays: Arrays, received: Receiver) -> Rows:
    meta = json.loads(arrays[DESCRIPTION].tobytes())
    shapes = tuple(RowShape(h, w, DTYPES[name]) for h, w, name in meta["shapes"])
    dtypes = meta["dtypes"]
    segments = tuple(
        Segment(
            start,
            stop,
            tuple(received.taken(arrays, f"{i}.{j}", dtype) for j, dtype in enumerate(dtypes)),
        )
        for i, (start, stop) in enumerate(meta["segments"])
    )
    mx.eval([s.arrays for s in segments])
    return Rows(Packing(shapes, tuple(meta["counts"])), segments)


def pack_state(state: PackedState) -> Arrays:
    arrays = {str(i): _to_numpy(array) for i, array in enumerate(state.arrays)}
    dtypes = [NAMES[str(a.dtype)] for a in state.arrays]
    arrays[DESCRIPTION] = _text({"skeleton": _described(state.skeleton), "dtypes": dtypes})
    return arrays


def unpack_state(arrays: Arrays, received: Receiver) -> PackedState:
    meta = json.loads(arrays[DESCRIPTION].tobytes())
    dtypes = enumerate(meta["dtypes"])
    found = tuple(received.taken(arrays, str(i), dtype) for i, dtype in dtypes)
    mx.eval(found)
    return PackedState(_restored(meta["skeleton"]), found)


def _text(value: dict[str, Any]) -> npt.NDArray[Any]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _to_numpy(array: mx.array) -> npt.NDArray[Any]:
    if array.dtype == mx.bfloat16:  # numpy has no such numbers
        array = array.view(mx.uint16)
    return np.asarray(array)


def _described(item: Any) -> Any:
    """JSON has no tuples and no keys but texts, so every container says what it is."""
    if isinstance(item, Slot):
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
        return Slot(item[1], item[2], tuple(item[3]))
    if item[0] == "dict":
        return {_restored(key): _restored(value) for key, value in item[1]}
    parts = [_restored(part) for part in item[1]]
    return tuple(parts) if item[0] == "tuple" else parts
