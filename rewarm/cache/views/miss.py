"""Say how much of a prompt can be reused, with what tiers know of it, and why not more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rewarm.values import Match, Miss, Missing

from ..find import Query, ResumePoint, find, parting
from ..memory import Memory
from ..tiers.base import Found
from ..tree import Tree


class Missed(NamedTuple):
    match: Match
    miss: Miss | None


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


def why(
    match: Match,
    tree: Tree,
    query: Query,
    memory: Memory,
    below: Found | None,
    salts: Sequence[str],
) -> Miss | None:
    """Look for the reason of a miss in what the caller's own namespace knows. None where all that
    could be reused was reused.

    `below` is the answer of a tier, which may know more of a prompt than memory does. The match has
    that already.
    `salts` are other salts that the request names itself."""
    if match.reason in ("disabled", "failed"):
        return Miss(match.reason, match.shared, match.resume)
    if match.resume >= query.length - 1:
        return None
    used, known = tree.walk(query.data, query.cuts)
    while used.parent is not None and used.end > match.resume:
        used = used.parent
    lost = memory.evicted.look(np.frombuffer(query.data, "<i4"), used)
    if lost > match.shared:
        return Miss("evicted", match.shared, match.resume, held=lost)
    named = [memory.tree(query.namespace.salted(salt), keep=False) for salt in salts]
    most = max((find(other, query).at for other in named), default=0)
    if most > match.shared:
        return Miss("salt", match.shared, match.resume, held=most)
    if match.reason is None:
        return None
    beyond = parting(tree, query)
    # Memory may have less of the prompt than the tier, or nothing beyond what is shared.
    has_less = known < match.shared or not beyond.other
    if has_less and below is not None and below.shared == match.shared:
        beyond = below.parting or beyond
    if match.reason == "no_checkpoint":
        why: Missing = "never_taken"
        if match.resume < lost:
            why = "evicted"
        elif beyond.reached == "decode":
            why = "other_origin"
        return Miss(match.reason, match.shared, match.resume, why=why)
    if match.reason == "diverged":
        other = np.frombuffer(beyond.other, "<i4")
        return Miss(match.reason, match.shared, match.resume, other=other, origin=beyond.origin)
    return Miss(match.reason, match.shared, match.resume)
