"""The parts of a cache, put together for one model, and the lock that they share."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from rewarm.errors import CacheClosed
from rewarm.options import CacheOptions, parse_size
from rewarm.values import Boundary, Namespace, Tokens

from .binding import Binding
from .commit import Committer
from .cuts import Divider
from .find import Query
from .identity import Description
from .layout import Layout
from .ledger import Ledger
from .memory import Memory, auto_size, most_buffers
from .model import MakeCaches, cache_maker, vocabulary_size
from .pins import Pin
from .positions import FAR, position_limit
from .restore import Restorer
from .tiers.base import Tier
from .tiers.disk.errors import StoreError
from .tiers.disk.store import Store
from .tiers.disk.tier import DiskTier
from .tiers.disk.trees import DiskTrees
from .tiers.lower import Lower
from .tree import encode
from .worth import Retention, WorkPerByte

log = logging.getLogger("rewarm")

CPU_CHUNK, GPU_CHUNK = 512, 2048


class CacheCore:
    """The parts of one cache. `PrefixCache` adds the calls that work with them."""

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
        layout: Layout | None = None,
        adapter: str = "",
        max_buffers: int | None = None,
        tiers: Sequence[Tier] = (),
        attach: bool = True,
    ) -> None:
        """`tiers` lie below memory, and below the disk where there is one, from fast to slow.

        The cache closes them. With `attach=False`, no tier is opened until `attach` is called."""
        CacheOptions(memory, disk, disk_size, reuse, chunk, kv_bits, kv_group_size)
        self.model = model
        self.reuse = reuse
        self.chunk = chunk or (CPU_CHUNK if mx.default_device() == mx.cpu else GPU_CHUNK)
        self.vocabulary = vocabulary_size(model) or 1 << 31
        self.blank = make_cache or cache_maker(model, max_kv_size, kv_bits, kv_group_size)
        self.layout = layout or Layout(self.blank())
        if not self.layout.reusable:
            what = ", ".join(self.layout.unknown) or "no layer"
            log.warning("reuse is off for %s: %s cannot be captured", type(model).__name__, what)
        self._divider = Divider(
            reuse,
            self.chunk,
            checkpoints=self.layout.has_state or self.layout.has_window,
        )
        self._find_limit()
        self._binding = Binding(
            model,
            self.blank,
            kv=f"{kv_bits}/{kv_group_size}" if kv_bits else "plain",
            adapter=adapter,
            exact=reuse == "exact",
            chunk=self.chunk,
        )
        ledger = Ledger(budget_of(memory), max_buffers or most_buffers())
        self.memory = Memory(
            self.layout, ledger, retention or WorkPerByte(), chunked=reuse == "exact"
        )
        self._lower = Lower(self.layout, self.memory.pins)
        self.memory.offer = self._lower.evicting
        self._committer = Committer(self.layout, self.memory, self._lower.changed)
        self._restorer = Restorer(self.layout, self.blank, self.memory, self._lower)
        self._lock = threading.RLock()
        self._closed = False
        self._owned = False
        self._folder = Path(disk) if disk is not None and self.layout.reusable else None
        self._disk_size = parse_size(disk_size, "disk_size")
        self._unopened = list(tiers) if self.layout.reusable else []
        self._attaching: threading.Thread | None = None
        # A cache that is dropped without `close` frees its arrays at once, too. No part may refer
        # to the cache: it would outlive its last user.
        weakref.finalize(self, _let_go, self.memory, self._lower).atexit = False
        if attach:
            self.attach()

    def attach(self, *, owned: bool = False) -> None:
        """Take the model's identity, and open the tiers for it.

        Call it on a thread that may run the model. It reads all weights. `owned` says that the
        caller alone has the model and never changes it, as a server does. Then nothing looks for
        changes, and another thread reads the weights while requests are answered. Until that is
        done, no tier is read or written. What memory holds by then is offered to the tiers later.
        """
        self._owned = owned
        if self._attaching is not None or not (self._folder or self._unopened):
            return
        description = self._binding.describe()
        if not owned:
            return self._attach(description)
        self._attaching = threading.Thread(
            target=self._attach, args=(description,), name="rewarm-attach", daemon=True
        )
        self._attaching.start()

    def _attach(self, description: Description) -> None:
        namespace = before = self._binding.namespace
        opened: list[Tier] = []
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
                self.memory.rename(namespace.base)
                self._lower.open(opened, self.memory.trees.values())
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
        model = getattr(self.model, "rewarm_source", type(self.model).__module__)
        grid = f"exact {self.chunk}" if self.reuse == "exact" else "fast"
        trees = DiskTrees(store, self.layout, namespace, model=model, grid=grid)
        in_use = partial(bool, self.memory.pins.held)
        return [DiskTier(trees, self.memory.evictor.policy, in_use), *self._unopened]

    def _attached(self) -> None:
        """Wait until `attach` is done."""
        work = self._attaching
        if work is not None:
            work.join()

    def rebind(self, model: Any = None) -> None:
        """Go on with the model as it is now; `model` may be another object that computes the same.

        Call it after arrays were edited in place: nothing else notices such an edit. State is found
        again where the model computes what it computed before. A cache without tiers cannot tell,
        and forgets everything."""
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
                self.memory.forget()
            else:
                if namespace != self._binding.namespace:
                    log.info("the model was changed: what is computed from now on is kept apart")
                self._binding.namespace = namespace

    def check_model(self, model: Any) -> None:
        """Raise unless the cache was made for a model that computes the same."""
        if model is not self.model:
            self._binding.check(model)
        elif self._lower.lanes:
            self.rebind()

    def namespace(self, salt: str | None = None) -> Namespace:
        """Return the namespace in which prompts with this salt share state."""
        return self._binding.namespace.salted(salt)

    @property
    def limit(self) -> int:
        """The position up to which state is stored: see `positions.py`."""
        return self._divider.limit

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers in use below memory, from fast to slow."""
        return tuple(lane.tier for lane in self._lower.lanes)

    def _query(self, prompt: Tokens, salt: str | None, boundaries: Sequence[Boundary]) -> Query:
        cuts = self._divider.grid(len(prompt), boundaries)
        return Query(self.namespace(salt), encode(prompt), cuts, self.layout, self.reuse)

    def _find_limit(self) -> None:
        # In `exact` a chunk is reused only where it and all before it lie between the prompt's own
        # cuts. A cold run would compute its rows with the same calls, so no limit is needed.
        stores = self.reuse == "fast" and self.layout.reusable
        limit = position_limit(self.model) if stores else FAR
        self._divider = replace(self._divider, limit=limit)

    def _release(self, pin: Pin) -> None:
        with self._lock:
            self.memory.release(pin)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise CacheClosed("this cache is closed: make a new PrefixCache")
            self.memory.drain()
            yield


def budget_of(memory: int | str) -> int:
    return parse_size(memory) if memory != "auto" else auto_size()


def _let_go(memory: Memory, lower: Lower) -> None:
    memory.forget()
    for lane in lower.lanes:
        lane.stop()
