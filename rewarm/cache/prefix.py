"""The prefix cache: what prompts share is computed once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy.typing as npt

from rewarm.errors import CacheClosed, InvalidOption, ModelMismatch

from .below import Below, Promoter
from .commit import Committer
from .cuts import APART, chunks, grid
from .disk.opening import open_tier
from .disk.tier import DiskTier
from .find import Found, find, restore
from .layout import Layout
from .lease import Cut, Lease, Match, Pin
from .memory import Held, MemoryTier, auto_size, most_buffers, parse_size
from .model import (
    MakeCaches,
    Namespace,
    cache_maker,
    check_kv,
    checked_tokens,
    fingerprint,
    vocabulary_size,
)
from .placement import WEIGHTS, Boundary, ChatPlacement, Kind, Placement, Shape
from .retention import Evictor, Retention, WorkPerByte
from .tree import Checkpoint, ChunkTree, Node, Origin, Tokens, Tree, encode
from .verify import verify

log = logging.getLogger("rewarm")

CPU_CHUNK, GPU_CHUNK = 512, 2048


@dataclass(frozen=True)
class Stats:
    """What the cache holds and did."""

    entries: int
    checkpoints: int
    tokens: int
    budget: int
    bytes: dict[str, dict[str, int]]
    """Really held, by tier, then by kind: rows, window, checkpoint; index is the tree itself."""
    buffers: int
    hits: int
    misses: int
    evictions: int
    leases: int

    @property
    def held(self) -> int:
        """All payload bytes in memory, without the index."""
        return sum(n for kind, n in self.bytes["memory"].items() if kind != "index")


class PrefixCache:
    """A tree of prompt state for one model: match, acquire, compute, commit.

    Calls may come from any thread: what the tree holds is evaluated.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | str = "auto",
        disk: str | None = None,
        disk_size: int | str = "20GB",
        reuse: Literal["fast", "exact"] = "fast",
        chunk: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        max_kv_size: int | None = None,
        make_cache: MakeCaches | None = None,
        retention: Retention | None = None,
        placement: Placement | None = None,
        layout: Layout | None = None,
        adapter: str = "",
        max_buffers: int | None = None,
    ) -> None:
        self.check_options(memory, disk, disk_size, reuse, chunk, kv_bits, kv_group_size)
        budget = parse_size(memory) if memory != "auto" else auto_size()
        self.model = model
        self.reuse = reuse
        self.chunk = chunk or (CPU_CHUNK if mx.default_device() == mx.cpu else GPU_CHUNK)
        self.placement = placement or ChatPlacement()
        self.blank = make_cache or cache_maker(model, max_kv_size, kv_bits, kv_group_size)
        self.layout = layout or Layout(self.blank())
        if not self.layout.reusable:
            what = ", ".join(self.layout.unknown) or "no layer"
            log.warning("reuse is off for %s: %s cannot be captured", type(model).__name__, what)
        self.memory = MemoryTier(budget, max_buffers or most_buffers())
        self._namespace = Namespace.of(
            model, f"{kv_bits}/{kv_group_size}" if kv_bits else "plain", adapter
        )
        self.vocabulary = vocabulary_size(model) or 1 << 31
        self._trees: dict[Namespace, Tree] = {}
        self._most_trees = 16
        self._evictor = Evictor(
            retention or WorkPerByte(),
            self.memory,
            reach=self.layout.longest_window,
            stateful=self.layout.has_state,
        )
        trees = self._trees.values()
        self._committer = Committer(self.layout, self.memory, self._evictor, trees)
        self.disk: DiskTier | None = None
        self._below: Below | None = None
        if disk is not None and self.layout.reusable:
            self.disk = open_tier(
                Path(disk),
                parse_size(disk_size, "disk_size"),
                self.layout,
                self._evictor.policy,
                model=model,
                adapter=adapter,
                caches=self.blank(),
                grid=f"exact {self.chunk}" if reuse == "exact" else "fast",
            )
        if self.disk is not None:
            promoter = Promoter(self.layout, self.memory, self._evictor, trees)
            self._below = Below(self.disk, promoter, self._trees)
            self._evictor.on_evict = self._below.let_down
            self._committer.on_change = self.disk.changed
        self._pins: set[Pin] = set()
        self._dropped: deque[Pin] = deque()
        self._lock = threading.RLock()
        self._clock = 0
        self._hits = self._misses = 0
        self._closed = False

    @staticmethod
    def check_options(
        memory: int | str = "auto",
        disk: str | None = None,
        disk_size: int | str = "20GB",
        reuse: str = "fast",
        chunk: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
    ) -> None:
        """Raise for values that mean nothing, before a model is loaded for them."""
        if reuse not in ("fast", "exact"):
            raise InvalidOption(f'reuse={reuse!r} is unknown: give "fast" or "exact"')
        if chunk is not None and chunk < APART:
            raise InvalidOption(f"chunk={chunk!r} is too short: give {APART} or more tokens")
        check_kv(kv_bits, kv_group_size)
        parse_size(disk_size, "disk_size")
        if memory != "auto":
            parse_size(memory)

    def match(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
    ) -> Match:
        """How much of a prompt could be reused now. Changes nothing."""
        prompt = checked_tokens(tokens, self.vocabulary)
        with self._entered():
            namespace = self._namespace.salted(salt)
            tree = self._trees.get(namespace) or self._new_tree()
            cuts = self._grid(prompt, boundaries)
            match = self._find(tree, prompt, cuts).match
            below = self._below.find(namespace, tree, prompt, cuts) if self._below else None
            if below is None or below.at <= match.resume:
                return match
            shared = max(match.shared, below.match.shared)
            return replace(below.match, shared=shared, tier="disk")

    def acquire(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        *,
        salt: str | None = None,
        boundaries: Sequence[Boundary] = (),
        marks: Sequence[int] = (),
        room: int = 0,
        warm: bool = False,
        hint: float = 1.0,
    ) -> Lease:
        """Caches that stand at the resume point of a prompt, and a lease on its path.

        `room` is how many tokens the answer may take: the caches then need not grow by copying.
        `hint` above 1 says that this prompt is likelier than others to be asked for again.
        `warm`: nobody has asked for this yet. It is no use of what it finds, and its commits evict
        nothing but other warm-ahead.
        """
        prompt = checked_tokens(tokens, self.vocabulary)
        with self._entered():
            began = time.perf_counter()
            self._clock += 1
            tree = self._tree(salt)
            own_cuts = self._grid(prompt, boundaries)
            found = self._find(tree, prompt, own_cuts)
            matched = time.perf_counter()
            found = self._promoted(found, self._namespace.salted(salt), tree, prompt, own_cuts)
            found, caches = self._restored(found, tree, prompt, own_cuts, room)
            restored = time.perf_counter()
            shape = Shape(len(prompt) - 1, found.at, found.junction, boundaries, marks)
            cuts = self._cuts(shape, own_cuts)
            pin = self._pinned(tree, found, warm, hint)
            return Lease(
                self,
                tree,
                prompt,
                caches,
                found.match,
                pin,
                cuts,
                self._dropped,
                warm=warm,
                hint=hint,
                match_ms=(matched - began) * 1e3,
                restore_ms=(restored - matched) * 1e3,
            )

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
            if lease.full or not lease.pin.live or not self.layout.reusable:
                return
            if origin == "decode" and self.reuse == "exact":
                return  # decoded state has other bits than a prefill of the same tokens
            try:
                self._committer.commit(lease, stop, origin, checkpoint, self._clock)
            except Exception:
                lease.full = True
                log.exception("a part of a prompt could not be stored; it will be computed again")

    def mark(self, lease: Lease, position: int, kind: Kind = "junction") -> None:
        """Take a checkpoint on the way: somebody waits for the prefix up to `position`."""
        if not lease.position < position <= len(lease.tokens) - 1:
            return
        with self._lock:
            ahead = [c for c in lease.cuts if c.stop > lease.position]
            if self.reuse == "fast" and all(c.stop != position for c in ahead):
                ahead = sorted([*ahead, Cut(position, None)])
            at = max((c.stop for c in ahead if c.stop <= position), default=None)
            lease.cuts = [
                Cut(c.stop, kind) if c.stop == at and c.checkpoint is None else c for c in ahead
            ]

    def waits(self, tokens: Sequence[int] | npt.NDArray[Any], salt: str | None = None) -> None:
        """Say that whoever sent this prompt has an answer that a person will think about; after a
        tool call, which is soon followed by its result, say nothing."""
        prompt = checked_tokens(tokens, self.vocabulary)
        with self._entered():
            tree = self._trees.get(self._namespace.salted(salt))
            if tree is not None:
                walk = tree.walk(encode(prompt), ())
                self._evictor.let_wait(walk.node)

    def stats(self) -> Stats:
        with self._entered():
            held = self.memory.held
            return Stats(
                entries=held.nodes,
                checkpoints=held.checkpoints,
                tokens=sum(n.length for t in self._trees.values() for n in t.nodes()),
                budget=self.memory.budget,
                bytes={
                    "memory": {
                        "rows": held.rows,
                        "window": held.window,
                        "checkpoint": held.checkpoint,
                        "index": held.index,
                    },
                    **({"disk": {"files": self.disk.nbytes()}} if self.disk else {}),
                },
                buffers=held.buffers,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictor.evictions,
                leases=len(self._pins),
            )

    def resize(self, memory: int | str) -> None:
        """Set another budget; what no longer fits goes at once, except what is leased."""
        with self._entered():
            self.memory.budget = parse_size(memory) if memory != "auto" else auto_size()
            self._evictor.make_room(self._trees.values(), 0, 0, self._clock)

    def verify(self) -> None:
        """Check every invariant of the tree and its accounting; raises BrokenInvariant."""
        with self._entered():
            verify(list(self._trees.values()), self.memory, self._pins, self.layout)

    def flush(self, *, wait: bool = True, durable: bool = False) -> bool:
        """Make what is held outlive this process; returns when it does.

        Without `wait` it is only given to the writer; False where that had no room for all of it.
        `durable`: only what is sure to be asked for again, such as system prompts and users' turns.
        A disk that refuses is said in the log."""
        while True:
            with self._entered():
                disk = self.disk
                done = True
                if disk is not None:
                    try:
                        done = disk.keep_fresh(self._trees, durable)
                        disk.touch()
                    except Exception:
                        log.exception("the disk tier could not be given what is new")
            if disk is None or not wait:
                return done
            disk.wait()
            if done or disk.writer.paused:
                return done

    def clear(self) -> None:
        """Forget everything, on disk too. Running requests go on, and store nothing more."""
        with self._entered():
            self._forget()
            if self.disk is not None:
                self.disk.forget()

    def close(self) -> None:
        """What the disk tier has is there for the next process."""
        with self._lock:
            if self._closed:
                return
        try:
            self.flush()
        finally:
            with self._lock:
                self._closed = True
                self._forget()
                if self.disk is not None:
                    self.disk.close()

    def check_model(self, model: Any) -> None:
        """Raise unless the cache was made for this model."""
        if model is not self.model and fingerprint(model) != self._namespace.model:
            raise ModelMismatch(
                f"this cache was made for another model ({type(self.model).__module__}): "
                "make one for this model with PrefixCache(model)"
            )

    def _find(self, tree: Tree, prompt: Tokens, cuts: list[int]) -> Found:
        return find(self.layout, tree, encode(prompt), len(prompt), cuts)

    def _restored(
        self, found: Found, tree: Tree, prompt: Tokens, cuts: list[int], room: int
    ) -> tuple[Found, list[Any]]:
        """The caches of a match. What cannot be restored after all is dropped: a shorter hit."""
        while found.at:
            try:
                left = len(prompt) - found.at
                caches = restore(self.layout, self.blank(), found, left + room)
                mx.eval([getattr(c, "state", None) for c in caches])
                return found, caches
            except Exception:
                log.exception("a stored prefix could not be restored; it is computed again")
                if self._discard(tree, found.node):
                    found = self._find(tree, prompt, cuts)
                else:
                    cold = replace(found.match, resume=0, reason="failed", tier=None)
                    found = replace(found, match=cold, node=tree.root)
        return found, self.blank()

    def _promoted(
        self, found: Found, namespace: Namespace, tree: Tree, prompt: Tokens, cuts: list[int]
    ) -> Found:
        """The match once memory has what only the disk had."""
        if self._below is None or not self._below.bring_up(
            found, namespace, tree, prompt, cuts, self._clock
        ):
            return found
        again = self._find(tree, prompt, cuts)
        if again.at <= found.at:
            return again
        return replace(again, match=replace(again.match, tier="disk"))

    def _discard(self, tree: Tree, node: Node) -> bool:
        """Remove a node and all below it, unless somebody holds it."""
        below = [node]
        for each in below:
            below.extend(each.children.values())
        if any(n.pins or (n.checkpoint and n.checkpoint.pins) for n in below):
            return False
        for each in reversed(below):
            self.memory.count(each, -1)
            tree.remove(each)
            if self.disk is not None:
                self.disk.gone(each)
        return True

    def _pinned(self, tree: Tree, found: Found, warm: bool, hint: float) -> Pin:
        """Pin a match's path, and refresh what it really used and nothing else."""
        pin = Pin(tree, found.node)
        pin.take()
        self._pins.add(pin)
        used = found.node.checkpoint
        if used is not None and found.at == found.node.end:
            pin.hold(used)
        if warm:
            return pin
        parts: list[Node | Checkpoint] = [*pin.checkpoints, *found.node.path()]
        for checkpoint in pin.checkpoints:
            checkpoint.hint = max(checkpoint.hint, hint)
        for part in parts:
            part.touch(self._clock)
        if found.at:
            self._hits += 1
        else:
            self._misses += 1
        return pin

    def _grid(self, prompt: Tokens, boundaries: Sequence[Boundary]) -> list[int]:
        """The prompt's own cuts in `exact`, which depend on nothing else."""
        if self.reuse == "fast":
            return []
        return grid(len(prompt) - 1, self.chunk, (b.position for b in boundaries if b.durable))

    def _cuts(self, shape: Shape, own_cuts: list[int]) -> list[Cut]:
        """Where prefill stops, and what is taken there."""
        for boundary in shape.boundaries:
            if boundary.kind is not None and boundary.kind not in WEIGHTS:
                raise InvalidOption(
                    f"boundary kind {boundary.kind!r} is unknown: give one of {', '.join(WEIGHTS)}"
                )
        points = self.placement.points(shape)
        kinds: dict[int, Kind] = {}
        if self.reuse == "fast":
            if self.layout.has_state or self.layout.has_window:
                kinds = {p.position: p.kind for p in points}
            stops = chunks(shape.resume, shape.stop, self.chunk, kinds)
            return [Cut(stop, kinds.get(stop)) for stop in stops]
        stops = [c for c in own_cuts if c > shape.resume]
        # A prompt that goes on where this one ends shares its whole chunks only.
        kinds = dict.fromkeys(stops[-2:-1], "end")
        for point in points:
            # The grid does not move: a checkpoint is taken at the cut before its point.
            cut = max((c for c in stops if c <= point.position), default=None)
            if cut is not None and WEIGHTS[point.kind] > WEIGHTS.get(kinds.get(cut, ""), 0.0):
                kinds[cut] = point.kind
        return [Cut(stop, kinds.get(stop)) for stop in stops]

    def _tree(self, salt: str | None) -> Tree:
        """The tree of a namespace. Empty ones are dropped now and then, or salts would pile up."""
        namespace = self._namespace.salted(salt)
        if namespace not in self._trees and len(self._trees) >= self._most_trees:
            used = {id(pin.tree) for pin in self._pins}
            for known, tree in list(self._trees.items()):
                if not tree.root.children and id(tree) not in used:
                    del self._trees[known]
            self._most_trees = 2 * len(self._trees) + 16
        return self._trees.setdefault(namespace, self._new_tree())

    def _new_tree(self) -> Tree:
        return Tree() if self.reuse == "fast" else ChunkTree()

    def _forget(self) -> None:
        for pin in self._pins:
            pin.live = False
        self._pins.clear()
        self._trees.clear()
        self.memory.held = Held()
        self._evictor.forget()

    def _release(self, pin: Pin) -> None:
        with self._lock:
            pin.drop()
            self._pins.discard(pin)
            # Where the budget was lowered meanwhile, what was leased can go now.
            self._evictor.make_room(self._trees.values(), 0, 0, self._clock)

    def _drain(self) -> None:
        """Unpin what forgotten leases held."""
        while self._dropped:
            self._release(self._dropped.popleft())

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise CacheClosed("this cache is closed: make a new PrefixCache")
            self._drain()
            yield
