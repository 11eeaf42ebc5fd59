"""Payloads of the tree, packed into few arrays that nothing else refers to.

MLX limits the number of buffers as well as their bytes, and a slice keeps its whole parent alive.
So everything here is a fresh copy, evaluated at once, with all layers of a kind stacked into one
array per row width and dtype.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from rewarm.accel import cpu_rows, cuda_rows
from rewarm.accel.cuda_rows import Heads, RowSpan
from rewarm.accel.device import allocated

SEGMENT, GPU_SEGMENT = 512, 2048
"""The most tokens in one packed array: a split copies one segment, never the whole node. On a GPU
the launch of a copy costs more than its bytes, and on Metal a restore launches a copy for each
segment and layer."""

TOKENS, HEADS = 2, 1
"""The axes of a row array: (batch, heads, tokens, width), as in mlx-lm's caches."""


def detached(parts: Sequence[mx.array], axis: int) -> mx.array:
    """Join the parts into one array, in a buffer of its own.

    Concatenation copies several parts, but not a single one. `mx.contiguous` does not copy either
    where the parent is only a little larger. An empty second part makes concatenation copy.
    """
    if len(parts) == 1:
        shape = list(parts[0].shape)
        shape[axis] = 0
        parts = [parts[0], mx.zeros(shape, parts[0].dtype)]
    return mx.concatenate(list(parts), axis=axis)


def longest_segment() -> int:
    return SEGMENT if mx.default_device() == mx.cpu else GPU_SEGMENT


class RowShape(NamedTuple):
    heads: int
    width: int
    dtype: mx.Dtype


@dataclass(frozen=True)
class Packing:
    """The places of all layers' row arrays in the packed ones. Equal packings can be joined."""

    shapes: tuple[RowShape, ...]
    counts: tuple[int, ...]
    """The number of each layer's arrays: 0 for a cache that the model never uses."""

    @staticmethod
    def of(layers: Sequence[Sequence[mx.array]]) -> Packing:
        shapes = []
        for array in (a for layer in layers for a in layer):
            if array.ndim != 4 or array.shape[0] != 1:
                raise ValueError(f"rows of shape {array.shape} are not one sequence's")
            shapes.append(RowShape(array.shape[HEADS], array.shape[3], array.dtype))
        return Packing(tuple(shapes), tuple(len(layer) for layer in layers))

    @cached_property
    def layers(self) -> list[range]:
        """The numbers of each layer's arrays."""
        firsts = accumulate(self.counts, initial=0)
        return [range(first, first + n) for first, n in zip(firsts, self.counts, strict=False)]

    @cached_property
    def groups(self) -> list[dict[int, int]]:
        """The numbers of the arrays that are stacked together, and the first head of each in the
        stack. Empty arrays are in no group."""
        groups: dict[tuple[int, mx.Dtype], dict[int, int]] = {}
        heads: Counter[tuple[int, mx.Dtype]] = Counter()
        for i, shape in enumerate(self.shapes):
            if shape.width and shape.heads:
                stack = (shape.width, shape.dtype)
                groups.setdefault(stack, {})[i] = heads[stack]
                heads[stack] += shape.heads
        return list(groups.values())

    @cached_property
    def packed(self) -> list[RowShape]:
        """The shapes of the stacked arrays, group by group."""
        groups = ([self.shapes[i] for i in group] for group in self.groups)
        return [RowShape(sum(s.heads for s in g), g[0].width, g[0].dtype) for g in groups]

    def nbytes(self, tokens: int) -> int:
        """Return the bytes that this many tokens will take once packed."""
        longest = longest_segment()
        whole, rest = divmod(tokens, longest)
        sizes = [heads * width * dtype.size for heads, width, dtype in self.packed]
        return sum(whole * allocated(n * longest) + allocated(n * rest) for n in sizes)

    def buffers(self, tokens: int) -> int:
        return -(-tokens // longest_segment()) * len(self.groups)

    def pack(self, layers: Sequence[Sequence[mx.array]], start: int, stop: int) -> Rows:
        """Make detached copies of row arrays that cover the tokens `start` to `stop`."""
        arrays = [a for layer in layers for a in layer]
        segments, longest = [], longest_segment()
        for begin in range(start, stop, longest):
            end = min(begin + longest, stop)
            cut = [a[:, :, begin - start : end - start] for a in arrays]
            packed = tuple(detached([cut[i] for i in group], HEADS) for group in self.groups)
            segments.append(Segment(begin, end, packed))
        mx.eval([s.arrays for s in segments])
        return Rows(self, tuple(segments))


@dataclass(frozen=True, slots=True)
class Segment:
    start: int
    stop: int
    arrays: tuple[mx.array, ...]

    def check(self, packing: Packing) -> None:
        """Raise where the arrays are not what the packing says. No later code checks it."""
        tokens = self.stop - self.start
        for array, (heads, width, dtype) in zip(self.arrays, packing.packed, strict=True):
            if array.shape != (1, heads, tokens, width) or array.dtype != dtype:
                raise ValueError(
                    f"rows {self.start} to {self.stop} have the form {array.shape} of {array.dtype}"
                )

    def cut(self, start: int, stop: int) -> Segment:
        """Copy a part of the segment. All of it is shared."""
        if (start, stop) == (self.start, self.stop):
            return self
        a, b = start - self.start, stop - self.start
        return Segment(start, stop, tuple(detached([x[:, :, a:b]], HEADS) for x in self.arrays))


@dataclass(frozen=True)
class Rows:
    """The rows of a span, for all layers of a group."""

    packing: Packing
    segments: tuple[Segment, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(allocated(a.nbytes) for s in self.segments for a in s.arrays)

    @property
    def buffers(self) -> int:
        return sum(len(segment.arrays) for segment in self.segments)

    @property
    def start(self) -> int:
        return self.segments[0].start

    @property
    def stop(self) -> int:
        return self.segments[-1].stop

    def split(self, at: int) -> tuple[Rows | None, Rows | None]:
        """Part the rows at `at`. Only the segment that `at` falls into is copied."""
        return self.part(self.start, at), self.part(at, self.stop)

    def part(self, start: int, stop: int) -> Rows | None:
        """Return the rows from `start` to `stop` that there are. Whole segments are shared."""
        if start <= self.start and self.stop <= stop:
            return self
        found = []
        for segment in self.segments:
            first, last = max(start, segment.start), min(stop, segment.stop)
            if first < last:
                found.append(segment.cut(first, last))
        mx.eval([segment.arrays for segment in found])
        return Rows(self.packing, tuple(found)) if found else None


def chained(pieces: Sequence[Rows]) -> Rows:
    """Chain rows that follow one another into one `Rows`. Copies nothing."""
    return Rows(pieces[0].packing, tuple(s for piece in pieces for s in piece.segments))


def join(
    pieces: Sequence[Rows], spans: Sequence[tuple[int, int]], wanted: Sequence[int], headroom: int
) -> list[mx.array]:
    """Copy the `wanted` arrays over the given spans, each with space for more tokens. The pieces
    have one packing."""
    packing, parts = pieces[0].packing, _parts(pieces, spans)
    for segment, _, _ in parts:
        segment.check(packing)
    made: dict[int, mx.array] = {}
    for g, group in enumerate(packing.groups):
        its = [i for i in group if i in wanted]
        rows = [RowSpan(s.arrays[g], a, b) for s, a, b in parts]
        heads = [Heads(group[i], packing.shapes[i].heads) for i in its]
        if its and cuda_rows.fits(rows[0].array, len(its)):
            arrays = cuda_rows.joined(rows, heads, headroom)
        elif its and cpu_rows.fits(rows, heads):
            arrays = cpu_rows.joined(rows, heads, headroom)
        else:
            arrays = [_concatenated(rows, each, headroom) for each in heads]
        made |= zip(its, arrays, strict=True)
    tokens = sum(stop - start for start, stop in spans) + headroom
    for i in wanted:
        if i not in made:  # an array without heads, or without a width
            number, width, dtype = packing.shapes[i]
            made[i] = mx.zeros((1, number, tokens, width), dtype)
    return [made[i] for i in wanted]


def _concatenated(rows: Sequence[RowSpan], heads: Heads, zeros: int) -> mx.array:
    stop = heads.first + heads.number
    found = [array[:, heads.first : stop, a:b] for array, a, b in rows]
    if zeros:
        shape = (1, heads.number, zeros, found[0].shape[3])
        found.append(mx.zeros(shape, found[0].dtype))
    return detached(found, TOKENS)


class SegmentPart(NamedTuple):
    """A part of a segment, counted from its start."""

    segment: Segment
    start: int
    stop: int


def _parts(pieces: Sequence[Rows], spans: Sequence[tuple[int, int]]) -> list[SegmentPart]:
    segments = [s for piece in pieces for s in piece.segments]
    parts = []
    for start, stop in spans:
        at = start
        for segment in segments:
            end = min(segment.stop, stop)
            if segment.start <= at < end:
                parts.append(SegmentPart(segment, at - segment.start, end - segment.start))
                at = end
        if at < stop:
            raise LookupError(f"rows {at} to {stop} are missing")
    return parts


PLAIN = (mx.array, bool, int, float, str, type(None))
"""The classes of values that a checkpoint can keep, also in lists, tuples and dictionaries."""


class ArraySlot(NamedTuple):
    """The place of an array of a state in the packed one of its dtype."""

    group: int
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PackedState:
    """A value made of arrays, numbers, texts and containers of these, at one position."""

    skeleton: Any
    arrays: tuple[mx.array, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(allocated(array.nbytes) for array in self.arrays)

    @property
    def buffers(self) -> int:
        return len(self.arrays)

    @staticmethod
    def pack(value: Any) -> PackedState:
        """Copy the arrays out of a value, and leave a slot in the place of each."""
        parts: dict[mx.Dtype, list[mx.array]] = {}

        def slot(item: Any) -> Any:
            if not isinstance(item, PLAIN):
                raise TypeError(f"a {type(item).__name__} cannot be kept in a checkpoint")
            if not isinstance(item, mx.array):
                return item
            group = parts.setdefault(item.dtype, [])
            start = sum(part.size for part in group)
            group.append(item.reshape(-1))
            return ArraySlot(list(parts).index(item.dtype), start, tuple(item.shape))

        skeleton = tree_map(slot, value, is_leaf=_is_whole)
        arrays = tuple(detached(group, 0) for group in parts.values())
        mx.eval(arrays)
        return PackedState(skeleton, arrays)

    def unpack(self) -> Any:
        """Return the value, with new handles for its arrays: they may be assigned into."""

        def filled(item: Any) -> Any:
            if not isinstance(item, ArraySlot):
                return item
            stop = item.start + math.prod(item.shape)
            return self.arrays[item.group][item.start : stop].reshape(item.shape)

        return tree_map(filled, self.skeleton, is_leaf=_is_whole)


def _is_whole(item: Any) -> bool:
    """True for an instance of a subclass of tuple or list: it is not taken apart."""
    return isinstance(item, (list, tuple)) and type(item) not in (list, tuple)


def items_of(value: Any) -> list[Any]:
    """List the arrays, numbers and texts in a value."""
    flat: Any = tree_flatten(value, is_leaf=_is_whole)
    return [item for _, item in flat]


def state_bytes(value: Any) -> int:
    """Return the bytes that `PackedState.pack(value)` will take, without packing it."""
    sizes: Counter[mx.Dtype] = Counter()
    for item in items_of(value):
        if isinstance(item, mx.array):
            sizes[item.dtype] += item.nbytes
    return sum(allocated(n) for n in sizes.values())
