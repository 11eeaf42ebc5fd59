"""The prefix cache: what prompts share is computed once."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy.typing as npt

from rewarm.accel import heap
from rewarm.errors import CacheClosed, InvalidOption, ModelMismatch
from rewarm.options import CacheOptions, parse_size
from rewarm.values import Boundary, Cost, Kind, Match, Miss, Namespace, Origin, Tokens

from .binding import Binding
from .commit import Committer
from .cuts import Divider
from .evicted import EvictedIndex
from .find import Query, find
from .forest import Forest
from .identity import Description
from .layout import Layout
from .lease import Lease
from .ledger import Held, Ledger
from .memory import auto_size, most_buffers
from .model import MakeCaches, cache_maker, checked_tokens, vocabulary_size
from .pins import Pin, Pins
from .placement import ChatPlacement, Placement, Shape
from .positions import Limit, limit_of
from .restore import Restorer, known_below
from .retention import Evictor, Item, Retention, WorkPerByte
from .tiers.base import Found, Tier
from .tiers.disk.records import StoreError
from .tiers.disk.store import Store
from .tiers.disk.tier import DiskTier
from .tiers.fetch import Fetch, Worth
from .tiers.lower import SILENCE, Answer, Lower
from .tiers.promote import Promoter
from .tree import Tree, encode
from .views.digest import digest
from .views.miss import Explainer, Missed
from .views.stats import Stats
from .views.survey import Survey, survey_of
from .views.verify import verify

log = logging.getLogger("rewarm")

CPU_CHUNK, GPU_CHUNK = 512, 2048


class PrefixCache:
    """A tree of prompt state for one model: match, acquire, compute, commit.

    Calls may come from any thread: what the tree holds is evaluated.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | str = CacheOptions.memory,
        disk: str | None = CacheOptions.disk,
        disk_size: int | str = CacheOptions.disk_size,
        reuse: Literal["fast", "exact"] = CacheOptions.reuse,
        chunk: int | None = CacheOptions.chunk,
        kv_bits: int | None = CacheOptions.kv_bits,
        kv_group_size: int = CacheOptions.kv_group_size,
        max_kv_size: int | None = None,
        make_cache: MakeCaches | None = None,
        retention: Retention | None = None,
        placement: Placement | None = None,
        layout: Layout | None = None,
        adapter: str = "",
        max_buffers: int | None = None,
        tiers: Sequence[Tier] = (),
        attach: bool = True,
    ) -> None:
        """`tiers` lie below memory, and below the disk where there is one: from fast to slow. The
        cache closes them. `attach=False` leaves all of that alone until `attach` is called."""
        CacheOptions(memory, disk, disk_size, reuse, chunk, kv_bits, kv_group_size)
        budget = parse_size(memory) if memory != "auto" else auto_size()
        self.model = model
        self.reuse = reuse
        self.chunk = chunk or (CPU_CHUNK if mx.default_device() == mx.cpu else GPU_CHUNK)
        self.blank = make_cache or cache_maker(model, max_kv_size, kv_bits, kv_group_size)
        self.layout = layout or Layout(self.blank())
        if not self.layout.reusable:
            what = ", ".join(self.layout.unknown) or "no layer"
            log.warning("reuse is off for %s: %s cannot be captured", type(model).__name__, what)
        self._divider = Divider(
            reuse,
            self.chunk,
            placement or ChatPlacement(),
            checkpoints=self.layout.has_state or self.layout.has_window,
        )
        self._find_limit()
        self.memory = Ledger(budget, max_buffers or most_buffers())
        self._binding = Binding(
            model,
            self.blank,
            kv=f"{kv_bits}/{kv_group_size}" if kv_bits else "plain",
            adapter=adapter,
            exact=reuse == "exact",
            chunk=self.chunk,
        )
        self.vocabulary = vocabulary_size(model) or 1 << 31
        self._trees = Forest(chunked=reuse == "exact")
        self._pins = Pins()
        self._lower = Lower(self.layout, self._pins)
        self._evicted_index = EvictedIndex()
        self._evictor = Evictor(
            retention or WorkPerByte(),
            self.memory,
            reach=self.layout.longest_window,
            stateful=self.layout.has_state,
            on_evict=partial(_evicted, self._evicted_index, self._lower, self.layout),
        )
        trees = self._trees.values()
        self._committer = Committer(
            self.layout, self.memory, self._evictor, trees, self._lower.changed
        )
        self._promoter = Promoter(self.layout, self.memory, self._evictor, trees)
        self._restorer = Restorer(self.layout, self.blank, self.memory, self._lower)
        self._explainer = Explainer(self._evicted_index)
        self._lock = threading.RLock()
        self._clock = 0
        self._closed = False
        self._owned = False
        self._folder = Path(disk) if disk is not None and self.layout.reusable else None
        self._disk_size = parse_size(disk_size, "disk_size")
        self._unopened = list(tiers) if self.layout.reusable else []
        self._attaching: threading.Thread | None = None
        # A cache that is dropped without `close` frees its arrays at once, too.
        weakref.finalize(self, _let_go, self._trees, self._lower).atexit = False
        if attach:
            self.attach()

    def attach(self, *, owned: bool = False) -> None:
        """Take the model's identity, and open what lies below memory under it.

        Call it on a thread that may run the model. All weights are read for it. `owned` says that
        the caller alone has the model and never changes it, as a server does: nothing then looks
        for changes, and the weights are read by another thread, while requests are answered. Until
        that is done, nothing is read or written below memory; what memory holds by then is given
        to the disk later, as everything is.
        """
        self._owned = owned
        if self._attaching is not None or not (self._folder or self._unopened):
            return
        description = self._binding.describe()
        if not owned:
            return self._attach(description)
        work = threading.Thread(
            target=self._attach, args=(description,), name="rewarm-attach", daemon=True
        )
        self._attaching = work
        work.start()

    def _attach(self, description: Description) -> None:
        before = self._binding.namespace
        opened: list[Tier] = []
        namespace = before
        try:
            namespace = self._binding.identified(description)
            opened = self._opened(namespace)
        except Exception:
            log.exception("there is no tier below memory: the model cannot be told from others")
        with self._lock:
            self._attaching, self._folder, self._unopened = None, None, []
            if self._closed or self._binding.namespace != before:
                log.warning("there is no tier below memory: the model changed while it was read")
            elif opened:
                self._binding.namespace = namespace
                self._trees.rename(namespace.base)
                self._lower.open(opened, self._trees.values())
                return
        for tier in opened:
            tier.close()

    def _opened(self, namespace: Namespace) -> list[Tier]:
        if self._folder is None:
            return self._unopened
        try:
            store = Store.open(self._folder, limit=self._disk_size)
        except StoreError as error:
            log.warning("there is no disk tier: %s", error)
            return self._unopened
        disk = DiskTier(
            store,
            self.layout,
            self._evictor.policy,
            namespace,
            model=getattr(self.model, "rewarm_source", type(self.model).__module__),
            grid=f"exact {self.chunk}" if self.reuse == "exact" else "fast",
            in_use=partial(bool, self._pins.held),
        )
        return [disk, *self._unopened]

    def _attached(self) -> None:
        """Wait until `attach` is done."""
        work = self._attaching
        if work is not None:
            work.join()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """What is in use below memory, from fast to slow."""
        return self._lower.tiers

    def rebind(self, model: Any = None) -> None:
        """Go on with the model as it is now; `model` may be another object that computes the same.

        For whoever edits arrays in place, which nothing else notices. State is found again where
        the model computes what it computed before; a cache without tiers cannot know that, and
        forgets everything."""
        self._attached()
        if model is not None and model is not self.model:
            self._binding.check(model)
        namespace = None
        if self._lower.lanes:
            namespace = self._binding.identified(self._binding.describe())
        with self._entered():
            self._find_limit()
            if namespace is None:
                self._binding.start_anew()
                self._forget()
            else:
                if namespace != self._binding.namespace:
                    log.info("the model was changed: what is computed from now on is kept apart")
                self._binding.namespace = namespace

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
            self._promote(fetch, tree)
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
        if fetch is True:
            fetch = self.fetch(prompt, salt, boundaries)
            fetch.wait(SILENCE)
        fetched = time.perf_counter()
        with self._entered():
            self._clock += 1
            query = self._query(prompt, salt, boundaries)
            tree = self._trees.of(query.namespace, self._used())
            found = find(tree, query)
            matched = time.perf_counter()
            below = fetch.known if fetch else None
            if fetch:
                before = found.at
                self._promote(fetch, tree)
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
        """What every node holds. The lock is held for a few nodes at a time."""
        with self._entered():
            trees = dict(self._trees)
        return survey_of(self._entered, trees, self.tiers, lambda: self._clock)

    def version(self) -> tuple[int, ...]:
        """Another one wherever a survey may have changed."""
        held = self.memory.held
        below = [n for tier in self.tiers for n in tier.browse().version]
        return (self._clock, held.nodes, held.total, *below)

    @property
    def limit(self) -> int:
        """The position up to which state is stored: see `positions.py`."""
        return self._divider.limit

    def digest(self) -> str:
        """One hash of what the tree knows: two caches with the same calls have the same one."""
        with self._entered():
            return digest(self._trees.values())

    def in_namespace(self, namespace: Namespace, salt: str | None) -> bool:
        return namespace == self._binding.namespace.salted(salt)

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
        """What the lower tiers have is there for the next process."""
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

    def check_model(self, model: Any) -> None:
        """Raise unless the cache was made for this model."""
        if model is not self.model:
            self._binding.check(model)
        elif self._lower.lanes:
            self.rebind()

    def _find_limit(self) -> None:
        # In `exact` a chunk is reused only where every chunk before it is the prompt's own. So its
        # rows were computed in the very calls that would compute them again, whatever these do.
        stores = self.reuse == "fast" and self.layout.reusable
        limit = limit_of(self.model) if stores else Limit()
        limit.say(self.model)
        self._divider = replace(self._divider, limit=limit.position)

    def _query(self, prompt: Tokens, salt: str | None, boundaries: Sequence[Boundary]) -> Query:
        namespace = self._binding.namespace.salted(salt)
        cuts = self._divider.grid(len(prompt), boundaries)
        return Query(namespace, encode(prompt), cuts, self.layout, self.reuse)

    def _asked(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        salt: str | None,
        boundaries: Sequence[Boundary],
        tiers: bool,
    ) -> tuple[Query, Tree, list[Answer]]:
        """What is needed to say how much of a prompt there is, and leaves no trace."""
        prompt = checked_tokens(tokens, self.vocabulary)
        with self._entered():
            query = self._query(prompt, salt, boundaries)
            tree = self._trees.known(query.namespace)
            tiers &= find(tree, query).at < query.length - 1
        return query, tree, self._lower.ask(query) if tiers else []

    def _promote(self, fetch: Fetch, tree: Tree) -> None:
        pieces = fetch.taken() if fetch.future.done() and fetch.epoch == self._lower.epoch else []
        try:
            if pieces and fetch.found is not None:
                self._promoter.promote(tree, fetch.query, pieces, fetch.found, self._clock)
        except Exception:
            log.exception("what was fetched could not be put into memory; it is computed again")
        fetch.cancel()
        self._drain()

    def _used(self) -> list[Tree]:
        return [pin.tree for pin in self._pins.held]

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

    def _forget(self) -> None:
        self._pins.forget()
        self._trees.take_apart()
        self._evicted_index.clear()
        self.memory.held = Held()
        self._evictor.forget()

    def _release(self, pin: Pin) -> None:
        with self._lock:
            self._pins.drop(pin)
            # Where the budget was lowered meanwhile, what was leased can go now.
            self._evictor.make_room(self._trees.values(), 0, 0, self._clock)

    def _drain(self) -> None:
        """Unpin what forgotten leases held."""
        while self._pins.dropped:
            self._release(self._pins.dropped.popleft())

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise CacheClosed("this cache is closed: make a new PrefixCache")
            self._drain()
            yield


def _evicted(gone: EvictedIndex, lower: Lower, layout: Layout, item: Item) -> None:
    """Memory is about to let go of something.

    This is no method: a cache that its own evictor refers to would outlive its last user.
    """
    gone.note(item, resumable=not layout.has_state)
    try:
        lower.evicting(item)
    except Exception:
        log.exception("something evicted could not be offered to a lower tier")


def _let_go(trees: Forest, lower: Lower) -> None:
    trees.take_apart()
    for lane in lower.lanes:
        lane.stop()
