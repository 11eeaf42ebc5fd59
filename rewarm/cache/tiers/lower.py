"""All tiers below memory: the cache offers them what memory has, and asks them for the rest.

Each tier has a thread, which makes all calls of the tier in order.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from rewarm.values import Tokens

from ..find import Query, find
from ..layout import Layout
from ..pins import Pins
from ..placement import WEIGHTS
from ..tree import Node, Tree, tree_of
from ..worth import Item
from .base import Found, Offer, Receipt, Take, Tier
from .fetch import Fetch, Worth

log = logging.getLogger("rewarm")

T = TypeVar("T")
U = TypeVar("U")

MOST_WAITING = 128 << 20
"""Bytes of payloads that may wait to be offered: they are in memory, beside the budget."""

DURABLE = 4.0
"""The least weight of the kinds of checkpoints that a `durable` flush offers."""

SILENCE = 10.0
"""Seconds without a byte or an answer after which a tier is not waited for any longer."""

Entered = Callable[[], AbstractContextManager[None]]


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


class Lower:
    """The tiers of one cache. A method is called under the cache's lock and does not wait, unless
    its docstring says otherwise."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.lanes: list[Lane] = []
        self._weights: set[str] = set()

    def open(self, tiers: Iterable[Tier], trees: Iterable[Tree]) -> None:
        """Begin to use these tiers. What the trees hold is offered first."""
        self.lanes += [Lane(tier) for tier in tiers]
        for tree in trees:
            for node in tree.nodes():
                self.changed(node)

    # Down

    def changed(self, node: Node) -> None:
        """Note a node of memory that is new or holds something new."""
        for lane in self.lanes:
            lane.fresh[node] = None

    def gone(self, node: Node) -> None:
        """Forget a node that memory has removed."""
        for lane in self.lanes:
            lane.fresh.pop(node, None)

    def evicting(self, item: Item) -> None:
        """Offer, for the last time, an item that memory is about to evict."""
        if item.what == "leaf":
            self.gone(item.node)
        if not item.is_warm and self._is_worth(item.node, durable=False):
            for lane in self.lanes:
                if lane.waiting < MOST_WAITING:
                    lane.offer([self._offer(item.node)])

    def hand_over(self, durable: bool) -> bool:
        """Offer what is new. Returns True where every tier had taken everything before."""
        done = True
        for lane in self.lanes:
            self._take_back(lane)
            offers = self._fresh_offers(lane, list(lane.fresh), durable)
            done &= not (offers or lane.waiting)
            if offers:
                lane.offer(offers)
        return done

    def flush(self, entered: Entered, durable: bool) -> bool:
        """Offer what is new, and wait until it is kept. Called without the lock."""
        kept = [self._flush(lane, entered, durable) for lane in self.lanes]
        return all(kept)

    def _flush(self, lane: Lane, entered: Entered, durable: bool) -> bool:
        with entered():
            self._take_back(lane)
            # Only what there is now: requests may go on, and this must end.
            todo = [node for node in lane.fresh if self._is_wanted(node, durable)]
        while True:
            with entered():
                offers = self._fresh_offers(lane, todo, durable)
            lane.offer(offers).result()
            try:
                kept = lane.submit(lane.tier.flush, None).result()
            except Exception:
                log.exception("the tier %r could not be flushed", lane.tier.name)
                kept = False
            lane.offer([]).result()  # what it could not keep after all comes back
            before = len(todo)
            with entered():
                self._take_back(lane)
                todo = [n for n in todo if n in lane.fresh and self._is_wanted(n, durable)]
            if not (todo and kept and len(todo) < before):
                return kept and not todo

    def _take_back(self, lane: Lane) -> None:
        """Put the nodes that a tier did not keep back among the fresh ones."""
        while lane.returned:
            node = lane.returned.popleft()
            if node.parent is not None:
                lane.fresh[node] = None

    def _fresh_offers(self, lane: Lane, nodes: list[Node], durable: bool) -> list[Offer]:
        """Make offers of as many of these nodes as may wait, and take them out of `fresh`."""
        offers: list[Offer] = []
        nbytes = lane.waiting
        for node in nodes:
            if nbytes >= MOST_WAITING:
                break
            if node in lane.fresh and self._is_wanted(node, durable):
                del lane.fresh[node]
                offers.append(self._offer(node))
                nbytes += offers[-1].nbytes
        return offers

    def _offer(self, node: Node) -> Offer:
        tree = tree_of(node)
        nodes = tuple(node.path())[::-1]
        cuts = () if tree.splits else tuple(each.end for each in nodes)
        return Offer(tree.namespace, tuple(map(_copied, nodes)), cuts, Receipt(nodes))

    def _is_wanted(self, node: Node, durable: bool) -> bool:
        return not node.warm and self._is_worth(node, durable)

    def _is_worth(self, node: Node, durable: bool) -> bool:
        """True where an offer is worth it; if `durable`, where a node is sure to be asked for."""
        checkpoint = node.checkpoint
        if durable:
            return checkpoint is not None and WEIGHTS[checkpoint.kind] >= DURABLE
        return checkpoint is not None or not self.layout.has_state

    # Up

    def fetch(self, query: Query, tree: Tree, pins: Pins, worth: Worth | None) -> Fetch:
        """Begin to fetch what the tiers have of a prompt. It pins what memory has of it."""
        point, walk = find(tree, query), tree.walk(query.data, query.cuts)
        query = replace(query, known=walk.shared if tree.splits else walk.node.end)
        self._weights.add(query.namespace.weights)
        pin = pins.hold(tree, walk.node)
        lanes = self.lanes if point.at < query.length - 1 else []
        return Fetch(query, point.at, pin, pins.dropped, worth, lanes)

    def ask(self, query: Query) -> list[Found]:
        """Ask all tiers what they could give. Called without the lock; it waits for them."""
        asked = [lane.find(query) for lane in self.lanes]
        wait(asked, SILENCE)
        answers = [future.result() for future in asked if future.done()]
        return [found for found in answers if found is not None]

    def foreign(self, prompt: Tokens, salt: str | None) -> int:
        """See `Tier.foreign`. Called without the lock; it waits."""
        asked = [lane.submit(lane.tier.foreign, prompt, salt) for lane in self.lanes]
        done = wait(asked, SILENCE).done
        return max((f.result() for f in done if f.exception() is None), default=0)

    def verify(self) -> None:
        """See `Tier.verify`. Called without the lock; it waits."""
        for lane in self.lanes:
            lane.submit(lane.tier.verify).result()

    def forget(self) -> list[Future[None]]:
        """Have everything of this model deleted, of every salt. Returns the futures to wait for."""
        for lane in self.lanes:
            lane.fresh.clear()
        return [lane.submit(lane.tier.forget, self._weights) for lane in self.lanes]

    def close(self) -> None:
        """Close the tiers, and wait for it. Called without the lock."""
        for lane in self.lanes:
            error = lane.submit(lane.tier.close).exception()
            lane.stop()
            if error is not None:
                log.error("the tier %r could not be closed", lane.tier.name, exc_info=error)


def _copied(node: Node) -> Node:
    copy = Node(None, node.start, node.key, node.origin, hits=node.hits)
    copy.rows, copy.window, copy.checkpoint = node.rows, node.window, node.checkpoint
    return copy


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    for job in iter(jobs.get, None):
        job()
        del job  # a waiting thread must not keep the job's payloads alive
