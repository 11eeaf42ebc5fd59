"""The disk tier: what memory holds, or once held, on disk.

It has trees of its own, of the same nodes as memory's, whose payloads are files. A path is on disk
from its first token on, so whatever is found there can be restored from there alone. All changes of
the index and all writing are jobs for one thread, in order; a payload that is still to be written
is read from where it waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from rewarm.values import Namespace

from ...find import Found, Query, find
from ...layout import Layout
from ...payload import PackedState, Rows, chained
from ...pins import Pin
from ...placement import WEIGHTS
from ...retention import Item, Retention
from ...tree import Node, Payload, Tree
from .others import Others
from .room import Room
from .source import OnDisk, Source
from .store import Store
from .trees import DiskTree, DiskTrees
from .writer import Writer

DURABLE = 4.0
"""Kinds of checkpoints of this weight or more are written before they are evicted."""
READERS = 4
GROUP = 4 << 20
"""Bytes up to which nodes that are written together share a file: opening one takes as long as
reading a few hundred kilobytes."""
GROUP_SHARE = 64
"""A file never takes more than this part of the limit for being shared: it goes as a whole."""


@dataclass(frozen=True)
class Loaded:
    """A node of a path as read from disk."""

    node: Node
    rows: Rows | None
    window: Rows | None
    state: PackedState | None


class DiskTier:
    """Called with the cache's lock held, except for `wait` and `close`."""

    def __init__(
        self,
        store: Store,
        layout: Layout,
        policy: Retention,
        namespace: Namespace,
        *,
        name: str,
        grid: str,
    ) -> None:
        """`name` and `grid` are the model and the reuse mode, as people call them."""
        self.store = store
        self.layout = layout
        self.writer = Writer(store)
        self.loads = 0
        """Spans that were brought up to memory."""
        self.trees = DiskTrees(store, self.writer, layout, namespace, name=name, grid=grid)
        self.others = Others(store, self.trees.is_ours)
        self._room = Room(store, self.writer, self.trees, layout, policy)
        self._readers = ThreadPoolExecutor(READERS, "rewarm-disk-read")
        self._fresh: dict[Node, Tree] = {}
        self._left_out = 0
        self._group = min(GROUP, store.limit // GROUP_SHARE)

    # Reading

    def find(self, query: Query) -> Found | None:
        self._undo_failed()
        own = self.trees.known(query.namespace)
        return find(self.layout, replace(query, tree=own.tree)) if own is not None else None

    def load(self, namespace: Namespace, found: Found, known: int) -> Iterator[Loaded]:
        """The nodes of a path that reach beyond what memory knows, from the first on.

        Files are read ahead of what is taken. It ends where something turns out to be damaged,
        which is then forgotten with all below it."""
        own = self.trees.of(namespace)
        first = self.layout.reach(found.at)
        reads: dict[Source, Future[Rows | PackedState | None]] = {}
        wanted: list[tuple[Node, list[OnDisk | None]]] = []
        for node in list(found.node.path())[::-1]:
            windowed = node.end > first or node.start < self.layout.kept
            checkpoint = node.checkpoint if node is found.node else None
            parts = [
                part if isinstance(part, OnDisk) else None
                for part in (
                    node.rows if node.end > known else None,
                    node.window if windowed else None,
                    checkpoint.state if checkpoint is not None else None,
                )
            ]
            for part in parts:
                if part is not None and part.source not in reads:
                    reads[part.source] = self._readers.submit(part.source.load, self.store)
            wanted.append((node, parts))
        # What is put into memory may push other things out of it, down to here.
        pin = Pin(own.tree, found.node)
        pin.take()
        lost = None
        try:
            for node, parts in wanted:
                got = [p and p.of(reads[p.source].result()) for p in parts]
                if any(p is not None and g is None for p, g in zip(parts, got, strict=True)):
                    lost = node
                    return
                self.trees.use(node, is_end=node is found.node)
                self.loads += 1
                rows, window, state = got
                yield Loaded(
                    node,
                    rows if isinstance(rows, Rows) else None,
                    window if isinstance(window, Rows) else None,
                    state if isinstance(state, PackedState) else None,
                )
        finally:
            pin.drop()
            if lost is not None and self._is_gone(lost):
                self.trees.drop(own, lost)

    def _is_gone(self, node: Node) -> bool:
        """Whether a part of a node was damaged; what could only not be read now is kept."""
        state = node.checkpoint.state if node.checkpoint is not None else None
        sources = [p.source for p in (node.rows, node.window, state) if isinstance(p, OnDisk)]
        return any(s.stored is not None and not self.store.knows(s.stored) for s in sources)

    @property
    def evictions(self) -> int:
        return self._room.evictions

    # Writing

    def keep(self, namespace: Namespace, memory: Tree, node: Node) -> bool:
        """Have a memory node, with all above it, written. False where there is no room for it."""
        chunked = not memory.splits
        self._undo_failed()
        own = self.trees.of(namespace)
        path = list(node.path())[::-1]
        data = b"".join(each.key for each in path)
        cuts = list(itertools.accumulate(each.length for each in path))
        at = own.tree.walk(data, cuts if chunked else ())
        upper, shared = at.node, at.shared
        if chunked:
            shared = upper.end
        elif shared < upper.end and (shared < node.end or node.checkpoint is not None):
            upper = self.trees.split(own, upper, shared)
        for group in self._groups([each for each in path if each.end > shared]):
            added = self._add(own, upper, group, memory)
            if added is None:
                return False
            upper = added
        if self.layout.has_window:
            self._keep_windows(own, upper, path, memory)
        if node.checkpoint is None:
            return True
        return self._keep_checkpoint(own, upper, node, memory)

    def changed(self, tree: Tree, node: Node) -> None:
        """Memory has something new."""
        self._fresh[node] = tree

    def fresh(self) -> list[Node]:
        """What memory has that was not given to the writer yet, or that the disk refused."""
        self._undo_failed()
        return list(self._fresh)

    def keep_fresh(
        self, namespaces: Mapping[Namespace, Tree], nodes: list[Node], durable: bool
    ) -> list[Node]:
        """Have nodes that are new in memory written; `durable`: only what is sure to be asked for
        again. Returns what is left because more waits to be written than may."""
        self._undo_failed()
        names = {id(tree): namespace for namespace, tree in namespaces.items()}
        for i, node in enumerate(nodes):
            if self.writer.full:
                return nodes[i:]
            tree = self._fresh.get(node)
            if tree is None:
                continue
            namespace = names.get(id(tree))
            if node.parent is None or namespace is None:
                del self._fresh[node]
            elif not node.warm and self._worth(node, durable):
                if self.keep(namespace, tree, node):
                    del self._fresh[node]
                else:
                    self._left_out += 1
        return []

    @property
    def refusals(self) -> int:
        """How often something could not be written, or there was no room for it."""
        return self.writer.failures + self._left_out

    def gone(self, node: Node) -> None:
        """Memory has let go of a node."""
        self._fresh.pop(node, None)

    def demote(self, namespace: Namespace, item: Item) -> None:
        """Memory is about to evict something."""
        if not item.warm and self._worth(item.node, durable=False) and not self.writer.full:
            self.keep(namespace, item.tree, item.node)

    def write_uses(self) -> None:
        self.trees.write_uses()

    def wait(self, timeout: float | None = None) -> bool:
        return self.writer.wait(timeout)

    def forget(self) -> None:
        """Everything of this model, whatever the salt."""
        self.writer.clear()
        self.writer.wait()
        self.writer.take_failed()
        self.trees.forget()
        self._fresh.clear()
        self._room.forget()
        for weights in self.trees.weights:
            self.store.clear(where={"weights": weights})

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

    def _worth(self, node: Node, durable: bool) -> bool:
        checkpoint = node.checkpoint
        if durable:
            return checkpoint is not None and WEIGHTS[checkpoint.kind] >= DURABLE
        return checkpoint is not None or not self.layout.has_state

    def _groups(self, nodes: list[Node]) -> Iterator[list[Node]]:
        """Nodes that continue one another, divided into what goes into one file."""
        group: list[Node] = []
        size = 0
        for node in nodes:
            nbytes = node.rows.nbytes if node.rows is not None else 0
            if group and (size + nbytes > self._group or not _alike(group[0].rows, node.rows)):
                yield group
                group, size = [], 0
            group.append(node)
            size += nbytes
        if group:
            yield group

    def tree_of(self, namespace: Namespace) -> Tree | None:
        own = self.trees.known(namespace)
        return own.tree if own is not None else None

    def _add(self, own: DiskTree, parent: Node, nodes: list[Node], memory: Tree) -> Node | None:
        """Nodes for the tokens of memory nodes from the end of `parent` on."""
        parts = []
        if self.layout.has_rows:
            rows = chained([node.rows for node in nodes if isinstance(node.rows, Rows)])
            rows = rows.part(parent.end, nodes[-1].end) if rows is not None else None
            if rows is None or (rows.start, rows.stop) != (parent.end, nodes[-1].end):
                return None
            parts.append(Source.of_rows(rows))
        for node in nodes:
            if isinstance(node.window, Rows):
                window = node.window.part(parent.end, node.end)
                parts += [Source.of_rows(window)] if window is not None else []
        size = sum(s.nbytes for s in parts)
        if self.writer.full or not self._room.make(size, [parent]):
            return None
        return self.trees.grow(own, parent, nodes, parts, memory)

    def _keep_windows(self, own: DiskTree, lower: Node, path: list[Node], memory: Tree) -> None:
        """Windows that came to memory after their rows."""
        in_memory = {(node.start, node.end): node for node in path}
        for each in lower.path():
            node = in_memory.get((each.start, each.end))
            window = node.window if node is not None else None
            has = each.window.start if each.window is not None else each.end
            if node is None or not isinstance(window, Rows) or window.start >= has:
                continue
            source = Source.of_rows(window)
            if self.writer.full or not self._room.make(source.nbytes, [lower]):
                return
            self.trees.put_window(own, each, source, window, (memory, node))

    def _keep_checkpoint(self, own: DiskTree, lower: Node, node: Node, memory: Tree) -> bool:
        taken = node.checkpoint
        at = lower if lower.end == node.end else self.trees.split(own, lower, node.end)
        if taken is None:
            return True
        if at.checkpoint is not None:
            self.trees.raise_kind(at, at.checkpoint, taken.kind)
            return True
        source = Source.of_state(taken.state) if isinstance(taken.state, PackedState) else None
        if source is not None and (self.writer.full or not self._room.make(source.nbytes, [at])):
            return False
        self.trees.put_checkpoint(own, at, taken, source, (memory, node))
        return True

    def _undo_failed(self) -> None:
        """What could not be written was never there, and is to be written another time."""
        for undo in self.writer.take_failed():
            for node in undo.nodes:
                if node.parent is not None:
                    self._fresh[node] = undo.memory
            self.trees.undo(undo)


def _alike(a: Payload | None, b: Payload | None) -> bool:
    return isinstance(a, Rows) and isinstance(b, Rows) and a.packing == b.packing
