"""The thread of a tier. It makes all calls of the tier, in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from ..find import Query
from ..tree import Node
from .base import Found, Offer, Take, Tier

log = logging.getLogger("rewarm")

T = TypeVar("T")
U = TypeVar("U")

MOST_WAITING = 128 << 20
"""Bytes of payloads that may wait to be offered: they are in memory, beside the budget."""


class Lane:
    """One tier, its thread, and the nodes of memory that it was not offered yet."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.fresh: dict[Node, None] = {}
        """Nodes of memory that are to be offered. The cache's lock guards them."""
        self.returned: deque[Node] = deque()
        """Nodes that the tier did not take, or could not keep after all."""
        self.waiting = 0
        """Bytes of offers that the tier has not seen yet."""
        self._count = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a tier that never answers must not keep the process from ending.
        name = f"rewarm-{tier.name}"
        threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True).start()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Make a call on the tier's thread, after all calls that were submitted before."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def find(self, query: Query) -> Future[Found | None]:
        """Ask what the tier could give; None where it has nothing, fails, or cannot be right."""

        def checked(found: Found | None) -> Found | None:
            # At least one token is left to compute.
            if found is None or not (0 <= found.resume < query.length and found.nbytes >= 0):
                return None
            shared = min(max(found.shared, found.resume), query.length)
            return replace(found, tier=self.tier.name, shared=shared)

        return self._ask(checked, "could not be asked", self.tier.find, query)

    def fetch(self, found: Found, take: Take) -> Future[None]:
        """Begin a fetch. The future is resolved when nothing more comes."""
        return self._ask(lambda _: None, "could not be read from", self.tier.fetch, found, take)

    def offer(self, offers: Sequence[Offer]) -> Future[None]:
        """Make offers. `returned` gets the nodes of those that the tier did not take."""
        nbytes = sum(offer.nbytes for offer in offers)
        with self._count:
            self.waiting += nbytes
        return self.submit(self._offer, offers, nbytes)

    def stop(self) -> None:
        """End the thread once all that was submitted is done. Does not wait for it."""
        self._jobs.put(None)

    def _offer(self, offers: Sequence[Offer], nbytes: int) -> None:
        try:
            refused = list(self.tier.offer(offers))
        except Exception:
            log.exception("the tier %r could not be offered anything", self.tier.name)
            refused = [offer.receipt for offer in offers]
        given = {offer.receipt for offer in offers}
        for receipt in refused:
            # An offer that was taken and then lost may have lost the nodes above it, too.
            self.returned.extend(receipt.nodes[-1:] if receipt in given else receipt.nodes)
        with self._count:
            self.waiting -= nbytes

    def _ask(
        self, change: Callable[[T], U], failed: str, call: Callable[..., Future[T]], *args: Any
    ) -> Future[U | None]:
        """Make a call whose answer comes later, and change it. None after a failure."""
        answer: Future[U | None] = Future()

        def settle(done: Future[Any]) -> None:
            found = None
            try:
                found = change(done.result())
            except OSError as error:  # an expected error, which the tier has logged
                log.debug("the tier %r %s: %s", self.tier.name, failed, error)
            except BaseException:
                log.exception("the tier %r %s", self.tier.name, failed)
            answer.set_result(found)

        def called(outer: Future[Future[T]]) -> None:
            if outer.exception() is not None:
                settle(outer)
            else:
                outer.result().add_done_callback(settle)

        self.submit(call, *args).add_done_callback(called)
        return answer


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    for job in iter(jobs.get, None):
        job()
        del job  # a waiting thread must not keep the job's payloads alive
