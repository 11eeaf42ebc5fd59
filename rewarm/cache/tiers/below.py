"""Between memory and the tier below: what is found there is brought up, what goes is let down.

An error below costs a miss, never an answer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rewarm.values import Namespace

from ..commit import split
from ..find import Found, Query
from ..layout import Layout
from ..ledger import Ledger
from ..payload import Rows
from ..pins import Pin
from ..retention import Evictor, Item
from ..tree import NODE_BYTES, WIDTH, Checkpoint, Node, Tree
from .disk.tier import DiskTier, Loaded

log = logging.getLogger("rewarm")


@dataclass
class Promoter:
    """Puts what was loaded into the memory tree."""

    layout: Layout
    ledger: Ledger
    evictor: Evictor
    trees: Collection[Tree]

    def promote(
        self, tree: Tree, data: bytes, cuts: list[int], loaded: Iterable[Loaded], now: int
    ) -> None:
        """Add to the path of `data`, which ends where the disk's match does. What does not fit is
        left out, and what follows it."""
        walk = tree.walk(data, cuts)
        pin = Pin(tree, walk.node)
        pin.take()
        try:
            known = walk.shared if tree.splits else walk.node.end
            inside = known < walk.node.end
            if inside and not split(pin, known, self.evictor, self.trees, now):
                return
            for part in loaded:
                if part.window is not None:  # memory may lack it where it knows the tokens
                    self._fill_windows(pin, part.window, now)
                if part.node.end > known and known * WIDTH < len(data):
                    if not self._grow(pin, max(part.node.start, known), part, now):
                        return
                    known = part.node.end
                if part.node.checkpoint is not None and known == part.node.end:
                    self._checkpoint(pin.node, part, now)
        finally:
            pin.drop()

    def _grow(self, pin: Pin, start: int, part: Loaded, now: int) -> bool:
        rows = part.rows.part(start, part.rows.stop) if part.rows is not None else None
        window = part.window.part(start, part.window.stop) if part.window is not None else None
        if self.layout.has_rows and rows is None:
            return False
        held = [p for p in (rows, window) if p is not None]
        key = part.node.key[(start - part.node.start) * WIDTH :]
        nbytes = NODE_BYTES + len(key) + sum(p.nbytes for p in held)
        if not self.evictor.make_room(self.trees, nbytes, sum(p.buffers for p in held), now):
            return False
        node = pin.tree.add(pin.node, key, part.node.origin)
        node.rows, node.window, node.last_used, node.hits = rows, window, now, part.node.hits
        self.ledger.count(node)
        pin.down(node)
        return True

    def _fill_windows(self, pin: Pin, window: Rows, now: int) -> None:
        """Give nodes that memory has the window rows that it let go of."""
        for node in pin.node.path():
            has = node.window.start if node.window is not None else node.end
            first = max(node.start, window.start)
            if not (first < has and window.stop >= node.end and node.start < window.stop):
                continue
            found = window.part(first, node.end)
            if found is None:
                continue
            if self.evictor.make_room(self.trees, found.nbytes, found.buffers, now):
                self.ledger.put_window(node, found)

    def _checkpoint(self, node: Node, part: Loaded, now: int) -> None:
        kept = part.node.checkpoint
        if node.end != part.node.end or node.checkpoint is not None or kept is None:
            return
        if self.layout.has_state and part.state is None:
            return
        state = part.state
        if state is not None and not self.evictor.make_room(
            self.trees, state.nbytes, state.buffers, now
        ):
            return
        self.ledger.put_checkpoint(
            node, Checkpoint(kept.kind, state, now, hits=kept.hits, hint=kept.hint)
        )


@dataclass
class Below:
    disk: DiskTier
    promoter: Promoter
    trees: Mapping[Namespace, Tree]

    def find(self, query: Query) -> Found | None:
        """What the disk tier could give."""
        try:
            return self.disk.find(query)
        except OSError:
            return None  # a store that is broken has said so
        except Exception:
            log.exception("the disk tier could not be asked; it is left alone")
            return None

    def tree(self, namespace: Namespace) -> Tree | None:
        """The disk's tree of a namespace that was asked for before."""
        return self.disk.tree_of(namespace)

    def bring_up(self, below: Found, query: Query, now: int) -> None:
        """Load what was found on disk."""
        tree, data = query.tree, query.data[: below.at * WIDTH]
        inside = [cut for cut in query.cuts if cut <= below.at]
        known = tree.walk(data, inside)
        try:
            have = known.shared if tree.splits else known.node.end
            loaded = self.disk.load(query.namespace, below, have)
            self.promoter.promote(tree, data, inside, loaded, now)
        except Exception:
            log.exception("a prefix could not be loaded from disk; it is computed again")

    def let_down(self, item: Item) -> None:
        """Memory is about to let go of something: the disk may keep it."""
        try:
            for namespace, tree in self.trees.items():
                if tree is item.tree:
                    self.disk.demote(namespace, item)
        except Exception:
            log.exception("something evicted could not be kept on disk")
        if item.what == "leaf":
            self.disk.gone(item.node)
