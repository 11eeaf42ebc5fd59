"""The disk tier: what memory holds, or once held, on disk.

It has trees of its own, of the same nodes as memory's, whose payloads are files. A path is on disk
from its first token on, so whatever is found there can be restored from there alone. All changes of
the index and all writing are jobs for one thread, in order; a payload that is still to be written
is read from where it waits."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..find import Found, find
from ..layout import Layout
from ..lease import Pin
from ..memory import Held, MemoryTier
from ..model import Namespace
from ..payload import PackedState, Rows
from ..placement import WEIGHTS
from ..retention import Evictor, Item, Retention
from ..tree import WIDTH, Checkpoint, ChunkTree, Node, Origin, Tree
from .codec import pack_rows, pack_state
from .source import OnDisk, Source
from .store import Store, StoredNode
from .writer import Job, Row, Undo, Writer

log = logging.getLogger("rewarm")

MARGIN = 64 << 10
"""Bytes that a transaction of the index may take beside its payloads."""
DURABLE = 4.0
"""Kinds of checkpoints of this weight or more are written before they are evicted."""
READERS = 4
UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Loaded:
    """A node of a path as read from disk."""

    node: Node
    rows: Rows | None
    window: Rows | None
    state: PackedState | None


class DiskTree:
    """A namespace's tree, and the number each of its nodes has in the index."""

    def __init__(self, tree: Tree, namespace: int) -> None:
        self.tree = tree
        self.namespace = namespace
        self.ids: dict[Node, int] = {}


class DiskTier:
    """Called with the cache's lock held, except for `wait` and `close`."""

    def __init__(
        self, store: Store, layout: Layout, policy: Retention, about: dict[str, Any]
    ) -> None:
        self.store = store
        self.layout = layout
        self.about = about
        self.account = MemoryTier(UNLIMITED, UNLIMITED)
        self.writer = Writer(store)
        self.loads = 0
        self._trees: dict[Namespace, DiskTree] = {}
        self._evictor = Evictor(
            policy,
            self.account,
            reach=layout.longest_window,
            stateful=layout.has_state,
            on_evict=self._evicted,
        )
        self._readers = ThreadPoolExecutor(READERS, "rewarm-disk-read")
        self._used: set[Node] = set()
        self._fresh: dict[Node, Tree] = {}

    # Reading

    def find(
        self, namespace: Namespace, chunked: bool, data: bytes, length: int, cuts: list[int]
    ) -> Found | None:
        self._undo_failed()
        own = self._known(namespace, chunked)
        return find(self.layout, own.tree, data, length, cuts) if own is not None else None

    def load(self, namespace: Namespace, found: Found, known: int) -> Iterator[Loaded]:
        """The nodes of a path that reach beyond what memory knows, from the first on.

        Files are read ahead of what is taken. It ends where something turns out to be damaged,
        which is then forgotten with all below it."""
        first = self.layout.reach(found.at)
        wanted: list[tuple[Node, list[Future[Any] | None]]] = []
        for node in list(found.node.path())[::-1]:
            rows = node.rows if node.end > known else None
            windowed = node.end > first or node.start < self.layout.kept
            state = node.checkpoint.state if node.checkpoint and node is found.node else None
            parts = (rows, node.window if windowed else None, state)
            wanted.append((node, [self._read(p) if p is not None else None for p in parts]))
        # What is put into memory may push other things out of it, down to here.
        pin = Pin(self._trees[namespace].tree, found.node)
        pin.take()
        lost = None
        try:
            for node, reads in wanted:
                got = [r.result() if r is not None else None for r in reads]
                if any(r is not None and g is None for r, g in zip(reads, got, strict=True)):
                    lost = node
                    return
                self._use(node, is_end=node is found.node)
                rows, window, state = got
                yield Loaded(node, rows, window, state)
        finally:
            pin.drop()
            if lost is not None and self._is_gone(lost):
                self._drop(self._trees[namespace], lost)

    def _use(self, node: Node, is_end: bool) -> None:
        now = int(time.time())
        node.last_used, node.hits = now, node.hits + 1
        if node.checkpoint is not None and is_end:
            node.checkpoint.last_used, node.checkpoint.hits = now, node.checkpoint.hits + 1
        self._used.add(node)
        self.loads += 1

    def _is_gone(self, node: Node) -> bool:
        """Whether a part of a node was damaged; what could only not be read now is kept."""
        state = node.checkpoint.state if node.checkpoint is not None else None
        sources = [p.source for p in (node.rows, node.window, state) if isinstance(p, OnDisk)]
        return any(s.stored is not None and not self.store.knows(s.stored) for s in sources)

    def _read(self, part: Any) -> Future[Any]:
        part = part if isinstance(part, OnDisk) else None
        return self._readers.submit(lambda: part.load(self.store) if part is not None else None)

    # Writing

    def keep(self, namespace: Namespace, memory: Tree, node: Node) -> bool:
        """Have a memory node, with all above it, written. False where there is no room for it."""
        chunked = not memory.splits
        self._undo_failed()
        own = self._tree(namespace, chunked)
        path = list(node.path())[::-1]
        data = b"".join(each.key for each in path)
        cuts = list(itertools.accumulate(each.length for each in path))
        at = own.tree.walk(data, cuts if chunked else ())
        upper, shared = at.node, at.shared
        if chunked:
            shared = upper.end
        elif shared < upper.end and (shared < node.end or node.checkpoint is not None):
            upper = self._split(own, upper, shared)
        for each in path:
            if each.end > shared:
                added = self._add(own, upper, each, max(shared, each.start), memory)
                if added is None:
                    return False
                upper = added
        if self.layout.has_window:
            self._keep_windows(own, upper, path, memory)
        if node.checkpoint is None:
            return True
        return self._keep_checkpoint(own, upper, node, node.checkpoint, memory)

    def changed(self, tree: Tree, node: Node) -> None:
        """Memory has something new."""
        self._fresh[node] = tree

    def keep_fresh(self, namespaces: Mapping[Namespace, Tree], durable: bool) -> bool:
        """Have what is new in memory written; `durable`: only what is sure to be asked for again.
        False where more waits to be written than may."""
        self._undo_failed()
        names = {id(tree): namespace for namespace, tree in namespaces.items()}
        for node, tree in list(self._fresh.items()):
            if self.writer.full:
                return False
            namespace = names.get(id(tree))
            if (
                node.parent is None
                or namespace is None
                or (
                    not node.warm
                    and self._worth(node, durable)
                    and self.keep(namespace, tree, node)
                )
            ):
                del self._fresh[node]
        return True

    def gone(self, node: Node) -> None:
        """Memory has let go of a node."""
        self._fresh.pop(node, None)

    def _worth(self, node: Node, durable: bool) -> bool:
        checkpoint = node.checkpoint
        if durable:
            return checkpoint is not None and WEIGHTS[checkpoint.kind] >= DURABLE
        return checkpoint is not None or not self.layout.has_state

    def demote(self, namespace: Namespace, item: Item) -> None:
        """Memory is about to evict something."""
        if not item.warm and self._worth(item.node, durable=False) and not self.writer.full:
            self.keep(namespace, item.tree, item.node)

    def touch(self) -> None:
        """Write down what was used, for the next process's retention."""
        for own in self._trees.values():
            rows = [self._row(own, node) for node in self._used if node in own.ids]
            if rows:
                self.writer.put(Job(updates=rows))
        self._used.clear()

    def wait(self, timeout: float | None = None) -> bool:
        return self.writer.wait(timeout)

    def forget(self) -> None:
        """Everything of this model, whatever the salt."""
        self.writer.clear()
        self.writer.wait()
        self._trees.clear()
        self._used.clear()
        self._fresh.clear()
        self.account.held = Held()
        self._evictor.forget()
        self.store.clear(where={"weights": self.about["weights"]})

    def nbytes(self) -> int:
        """What the store takes on disk."""
        try:
            return self.store.bytes()
        except OSError:
            return 0

    def close(self) -> None:
        self.writer.close()
        self._readers.shutdown()
        self.store.close()

    # Trees

    def _known(self, namespace: Namespace, chunked: bool) -> DiskTree | None:
        """A namespace's tree, if anything was ever stored for it."""
        if namespace not in self._trees and not self.store.known_namespace(self.digest(namespace)):
            return None
        return self._tree(namespace, chunked)

    def _tree(self, namespace: Namespace, chunked: bool) -> DiskTree:
        own = self._trees.get(namespace)
        if own is None:
            digest = self.digest(namespace)
            salt = (
                hashlib.sha256(namespace.salt.encode()).hexdigest()[:16] if namespace.salt else ""
            )
            number = self.store.namespace(digest, {**self.about, "salt": salt})
            own = DiskTree(ChunkTree() if chunked else Tree(), number)
            self._trees[namespace] = own
            self._grow(own)
        return own

    def digest(self, namespace: Namespace) -> str:
        """What must be equal, as one text: the weights in full, and not the sample of a process."""
        parts = {**asdict(namespace), **self.about}
        del parts["name"]
        text = "\n".join(f"{name}={value}" for name, value in sorted(parts.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _grow(self, own: DiskTree) -> None:
        """The tree as the index has it."""
        rows, payloads = self.store.nodes(own.namespace)
        sources: dict[int, Source] = {}

        def part(number: int | None, start: int, stop: int) -> OnDisk | None:
            if number is None:
                return None
            source = sources.setdefault(number, Source(stored=payloads[number]))
            first, last = source.span or (start, stop)
            return OnDisk(source, max(start, first), min(stop, last))

        nodes: dict[int | None, Node] = {None: own.tree.root}
        for row in rows:
            parent = nodes.get(row.parent)
            if parent is None or row.start != parent.end:
                continue
            if own.tree.child(parent, row.key, 0, len(row.key) // WIDTH) is not None:
                continue  # a row that should have been removed
            if self.layout.has_rows and row.rows is None:
                continue
            origin: Origin = "decode" if row.origin == "decode" else "prefill"
            node = own.tree.add(parent, row.key, origin)
            node.hits, node.last_used = row.hits, int(row.used)
            node.rows = part(row.rows, node.start, node.end)
            node.window = part(row.window, node.start, node.end)
            whole = row.state is not None or not self.layout.has_state
            if row.kind is not None and row.kind in WEIGHTS and whole:
                state = part(row.state, node.end, node.end)
                node.checkpoint = Checkpoint(
                    row.kind, state, int(row.used), hits=row.hits, hint=row.hint
                )
            nodes[row.id] = node
            own.ids[node] = row.id
            self.account.count(node)

    def _add(
        self, own: DiskTree, parent: Node, node: Node, start: int, memory: Tree
    ) -> Node | None:
        """A node for the tokens of a memory node from `start` on."""
        rows, window = node.rows, node.window
        if start > node.start:
            rows = rows.split(start)[1] if rows is not None else None
            window = window.split(start)[1] if window is not None else None
        if self.layout.has_rows and not isinstance(rows, Rows):
            return None
        parts = [
            Source(waiting=p, packed=pack_rows(p)) for p in (rows, window) if isinstance(p, Rows)
        ]
        size = sum(s.nbytes for s in parts)
        if self.writer.full or not self._make_room(size, [parent]):
            return None
        added = own.tree.add(parent, node.key[(start - node.start) * WIDTH :], node.origin)
        added.hits, added.last_used = node.hits, int(time.time())
        found = iter(parts)
        if isinstance(rows, Rows):
            added.rows = OnDisk(next(found), rows.start, rows.stop)
        if isinstance(window, Rows):
            added.window = OnDisk(next(found), window.start, window.stop)
        own.ids[added] = self.store.next_id()
        self.account.count(added)
        undo = Undo("node", added, (memory, node))
        self.writer.put(Job(payloads=parts, adds=[self._row(own, added)], undo=undo))
        return added

    def _keep_windows(self, own: DiskTree, lower: Node, path: list[Node], memory: Tree) -> None:
        """Windows that came to memory after their rows."""
        in_memory = {(node.start, node.end): node for node in path}
        for each in lower.path():
            source_node = in_memory.get((each.start, each.end))
            window = source_node.window if source_node is not None else None
            has = each.window.start if each.window is not None else each.end
            if source_node is None or not isinstance(window, Rows) or window.start >= has:
                continue
            source = Source(waiting=window, packed=pack_rows(window))
            if self.writer.full or not self._make_room(source.nbytes, [lower]):
                return
            gone = self._released(each.window)
            self.account.put_window(each, OnDisk(source, window.start, window.stop))
            undo = Undo("window", each, (memory, source_node))
            rows = [self._row(own, each)]
            self.writer.put(Job([source], updates=rows, frees=gone, undo=undo))

    def _keep_checkpoint(
        self, own: DiskTree, lower: Node, node: Node, checkpoint: Checkpoint, memory: Tree
    ) -> bool:
        at = lower if lower.end == node.end else self._split(own, lower, node.end)
        known = at.checkpoint
        if known is not None:
            if WEIGHTS[checkpoint.kind] > WEIGHTS[known.kind]:
                known.kind = checkpoint.kind
                self._used.add(at)
            return True
        state = None
        parts = []
        if isinstance(checkpoint.state, PackedState):
            source = Source(waiting=checkpoint.state, packed=pack_state(checkpoint.state))
            if self.writer.full or not self._make_room(source.nbytes, [at]):
                return False
            parts.append(source)
            state = OnDisk(source, at.end, at.end)
        kept = Checkpoint(
            checkpoint.kind,
            state,
            int(time.time()),
            hits=checkpoint.hits,
            hint=checkpoint.hint,
        )
        self.account.put_checkpoint(at, kept)
        undo = Undo("checkpoint", at, (memory, node)) if parts else None
        self.writer.put(Job(payloads=parts, updates=[self._row(own, at)], undo=undo))
        return True

    def _split(self, own: DiskTree, node: Node, at: int) -> Node:
        self.account.count(node, -1)
        upper = own.tree.split(node, at)
        self.account.count(upper)
        self.account.count(node)
        own.ids[upper] = self.store.next_id()
        rows = [self._row(own, upper), self._row(own, node)]
        self.writer.put(Job(adds=rows[:1], updates=rows[1:]))
        return upper

    def _row(self, own: DiskTree, node: Node) -> Row:
        parent = own.ids.get(node.parent) if node.parent is not None else None
        checkpoint = node.checkpoint
        stored = StoredNode(
            id=own.ids[node],
            parent=parent,
            start=node.start,
            key=node.key,
            origin=node.origin,
            kind=checkpoint.kind if checkpoint is not None else None,
            hits=node.hits,
            used=float(node.last_used),
            hint=checkpoint.hint if checkpoint is not None else 1.0,
            rows=None,
            window=None,
            state=None,
        )
        state = checkpoint.state if checkpoint is not None else None
        return Row(own.namespace, stored, *(_source(p) for p in (node.rows, node.window, state)))

    # Limits

    def _make_room(self, nbytes: int, holding: list[Node]) -> bool:
        """Room for so many bytes by the time that they are written."""
        if self._lacking(nbytes) <= 0:
            return True
        self._drop_strangers(nbytes)
        for node in holding:
            node.pins += 1
        try:
            trees = [own.tree for own in self._trees.values()]
            # What goes may free less than it seems: two nodes may share a file.
            while (lacking := self._lacking(nbytes)) > 0:
                before = self._evictor.evictions
                self.account.budget = max(self.account.held.total - lacking, 0)
                self._evictor.make_room(trees, 0, 0, int(time.time()))
                if self._evictor.evictions == before:
                    break
        finally:
            self.account.budget = UNLIMITED
            for node in holding:
                node.pins -= 1
        return self._lacking(nbytes) <= 0

    def _lacking(self, nbytes: int) -> int:
        coming = self.writer.waiting - self.writer.freeing
        try:
            return nbytes + MARGIN + coming - self.store.room()
        except OSError:  # the folder is gone, or the store is broken: there is no room at all
            return UNLIMITED

    def _drop_strangers(self, nbytes: int) -> None:
        """What other models have here goes first, the longest unused before others."""
        ours = self.about["weights"]
        try:
            known = self.store.namespaces()
        except OSError:
            return
        strangers = [n for n in known if n.about.get("weights") != ours and n.bytes]
        for each in sorted(strangers, key=lambda n: n.used):
            if self._lacking(nbytes) <= 0:
                return
            log.info("the disk tier is full: %s makes room", each.about.get("name", each.digest))
            self.store.clear(namespace=each.id)

    def _evicted(self, item: Item) -> None:
        """The disk's own eviction: rows of the index, and the files that nobody else has."""
        own = next(o for o in self._trees.values() if o.tree is item.tree)
        node = item.node
        state = node.checkpoint.state if node.checkpoint is not None else None
        if item.what == "leaf":
            number = own.ids.pop(node)
            self._used.discard(node)
            gone = self._released(node.rows, node.window, state)
            self.writer.put(Job(removes=[number], frees=gone))
            return
        # The row goes on without it, in the same transaction.
        row = self._row(own, node)
        if item.what == "checkpoint":
            row = replace(row, node=replace(row.node, kind=None), state=None)
            gone = self._released(state)
        else:
            row = replace(row, window=None)
            gone = self._released(node.window)
        self.writer.put(Job(updates=[row], frees=gone))

    def _released(self, *parts: Any) -> list[Source]:
        """The payloads that no node has any more."""
        sources = [p.source for p in parts if isinstance(p, OnDisk)]
        for source in sources:
            source.users -= 1
        return [source for source in sources if source.users <= 0]

    def _undo_failed(self) -> None:
        """What could not be written was never there, and is to be written another time."""
        for undo in self.writer.take_failed():
            tree, kept = undo.memory
            if kept.parent is not None:
                self._fresh[kept] = tree
            own = next((o for o in self._trees.values() if undo.node in o.ids), None)
            if own is None:
                continue
            if undo.what == "node":
                self._drop(own, undo.node)
            elif undo.what == "checkpoint" and undo.node.checkpoint is not None:
                self._released(undo.node.checkpoint.state)
                self.account.put_checkpoint(undo.node, None)
            elif undo.what == "window":
                self._released(undo.node.window)
                self.account.put_window(undo.node, None)

    def _drop(self, own: DiskTree, node: Node) -> None:
        """Forget a node and all below it."""
        if node not in own.ids:
            return
        below = [node]
        for each in below:
            below.extend(each.children.values())
        removes, frees = [], []
        for each in reversed(below):
            self.account.count(each, -1)
            number = own.ids.pop(each, None)
            self._used.discard(each)
            state = each.checkpoint.state if each.checkpoint is not None else None
            frees += self._released(each.rows, each.window, state)
            if number is not None:
                removes.append(number)
            own.tree.remove(each)
        self.writer.put(Job(removes=removes, frees=frees))


def _source(part: Any) -> Source | None:
    return part.source if isinstance(part, OnDisk) else None
