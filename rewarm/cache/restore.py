"""From a prompt to caches that stand at its resume point, whatever tier that lies in."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from rewarm.accel.launch import is_cuda
from rewarm.values import Match

from .find import Found, Query, find
from .layout import Layout
from .ledger import Ledger
from .model import MakeCaches
from .payload import PackedState, Rows
from .tiers.below import Below
from .tree import Node, Tree

log = logging.getLogger("rewarm")

STEP = 256
"""Rows by which mlx-lm's caches grow. On CUDA restored ones are of such lengths, too: MLX uses a
freed buffer only for one of its size again, and a new one takes longer than the copy into it."""


@dataclass
class Restorer:
    """What cannot be restored after all is dropped: a shorter hit."""

    layout: Layout
    blank: MakeCaches
    ledger: Ledger
    below: Below | None = None

    def match(self, query: Query) -> Match:
        """How much could be restored. Changes nothing."""
        found = find(self.layout, query)
        below = self.below.find(query) if self.below is not None else None
        if below is not None and below.at > found.at:
            found, below = replace(below, match=replace(below.match, tier="disk")), found
        return _known_to_both(found, below).match

    def promoted(self, found: Found, query: Query, now: int) -> Found:
        """The match once memory has what only the disk had."""
        below = self.below.find(query) if self.below is not None else None
        if self.below is None or below is None:
            return found
        if below.at > found.at:
            self.below.bring_up(below, query, now)
            before, found = found.at, find(self.layout, query)
            if found.at > before:
                found = replace(found, match=replace(found.match, tier="disk"))
            below = self.below.find(query)  # what turned out to be damaged is not known
        return _known_to_both(found, below)

    def restored(self, found: Found, query: Query, room: int) -> tuple[Found, list[Any]]:
        """The caches of a match, with room for `room` tokens beyond the prompt."""
        if is_cuda():
            room += -(query.length + room) % STEP
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
            self.ledger.count(each, -1)
            tree.remove(each)
            if self.below is not None:
                self.below.disk.gone(each)
        return True


def _known_to_both(found: Found, other: Found | None) -> Found:
    """A match, where another tier knows more of the prompt without being able to resume there:
    it is computed although it was known."""
    if other is None or other.match.shared <= found.match.shared:
        return found
    match = replace(
        found.match,
        shared=other.match.shared,
        reason=other.match.reason or found.match.reason,
    )
    return replace(found, match=match, junction=max(found.junction, other.junction))
