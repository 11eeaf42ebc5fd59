"""Committing: what a running request has computed goes into the tree, once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from .cuts import APART
from .layout import Layout
from .lease import Lease
from .memory import MemoryTier
from .placement import WEIGHTS, Kind
from .retention import Evictor
from .tree import NODE_BYTES, WIDTH, Checkpoint, Node, Origin, Tree, agreement

SPARE_BUFFERS = 4
"""Reserved where the number is known only afterwards: a state takes one for each dtype."""


@dataclass
class Committer:
    """Writes into the trees. Copies come first: where one fails, the tree is as it was."""

    layout: Layout
    memory: MemoryTier
    evictor: Evictor
    trees: Collection[Tree]

    def store(self, lease: Lease, stop: int, origin: Origin, now: int) -> None:
        """Follow what the tree knows of the new tokens, then add a node for the rest."""
        pin, first = lease.pin, lease.stored
        while lease.stored < stop and not lease.full:
            node, at = pin.node, lease.stored
            if at < node.end:
                known = node.key[(at - node.start) * WIDTH :]
                lease.stored = at + agreement(known, lease.data[at * WIDTH : stop * WIDTH])
                if lease.stored == node.end and first <= node.start:
                    self._refill_window(lease, node, stop, now)
                elif lease.stored < min(stop, node.end):
                    self._split(lease, lease.stored, now)
            else:
                child = lease.tree.child(node, lease.data, at, stop)
                if child is None:
                    return self._grow(lease, stop, origin, now)
                pin.down(child)

    def take_checkpoint(self, lease: Lease, stop: int, kind: Kind, now: int) -> None:
        if not (self.layout.has_state or self.layout.has_window):
            return
        if stop < lease.pin.node.end and not self._split(lease, stop, now):
            return
        node = lease.pin.node
        if node.checkpoint is not None:
            if WEIGHTS[kind] > WEIGHTS[node.checkpoint.kind]:
                node.checkpoint.kind = kind
            return
        state = None
        if self.layout.has_state:
            nbytes = self.layout.state_bytes(lease.caches)
            if not self._make_room(nbytes, SPARE_BUFFERS, now):
                return
            state = self.layout.capture(lease.caches)
        self.memory.put_checkpoint(node, Checkpoint(kind, state, now))

    def _grow(self, lease: Lease, stop: int, origin: Origin, now: int) -> None:
        """Add a leaf for the tokens from `lease.stored` to `stop`, or the part that fits."""
        layout, caches, start = self.layout, lease.caches, lease.stored
        window_from = self._window_from(lease, start, stop, stop)
        packings = []
        if layout.has_rows:
            packings.append((start, layout.packing("rows", caches, start, stop)))
        if window_from < stop:
            packings.append((window_from, layout.packing("window", caches, window_from, stop)))

        def cost(tokens: int) -> tuple[int, int]:
            nbytes, buffers = NODE_BYTES + tokens * WIDTH, 0
            for first, packing in packings:
                held = max(start + tokens - first, 0)
                nbytes += packing.nbytes(held)
                buffers += packing.buffers(held)
            return nbytes, buffers

        if not self._make_room(*cost(stop - start), now):
            lease.full = True
            if layout.has_state or not lease.tree.splits:
                return  # a part of a chunk could not be resumed from
            stop = start + _largest(stop - start, lambda n: self.memory.fits(*cost(n)))
            if stop - start < APART:
                return
        rows = layout.pack("rows", caches, start, stop) if layout.has_rows else None
        window = None
        if window_from < stop:
            window = layout.pack("window", caches, window_from, stop)
        node = lease.tree.add(lease.pin.node, lease.data[start * WIDTH : stop * WIDTH], origin)
        node.rows, node.window, node.last_used = rows, window, now
        self.memory.count(node)
        lease.pin.down(node)
        lease.stored = stop

    def _window_from(self, lease: Lease, start: int, stop: int, position: int) -> int:
        """The first row of a span whose window is worth storing and still there."""
        if not self.layout.has_window:
            return stop
        first = max(start, self.layout.held(lease.caches, position))
        if not lease.tree.splits and start >= self.layout.kept:
            # Only the end of a chunk is ever resumed at.
            first = max(first, self.layout.reach(stop))
        return first

    def _refill_window(self, lease: Lease, node: Node, position: int, now: int) -> None:
        """Give a node its window rows again, now that they were computed anew."""
        if not self.layout.has_window or node.window is not None:
            return
        first = self._window_from(lease, node.start, node.end, position)
        if first >= node.end:
            return
        packing = self.layout.packing("window", lease.caches, first, node.end)
        tokens = node.end - first
        if self._make_room(packing.nbytes(tokens), packing.buffers(tokens), now):
            window = self.layout.pack("window", lease.caches, first, node.end)
            self.memory.put_window(node, window)

    def _split(self, lease: Lease, at: int, now: int) -> bool:
        """Split the lease's deepest node; the lease then holds the upper half."""
        node = lease.pin.node
        if not lease.tree.splits or not self._make_room(NODE_BYTES, SPARE_BUFFERS, now):
            lease.full = True
            return False
        self.memory.count(node, -1)
        try:
            upper = lease.tree.split(node, at)
            self.memory.count(upper)
        finally:
            self.memory.count(node)
        lease.pin.up(upper)
        return True

    def _make_room(self, nbytes: int, buffers: int, now: int) -> bool:
        return self.evictor.make_room(self.trees, nbytes, buffers, now)


def _largest(high: int, fits: Callable[[int], Any]) -> int:
    """The largest n up to `high` that fits."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
