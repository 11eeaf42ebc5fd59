"""The figures of a cache: how much it holds, and what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ..find import MEMORY
from ..memory import Memory
from ..tiers.base import TierStats
from ..worth import What


@dataclass(frozen=True)
class Stats:
    """The figures of a cache at one moment."""

    entries: int
    checkpoints: int
    tokens: int
    buffers: int
    hits: int
    misses: int
    leases: int
    tiers: Mapping[str, TierStats]
    """By name: memory first, then what lies below it, from fast to slow."""

    @staticmethod
    def of(memory: Memory, below: Mapping[str, TierStats]) -> Stats:
        ledger, pins, held = memory.ledger, memory.pins, memory.ledger.held
        evicted = {what: memory.evictor.evicted[what] for what in get_args(What)}
        return Stats(
            entries=held.nodes,
            checkpoints=held.checkpoints,
            tokens=held.tokens,
            buffers=held.buffers,
            hits=pins.hits,
            misses=pins.misses,
            leases=len(pins.live),
            tiers={MEMORY: TierStats(ledger.budget, dict(held.kinds), evicted), **below},
        )

    def shown(self) -> dict[str, Any]:
        """Return the figures for `GET /v1/cache`."""
        names = (
            *("entries", "checkpoints", "tokens", "budget", "bytes", "buffers", "hits", "misses"),
            *("evictions", "evicted", "leases", "held"),
        )
        return {name: getattr(self, name) for name in names}

    @property
    def memory(self) -> TierStats:
        return self.tiers[MEMORY]

    @property
    def below(self) -> dict[str, TierStats]:
        return {name: tier for name, tier in self.tiers.items() if name != MEMORY}

    @property
    def budget(self) -> int:
        return self.memory.budget

    @property
    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes held, by tier and kind; `index` is the tree itself."""
        return {name: dict(tier.kinds) for name, tier in self.tiers.items()}

    @property
    def held(self) -> int:
        """All payload bytes in memory, without the index."""
        return sum(n for kind, n in self.memory.kinds.items() if kind != "index")

    @property
    def evictions(self) -> int:
        return sum(self.evicted.values())

    @property
    def evicted(self) -> Mapping[str, int]:
        """Evictions from memory by what went: leaf, checkpoint, window."""
        return {what: count for what, count in self.memory.evictions.items() if count}
