"""The parts of a cache, put together for one model, and the lock that they share."""

from __future__ import annotations

import hashlib
import itertools
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

from rewarm.accel.execution import execution
from rewarm.errors import CacheClosed, ModelMismatch
from rewarm.options import CacheOptions, parse_size
from rewarm.values import Namespace

from .identity import Description, Watch, keeps_memos, run_once
from .layout import Layout
from .memory import Memory, auto_size
from .model import MakeCaches, blank_caches, vocabulary_size
from .placement import Divider
from .positions import FAR, position_limit
from .tiers.base import Tier
from .tiers.disk.errors import StoreError
from .tiers.disk.store import Store
from .tiers.disk.tier import DiskTier
from .tiers.disk.trees import DiskTrees
from .transfer import Transfer
from .worth import Retention, WorkPerByte

log = logging.getLogger("rewarm")

CPU_CHUNK, GPU_CHUNK = 512, 2048

_unknown = itertools.count(1)


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
        self.blank = make_cache or partial(blank_caches, model, max_kv_size, kv_bits, kv_group_size)
        self.layout = layout or Layout(self.blank())
        if not self.layout.reusable:
            what = ", ".join(self.layout.unknown) or "no layer"
            log.warning("reuse is off for %s: %s cannot be captured", type(model).__name__, what)
        self._divide()
        # A folder may be moved, so its path is no name. The model's identity covers its content.
        named = "" if Path(adapter).is_dir() else adapter
        kv = f"{kv_bits}/{kv_group_size}" if kv_bits else "plain"
        form = hashlib.sha256(Description.of(self.blank()).text).hexdigest()[:16]
        self._namespace = Namespace("", named, kv, form)
        self._start_anew()
        policy = retention or WorkPerByte()
        self.memory = Memory(self.layout, budget_of(memory), policy, chunked=reuse == "exact")
        self._lower = self.memory.lower
        self._transfer = Transfer(self.layout, self.blank, self.memory)
        self._lock = threading.RLock()
        self._closed = False
        self._owned = False
        self._folder = Path(disk) if disk is not None and self.layout.reusable else None
        self._disk_size = parse_size(disk_size, "disk_size")
        self._unopened = list(tiers) if self.layout.reusable else []
        self._attaching: threading.Thread | None = None
        # A cache that is dropped without `close` frees its arrays at once, too. No part may refer
        # to the cache: it would outlive its last user.
        weakref.finalize(self, _let_go, self.memory).atexit = False
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
        description = self._described(self.model)
        if not owned:
            return self._attach(description)
        self._attaching = threading.Thread(
            target=self._attach, args=(description,), name="rewarm-attach", daemon=True
        )
        self._attaching.start()

    def _attach(self, description: Description) -> None:
        namespace = before = self._namespace
        opened: list[Tier] = []
        try:
            namespace = self._identified(description)
            opened = self._opened(namespace)
        except Exception:
            log.exception("there is no tier below memory: the model cannot be told from others")
        with self._lock:
            self._attaching, self._folder, self._unopened = None, None, []
            if self._closed or self._namespace != before:
                log.warning("there is no tier below memory: the model changed while it was read")
            elif opened:
                self._namespace = namespace
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
        in_use = partial(bool, self.memory.pins.live)
        return [DiskTier(trees, self.memory.evictor.policy, in_use), *self._unopened]

    def _attached(self) -> None:
        """Wait until `attach` is done."""
        if (work := self._attaching) is not None:
            work.join()

    def rebind(self, model: Any = None) -> None:
        """Go on with the model as it is now; `model` may be another object that computes the same.

        Call it after arrays were edited in place: nothing else notices such an edit. State is found
        again where the model computes what it computed before. A cache without tiers cannot tell,
        and forgets everything."""
        self._attached()
        if model is not None and model is not self.model:
            self.check_model(model)
        namespace = self._identified(self._described(self.model)) if self._lower.lanes else None
        with self._entered():
            self._divide()
            if namespace is None:
                self._start_anew()
                self.memory.forget()
            elif namespace != self._namespace:
                log.info("the model was changed: what is computed from now on is kept apart")
                self._namespace = namespace

    def check_model(self, model: Any) -> None:
        """Raise unless the cache was made for a model that computes the same."""
        if model is self.model:
            if self._lower.lanes:
                self.rebind()
            return
        mine, theirs = (self._identified(self._described(each)) for each in (self.model, model))
        if mine != theirs:
            raise ModelMismatch(
                f"this cache was made for another model ({type(self.model).__module__}): "
                "make one for this model with PrefixCache(model)"
            )

    def namespace(self, salt: str | None = None) -> Namespace:
        """Return the namespace in which prompts with this salt share state."""
        return self._namespace.salted(salt)

    def _start_anew(self) -> None:
        """Take a namespace that is valid only in this process, and for the model as it is."""
        self._namespace = replace(self._namespace, base=f"unknown {next(_unknown)}")
        self._watch = Watch(self.model)

    def _is_same(self) -> bool:
        """True where the model's modules still hold the same objects.

        Some models replace values whenever they run. Such a change does not count.
        """
        changes = set(self._watch.changes())
        if not changes:
            return True
        besides = self._watch.besides
        before = Watch(self.model, besides)
        run_once(self.model, self.blank)
        written = set(before.changes())
        if changes <= written:
            self._watch = Watch(self.model, besides | written)
        return changes <= written

    def _described(self, model: Any) -> Description:
        """Describe a model as it is now. Call it on a thread that may run the model."""
        if keeps_memos(model):
            run_once(model, self.blank)
        if model is self.model:
            self._watch = Watch(model, self._watch.besides)
        return Description.of(model)

    def _identified(self, description: Description) -> Namespace:
        """Return the namespace of a described model. This is slow, because it reads all weights."""
        executes = execution(exact=self.reuse == "exact", chunk=self.chunk)
        return replace(self._namespace, base=description.identity(executes))

    @property
    def limit(self) -> int:
        """The position up to which state is stored: see `positions.py`."""
        return self._divider.limit

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers in use below memory, from fast to slow."""
        return tuple(lane.tier for lane in self._lower.lanes)

    def _divide(self) -> None:
        """Divide prompts for the model as it is now."""
        # In `exact` a chunk is reused only where it and all before it lie between the prompt's own
        # cuts. A cold run would compute its rows with the same calls, so no limit is needed.
        stores = self.reuse == "fast" and self.layout.reusable
        limit = position_limit(self.model) if stores else FAR
        self._divider = Divider(self.reuse, self.chunk, limit)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise CacheClosed("this cache is closed: make a new PrefixCache")
            self.memory.drain()
            yield


def budget_of(memory: int | str) -> int:
    return parse_size(memory) if memory != "auto" else auto_size()


def _let_go(memory: Memory) -> None:
    memory.forget()
    for lane in memory.lower.lanes:
        lane.stop()
