"""The prefix cache: what prompts share is computed once."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from rewarm.accel import heap
from rewarm.errors import InvalidOption, ModelMismatch
from rewarm.values import Boundary, Cost, Kind, Match, Miss, Origin

from .core import CacheCore, budget_of
from .find import Query, ResumePoint, find
from .model import TokenIds, checked_tokens
from .pins import Lease
from .tiers.base import Found
from .tiers.fetch import Fetch, Worth
from .tiers.lower import SILENCE
from .tiers.promote import Promotion
from .tree import Node, Tree, encode
from .views.miss import Missed, known_below, match_with, why
from .views.stats import Stats
from .views.survey import Survey, survey_of
from .views.verify import digest, verify

log = logging.getLogger("rewarm")

AskTiers = bool | Sequence[Found]
"""True asks the tiers and waits for them. Answers of `ask_tiers` are used instead."""


class PrefixCache(CacheCore):
    """A tree of prompt state for one model: match, acquire, compute, commit.

    Calls may come from any thread: what the tree holds is evaluated.
    """

    def match(
        self,
        tokens: TokenIds,
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
        *,
        tiers: AskTiers = True,
    ) -> Match:
        """Say how much of a prompt could be reused now. Changes nothing.

        It asks lower tiers and waits for them, without the lock, unless `tiers` is false or holds
        what `ask_tiers` returned."""
        answers = self.ask_tiers(tokens, salt, boundaries) if tiers is True else tiers or ()
        with self._looking_for(tokens, salt, boundaries, keep=False) as (query, tree):
            return match_with(tree, query, answers)

    def miss(
        self,
        tokens: TokenIds,
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
        *,
        other_salts: Sequence[str] = (),
        tiers: AskTiers = True,
    ) -> Missed:
        """Say how much of a prompt could be reused now, and why not more. It waits as `match` does.

        It looks at the prompt's own salt only, and at the `other_salts` that the caller names."""
        answers = self.ask_tiers(tokens, salt, boundaries) if tiers is True else tiers or ()
        with self._looking_for(tokens, salt, boundaries, keep=False) as (query, tree):
            match = match_with(tree, query, answers)
            below = max(answers, key=lambda found: found.shared, default=None)
            return Missed(match, self._why(match, tree, query, below, other_salts))

    def ask_tiers(
        self, tokens: TokenIds, salt: str | None = None, boundaries: Sequence[Boundary] = ()
    ) -> Sequence[Found]:
        """Ask lower tiers what they have of a prompt beyond memory, and wait for their answers.

        Give these to `match` or `miss` where that call must not wait."""
        if not self.tiers:
            return ()
        with self._looking_for(tokens, salt, boundaries, keep=False) as (query, tree):
            is_all_here = find(tree, query).at == query.length - 1
        return () if is_all_here else self._lower.ask(query)

    def foreign(self, tokens: TokenIds, salt: str | None = None) -> int:
        """Return the number of tokens of a prompt that lower tiers have of other models, or in
        another form, under the same salt. It waits for the tiers."""
        return self._lower.foreign(checked_tokens(tokens, self.vocabulary), salt)

    def fetch(
        self,
        tokens: TokenIds,
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
        *,
        worth: Worth | None = None,
    ) -> Fetch:
        """Begin to fetch what lower tiers have of a prompt beyond memory. Returns at once.

        The tiers are asked from fast to slow. The one with the furthest resume point is used,
        unless `worth` says that fetching takes longer than computing. Everything that takes time
        happens on other threads, and `future` is resolved at the end. Then give the fetch to
        `take_in` or to `acquire`.
        """
        with self._looking_for(tokens, salt, boundaries, keep=True) as (query, tree):
            return self._lower.fetch(query, tree, self.memory.pins, worth)

    def take_in(self, fetch: Fetch) -> Match:
        """Put what a fetch brought into the memory tree, and say what can be reused now.

        It is quick and reads nothing: damaged and wrong payloads were left out before. What does
        not fit is left out, too. Call it once `fetch.future` is resolved. Before that, it cancels
        the fetch, and uses nothing of it.
        """
        with self._entered():
            tree = self.memory.tree(fetch.query.namespace)
            return self._with_fetched(fetch, find(tree, fetch.query).at, tree, fetch.query).match

    def acquire(
        self,
        tokens: TokenIds,
        *,
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
        marks: Sequence[int] = (),
        headroom: int = 0,
        warm: bool = False,
        hint: float = 1.0,
        fetch: bool | Fetch = True,
    ) -> Lease:
        """Lease a prompt's path, with caches that stand at its resume point.

        `fetch=True` waits for what lower tiers have of the prompt, without the lock: it is for a
        thread that has nothing else to do. `fetch=False` takes what memory holds, at once. A
        resolved fetch of this prompt is taken in under the same lock as the lease, and the lease's
        match names the tier that it came from.

        `headroom` is the number of tokens that the answer may take: the caches then need not grow.
        `hint` above 1 says that this prompt is likelier than others to be asked for again.
        `warm` says that no request has asked for this yet: what it finds is not refreshed, and its
        commits evict only warm-ahead.
        """
        if not 0 < hint < math.inf:
            raise InvalidOption(f"hint={hint!r} is no likelihood: give a number above 0, such as 2")
        began = time.perf_counter()
        if not self._owned and not self._is_same():
            self.rebind()
        if fetch is True and self.tiers:
            fetch = self.fetch(tokens, salt, boundaries)
            fetch.wait(SILENCE)
        fetched = time.perf_counter()
        with self._looking_for(tokens, salt, boundaries, keep=True) as (query, tree):
            self.memory.clock += 1
            found = find(tree, query)
            matched = time.perf_counter()
            below = None
            if isinstance(fetch, Fetch):
                below = fetch.known if fetch.query.is_for(query) else None
                found = self._with_fetched(fetch, found.at, tree, query)
            found, caches = self._transfer.restored(found, tree, query, headroom)
            if below is not None:
                found = known_below(found, below)
            restored = time.perf_counter()
            cuts = self._divider.cuts(query, found, boundaries, marks)
            miss = self._why(found.match, tree, query, below) if not warm else None
            pin = self.memory.pins.take(tree, found, self.memory.clock, warm=warm, hint=hint)
            cost = Cost(
                found.match,
                resumed_at=pin.checkpoints[0].kind if pin.checkpoints else None,
                match_ms=(matched - fetched) * 1e3,
                restore_ms=(restored - matched + fetched - began) * 1e3,
                restored_bytes=pin.nbytes,
                miss=miss,
            )
            return Lease(self, query, caches, pin, cuts, cost, warm=warm, hint=hint)

    def commit(
        self, lease: Lease, stop: int, *, origin: Origin = "prefill", checkpoint: Kind | None = None
    ) -> None:
        """Store what the tree lacks of the lease's caches, which stand at `stop`.

        It never fails a request: what does not fit or cannot be read is left out, with all that
        follows it.
        """
        if lease.cache is not self:
            raise ModelMismatch("this lease belongs to another cache")
        if not lease.stored <= stop <= len(lease.tokens):
            raise InvalidOption(
                f"stop={stop!r}: give a position from {lease.stored}, where the last commit "
                f"ended, to {len(lease.tokens)}"
            )
        with self._lock:
            self.memory.drain()
            lease.position = stop
            if self.reuse == "exact" and origin == "prefill":
                self.layout.settle(lease.caches)
            if stop > self.limit:
                lease.stopped_storing = True
            was_cleared = lease.pin not in self.memory.pins.live
            if lease.stopped_storing or was_cleared or not self.layout.reusable:
                return
            if origin == "decode" and self.reuse == "exact":
                return  # decoded state has other bits than a prefill of the same tokens
            try:
                self._transfer.commit(lease, stop, origin, checkpoint)
            except Exception:
                lease.stopped_storing = True
                log.exception("a part of a prompt could not be stored; it will be computed again")

    def mark(self, lease: Lease, position: int, kind: Kind = "junction") -> None:
        """Plan a checkpoint at `position` in the prefill: another request waits for that prefix."""
        if not lease.position < position <= len(lease.tokens) - 1:
            return
        with self._lock:
            ahead = [c for c in lease.cuts if c.stop > lease.position]
            lease.cuts = self._divider.marked(ahead, position, kind)

    def mark_idle(
        self, tokens: TokenIds, salt: str | None = None, boundaries: Sequence[Boundary] = ()
    ) -> None:
        """Note that this prompt has an answer that a person will reply to. Do not call it after a
        tool call: its result follows soon."""
        with self._looking_for(tokens, salt, boundaries, keep=False) as (query, tree):
            self.memory.evictor.mark_idle(tree.walk(query.data, query.cuts).node)

    def nodes(self) -> list[Node]:
        """List the nodes that memory holds now, of all salts. They change as requests go on. Do
        not change them."""
        with self._entered():
            return self.memory.nodes()

    def stats(self) -> Stats:
        below = {tier.name: tier.stats() for tier in self.tiers}
        with self._entered():
            return Stats.of(self.memory, below)

    def survey(self) -> Survey:
        """Look at what every node holds. The lock is held for a few nodes at a time."""
        with self._entered():
            trees, clock = dict(self.memory.trees), self.memory.clock
        return survey_of(self._entered, trees, clock, self.tiers)

    def version(self) -> tuple[int, ...]:
        """Return a value that differs whenever a survey may have changed."""
        held = self.memory.ledger.held
        below = [n for tier in self.tiers for n in tier.browse().version]
        return (self.memory.clock, held.nodes, held.total, *below)

    def digest(self) -> str:
        """Hash what the trees know. Two caches with the same calls have the same hash."""
        with self._entered():
            return digest(self.memory.trees.values())

    def resize(self, memory: int | str) -> None:
        """Set another budget. What no longer fits is evicted at once, except what is leased."""
        with self._entered():
            self.memory.ledger.budget = budget_of(memory)
            self.memory.evictor.make_room()

    def trim(self, nbytes: int) -> None:
        """Evict what is worth least until no more than `nbytes` are held, or only what is leased
        is left. The budget stays as it is."""
        with self._entered():
            self.memory.evictor.trim(nbytes)

    def verify(self, *, tiers: bool = False) -> None:
        """Check every invariant of the tree and its accounting. Raises BrokenInvariant. With
        `tiers`, everything below memory is read and checked, too."""
        if tiers:
            self._lower.verify()
        with self._entered():
            verify(self.memory, self.layout)

    def flush(self, *, wait: bool = True, durable: bool = False) -> bool:
        """Give what is held to lower tiers, and wait until it outlives this process.

        Returns False where a tier refused a part, or has no space for it. Without `wait` it is only
        offered, and False means that a tier may not have taken all of it yet. `durable` takes only
        what is sure to be asked for again, such as system prompts and users' turns. A refusal of a
        tier is logged."""
        if wait:
            self._attached()
        with self._entered():
            if self._attaching is not None:
                return False
            if not wait:
                return self._lower.hand_over(durable)
        return self._lower.flush(self._entered, durable)

    def clear(self, *, give_back: bool = True, wait: bool = True) -> Sequence[Future[None]]:
        """Forget everything, in lower tiers too. Running requests go on, and store nothing more.

        Its memory goes back to the system; without `give_back`, the process keeps it. Returns a
        future for each tier's deletion. Without `wait`, these may not be resolved yet."""
        with self._entered():
            self.memory.forget()
            forgotten = self._lower.forget()
        for each in forgotten if wait else ():
            each.result()
        if give_back:
            heap.give_back()
        return forgotten

    def close(self) -> None:
        """Flush, and free everything. Lower tiers keep what they have for the next process."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            with self._lock:
                self._closed = True
                self.memory.forget()
            self._lower.close()

    @contextmanager
    def _looking_for(
        self, tokens: TokenIds, salt: str | None, boundaries: Sequence[Boundary], *, keep: bool
    ) -> Iterator[tuple[Query, Tree]]:
        """Enter, and give the query for a prompt, and its tree: see `Memory.tree`."""
        prompt = checked_tokens(tokens, self.vocabulary)
        with self._entered():
            namespace, cuts = self.namespace(salt), self._divider.grid(len(prompt), boundaries)
            query = Query(namespace, encode(prompt), cuts, self.layout, self.reuse)
            yield query, self.memory.tree(namespace, keep=keep)

    def _with_fetched(self, fetch: Fetch, before: int, tree: Tree, query: Query) -> ResumePoint:
        """Put what was fetched into its tree, end the fetch, and look for the prompt again. It
        could resume at `before`."""
        is_whole = fetch.future.done() and fetch.pin in self.memory.pins.live
        pieces = fetch.taken() if is_whole else []
        try:
            if pieces and fetch.found is not None:
                into = self.memory.tree(fetch.query.namespace)
                Promotion(self.memory, fetch.query, fetch.found, pieces).into(into)
        except Exception:
            log.exception("what was fetched could not be put into memory; it is computed again")
        fetch.cancel()
        self.memory.drain()
        found = find(tree, query)
        if found.at <= before:
            return found
        return replace(found, match=replace(found.match, tier=fetch.tier))

    def _why(
        self, match: Match, tree: Tree, query: Query, below: Found | None, salts: Sequence[str] = ()
    ) -> Miss | None:
        try:
            return why(match, tree, query, self.memory, below, salts)
        except Exception:
            log.exception("the reason of a miss could not be found")
            return Miss(match.reason, match.shared, match.resume) if match.reason else None
