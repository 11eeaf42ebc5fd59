"""What is told of a cache: how much it holds, and what it did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """What the cache holds and did."""

    entries: int
    checkpoints: int
    tokens: int
    budget: int
    bytes: dict[str, dict[str, int]]
    """Really held, by tier, then by kind: rows, window, checkpoint; index is the tree itself."""
    buffers: int
    hits: int
    misses: int
    evictions: int
    evicted: dict[str, int]
    """Evictions from memory by what went: leaf, checkpoint, window."""
    leases: int

    @property
    def held(self) -> int:
        """All payload bytes in memory, without the index."""
        return sum(n for kind, n in self.bytes["memory"].items() if kind != "index")
