"""Cuts: the positions where prefill is divided, and the checkpoints to take there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from rewarm.errors import InvalidOption
from rewarm.options import LEAST_CHUNK
from rewarm.values import Boundary, Cut, Kind

from .placement import WEIGHTS, Shape, points
from .positions import FAR

APART = LEAST_CHUNK
"""In `exact`, a durable boundary is a cut only this many tokens after the last one."""


def chunks(start: int, stop: int, chunk: int, points: Iterable[int] = ()) -> list[int]:
    """Return the cuts of `fast`: every `chunk` tokens, and at each point of a checkpoint."""
    stops = sorted({p for p in points if start < p < stop} | ({stop} if stop > start else set()))
    cuts: list[int] = []
    for begin, end in pairwise([start, *stops]):
        cuts.extend(range(begin + chunk, end, chunk))
        cuts.append(end)
    return cuts


def grid(stop: int, chunk: int, durable: Iterable[int] = ()) -> list[int]:
    """Return the cuts of `exact` up to `stop`, where the last chunk ends unfinished.

    A cut lies at a durable boundary at least `APART` tokens after the last cut, and every `chunk`
    tokens otherwise. It depends only on what lies before it: a longer prompt never moves it.
    """
    cuts: list[int] = []
    boundaries = sorted(durable)
    last = 0
    while last < stop:
        following = bisect_left(boundaries, last + APART)
        last = min([last + chunk, *boundaries[following : following + 1]])
        cuts.append(min(last, stop))
    return cuts


@dataclass(frozen=True)
class Divider:
    """Divides the prefill of prompts, in the reuse mode of one cache."""

    reuse: Literal["fast", "exact"]
    chunk: int
    checkpoints: bool
    """False where rows hold everything, so no checkpoint is taken."""
    limit: int = FAR
    """In `fast`, nothing is stored beyond this position: see `positions.py`. It is a cut of each
    prompt that crosses it, and later cuts are counted from it. So no stored row comes from a chunk
    that crosses it, and after a hit the later chunks are those of a cold run."""

    def grid(self, tokens: int, boundaries: Sequence[Boundary]) -> list[int]:
        """Return the prompt's own cuts in `exact`, and none in `fast`."""
        if self.reuse == "fast":
            return []
        return grid(tokens - 1, self.chunk, (b.position for b in boundaries if b.durable))

    def cuts(self, shape: Shape, own_cuts: list[int]) -> list[Cut]:
        """Give the positions at which prefill stops, and the checkpoints to take there."""
        for boundary in shape.boundaries:
            if boundary.kind is not None and boundary.kind not in WEIGHTS:
                raise InvalidOption(
                    f"boundary kind {boundary.kind!r} is unknown: give one of {', '.join(WEIGHTS)}"
                )
        last = min(shape.stop, self.limit)
        wanted = points(replace(shape, stop=last))
        kinds: dict[int, Kind] = {}
        if self.reuse == "fast":
            if self.checkpoints:
                kinds = {p.position: p.kind for p in wanted}
            stops = chunks(shape.resume, last, self.chunk, kinds)
            stops += chunks(last, shape.stop, self.chunk)
            return [Cut(stop, kinds.get(stop)) for stop in stops]
        stops = [c for c in own_cuts if c > shape.resume]
        # A longer prompt shares only the whole chunks of this one: the end is taken at the last.
        kinds = dict.fromkeys(stops[-2:-1], "end")
        for point in wanted:
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
