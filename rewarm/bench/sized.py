"""Payloads that only have sizes, for the real tree, placement and retention without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from rewarm.cache import PrefixCache
from rewarm.cache.layout import Layout, SpanGroup
from rewarm.cache.payload import SEGMENT
from rewarm.cache.worth import Retention

from .profiles import Profile

VOCABULARY = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SizedRows:
    start: int
    stop: int
    width: int
    """The bytes of a token."""

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.width

    @property
    def buffers(self) -> int:
        return -(-(self.stop - self.start) // SEGMENT)

    def split(self, at: int) -> tuple[SizedRows | None, SizedRows | None]:
        return (
            SizedRows(self.start, min(at, self.stop), self.width) if self.start < at else None,
            SizedRows(max(at, self.start), self.stop, self.width) if at < self.stop else None,
        )


@dataclass(frozen=True, slots=True)
class SizedState:
    nbytes: int
    buffers: int = 1


@dataclass(frozen=True, slots=True)
class SizedPacking:
    width: int

    def nbytes(self, tokens: int) -> int:
        return tokens * self.width

    def buffers(self, tokens: int) -> int:
        return -(-tokens // SEGMENT)


@dataclass
class SizedLayout:
    """A `Layout` whose answers come from a profile."""

    profile: Profile
    reusable: bool = True
    kept: int = 0
    unknown: list[str] = field(default_factory=list)

    @property
    def has_rows(self) -> bool:
        return self.profile.row_bytes > 0

    @property
    def has_window(self) -> bool:
        return self.profile.window_bytes > 0

    @property
    def has_state(self) -> bool:
        return self.profile.state_bytes > 0

    @property
    def longest_window(self) -> int:
        return self.profile.window

    def reach(self, position: int) -> int:
        return max(0, position - self.profile.window) if self.has_window else position

    def first_row(self, caches: list[Any], position: int) -> int:
        # A prefill commits chunk by chunk, so all rows of the last chunk are still there.
        return 0

    def stands_at(self, caches: list[Any], position: int) -> bool:
        return True

    def packing(self, group: SpanGroup, caches: list[Any], start: int, stop: int) -> SizedPacking:
        return SizedPacking(self._width(group))

    def pack(self, group: SpanGroup, caches: list[Any], start: int, stop: int) -> SizedRows:
        return SizedRows(start, stop, self._width(group))

    def state_bytes(self, caches: list[Any]) -> int:
        return self.profile.state_bytes

    def capture(self, caches: list[Any]) -> SizedState:
        return SizedState(self.profile.state_bytes)

    def build(self, blank: list[Any], *_: Any) -> list[Any]:
        return blank

    def _width(self, group: SpanGroup) -> int:
        return self.profile.row_bytes if group == "rows" else self.profile.window_bytes


class _NoModel:
    """The rest of a model that `PrefixCache` asks for."""

    args = {"vocab_size": VOCABULARY}  # noqa: RUF012

    def parameters(self) -> dict[str, Any]:
        return {}


def sized_cache(
    profile: Profile, memory: int, retention: Retention | None = None, chunk: int = 2048
) -> PrefixCache:
    """Make a cache that stores sizes instead of payloads."""
    cache = PrefixCache(
        _NoModel(),
        memory=memory,
        chunk=chunk,
        make_cache=list,
        layout=cast(Layout, SizedLayout(profile)),
        retention=retention,
    )
    cache.memory.ledger.max_buffers = 1 << 60
    cache.memory.evictor.on_evict = None  # no request asks for the reason of a miss
    return cache
