"""Transfer: move state from running caches into the trees, and back."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from rewarm.accel.device import is_cuda
from rewarm.values import Kind, Origin

from .find import Query, ResumePoint, find
from .layout import Layout
from .memory import SPARE_BUFFERS, Memory
from .model import MakeCaches
from .pins import Lease
from .placement import APART, WEIGHTS
from .tree import NODE_BYTES, WIDTH, Checkpoint, Tree, agreement

log = logging.getLogger("rewarm")

STEP = 256
"""The number of rows by which mlx-lm's caches grow. On CUDA the length of a restored cache is a
multiple of it: MLX reuses a freed buffer only for one of the same size, and a new buffer takes
longer than the copy."""


@dataclass
class Transfer:
    """Stores in the trees, once, what running requests have computed, and builds caches from it.

    A commit copies first: where a copy fails, the tree stays as it was. What cannot be restored is
    dropped, and the hit is shorter."""

    layout: Layout
    blank: MakeCaches
    memory: Memory

    def restored(
        self, found: ResumePoint, tree: Tree, query: Query, headroom: int
    ) -> tuple[ResumePoint, list[Any]]:
        """Build the caches of a match, with room for `headroom` tokens beyond the prompt."""
        if is_cuda():
            headroom += -(query.length + headroom) % STEP
        while found.at:
            try:
                more = query.length - found.at + headroom
                caches = self.layout.build(self.blank(), found.node, found.at, more)
                mx.eval([getattr(c, "state", None) for c in caches])
                return found, caches
            except Exception:
                log.exception("a stored prefix could not be restored; it is computed again")
                if self.memory.discard(tree, found.node):
                    found = find(tree, query)
                else:
                    cold = replace(found.match, resume=0, reason="failed", tier=None)
                    found = replace(found, match=cold, node=tree.root)
        return found, self.blank()

    def commit(self, lease: Lease, stop: int, origin: Origin, kind: Kind | None) -> None:
        if not stop:
            return  # the root holds nothing
        if not self.layout.stands_at(lease.caches, stop):
            raise LookupError(f"the running cache does not stand at {stop}")
        lease.pin.up_to(lease.stored)
        self._store(lease, stop, origin)
        if kind is not None and not lease.stopped_storing:
            self._take_checkpoint(lease, stop, kind)
        if self.layout.has_window and lease.stored == stop:
            self._fill_windows(lease, stop)

    def _store(self, lease: Lease, stop: int, origin: Origin) -> None:
        """Follow what the tree knows of the new tokens, then add a node for the rest."""
        pin = lease.pin
        while lease.stored < stop and not lease.stopped_storing:
            node, at = pin.node, lease.stored
            if at < node.end:
                known = node.key[(at - node.start) * WIDTH :]
                lease.stored = at + agreement(known, lease.data[at * WIDTH : stop * WIDTH])
                if lease.stored < min(stop, node.end):
                    self._split(lease, lease.stored)
            else:
                child = pin.tree.child(node, lease.data, at, stop)
                if child is None:
                    return self._grow(lease, stop, origin)
                pin.down(child)
                child.warm &= lease.warm

    def _take_checkpoint(self, lease: Lease, stop: int, kind: Kind) -> None:
        if not (self.layout.has_state or self.layout.has_window):
            return
        if stop < lease.pin.node.end and not self._split(lease, stop):
            return
        node = lease.pin.node
        known = node.checkpoint
        if known is not None:
            known.kind = max(known.kind, kind, key=lambda k: WEIGHTS[k])
            known.warm &= lease.warm
            known.hint = max(known.hint, lease.hint)
            return
        state = None
        if self.layout.has_state:
            if not self._make_room(lease, self.layout.state_bytes(lease.caches), SPARE_BUFFERS):
                return
            state = self.layout.capture(lease.caches)
        taken = Checkpoint(kind, state, self.memory.clock, hint=lease.hint, warm=lease.warm)
        self.memory.ledger.put_checkpoint(node, taken)
        lease.pin.hold(taken)
        self.memory.lower.changed(node)

    def _grow(self, lease: Lease, stop: int, origin: Origin) -> None:
        """Add a leaf for the tokens from `lease.stored` to `stop`, or the part that fits."""
        layout, caches, start, pin = self.layout, lease.caches, lease.stored, lease.pin
        window_from = self._window_from(lease, start, stop, stop)
        packings = []
        if layout.has_rows:
            packings.append((start, layout.packing("rows", caches, start, stop)))
        if window_from < stop:
            packings.append((window_from, layout.packing("window", caches, window_from, stop)))

        def cost(tokens: int) -> tuple[int, int]:
            nbytes, buffers = NODE_BYTES + tokens * WIDTH, 0
            for first, packing in packings:
                rows_in = max(start + tokens - first, 0)
                nbytes += packing.nbytes(rows_in)
                buffers += packing.buffers(rows_in)
            return nbytes, buffers

        if not self._make_room(lease, *cost(stop - start)):
            lease.stopped_storing = True
            if layout.has_state or not pin.tree.splits:
                return  # the model could not resume from a part
            ledger = self.memory.ledger
            too_many = bisect_left(
                range(stop - start), True, key=lambda n: not ledger.fits(*cost(n))
            )
            stop = start + too_many - 1
            if stop - start < APART:
                return
        rows = layout.pack("rows", caches, start, stop) if layout.has_rows else None
        window = layout.pack("window", caches, window_from, stop) if window_from < stop else None
        above, key = pin.node, lease.data[start * WIDTH : stop * WIDTH]
        node = self.memory.grow(pin, key, origin, rows, window)
        node.warm, node.waits = lease.warm, lease.warm and above.waits
        self.memory.lower.changed(node)
        lease.stored = stop
        if layout.has_state and self._is_last_that_fits(lease, cost(stop - start)[0]):
            # The model cannot resume from rows alone: take a checkpoint while there is room.
            self._take_checkpoint(lease, stop, "end")
            lease.stopped_storing = True

    def _is_last_that_fits(self, lease: Lease, chunk_bytes: int) -> bool:
        """True where the request's own path fills the budget: after another chunk there would be no
        room for a checkpoint."""
        nodes = lease.pin.node.path()
        own = sum(n.index_bytes + (n.rows.nbytes if n.rows else 0) for n in nodes)
        own += sum(c.nbytes for c in lease.pin.checkpoints)
        state = self.layout.state_bytes(lease.caches)
        return own + chunk_bytes + 2 * state > self.memory.ledger.budget

    def _window_from(self, lease: Lease, start: int, stop: int, position: int) -> int:
        """Return the first row of a span whose window row is worth storing, and still there."""
        if not self.layout.has_window:
            return stop
        first = max(start, self.layout.first_row(lease.caches, position))
        if not lease.pin.tree.splits and start >= self.layout.kept:
            # A prompt resumes only at the end of a chunk.
            first = max(first, self.layout.reach(stop))
        return first

    def _fill_windows(self, lease: Lease, position: int) -> None:
        """Add the window rows that the path lacks and the running cache still has."""
        oldest = self.layout.first_row(lease.caches, position)
        for node in lease.pin.node.path():
            if node.end <= oldest:
                break
            first = self._window_from(lease, node.start, node.end, position)
            has = node.window.start if node.window is not None else node.end
            if node.end > position or first >= has:
                continue
            packing = self.layout.packing("window", lease.caches, first, node.end)
            tokens = node.end - first
            if self._make_room(lease, packing.nbytes(tokens), packing.buffers(tokens)):
                window = self.layout.pack("window", lease.caches, first, node.end)
                self.memory.ledger.put_window(node, window)
                self.memory.lower.changed(node)

    def _split(self, lease: Lease, at: int) -> bool:
        """Split the lease's deepest node; the lease then holds the upper half."""
        pin = lease.pin
        done = pin.tree.splits and self.memory.split(pin, at, only_warm=lease.warm)
        lease.stopped_storing |= not done
        return done

    def _make_room(self, lease: Lease, nbytes: int, buffers: int) -> bool:
        return self.memory.evictor.make_room(nbytes, buffers, only_warm=lease.warm)
