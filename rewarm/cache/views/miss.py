"""Say how much of a prompt can be reused, with what tiers know of it, and why not more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rewarm.values import Match, Miss, Missing

from ..find import Query, ResumePoint, find, parting
from ..memory import EvictedIndex
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
    evicted: EvictedIndex,
    below: Found | None = None,
    named: Sequence[Tree] = (),
) -> Miss | None:
    """Look for the reason of a miss in what the caller's own namespace knows. None where all that
    could be reused was reused.

    `below` is the answer of a tier, which may know more of a prompt than memory does.
    `named` are the trees of other salts that the request names itself."""
    if match.reason in ("disabled", "failed"):
        return Miss(match.reason, match.shared, match.resume)
    if match.resume >= query.length - 1:
        return None
    used, known = tree.walk(query.data, query.cuts)
    if below is not None:
        goes_on = match.reason is None and below.shared == match.shared
        if below.shared > match.shared or (goes_on and below.reason == "diverged"):
            match = replace(match, shared=below.shared, reason=below.reason)
    reason = match.reason
    while used.parent is not None and used.end > match.resume:
        used = used.parent
    lost = evicted.look(np.frombuffer(query.data, "<i4"), used)
    if lost > match.shared:
        return Miss("evicted", match.shared, match.resume, held=lost)
    found = [find(other, query).at for other in named]
    if found and max(found) > match.shared:
        return Miss("salt", match.shared, match.resume, held=max(found))
    if reason is None:
        return None
    beyond = parting(tree, query)
    # Memory may have less of the prompt than the tier, or nothing beyond what is shared.
    has_less = known < match.shared or not beyond.other
    if has_less and below is not None and below.shared == match.shared:
        beyond = below.parting or beyond
    if reason == "no_checkpoint":
        why: Missing = "never_taken"
        if match.resume < lost:
            why = "evicted"
        elif beyond.reached == "decode":
            why = "other_origin"
        return Miss(reason, match.shared, match.resume, why=why)
    if reason == "diverged":
        other = np.frombuffer(beyond.other, "<i4")
        return Miss(reason, match.shared, match.resume, other=other, origin=beyond.origin)
    return Miss(reason, match.shared, match.resume)
