"""Chunking in `fast`, and the grid of `exact`."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rewarm.cache.placement import APART, Divider, chunks
from rewarm.cache.positions import FAR
from rewarm.values import Boundary

positions = st.lists(st.integers(1, 600), max_size=12)


def grid(stop: int, chunk: int, durable: list[int]) -> list[int]:
    """Return the cuts of a prompt that ends after `stop`."""
    return Divider("exact", chunk, FAR).grid(stop + 1, [Boundary(at) for at in durable])


@given(st.integers(0, 300), st.integers(0, 300), st.integers(16, 128), positions)
def test_chunks_cover_the_span_and_stop_at_every_point(
    start: int, length: int, chunk: int, points: list[int]
) -> None:
    stop = start + length
    cuts = chunks(start, stop, chunk, points)
    assert cuts == sorted(set(cuts))
    assert cuts[-1:] == ([stop] if length else [])
    assert all(0 < b - a <= chunk for a, b in pairwise([start, *cuts]))
    assert {p for p in points if start < p < stop} <= set(cuts)


@given(st.integers(1, 600), st.integers(1, 600), st.integers(16, 128), positions, positions)
def test_what_comes_later_never_moves_an_earlier_cut(
    stop: int, more: int, chunk: int, durable: list[int], later: list[int]
) -> None:
    before = [b for b in durable if b <= stop]
    after = [stop + b for b in later]
    short = grid(stop, chunk, before)
    long = grid(stop + more, chunk, before + after)
    # The last cut of the shorter prompt ends an unfinished chunk.
    assert short[:-1] == [c for c in long if c < stop]


@given(st.integers(1, 600), st.integers(16, 128), positions)
def test_the_grid_cuts_at_durable_boundaries_that_are_far_enough_apart(
    stop: int, chunk: int, durable: list[int]
) -> None:
    cuts = [0, *grid(stop, chunk, durable)]
    assert all(b - a <= chunk for a, b in pairwise(cuts))
    for a, b in pairwise(cuts[:-1]):
        assert b - a >= APART
        assert b - a == chunk or b in durable
    for boundary in durable:
        if boundary < stop:
            last = max(c for c in cuts if c < boundary)
            assert boundary in cuts or boundary - last < APART
