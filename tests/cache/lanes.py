"""The threads of tiers, for tests that wait for them."""

from __future__ import annotations

from rewarm.cache import PrefixCache


def handed_over(cache: PrefixCache) -> None:
    """Wait until the tiers have taken all that was offered to them."""
    for lane in cache._lower.lanes:
        lane.submit(lambda: None).result()
