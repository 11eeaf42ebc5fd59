"""Find how far a prompt is known, and the position that the model can resume at.

A model can resume only where all its layers can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rewarm.values import Match, Namespace, Origin, Reason

from .layout import Layout
from .tree import WIDTH, Node, Tree, Walk, agreement

MEMORY = "memory"
"""The name of memory, which lies above all tiers."""

GLIMPSE = 48
"""The number of stored tokens to show where a prompt diverges from them."""


@dataclass(frozen=True)
class Query:
    """A prompt to look for. It never changes, so it may be handed to any thread."""

    namespace: Namespace
    data: bytes
    """The prompt's tokens as a key."""
    cuts: Sequence[int]
    """The prompt's own cuts in `exact`; none in `fast`."""
    layout: Layout
    reuse: Literal["fast", "exact"]
    known: int = 0
    """The number of tokens whose rows memory has already: a tier need not give them back."""

    @property
    def length(self) -> int:
        return len(self.data) // WIDTH

    def is_for(self, other: Query) -> bool:
        """True where both ask for the same prompt of the same namespace."""
        return self.namespace == other.namespace and self.data == other.data

    def upto(self, position: int) -> tuple[bytes, tuple[int, ...]]:
        """Return the key of the prompt up to a position, and the cuts up to it."""
        return self.data[: position * WIDTH], tuple(c for c in self.cuts if c <= position)


@dataclass(frozen=True)
class ResumePoint:
    """A match, and its place in a tree."""

    match: Match
    node: Node
    """The node that has the resume point inside or at its end; the root where there is no reuse."""
    junction: int
    """The position that the prompt could resume at if there were a checkpoint."""

    @property
    def at(self) -> int:
        return self.match.resume


@dataclass(frozen=True)
class Parting:
    """The place where a prompt leaves a tree."""

    reached: Origin | None
    """The origin of the deepest span that the prompt reached."""
    other: bytes = b""
    """The first tokens that are stored there instead, as a key."""
    origin: Origin | None = None


def find(tree: Tree, query: Query) -> ResumePoint:
    layout, length = query.layout, query.length
    walk = tree.walk(query.data, query.cuts)
    # At least one token is left to compute. In a tree of chunks only whole ones count.
    limit = min(walk.shared, length - 1) if tree.splits else walk.node.end
    if not layout.reusable:
        return ResumePoint(Match(length, walk.shared, reason="disabled"), tree.root, limit)
    node, resume = _resume(layout, walk.node, limit) or (tree.root, 0)
    reason = _missed(walk, query.data, length, resume, limit) if resume < length - 1 else None
    match = Match(length, walk.shared, resume, reason, MEMORY if resume else None)
    return ResumePoint(match, node, junction=limit)


def parting(tree: Tree, query: Query) -> Parting:
    """Find what a tree has instead of a prompt's next tokens. Of several branches, take the one
    that was used last."""
    node, shared = tree.walk(query.data, query.cuts)
    reached = node.origin if node.parent is not None else None
    branches = [node] if shared < node.end else list(node.children.values())
    if shared > node.end:
        rest = query.data[node.end * WIDTH :]
        branches = [c for c in branches if agreement(c.key, rest) == shared - node.end]
    if not branches:
        return Parting(reached)
    latest = max(branches, key=lambda branch: branch.last_used)
    begin = (shared - latest.start) * WIDTH
    return Parting(reached, _path_from(latest, begin), latest.origin)


def _path_from(node: Node, begin: int) -> bytes:
    """Return the first tokens stored from byte `begin` of a node on, down the branch used last."""
    found = node.key[begin : begin + GLIMPSE * WIDTH]
    while len(found) < GLIMPSE * WIDTH and node.children:
        node = max(node.children.values(), key=lambda child: child.last_used)
        found += node.key[: GLIMPSE * WIDTH - len(found)]
    return found


def _missed(walk: Walk, data: bytes, length: int, resume: int, limit: int) -> Reason | None:
    """Return the reason that costs most: the tree has other tokens, or no later resume point.

    None for a prompt that goes on beyond the end of the tree: there was no more to reuse."""
    node, shared = walk
    if not shared:
        return "cold"
    parts = shared < node.end or bool(node.children)
    if shared > node.end:
        # The prompt agrees with a chunk that it does not have itself. Where it agrees with all of
        # that chunk, it has other cuts, but no other tokens.
        parts = data[node.end * WIDTH : shared * WIDTH] not in node.children
    if parts and length - 1 - shared >= shared - resume:
        return "diverged"
    if resume < min(shared, length - 1):
        return "exact_mode" if resume == limit else "no_checkpoint"
    return None


def _resume(layout: Layout, node: Node, limit: int) -> tuple[Node, int] | None:
    """Find the last position up to `limit` that every layer can be restored at."""
    for each in node.path():
        position = min(each.end, limit)
        if position > each.start:
            at_checkpoint = each.checkpoint is not None and position == each.end
            if (at_checkpoint or not layout.has_state) and _has_window(layout, each, position):
                return each, position
    return None


def _has_window(layout: Layout, node: Node, position: int) -> bool:
    """True where the window rows that `position` needs are all in the tree.

    It is enough to ask at the ends of nodes: within one stretch of held rows, the last position is
    the easiest to restore.
    """
    if node.windows(layout.reach(position), position) is None:
        return False
    return not layout.kept or all(
        above.window is not None and above.window.start == above.start
        for above in node.path()
        if above.start < layout.kept
    )
