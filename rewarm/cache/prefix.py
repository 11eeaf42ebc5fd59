"""The prefix cache: what prompts share is computed once."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from rewarm.accel import heap
from rewarm.errors import InvalidOption, ModelMismatch
from rewarm.options import parse_size
from rewarm.values import Boundary, Cost, Kind, Match, Miss, Origin

from .core import CacheCore
from .find import Query, find
from .lease import Lease
from .memory import auto_size
from .model import checked_tokens
from .placement import Shape
from .restore import known_below
from .tiers.base import Found
from .tiers.fetch import Fetch, Worth
from .tiers.lower import SILENCE, Answer
from .tree import Tree, encode
from .views.digest import digest
from .views.miss import Missed
from .views.stats import Stats
from .views.survey import Survey, survey_of
from .views.verify import verify

log = logging.getLogger("rewarm")


class PrefixCache(CacheCore):
    """A tree of prompt state for one model: match, acquire, compute, commit.

    Calls may come from any thread: what the tree holds is evaluated.
    """

    def match(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
        *,
        tiers: bool = True,
    ) -> Match:
        """Say how much of a prompt could be reused now. Changes nothing.

        It waits for the answers of lower tiers, unless `tiers` is false. The lock is not held."""
        query, tree, answers = self._asked(tokens, salt, boundaries, tiers)
        with self._entered():
            return self._restorer.match(tree, query, answers)

    def miss(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
        *,
        other_salts: Sequence[str] = (),
        tiers: bool = True,
    ) -> Missed:
        """Say how much of a prompt could be reused now, and why not more: as `match` does.

        It looks at the prompt's own salt only, and at the `other_salts` that the caller names."""
        query, tree, answers = self._asked(tokens, salt, boundaries, tiers)
        with self._entered():
            match = self._restorer.match(tree, query, answers)
            below = max((a.found for a in answers), key=lambda f: f.shared, default=None)
            return Missed(match, self._why(match, tree, query, below, other_salts))

    def foreign(self, tokens: Sequence[int] | npt.NDArray[Any], salt: str | None = None) -> int:
        """The number of tokens of a prompt that lower tiers have of other models, or in another
        form, under the same salt. It waits for them."""
        return self._lower.foreign(checked_tokens(tokens, self.vocabulary), salt)

    def fetch(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
        *,
        worth: Worth | None = None,
    ) -> Fetch:
        """Begin to bring what lower tiers have of a prompt beyond memory. Returns at once.

        The tiers are asked from fast to slow, and what can be resumed furthest on is fetched, where
        `worth` has nothing against it. Everything that takes time happens on other threads:
        `future` says when it is over. Then `take_in` it, or hand it to `acquire`.
        """
        prompt = checked_tokens(tokens, self.vocabulary)
        with self._entered():
            query = self._query(prompt, salt, boundaries)
            return self._lower.fetch(query, self._trees.of(query.namespace, self._used()), worth)

    def take_in(self, fetch: Fetch) -> Match:
        """Put what a fetch brought into the memory tree, and say what can be reused now.

        It is quick and reads nothing: what was damaged, or was not what was asked for, is not among
        it any more. What does not fit is left out. Call it once `fetch.future` is resolved; before
        that it is as if nothing had come, and the fetch is cancelled.
        """
        with self._entered():
            tree = self._trees.of(fetch.query.namespace, self._used())
            before = find(tree, fetch.query).at
            self._promote(fetch)
            match = find(tree, fetch.query).match
            return replace(match, tier=fetch.tier) if match.resume > before else match

    def acquire(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        *,
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
        marks: Sequence[int] = (),
        headroom: int = 0,
        warm: bool = False,
        hint: float = 1.0,
        fetch: bool | Fetch = True,
    ) -> Lease:
        """Caches that stand at the resume point of a prompt, and a lease on its path.

        `fetch=True` waits for what lower tiers have of the prompt, without the lock: it is for a
        thread that has nothing else to do. `fetch=False` takes what memory holds, at once. A fetch
        of this prompt that is resolved is taken in under the same lock as the lease, and the
        lease's match names the tier that it came from.

        `headroom` is how many tokens the answer may take: the caches then need not grow by copying.
        `hint` above 1 says that this prompt is likelier than others to be asked for again.
        `warm`: nobody has asked for this yet. It is no use of what it finds, and its commits evict
        nothing but other warm-ahead.
        """
        if not 0 < hint < math.inf:
            raise InvalidOption(f"hint={hint!r} is no likelihood: give a number above 0, such as 2")
        prompt = checked_tokens(tokens, self.vocabulary)
        began = time.perf_counter()
        if not self._owned and not self._binding.is_same():
            self.rebind()
        if fetch is True and self.tiers:
            fetch = self.fetch(prompt, salt, boundaries)
            fetch.wait(SILENCE)
        fetched = time.perf_counter()
        with self._entered():
            self._clock += 1
            query = self._query(prompt, salt, boundaries)
            tree = self._trees.of(query.namespace, self._used())
            found = find(tree, query)
            matched = time.perf_counter()
            below = None
            if isinstance(fetch, Fetch):
                below = fetch.known if fetch.query.is_for(query) else None
                before = found.at
                self._promote(fetch)
                found = find(tree, query)
                if found.at > before:
                    found = replace(found, match=replace(found.match, tier=fetch.tier))
                if below is not None:
                    found = known_below(found, below)
            found, caches = self._restorer.restored(found, tree, query, headroom)
            restored = time.perf_counter()
            shape = Shape(len(prompt) - 1, found.at, found.junction, boundaries, marks)
            cuts = self._divider.cuts(shape, list(query.cuts))
            miss = self._why(found.match, tree, query, below) if not warm else None
            pin = self._pins.take(tree, found.node, found.at, warm=warm, hint=hint, now=self._clock)
            cost = Cost(
                found.match,
                resumed_at=pin.checkpoints[0].kind if pin.checkpoints else None,
                match_ms=(matched - fetched) * 1e3,
                restore_ms=(restored - matched + fetched - began) * 1e3,
                restored_bytes=pin.nbytes,
                miss=miss,
            )
            dropped = self._pins.dropped
            return Lease(self, tree, prompt, caches, pin, cuts, cost, dropped, warm, hint)

    def commit(
        self,
        lease: Lease,
        stop: int,
        *,
        origin: Origin = "prefill",
        checkpoint: Kind | None = None,
    ) -> None:
        """Store what the lease's caches, which stand at `stop`, hold and the tree does not.

        Never fails a request: what does not fit or cannot be read is left out, and what follows it.
        """
        if lease.cache is not self:
            raise ModelMismatch("this lease belongs to another cache")
        if not lease.stored <= stop <= len(lease.tokens):
            raise InvalidOption(
                f"stop={stop!r}: give a position from {lease.stored}, where the last commit "
                f"ended, to {len(lease.tokens)}"
            )
        with self._lock:
            self._drain()
            lease.position = stop
            if self.reuse == "exact" and origin == "prefill":
                self.layout.settle(lease.caches)
            if lease.stopped_storing or not lease.pin.live or not self.layout.reusable:
                return
            if origin == "decode" and self.reuse == "exact":
                return  # decoded state has other bits than a prefill of the same tokens
            if stop > self.limit:
                lease.stopped_storing = True
                return
            try:
                self._committer.commit(lease, stop, origin, checkpoint, self._clock)
            except Exception:
                lease.stopped_storing = True
                log.exception("a part of a prompt could not be stored; it will be computed again")

    def mark(self, lease: Lease, position: int, kind: Kind = "junction") -> None:
        """Take a checkpoint on the way: somebody waits for the prefix up to `position`."""
        if not lease.position < position <= len(lease.tokens) - 1:
            return
        with self._lock:
            ahead = [c for c in lease.cuts if c.stop > lease.position]
            lease.cuts = self._divider.marked(ahead, position, kind)

    def mark_idle(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
    ) -> None:
        """Say that whoever sent this prompt has an answer that a person will think about; after a
        tool call, which is soon followed by its result, say nothing."""
        prompt = checked_tokens(tokens, self.vocabulary)
        with self._entered():
            tree = self._trees.get(self._binding.namespace.salted(salt))
            if tree is not None:
                walk = tree.walk(encode(prompt), self._divider.grid(len(prompt), boundaries))
                self._evictor.mark_idle(walk.node)

    def stats(self) -> Stats:
        below = {tier.name: tier.stats() for tier in self.tiers}
        with self._entered():
            return Stats.of(self.memory, self._pins, self._evictor, below)

    def survey(self) -> Survey:
        """Look at what every node holds. The lock is held for a few nodes at a time."""
        with self._entered():
            trees = dict(self._trees)
        return survey_of(self._entered, trees, self.tiers, lambda: self._clock)

    def version(self) -> tuple[int, ...]:
        """Another one wherever a survey may have changed."""
        held = self.memory.held
        below = [n for tier in self.tiers for n in tier.browse().version]
        return (self._clock, held.nodes, held.total, *below)

    def digest(self) -> str:
        """One hash of what the tree knows: two caches with the same calls have the same one."""
        with self._entered():
            return digest(self._trees.values())

    def resize(self, memory: int | str) -> None:
        """Set another budget; what no longer fits goes at once, except what is leased."""
        with self._entered():
            self.memory.budget = parse_size(memory) if memory != "auto" else auto_size()
            self._evictor.make_room(self._trees.values(), 0, 0, self._clock)

    def verify(self, *, tiers: bool = False) -> None:
        """Check every invariant of the tree and its accounting; raises BrokenInvariant. With
        `tiers` everything below memory is read and checked, too."""
        if tiers:
            self._lower.verify()
        with self._entered():
            trees = list(self._trees.values())
            verify(trees, self.memory, self._pins.held, self.layout)
            self._evictor.verify(trees)

    def flush(self, *, wait: bool = True, durable: bool = False) -> bool:
        """Make what is held outlive this process; returns when it does.

        False where a part is not there after all: a tier refused, or has no space for it. Without
        `wait` it is only offered; False where a tier may not have taken all of it yet.
        `durable`: only what is sure to be asked for again, such as system prompts and users' turns.
        A tier that refuses is said in the log."""
        if wait:
            self._attached()
        with self._entered():
            if self._attaching is not None:
                return False
            if not wait:
                return self._lower.hand_over(durable)
        return self._lower.flush(self._entered, durable)

    def clear(self, *, give_back: bool = True) -> None:
        """Forget everything, in lower tiers too. Running requests go on, and store nothing more.

        Its memory goes back to the system; without `give_back` it stays for what comes next."""
        with self._entered():
            self._forget()
            forgotten = self._lower.forget()
        for each in forgotten:
            each.result()
        if give_back:
            heap.give_back()

    def close(self) -> None:
        """Flush, and let go of everything. Lower tiers keep what they have for the next process."""
        with self._lock:
            if self._closed:
                return
        try:
            self.flush()
        finally:
            with self._lock:
                self._closed = True
                self._forget()
            self._lower.close()

    def _asked(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        salt: str | None,
        boundaries: Sequence[Boundary],
        tiers: bool,
    ) -> tuple[Query, Tree, list[Answer]]:
        """Look for a prompt without a trace: the query, memory's tree, the tiers' answers."""
        prompt = checked_tokens(tokens, self.vocabulary)
        with self._entered():
            query = self._query(prompt, salt, boundaries)
            tree = self._trees.known(query.namespace)
            tiers &= find(tree, query).at < query.length - 1
        return query, tree, self._lower.ask(query) if tiers else []

    def _promote(self, fetch: Fetch) -> None:
        """Put what came into the tree that it was fetched for, and end the fetch."""
        pieces = fetch.taken() if fetch.future.done() and fetch.epoch == self._lower.epoch else []
        try:
            if pieces and fetch.found is not None:
                tree = self._trees.of(fetch.query.namespace, self._used())
                self._promoter.promote(tree, fetch.query, pieces, fetch.found, self._clock)
        except Exception:
            log.exception("what was fetched could not be put into memory; it is computed again")
        fetch.cancel()
        self._drain()

    def _why(
        self,
        match: Match,
        tree: Tree,
        query: Query,
        below: Found | None,
        other_salts: Sequence[str] = (),
    ) -> Miss | None:
        names = {self._binding.namespace.salted(salt) for salt in other_salts} - {query.namespace}
        named = [self._trees[name] for name in names if name in self._trees]
        try:
            return self._explainer.why(match, tree, query, below, named)
        except Exception:
            log.exception("the reason of a miss could not be found")
            return Miss(match.reason, match.shared, match.resume) if match.reason else None
