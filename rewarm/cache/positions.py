"""Find the position up to which a token's rows do not depend on what comes after it.

A rotary module may change its frequencies once a sequence is longer than the model was trained for
(dynamic NTK). A token's keys then depend on where the chunk that it was computed in ends, or
begins. Such modules are found by calling the position modules of the live model alone, on small
arrays: the model itself never runs.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from .identity import modules_of
from .model import most_heads

log = logging.getLogger("rewarm")

FAR = 1 << 62
"""The value that stands for no limit."""

MOST = 1 << 24
"""The farthest position that is looked at: float32 counts no further."""

POWERS = tuple(1 << n for n in range(6, 23))
"""Lengths that are looked at in every model. Dynamic NTK shows at each of them beyond its limit."""

MARGIN = 16
"""The most tokens by which a module's limit differs from a number that it holds."""

TOLERANCE = 1e-3
"""The largest difference between rows that count as the same, as a share of the input. The first
token beyond the limit of dynamic NTK turns a row by 0.03 or more."""

WIDTHS = (64, 128, 256, 512)
"""Head sizes to try where a module does not hold its own."""


@functools.cache
def _warn(model: str, module: str, position: int) -> None:
    if position:
        log.warning(
            "%s: %s turns tokens otherwise in a sequence of more than %d tokens, depending on how "
            "long it is; what lies beyond that position is not reused, and computed again for "
            'every prompt (reuse="exact" reuses it)',
            *(model, module, position),
        )
    else:
        log.warning(
            "%s: nothing is reused, since %s could not be called alone: whether it turns a token "
            'otherwise when more tokens follow is not known (reuse="exact" does not depend on it)',
            *(model, module),
        )


def position_limit(model: Any) -> int:
    """Return the lowest limit of a model's position modules, or `FAR` where none has one. Log it.

    Up to the limit, a token gets the same row however the sequence is divided into chunks. Beyond
    it, this is not so. Call it on a thread that may run the model. Copies of the modules are
    called, because some modules keep what they computed last.
    """
    modules = _distinct(position_modules(model))
    limits = [(_limit_of(module, model), type(module).__name__) for module in modules]
    limit, name = min(limits, default=(FAR, ""))
    if limit < FAR:
        _warn(type(model).__module__.rpartition(".")[2], name, limit)
    return limit


def position_modules(model: Any) -> list[Module]:
    """Return the modules that are called as `nn.RoPE` is, with one array and an offset.

    They hold no modules of another kind: attention that takes an offset holds projections."""
    modules = modules_of(model)
    kinds = {kind for kind in {type(m) for m in modules} if _takes_offset(kind)}
    own = [module for module in modules if type(module) in kinds]
    return [m for m in own if kinds.issuperset(type(part) for part in modules_of(m))]


def _takes_offset(kind: type) -> bool:
    try:
        _, array, *others = inspect.signature(kind.__call__).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return False
    return (
        array.default is array.empty
        and any(other.name == "offset" for other in others)
        and all(o.default is not o.empty or o.kind is o.VAR_KEYWORD for o in others)
    )


def _limit_of(module: Module, model: Any) -> int:
    """Find the last length at which rows agree, before the first at which they do not."""
    probe = _Probe.of(module, most_heads(model))
    if probe is None:
        return 0
    arguments = [getattr(model, name, None) for name in ("args", "config")]
    numbers = {*_numbers(module), *_numbers(arguments), *POWERS}
    agreed = 1
    for stop in sorted(n + MARGIN for n in numbers):
        if probe.agrees(stop):
            agreed = stop
            continue
        while stop - agreed > 1:
            middle = (agreed + stop) // 2
            agreed, stop = (middle, stop) if probe.agrees(middle) else (agreed, middle)
        return agreed
    return FAR


@dataclass(frozen=True)
class _Probe:
    """A position module, and the arrays that it takes."""

    module: Module
    heads: int
    """Some modules take this axis for that of the tokens by mistake."""
    width: int

    @staticmethod
    def of(module: Module, heads: int) -> _Probe | None:
        """Make a probe, or return None where the module cannot be called alone."""
        sizes = (2 * value.size for value in module.values() if isinstance(value, mx.array))
        own = sorted(n for n in {*_numbers(module), *sizes} if 2 <= n <= max(WIDTHS))
        for width in (*own, *WIDTHS):
            try:
                probe = _Probe(deepcopy(module), heads, width)
                probe.agrees(2)
                return probe
            except Exception:
                log.debug("%s takes no rows of %d", type(module).__name__, width, exc_info=True)
        return None

    def agrees(self, stop: int) -> bool:
        """True where one call that ends at `stop` gives the same rows as a call for each row."""
        start = max(0, stop - self.heads - 2 * MARGIN)
        together = self._call(start, stop)
        apart = [
            mx.abs(one[..., row - start, :] - other[..., 0, :]).max()
            for row in {start, (start + stop) // 2, stop - 1}
            for one, other in zip(together, self._call(row, row + 1), strict=True)
        ]
        return bool((mx.stack(apart) <= TOLERANCE).all())

    def _call(self, start: int, stop: int) -> list[mx.array]:
        # Two sequences: for a single row MLX has another kernel, which rounds otherwise.
        ones = mx.ones((2, self.heads, stop - start, self.width))
        found = self.module(ones, offset=start)
        return list(found) if isinstance(found, (list, tuple)) else [found]


def _distinct(modules: list[Module]) -> list[Module]:
    """Keep one of the modules with equal values: every layer has a position module of its own."""
    found = {tuple(_own_values(part) for part in modules_of(module)): module for module in modules}
    return list(found.values())


def _own_values(module: Module) -> tuple[Any, ...]:
    values = {**module, **vars(module)}
    return type(module), *((n, _plain(v)) for n, v in values.items() if not isinstance(v, Module))


def _plain(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value.shape, str(value.dtype), np.array(value.flatten().view(mx.uint8)).tobytes()
    return repr(value)


def _numbers(thing: Any, depth: int = 4) -> Iterator[int]:
    """Yield the numbers in a module or in a model's arguments that may be lengths."""
    if isinstance(thing, (int, float)):
        if not isinstance(thing, bool) and 1 < thing <= MOST:
            yield int(thing)
    elif depth and not isinstance(thing, (str, mx.array)):
        inside = list(thing.values()) if isinstance(thing, dict) else []
        inside += thing if isinstance(thing, (list, tuple)) else []
        inside += getattr(thing, "__dict__", {}).values()
        for each in inside:
            yield from _numbers(each, depth - 1)
