"""The tree as JSON: the spans with the most below them, and the rest of each place in one entry.

A survey walks every node, so each is used until something has changed. After a slow survey, the
next one is delayed until surveys take only a small share of the time. Words of prompts are shown to
the tenant whose salt they were sent with; others see sizes only."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rewarm.cache import PrefixCache
from rewarm.cache.views.survey import BYTES, COLUMNS, KINDS, SUMMED, Survey
from rewarm.generate.why.labels import Label, Labels, MessageStart

from ..errors import ApiError

SHARE = 0.01
"""The share of a thread's time that long surveys may take."""
SHORT = 0.01
"""A survey that takes fewer seconds is taken again whenever something has changed."""
LABELS = 200
"""The number of spans in a reply that have words: those with the most below them."""


@dataclass(frozen=True)
class TreeQuery:
    """The part of the tree that is asked for."""

    root: str | None = None
    depth: int = 1 << 30
    limit: int = 256
    offset: int = 0
    """The number of the root's largest children that are left out."""
    salt: str | None = None


class TreeView:
    """Take surveys, and make replies from the latest one. Called on the server's own threads."""

    def __init__(self, cache: PrefixCache, labels: Labels) -> None:
        self.cache = cache
        self.labels = labels
        self._lock = threading.Lock()
        self._survey: Survey | None = None
        self._version: tuple[int, ...] = ()
        self._next = 0.0
        self.words: dict[str, Label] = {}

    def tag(self, query: TreeQuery) -> str:
        """Make a tag of a reply, which stays the same for as long as the reply does."""
        return f"{hash((self._version, query)) & (1 << 64) - 1:016x}"

    def forget(self) -> None:
        """Forget all words: the cache was cleared."""
        with self._lock:
            self._survey, self.words, self._next = None, {}, 0.0

    def refresh(self) -> None:
        """Take a survey, if something has changed and the last one is long enough ago."""
        # A request that comes meanwhile gets the last survey.
        if not self._lock.acquire(blocking=self._survey is None):
            return
        try:
            version = self.cache.version()
            began = time.monotonic()
            if self._survey is not None and (version == self._version or began < self._next):
                return
            self._survey, self._version = self.cache.survey(), version
            cost = time.monotonic() - began
            self._next = 0.0 if cost < SHORT else began + cost / SHARE
        finally:
            self._lock.release()

    def reply(self, query: TreeQuery) -> dict[str, Any]:
        survey = self._survey
        while survey is None:  # cleared between two looks
            self.refresh()
            survey = self._survey
        root = 0 if query.root is None else survey.find(query.root)
        if root is None:
            gone = f"root={query.root}: there is no such span any more"
            raise ApiError(404, f"{gone}; leave it out for the whole tree")
        page = _Page(self, survey, root, query)
        body = page.body()
        if page.words:
            self.words = page.words
        return body


@dataclass
class _Page:
    """One reply, as it is made."""

    view: TreeView
    survey: Survey
    root: int
    query: TreeQuery
    words: dict[str, Label] = field(default_factory=dict)
    _rows: list[int] = field(default_factory=list)
    """The rows below the root that are shown, parents first."""
    _taken: Counter[int] = field(default_factory=Counter)
    """The number of children of each row that are shown."""
    _last_roles: dict[int, str | None] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        survey = self.survey
        self._choose()
        namespace = self.view.cache.namespace(self.query.salt)
        own = next((row for row, owner in survey.owners.items() if owner == namespace), None)
        yours = range(0) if own is None else range(own, own + int(survey.size[own]))
        lit = self._last_use(yours)
        root, *nodes = self._nodes([self.root, *self._rows])
        for row, node in zip(self._rows, nodes, strict=True):
            if row in survey.owners:
                node["yours"] = row == own
            elif row in yours:
                node["used_last"] = bool(lit) and node["hits"] > 0 and node["last_used"] == lit
                if len(self.words) < LABELS:
                    node["label"] = vars(self._label(row))
        merged = list(self._merged())
        return {"clock": survey.clock, "root": root, "nodes": nodes, "merged": merged}

    def _choose(self) -> None:
        """Choose the rows with the most tokens below them, from the root on."""
        tokens = self.survey.sums[:, SUMMED.index("tokens")]
        queue: list[tuple[int, int, int, int, int]] = []

        def put(above: int, place: int, depth: int) -> None:
            siblings = self.survey.children(above)
            if place < len(siblings) and depth <= self.query.depth:
                row = int(siblings[place])
                heapq.heappush(queue, (-int(tokens[row]), row, above, place, depth))

        put(self.root, self.query.offset, 1)
        while queue and len(self._rows) < self.query.limit:
            _, row, above, place, depth = heapq.heappop(queue)
            self._rows.append(row)
            self._taken[above] += 1
            put(above, place + 1, depth)
            put(row, 0, depth + 1)

    def _nodes(self, rows: list[int]) -> Iterator[dict[str, Any]]:
        survey = self.survey
        # Lists are taken once: reading an array cell by cell would cost more than all the rest.
        cells, sums = survey.cells[rows].tolist(), survey.sums[rows].tolist()
        leaves = (survey.size[rows] == 1).tolist()
        names = {row: survey.name(row) for row in {*rows, *(c[0] for c in cells)} if row >= 0}
        for row, cell, below, leaf in zip(rows, cells, sums, leaves, strict=True):
            parent, _, _, start, tokens, kind, hits, last_used = cell[:8]
            node: dict[str, Any] = {
                "id": names[row],
                "parent": names.get(parent),
                "start": start,
                "tokens": tokens,
                "bytes": _bytes(cell, self.survey.tiers),
                "checkpoint": KINDS[kind],
                "hits": hits,
                "last_used": last_used,
            }
            if not leaf:
                node["with_below"] = _summed(below, self.survey.tiers)
            yield node

    def _merged(self) -> Iterator[dict[str, Any]]:
        """Sum up the children that are not in the reply, for each place that has some."""
        for row in [self.root, *self._rows]:
            first = self._taken[row] + (self.query.offset if row == self.root else 0)
            rest = self.survey.children(row)[first:]
            if len(rest):
                yield {
                    "parent": self.survey.name(row),
                    "count": len(rest),
                    "offset": first,
                    **_summed(self.survey.sums[rest].sum(axis=0).tolist(), self.survey.tiers),
                }

    def _last_use(self, rows: range) -> int:
        """Give the clock of the newest request that found something in these rows."""
        span = slice(rows.start, rows.stop)
        used = self.survey.column("last_used")[span]
        # Spans that only the disk has may have a later time, at which no request used them.
        found = (self.survey.column("hits")[span] > 0) & (used <= self.survey.clock)
        return int(np.max(used[found], initial=0))

    def _label(self, row: int) -> Label:
        survey = self.survey
        name = f"{survey.name(row)}+{int(survey.cells[row, COLUMNS.index('tokens')])}"
        label = self.view.words.get(name)
        if label is None:
            role_before = self._role_at_end(int(survey.cells[row, 0]))
            label = self.view.labels.label(survey.keys[row], self._starts(row), role_before)
        self.words[name] = label
        return label

    def _starts(self, row: int) -> list[MessageStart]:
        before, above = b"", int(self.survey.cells[row, 0])
        while above > 0 and len(before) < self.view.labels.longest:
            before = self.survey.keys[above][-self.view.labels.longest :] + before
            above = int(self.survey.cells[above, 0])
        return self.view.labels.starts(self.survey.keys[row], before)

    def _role_at_end(self, row: int) -> str | None:
        """Give the role of the message that a span ends in."""
        climbed = []
        while row > 0 and row not in self._last_roles:
            climbed.append(row)
            starts = self._starts(row)
            if starts:
                self._last_roles[row] = starts[-1].role
                break
            row = int(self.survey.cells[row, 0])
        role = self._last_roles.get(row)
        self._last_roles.update(dict.fromkeys(climbed, role))
        return role


def _bytes(values: list[int], tiers: Sequence[str]) -> dict[str, dict[str, int]]:
    """Give the bytes by tier and kind. They are the last values of a row, and of a sum."""
    found: dict[str, dict[str, int]] = {}
    names = [(tier, kind) for tier in tiers for kind in BYTES]
    for (tier, kind), nbytes in zip(names, values[-len(names) :], strict=True):
        if nbytes:
            found.setdefault(tier, {})[kind] = nbytes
    return found


def _summed(values: list[int], tiers: Sequence[str]) -> dict[str, Any]:
    counts = dict(zip(SUMMED[:3], values[:3], strict=True))  # nodes, tokens, checkpoints
    return {**counts, "bytes": _bytes(values, tiers)}
