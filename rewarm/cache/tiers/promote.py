"""Put the payloads of a fetch into the memory tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewarm.values import Origin

from ..find import Query
from ..memory import Memory
from ..payload import Rows, chained
from ..pins import Pin
from ..tree import NODE_BYTES, WIDTH, Checkpoint, Tree
from .base import Found
from .seal import PathPayload, What


@dataclass(frozen=True)
class Promotion:
    """Puts what a fetch brought into a tree, in memory and without waiting for anything."""

    memory: Memory
    query: Query
    found: Found
    pieces: Sequence[PathPayload]

    def into(self, tree: Tree) -> None:
        """Extend the path of a prompt. What does not fit is left out, with all that follows it."""
        query = self.query
        upto = max(piece.stop for piece in self.pieces)
        walk = tree.walk(*query.upto(upto))
        pin = Pin(tree, walk.node)
        try:
            known = walk.shared if tree.splits else walk.node.end
            if known < walk.node.end and not self.memory.split(pin, known):
                return
            self._fill_windows(pin)
            self._put_checkpoint(pin)
            origins: dict[int, Origin] = {}
            for piece in self.pieces:
                origins |= piece.ends
            # In `exact` these are the prompt's own cuts: a payload may hold several chunks.
            for stop in query.cuts if query.reuse == "exact" else sorted(origins):
                if not known < stop <= upto:
                    continue
                if not self._grow(pin, stop, origins.get(stop, "prefill")):
                    return
                self._put_checkpoint(pin)
        finally:
            pin.drop()

    def _grow(self, pin: Pin, stop: int, origin: Origin) -> bool:
        start = pin.node.end
        rows, window = self._rows("rows", start, stop), self._rows("window", start, stop)
        if self.query.layout.has_rows and (rows is None or rows.start > start):
            return False
        payloads = [p for p in (rows, window) if p is not None]
        nbytes = NODE_BYTES + (stop - start) * WIDTH + sum(p.nbytes for p in payloads)
        fits = self.memory.evictor.make_room(nbytes, sum(p.buffers for p in payloads))
        if fits:
            key = self.query.data[start * WIDTH : stop * WIDTH]
            self.memory.grow(pin, key, origin, rows, window)
        return fits

    def _fill_windows(self, pin: Pin) -> None:
        """Give memory's nodes back the window rows that were evicted."""
        for node in pin.node.path():
            has = node.window.start if node.window is not None else node.end
            window = self._rows("window", node.start, node.end)
            if window is None or window.start >= has:
                continue
            if self.memory.evictor.make_room(window.nbytes, window.buffers):
                self.memory.ledger.put_window(node, window)

    def _put_checkpoint(self, pin: Pin) -> None:
        node, found = pin.node, self.found
        at_end = next((p for p in self.pieces if p.what == "state" and p.start == node.end), None)
        state = at_end.value if at_end is not None else None
        kind = found.kind if found.resume == node.end else None
        if at_end is not None:
            kind = kind or at_end.kind or "end"
        if node.parent is None or node.checkpoint is not None or kind is None:
            return
        if state is None and self.query.layout.has_state:
            return
        if state is None or self.memory.evictor.make_room(state.nbytes, state.buffers):
            taken = Checkpoint(kind, state, self.memory.clock, hint=found.hint)
            self.memory.ledger.put_checkpoint(node, taken)

    def _rows(self, what: What, start: int, stop: int) -> Rows | None:
        """Return the rows that end at `stop`, as far back to `start` as they have no gap."""
        parts: list[Rows] = []
        for piece in sorted(self.pieces, key=lambda piece: -piece.stop):
            if piece.what != what or not isinstance(piece.value, Rows):
                continue
            at = parts[0].start if parts else stop
            part = piece.value.part(start, at)
            if part is not None and part.stop == at:
                parts.insert(0, part)
        return chained(parts) if parts else None
