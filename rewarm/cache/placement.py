"""Placement: the positions where prefill is divided, and the checkpoints to take there.

To take a checkpoint is cheap. Retention chooses which ones are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from rewarm.errors import InvalidOption
from rewarm.options import LEAST_CHUNK
from rewarm.values import Boundary, Cut, Kind

from .find import Query, ResumePoint

WEIGHTS: dict[str, float] = {
    "system": 8.0,
    "mark": 8.0,
    "user": 4.0,
    "turn": 4.0,
    "junction": 4.0,
    "end": 1.0,
    "answer": 1.0,
    "sparse": 4.0,
}
"""The likelihood that a checkpoint of each kind is asked for again, relative to one at the end of a
prompt. A chat whose end was evicted goes on from a sparse one."""

APART = LEAST_CHUNK
"""In `exact`, a durable boundary is a cut only this many tokens after the last one."""

SPARSE = 8192
"""Tokens between two checkpoints of a long span that has no other."""

NEAR = 8
"""The least number of tokens between two checkpoints. Of two closer ones, the earlier is taken."""


class Point(NamedTuple):
    position: int
    kind: Kind


def points(start: int, stop: int, wanted: Iterable[Point]) -> list[Point]:
    """Choose where to take checkpoints, in order, after `start` and up to `stop`: at the wanted
    points, at the end, and at sparse ones between them."""
    if stop <= start:
        return []
    found: list[Point] = []
    inside = sorted(wanted, key=lambda point: (point.position, -WEIGHTS[point.kind]))
    last = start
    # The end is always taken: an exact repeat resumes there.
    for point in [*(p for p in inside if start < p.position < stop), Point(stop, "end")]:
        if last and point.position - last < NEAR and point.position < stop:
            continue  # to replay the few tokens between two near points is cheap
        between = range(last + SPARSE, point.position - NEAR, SPARSE)
        found += [*(Point(position, "sparse") for position in between), point]
        last = point.position
    return found


def chunks(start: int, stop: int, chunk: int, points: Iterable[int] = ()) -> list[int]:
    """Return the cuts of `fast`: every `chunk` tokens, and at each point of a checkpoint."""
    stops = sorted({p for p in points if start < p < stop} | ({stop} if stop > start else set()))
    cuts: list[int] = []
    for begin, end in pairwise([start, *stops]):
        cuts.extend(range(begin + chunk, end, chunk))
        cuts.append(end)
    return cuts


@dataclass(frozen=True)
class Divider:
    """Divides the prefill of prompts, in the reuse mode of one cache."""

    reuse: Literal["fast", "exact"]
    chunk: int
    limit: int
    """In `fast`, nothing is stored beyond this position: see `positions.py`. It is a cut of each
    prompt that crosses it, and later cuts are counted from it. So no stored row comes from a chunk
    that crosses it, and after a hit the later chunks are those of a cold run."""

    def grid(self, tokens: int, boundaries: Sequence[Boundary]) -> list[int]:
        """Return the prompt's own cuts in `exact`, and none in `fast`. The last chunk ends
        unfinished.

        A cut lies at a durable boundary at least `APART` tokens after the last cut, and every
        `chunk` tokens otherwise. It depends only on what lies before it: a longer prompt never
        moves it.
        """
        cuts: list[int] = []
        if self.reuse == "fast":
            return cuts
        durable = sorted(b.position for b in boundaries if b.durable)
        last, stop = 0, tokens - 1
        while last < stop:
            following = bisect_left(durable, last + APART)
            last = min([last + self.chunk, *durable[following : following + 1]])
            cuts.append(min(last, stop))
        return cuts

    def cuts(
        self, query: Query, found: ResumePoint, boundaries: Sequence[Boundary], marks: Sequence[int]
    ) -> list[Cut]:
        """Give the positions at which prefill stops, and the checkpoints to take there. The last
        token of a prompt is left to the first decode step."""
        for boundary in boundaries:
            if boundary.kind is not None and boundary.kind not in WEIGHTS:
                raise InvalidOption(
                    f"boundary kind {boundary.kind!r} is unknown: give one of {', '.join(WEIGHTS)}"
                )
        start, stop = found.at, query.length - 1
        last = min(stop, self.limit)
        wanted = [Point(position, "mark") for position in marks]
        wanted += [Point(b.position, b.kind) for b in boundaries if b.kind]
        if found.junction > start:
            wanted.append(Point(found.junction, "junction"))
        taken = points(start, last, wanted)
        if self.reuse == "fast":
            # Where rows hold everything, no checkpoint is taken.
            takes = query.layout.has_state or query.layout.has_window
            kinds = {p.position: p.kind for p in taken} if takes else {}
            stops = chunks(start, last, self.chunk, kinds) + chunks(last, stop, self.chunk)
            return [Cut(stop, kinds.get(stop)) for stop in stops]
        stops = [c for c in query.cuts if c > start]
        # A longer prompt shares only the whole chunks of this one: the end is taken at the last.
        kinds = dict.fromkeys(stops[-2:-1], "end")
        for point in taken:
            # The grid does not move: a checkpoint is taken at the cut before its point.
            cut = max((c for c in stops if c <= point.position), default=None)
            if cut is not None and WEIGHTS[point.kind] > WEIGHTS.get(kinds.get(cut, ""), 0.0):
                kinds[cut] = point.kind
        return [Cut(stop, kinds.get(stop)) for stop in stops]

    def marked(self, cuts: list[Cut], position: int, kind: Kind) -> list[Cut]:
        """Add a checkpoint at `position`; in `exact`, at the cut before it."""
        if position > self.limit:
            return cuts
        if self.reuse == "fast" and all(c.stop != position for c in cuts):
            cuts = sorted([*cuts, Cut(position, None)])
        at = max((c.stop for c in cuts if c.stop <= position), default=None)
        return [Cut(c.stop, kind) if c.stop == at and c.checkpoint is None else c for c in cuts]
