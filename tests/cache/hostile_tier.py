"""A tier that keeps everything in a dictionary. It may be slow, lose some, or give wrong ones."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Literal

from rewarm.cache.find import Query
from rewarm.cache.tiers.base import (
    FetchCancelled,
    Found,
    Offer,
    Receipt,
    Sealed,
    Take,
    Tier,
    resolved,
)
from rewarm.cache.tiers.seal import sealed
from rewarm.cache.tree import WIDTH

Vice = Literal["slow", "loses", "another key", "older", "damaged", "promises"]


class HostileTier(Tier):
    name = "hostile"

    def __init__(self, *vices: Vice, seed: int = 0) -> None:
        self.vices = vices
        self.draw = random.Random(seed)
        self.kept: dict[bytes, dict[Offer, list[Sealed]]] = {}

    def offer(self, offers: Sequence[Offer]) -> Sequence[Receipt]:
        for offer in offers:
            self.kept.setdefault(offer.data, {})[offer] = sealed(offer)
        return []

    def find(self, query: Query) -> Future[Found | None]:
        fits = [o for data, kept in self.kept.items() if query.data.startswith(data) for o in kept]
        if "older" not in self.vices:
            fits = [o for o in fits if o.namespace == query.namespace]
        fits = [o for o in fits if len(o.data) < len(query.data) and {*o.cuts} <= {*query.cuts}]
        best = max(fits, key=lambda o: len(o.data), default=None)
        if best is None:
            return resolved(None)
        resume = query.length - 1 if "promises" in self.vices else len(best.data) // WIDTH
        return resolved(Found(resume, 1 << 20, handle=best))

    def fetch(self, found: Found, take: Take) -> Future[None]:
        later: Future[None] = Future()
        give = partial(self._give, found.handle, take, later)
        threading.Timer(0.01 * ("slow" in self.vices), give).start()
        return later

    def _give(self, offer: Offer, take: Take, later: Future[None]) -> None:
        if "another key" in self.vices:
            every = [o for kept in self.kept.values() for o in kept]
            others = [o for o in every if not offer.data.startswith(o.data)]
            offer = self.draw.choice(others or every)
        for payload in self.kept[offer.data][offer]:
            if "damaged" in self.vices:
                name = next(n for n in payload if n[0].isdigit())
                payload = {**payload, name: payload[name] + 1}
            if "loses" not in self.vices or self.draw.random() < 0.5:
                with suppress(FetchCancelled):
                    take(payload)
        later.set_result(None)
