"""Committing: what a running request has computed goes into the tree, once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rewarm.values import Kind, Origin

from .cuts import APART
from .layout import Layout
from .lease import Lease
from .ledger import Ledger
from .pins import Pin
from .placement import WEIGHTS
from .retention import Evictor
from .tree import NODE_BYTES, WIDTH, Checkpoint, Node, Tree, agreement

SPARE_BUFFERS = 4
"""Reserved where the number is known only afterwards: a state takes one for each dtype."""


@dataclass
class Committer:
    """Writes into the trees. Copies come first: where one fails, the tree is as it was."""

    layout: Layout
    ledger: Ledger
    evictor: Evictor
    trees: Collection[Tree]
    on_change: Callable[[Tree, Node], None] = lambda tree, node: None
    """Told of a node that is new, or has something new."""

    def commit(self, lease: Lease, stop: int, origin: Origin, kind: Kind | None, now: int) -> None:
        if not stop:
            return  # the root holds nothing
        if not self.layout.stands_at(lease.caches, stop):
            raise LookupError(f"the running cache does not stand at {stop}")
        lease.pin.up_to(lease.stored)
        self._store(lease, stop, origin, now)
        if kind is not None and not lease.stopped_storing:
            self._take_checkpoint(lease, stop, kind, now)
        if self.layout.has_window and lease.stored == stop:
            self._fill_windows(lease, stop, now)

    def _store(self, lease: Lease, stop: int, origin: Origin, now: int) -> None:
        """Follow what the tree knows of the new tokens, then add a node for the rest."""
        pin = lease.pin
        while lease.stored < stop and not lease.stopped_storing:
            node, at = pin.node, lease.stored
            if at < node.end:
                known = node.key[(at - node.start) * WIDTH :]
                lease.stored = at + agreement(known, lease.data[at * WIDTH : stop * WIDTH])
                if lease.stored < min(stop, node.end):
                    self._split(lease, lease.stored, now)
            else:
                child = lease.tree.child(node, lease.data, at, stop)
                if child is None:
                    return self._grow(lease, stop, origin, now)
                pin.down(child)
                child.warm &= lease.warm

    def _take_checkpoint(self, lease: Lease, stop: int, kind: Kind, now: int) -> None:
        if not (self.layout.has_state or self.layout.has_window):
            return
        if stop < lease.pin.node.end and not self._split(lease, stop, now):
            return
        node = lease.pin.node
        if node.checkpoint is not None:
            if WEIGHTS[kind] > WEIGHTS[node.checkpoint.kind]:
                node.checkpoint.kind = kind
            node.checkpoint.warm &= lease.warm
            node.checkpoint.hint = max(node.checkpoint.hint, lease.hint)
            return
        state = None
        if self.layout.has_state:
            nbytes = self.layout.state_bytes(lease.caches)
            if not self._make_room(lease, nbytes, SPARE_BUFFERS, now):
                return
            state = self.layout.capture(lease.caches)
        self.ledger.put_checkpoint(
            node, Checkpoint(kind, state, now, hint=lease.hint, warm=lease.warm)
        )
        if node.checkpoint is not None:
            lease.pin.hold(node.checkpoint)
        self.on_change(lease.tree, node)

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

        if not self._make_room(lease, *cost(stop - start), now):
            lease.stopped_storing = True
            if layout.has_state or not lease.tree.splits:
                return  # a part of a chunk could not be resumed from
            stop = start + _largest(stop - start, lambda n: self.ledger.fits(*cost(n)))
            if stop - start < APART:
                return
        rows = layout.pack("rows", caches, start, stop) if layout.has_rows else None
        window = None
        if window_from < stop:
            window = layout.pack("window", caches, window_from, stop)
        node = lease.tree.add(lease.pin.node, lease.data[start * WIDTH : stop * WIDTH], origin)
        node.rows, node.window, node.last_used, node.warm = rows, window, now, lease.warm
        node.waits = lease.warm and lease.pin.node.waits
        self.ledger.count(node)
        self.on_change(lease.tree, node)
        lease.pin.down(node)
        lease.stored = stop
        if layout.has_state and self._is_last_that_fits(lease, cost(stop - start)[0]):
            # Rows alone cannot be resumed from: end with a checkpoint while there is room.
            self._take_checkpoint(lease, stop, "end", now)
            lease.stopped_storing = True

    def _is_last_that_fits(self, lease: Lease, chunk_bytes: int) -> bool:
        """Whether a request has filled the budget by itself: another chunk would leave no room
        for a checkpoint after it."""
        nodes = lease.pin.node.path()
        own = sum(n.index_bytes + (n.rows.nbytes if n.rows else 0) for n in nodes)
        own += sum(c.nbytes for c in lease.pin.checkpoints)
        state = self.layout.state_bytes(lease.caches)
        return own + chunk_bytes + 2 * state > self.ledger.budget

    def _window_from(self, lease: Lease, start: int, stop: int, position: int) -> int:
        """The first row of a span whose window is worth storing and still there."""
        if not self.layout.has_window:
            return stop
        first = max(start, self.layout.held(lease.caches, position))
        if not lease.tree.splits and start >= self.layout.kept:
            # Only the end of a chunk is ever resumed at.
            first = max(first, self.layout.reach(stop))
        return first

    def _fill_windows(self, lease: Lease, position: int, now: int) -> None:
        """Give the path the window rows that it lacks and the running cache still holds."""
        held = self.layout.held(lease.caches, position)
        for node in lease.pin.node.path():
            if node.end <= held:
                break
            first = self._window_from(lease, node.start, node.end, position)
            has = node.window.start if node.window is not None else node.end
            if node.end > position or first >= has:
                continue
            packing = self.layout.packing("window", lease.caches, first, node.end)
            tokens = node.end - first
            if self._make_room(lease, packing.nbytes(tokens), packing.buffers(tokens), now):
                window = self.layout.pack("window", lease.caches, first, node.end)
                self.ledger.put_window(node, window)
                self.on_change(lease.tree, node)

    def _split(self, lease: Lease, at: int, now: int) -> bool:
        """Split the lease's deepest node; the lease then holds the upper half."""
        done = lease.tree.splits and split(
            lease.pin, at, self.evictor, self.trees, now, only_warm=lease.warm
        )
        lease.stopped_storing |= not done
        return done

    def _make_room(self, lease: Lease, nbytes: int, buffers: int, now: int) -> bool:
        return self.evictor.make_room(self.trees, nbytes, buffers, now, only_warm=lease.warm)


def split(
    pin: Pin,
    at: int,
    evictor: Evictor,
    trees: Collection[Tree],
    now: int,
    only_warm: bool = False,
) -> bool:
    """Split a pinned node where there is room for it; the upper half stays pinned."""
    node, ledger = pin.node, evictor.ledger
    if not evictor.make_room(trees, NODE_BYTES, SPARE_BUFFERS, now, only_warm=only_warm):
        return False
    ledger.count(node, -1)
    try:
        ledger.count(pin.tree.split(node, at))
    finally:
        ledger.count(node)
    pin.up_to(at)
    return True


def _largest(high: int, fits: Callable[[int], Any]) -> int:
    """The largest n up to `high` that fits."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
