"""Cuts: where prefill is divided into chunks, and what is taken there."""

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
    """The cuts of `fast`: every `chunk` tokens, and at each point where a checkpoint is taken."""
    stops = sorted({p for p in points if start < p < stop} | ({stop} if stop > start else set()))
    cuts: list[int] = []
    for begin, end in pairwise([start, *stops]):
        cuts.extend(range(begin + chunk, end, chunk))
        cuts.append(end)
    return cuts


def grid(stop: int, chunk: int, durable: Iterable[int] = ()) -> list[int]:
    """The cuts of `exact` up to `stop`, which ends the last, unfinished chunk.

    A cut lies at a durable boundary at least `APART` tokens after the last cut, and every `chunk`
    tokens otherwise. It depends on what lies before it only: a longer prompt never moves it.
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
    """Divides the prefill of prompts, as the mode of one cache has it."""

    reuse: Literal["fast", "exact"]
    chunk: int
    checkpoints: bool
    """False where rows hold everything, so no checkpoint is taken."""
    limit: int = FAR
    """In `fast`, the position beyond which nothing is stored: see `positions.py`. It is a cut of
    each prompt that crosses it, and the cuts behind it depend on nothing else. So no stored row is
    of a chunk that crosses it, and a hit goes on as a cold run does."""

    def grid(self, tokens: int, boundaries: Sequence[Boundary]) -> list[int]:
        """The prompt's own cuts in `exact`, which depend on nothing else; none in `fast`."""
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
        # A prompt that goes on where this one ends shares its whole chunks only.
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
