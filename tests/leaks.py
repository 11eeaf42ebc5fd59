"""Measure the memory that is active beyond what a tree holds."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator

import mlx.core as mx
import pytest

from rewarm.cache import PrefixCache

COMPILED = 4096
"""The bytes of constants that mlx-lm's compiled functions keep for shapes they have seen."""


def payload_bytes(cache: PrefixCache) -> int:
    """Count the bytes of the arrays that the tree holds."""
    held = cache.stats().bytes["memory"]
    return held["rows"] + held["window"] + held["checkpoint"]


class Surplus:
    """The growth of active memory beyond what the tree holds, since this was made."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._before = mx.get_active_memory() - payload_bytes(cache)

    def left_over(self) -> int:
        return mx.get_active_memory() - payload_bytes(self._cache) - self._before

    def left_over_after_its_turn(self) -> int:
        """Wait for the engine's last turn, which ends after the sink is told of the end."""
        deadline = time.monotonic() + 5
        while self.left_over() > COMPILED and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.left_over()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Switch off the collector, which would hide a cycle, and count no freed buffer as active."""
    limit = mx.set_cache_limit(0)
    gc.disable()
    logging.disable()  # pytest would keep every exception's frames with its records
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
        mx.set_cache_limit(limit)
