"""The layers of one model, by kind. They are read from a running cache, or built into a new one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import mlx.core as mx

from .layer_kinds import Group, Rotating, SpanKind, StateKind, kind_of, leaves, replaced
from .payload import PackedState, Packing, Rows, join, state_bytes
from .tree import Node

SpanGroup = Literal["rows", "window"]

FAR = 1 << 40
"""A position beyond the reach of every window."""


class Layout:
    """The layers of a model's prompt cache. Not every layer has a cache, and some have two."""

    def __init__(self, blank: list[Any]) -> None:
        caches = leaves(blank)
        self.kinds = [kind_of(cache) for cache in caches]
        pairs = zip(caches, self.kinds, strict=True)
        self.unknown = sorted({type(cache).__name__ for cache, kind in pairs if kind is None})
        self.reusable = bool(self.kinds) and not self.unknown
        self.groups: dict[Group, list[int]] = {"rows": [], "window": [], "state": []}
        """The numbers of the single caches of each group."""
        for i, kind in enumerate(self.kinds):
            if kind is not None:
                self.groups[kind.group].append(i)
        self.has_rows = bool(self.groups["rows"])
        self.has_window = bool(self.groups["window"])
        self.has_state = bool(self.groups["state"])
        windows = [kind for _, kind in self._spans("window")]
        self.kept = max((kind.kept for kind in windows), default=0)
        """The number of rows at the very start that every window needs at every position."""
        lengths = [FAR - kind.reach(FAR) for kind in windows]
        self.longest_window = max(lengths, default=0)
        self.shortest_window = min(lengths, default=0)
        """After this many single steps the first window begins to be overwritten."""

    def reach(self, position: int) -> int:
        """Return the first window row needed to go on from `position`."""
        return min((k.reach(position) for _, k in self._spans("window")), default=position)

    def first_row(self, caches: list[Any], position: int) -> int:
        """Return the first row from which every window of a running cache holds all rows."""
        found = leaves(caches)
        windows = [(found[i], k) for i, k in self._spans("window") if found[i].keys is not None]
        return max((k.first_row(cache, position) for cache, k in windows), default=0)

    def stands_at(self, caches: list[Any], position: int) -> bool:
        """True where a running cache has seen just this many tokens, as far as its offsets tell."""
        found = leaves(caches)
        spans = [found[i] for i in (*self.groups["rows"], *self.groups["window"])]
        return all(c.offset == position for c in spans if c.keys is not None)

    def settle(self, caches: list[Any]) -> None:
        """Bring a running cache into the form that it would have if it were restored here."""
        found = leaves(caches)
        for i, kind in self._spans("window"):
            if isinstance(kind, Rotating):
                kind.settle(found[i])

    def packing(self, group: SpanGroup, caches: list[Any], start: int, stop: int) -> Packing:
        """Say how the rows of a span would be packed. Copies nothing."""
        return Packing.of(self._read(group, caches, start, stop))

    def pack(self, group: SpanGroup, caches: list[Any], start: int, stop: int) -> Rows:
        layers = self._read(group, caches, start, stop)
        if any(a.shape[2] != stop - start for layer in layers for a in layer):
            raise LookupError(f"the running cache does not hold the rows {start} to {stop}")
        return Packing.of(layers).pack(layers, start, stop)

    def state_bytes(self, caches: list[Any]) -> int:
        return state_bytes(self._capture(caches))

    def capture(self, caches: list[Any]) -> PackedState:
        return PackedState.pack(self._capture(caches))

    def build(self, blank: list[Any], node: Node, position: int, headroom: int) -> list[Any]:
        """Build a prompt cache from the path of a node, at a position in it or at its end, with
        space for `headroom` more tokens.

        Raises where anything is missing or of another form: the caller then starts cold.
        """
        new, path = leaves(blank), [*node.path()][::-1]
        if self.has_rows:
            rows = [n.rows for n in path if isinstance(n.rows, Rows)]
            self._load_rows(new, "rows", rows, position, headroom)
        if self.has_window:
            windows = [n.window for n in path if isinstance(n.window, Rows)]
            self._load_rows(new, "window", windows, position, 0)
        if self.has_state:
            state = node.state
            if not isinstance(state, PackedState):
                raise LookupError(f"no checkpoint at {position}")
            for i, value in zip(self.groups["state"], state.unpack(), strict=True):
                new[i] = cast(StateKind, self.kinds[i]).load(new[i], value)
        return cast("list[Any]", replaced(blank, new))

    def _load_rows(
        self, new: list[Any], group: SpanGroup, pieces: Sequence[Rows], position: int, headroom: int
    ) -> None:
        """Join the rows of a group's layers, and load them. All that need the same spans are joined
        at once."""
        layers, packing = self._spans(group), pieces[0].packing
        if any(p.packing != packing for p in pieces):
            raise LookupError("rows of another form")
        if len(packing.counts) != len(layers):
            raise LookupError(f"rows of {len(packing.counts)} layers for {len(layers)}")
        wanted: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for (_, kind), numbers in zip(layers, packing.layers, strict=True):
            wanted.setdefault(_needed(kind, position), []).extend(numbers)
        joined: dict[int, mx.array] = {}
        for spans, asked in wanted.items():
            arrays = join(pieces, spans, asked, headroom)
            joined |= zip(asked, arrays, strict=True)
        for (i, kind), numbers in zip(layers, packing.layers, strict=True):
            if numbers:
                new[i] = kind.load(new[i], [joined[n] for n in numbers], position)

    def _spans(self, group: SpanGroup) -> list[tuple[int, SpanKind]]:
        return [(i, cast(SpanKind, self.kinds[i])) for i in self.groups[group]]

    def _read(
        self, group: SpanGroup, caches: list[Any], start: int, stop: int
    ) -> list[list[mx.array]]:
        found = leaves(caches)
        return [
            k.read(found[i], start, stop) if found[i].keys is not None else []
            for i, k in self._spans(group)
        ]

    def _capture(self, caches: list[Any]) -> list[Any]:
        found = leaves(caches)
        return [cast(StateKind, self.kinds[i]).capture(found[i]) for i in self.groups["state"]]


def _needed(kind: SpanKind, position: int) -> tuple[tuple[int, int], ...]:
    """Return the spans of rows that a layer needs to go on from `position`."""
    first = kind.reach(position)
    return tuple((a, b) for a, b in ((0, min(kind.kept, first)), (first, position)) if a < b)
