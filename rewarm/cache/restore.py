"""Restore: build caches that stand at a prompt's resume point from the tree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from rewarm.accel.device import is_cuda
from rewarm.values import Match

from .find import Query, ResumePoint, find
from .layout import Layout
from .memory import Memory
from .model import MakeCaches
from .payload import PackedState, Rows
from .tiers.base import Found
from .tiers.lower import Lower
from .tree import Node, Tree

log = logging.getLogger("rewarm")

STEP = 256
"""The number of rows by which mlx-lm's caches grow. On CUDA the length of a restored cache is a
multiple of it: MLX reuses a freed buffer only for one of the same size, and a new buffer takes
longer than the copy."""


@dataclass
class Restorer:
    """Builds caches from the tree. What cannot be restored is dropped, and the hit is shorter."""

    layout: Layout
    blank: MakeCaches
    memory: Memory
    lower: Lower

    def restored(
        self, found: ResumePoint, tree: Tree, query: Query, headroom: int
    ) -> tuple[ResumePoint, list[Any]]:
        """Build the caches of a match, with room for `headroom` tokens beyond the prompt."""
        if is_cuda():
            headroom += -(query.length + headroom) % STEP
        while found.at:
            try:
                caches = self._built(found, query.length - found.at + headroom)
                mx.eval([getattr(c, "state", None) for c in caches])
                return found, caches
            except Exception:
                log.exception("a stored prefix could not be restored; it is computed again")
                if self._discard(tree, found.node):
                    found = find(tree, query)
                else:
                    cold = replace(found.match, resume=0, reason="failed", tier=None)
                    found = replace(found, match=cold, node=tree.root)
        return found, self.blank()

    def _built(self, found: ResumePoint, headroom: int) -> list[Any]:
        """Build the caches of a match. Raises where anything is missing or of another form."""
        path = [*found.node.path()][::-1]
        return self.layout.build(
            self.blank(),
            rows=[node.rows for node in path if isinstance(node.rows, Rows)],
            window=[node.window for node in path if isinstance(node.window, Rows)],
            state=found.node.state if isinstance(found.node.state, PackedState) else None,
            position=found.at,
            headroom=headroom,
        )

    def _discard(self, tree: Tree, node: Node) -> bool:
        """Remove a node and all below it, unless one of them is in use."""
        gone = self.memory.discard(tree, node)
        for each in gone:
            self.lower.gone(each)
        return bool(gone)


def known_below(point: ResumePoint, found: Found) -> ResumePoint:
    """Add to a match what a tier knows of the prompt beyond memory. Those tokens are computed again
    although they are known."""
    known = point.match.shared
    parts = found.reason == "diverged" and found.shared == known and point.match.reason is None
    if found.shared <= known and not parts:
        return point
    match = replace(point.match, shared=found.shared, reason=found.reason or point.match.reason)
    return replace(point, match=match, junction=max(point.junction, found.junction))


def match_with(tree: Tree, query: Query, answers: Sequence[Found]) -> Match:
    """Match a prompt with what memory has, and with what tiers may give. Changes nothing."""
    point = find(tree, query)
    found = max(answers, key=lambda answer: answer.resume, default=None)
    for answer in answers:
        point = known_below(point, answer)
    if found is None or found.resume <= point.at:
        return point.match
    shared = max(point.match.shared, found.shared)
    reason = point.match.reason if shared > found.shared else found.reason
    return Match(query.length, shared, found.resume, reason, found.tier)
