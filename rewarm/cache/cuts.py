"""Cuts: where prefill is divided into chunks. Pure functions of positions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

APART = 16
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
    last = 0
    boundaries = sorted(set(durable))
    i = 0
    while True:
        while i < len(boundaries) and boundaries[i] < last + APART:
            i += 1
        last += chunk
        if i < len(boundaries) and boundaries[i] < last:
            last = boundaries[i]
        if last >= stop:
            break
        cuts.append(last)
    return [*cuts, stop] if stop > 0 else []
