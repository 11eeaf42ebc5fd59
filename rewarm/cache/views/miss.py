"""Why not more of a prompt was reused, with the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rewarm.values import Match, Miss, Missing, Origin

from ..evicted import EvictedIndex
from ..find import Query, find
from ..layout import Layout
from ..tree import WIDTH, Node, Tree, agreement

GLIMPSE = 48
"""Tokens of the other side that are kept of a divergence."""


class Missed(NamedTuple):
    match: Match
    miss: Miss | None


@dataclass
class Explainer:
    """Looks for the reason of a miss in what the caller's own namespace knows."""

    layout: Layout
    evicted: EvictedIndex

    def why(
        self,
        match: Match,
        query: Query,
        below: Tree | None = None,
        named: Sequence[Tree] = (),
    ) -> Miss | None:
        """None where all that could be reused was.

        `below` is the same namespace on disk, which may know more of a prompt than memory does.
        `named` are the trees of other salts that the request names itself."""
        if match.reason in ("disabled", "failed"):
            return Miss(match.reason, match.shared, match.resume)
        if match.resume >= query.length - 1:
            return None
        tree, data, cuts = query.tree, query.data, query.cuts
        used, known = tree.walk(data, cuts)
        parts_from = tree
        if below is not None:
            there = find(self.layout, replace(query, tree=below)).match
            goes_on = match.reason is None and there.shared == match.shared
            if there.shared > match.shared or (goes_on and there.reason == "diverged"):
                match = replace(match, shared=there.shared, reason=there.reason)
                known = 0
            if known < match.shared:
                parts_from = below
        reason = match.reason
        while used.parent is not None and used.end > match.resume:
            used = used.parent
        lost = self.evicted.look(np.frombuffer(data, "<i4"), used, tree.seed)
        if lost.resume > match.shared:
            return Miss("evicted", match.shared, match.resume, held=lost.resume)
        found = [find(self.layout, replace(query, tree=other)).at for other in named]
        if found and max(found) > match.shared:
            return Miss("salt", match.shared, match.resume, held=max(found))
        if reason is None:
            return None
        beyond = parted(parts_from, data, cuts)
        if reason == "no_checkpoint":
            why: Missing = "never_taken"
            if match.resume < lost.resume:
                why = "evicted"
            elif beyond.node.origin == "decode":
                why = "other_origin"
            return Miss(reason, match.shared, match.resume, why=why)
        if reason == "diverged":
            other = np.frombuffer(beyond.other, "<i4")
            return Miss(reason, match.shared, match.resume, other=other, origin=beyond.origin)
        return Miss(reason, match.shared, match.resume)


@dataclass(frozen=True)
class Parted:
    """Where a prompt leaves a tree."""

    node: Node
    """The deepest one that it reached, wholly or in part."""
    other: bytes = b""
    """The beginning of what is stored there instead."""
    origin: Origin | None = None


def parted(tree: Tree, data: bytes, cuts: Sequence[int] = ()) -> Parted:
    """What a tree has instead of a prompt's next tokens; of several branches, the last used one."""
    walk = tree.walk(data, cuts)
    node = walk.node
    if walk.shared < node.end:
        begin = (walk.shared - node.start) * WIDTH
        return Parted(node, _path_from(node, begin), node.origin)
    rest = data[node.end * WIDTH :]
    further = list(node.children.values())
    if walk.shared > node.end:
        further = [c for c in further if agreement(c.key, rest) == walk.shared - node.end]
    if not further:
        return Parted(node)
    latest = max(further, key=lambda child: child.last_used)
    begin = (walk.shared - node.end) * WIDTH
    return Parted(node, _path_from(latest, begin), latest.origin)


def _path_from(node: Node, begin: int) -> bytes:
    """A glimpse of what is stored from within a node on, down the branch that was used last."""
    found = node.key[begin : begin + GLIMPSE * WIDTH]
    while len(found) < GLIMPSE * WIDTH and node.children:
        node = max(node.children.values(), key=lambda child: child.last_used)
        found += node.key[: GLIMPSE * WIDTH - len(found)]
    return found
