"""From a prompt to caches that stand at its resume point, whatever tier that lies in."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .below import Below
from .find import Found, Query, find
from .layout import Layout
from .lease import Match
from .memory import MemoryTier
from .model import MakeCaches
from .payload import PackedState, Rows
from .tree import Node, Tree

log = logging.getLogger("rewarm")


@dataclass
class Restorer:
    """What cannot be restored after all is dropped: a shorter hit."""

    layout: Layout
    blank: MakeCaches
    memory: MemoryTier
    below: Below | None = None

    def match(self, query: Query) -> Match:
        """How much could be restored. Changes nothing."""
        match = find(self.layout, query).match
        below = self.below.find(query) if self.below is not None else None
        if below is None or below.at <= match.resume:
            return match
        shared = max(match.shared, below.match.shared)
        return replace(below.match, shared=shared, tier="disk")

    def promoted(self, found: Found, query: Query, now: int) -> Found:
        """The match once memory has what only the disk had."""
        if self.below is None or not self.below.bring_up(found, query, now):
            return found
        again = find(self.layout, query)
        if again.at <= found.at:
            return again
        return replace(again, match=replace(again.match, tier="disk"))

    def restored(self, found: Found, query: Query, room: int) -> tuple[Found, list[Any]]:
        """The caches of a match, with room for `room` tokens beyond the prompt."""
        while found.at:
            try:
                caches = self._built(found, query.length - found.at + room)
                mx.eval([getattr(c, "state", None) for c in caches])
                return found, caches
            except Exception:
                log.exception("a stored prefix could not be restored; it is computed again")
                if self._discard(query.tree, found.node):
                    found = find(self.layout, query)
                else:
                    cold = replace(found.match, resume=0, reason="failed", tier=None)
                    found = replace(found, match=cold, node=query.tree.root)
        return found, self.blank()

    def _built(self, found: Found, room: int) -> list[Any]:
        """Raises where anything is missing or of another form."""
        rows: list[Rows] = []
        window: list[Rows] = []
        for node in found.node.path():
            if isinstance(node.rows, Rows):
                rows.append(node.rows)
            if isinstance(node.window, Rows):
                window.append(node.window)
        state = found.node.checkpoint.state if found.node.checkpoint else None
        return self.layout.build(
            self.blank(),
            rows=rows[::-1],
            window=window[::-1],
            state=state if isinstance(state, PackedState) else None,
            position=found.at,
            room=room,
        )

    def _discard(self, tree: Tree, node: Node) -> bool:
        """Remove a node and all below it, unless somebody holds it."""
        below = [node]
        for each in below:
            below.extend(each.children.values())
        if any(n.pins or (n.checkpoint and n.checkpoint.pins) for n in below):
            return False
        for each in reversed(below):
            self.memory.count(each, -1)
            tree.remove(each)
            if self.below is not None:
                self.below.disk.gone(each)
        return True
