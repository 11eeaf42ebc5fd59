"""The trees on disk. All that is known of a node on disk is in the node itself.

The trees are as the disk will be once everything that waits is written. The index follows them:
`take_changes` gives the rows of the nodes that have changed, as far as their files are complete.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from rewarm.values import Kind, Namespace, Origin

from ...layout import Layout
from ...ledger import Held, Ledger
from ...placement import WEIGHTS
from ...tree import WIDTH, Checkpoint, ChunkTree, Node, Tree, tree_of
from ...worth import Item
from ..base import Offer, Receipt, Sealed, Span
from ..seal import FORMAT, What, digest_of
from .index import Changes, FileRow, NamespaceInfo, NamespaceRow, NodeRow, new_id
from .parts import File, FilePart, nbytes_of, parts_of, written_id
from .store import Store

UNLIMITED = 1 << 60
SECOND = 1000
"""Ticks of the clock in a second. Many things are written in one, and their order matters."""


def clock() -> int:
    return int(time.time() * SECOND)


@dataclass(eq=False)
class DiskTree:
    """A namespace's tree, with the number of each of its nodes in the index."""

    tree: Tree
    id: int
    digest: str
    about: dict[str, Any]
    ids: dict[Node, int] = field(default_factory=dict)


class DiskTrees:
    """All trees of this model on disk. Every method is called under the tier's lock."""

    def __init__(
        self, store: Store, layout: Layout, namespace: Namespace, *, model: str, grid: str
    ) -> None:
        self.store = store
        self.layout = layout
        self.ledger = Ledger(UNLIMITED, UNLIMITED)
        self.waiting: deque[File] = deque()
        """Files to be written, in the order of the offers. Those that no node has are skipped."""
        self.waiting_bytes = 0
        self.returned: list[Receipt] = []
        """Offers that could not be kept after all."""
        self.changed = 0
        """The number of times that there was something new to write."""
        self._writing: File | None = None
        self._gone = Changes()
        """The rows to remove from the index."""
        self._dirty: dict[Node, DiskTree] = {}
        """Nodes that are new to the index, or differ from their rows in it."""
        self._used: dict[Node, DiskTree] = {}
        """Nodes that were only used. No write is made for them alone: see `note_uses`."""
        self._taken: dict[Node, DiskTree] = {}
        """The dirty nodes of the current transaction."""
        self._bases = {namespace.salted(None)}
        """Every namespace that this process has used, without the salt."""
        self._for_people = {"name": model, "grid": grid}
        self._chunked = grid.startswith("exact")
        self._stored = {info.id: info for info in store.index.at_start}
        self._known: dict[int, DiskTree] = {}
        """The trees that were read, by the number of their namespace."""
        self._names: dict[Namespace, int] = {}
        """The numbers of the namespaces that were asked for. The index does not reveal salts."""

    def __iter__(self) -> Iterator[DiskTree]:
        return iter(self._known.values())

    # Which trees there are

    @property
    def weights(self) -> set[str]:
        """The digests of the weights that this process has used."""
        return {base.weights for base in self._bases}

    def known(self, namespace: Namespace) -> DiskTree | None:
        """Return a namespace's tree, if anything was ever stored for it."""
        if namespace not in self._names and _number(digest_of(namespace)) not in self._stored:
            return None
        return self.of(namespace)

    def of(self, namespace: Namespace) -> DiskTree:
        id = self._names.get(namespace)
        if id is None or id not in self._known:
            digest = digest_of(namespace)
            id = _number(digest)
            self._read(id, digest, {**_about(namespace), **self._for_people})
            self._names[namespace] = id
            self._bases.add(namespace.salted(None))
        return self._known[id]

    def by_namespace(self) -> dict[Namespace, Tree]:
        """Return the trees that were asked for since the start. The index may have more."""
        return {name: self._known[id].tree for name, id in self._names.items()}

    def read_all(self) -> None:
        """Read the trees of every salt, asked for or not: they share the disk."""
        for info in self._stored.values():
            if self.is_ours(info):
                self._read(info.id, info.digest, info.about)

    def is_ours(self, info: NamespaceInfo) -> bool:
        """True where a namespace is one of this process, perhaps with another salt."""
        return any(
            all(info.about.get(k) == v for k, v in _about(base).items() if k != "salt")
            for base in self._bases
        )

    def strangers(self) -> list[NamespaceInfo]:
        """Return the namespaces of others, with the longest unused last."""
        others = [i for i in self._stored.values() if i.bytes and not self.is_ours(i)]
        return sorted(others, key=lambda info: -info.used)

    def clear(self, stranger: NamespaceInfo) -> None:
        del self._stored[stranger.id]
        self._gone.cleared[stranger.id] = stranger.bytes
        self.store.plan(-stranger.bytes)

    def _read(self, id: int, digest: str, about: dict[str, Any]) -> DiskTree:
        if id not in self._known:
            own = DiskTree(ChunkTree() if self._chunked else Tree(), id, digest, about)
            if id in self._stored:
                with _no_collection():
                    self._build(own)
            self._known[id] = own
        return self._known[id]

    def _build(self, own: DiskTree) -> None:
        """Make the nodes that the index has. What cannot be used is to be removed."""
        stored = self.store.index.load(own.id)
        files: dict[int | None, File] = {}
        for id, row in stored.files.items():
            span = (row.start, row.stop) if row.start is not None and row.stop is not None else None
            files[id] = File(id, own.id, span, row.nbytes, row.nbytes)
        nodes: dict[int | None, Node] = {None: own.tree.root}
        for each in stored.nodes:
            node = self._node(own, nodes.get(each.parent), each, files)
            if node is None:
                self._gone.gone_nodes.append(each.id)
                continue
            nodes[each.id] = node
            own.ids[node] = each.id
            self.ledger.count(node)
        self._gone.gone_nodes += stored.lost
        self._gone.gone_files |= dict.fromkeys(stored.unused, 0)
        for file in files.values():
            if not file.nodes:
                self._free(file)

    def _node(
        self, own: DiskTree, parent: Node | None, row: NodeRow, files: dict[int | None, File]
    ) -> Node | None:
        if parent is None or (self.layout.has_rows and row.rows_file is None):
            return None
        start, stop = parent.end, parent.end + len(row.key) // WIDTH
        if parent.children and own.tree.child(parent, row.key, 0, stop - start) is not None:
            return None
        rows, window, state = (
            files.get(id) for id in (row.rows_file, row.window_file, row.state_file)
        )
        if any(file and not file.overlaps(start, stop) for file in (rows, window)):
            return None
        if state is not None and state.span is not None:
            return None
        node = own.tree.add(parent, row.key, cast(Origin, row.origin))
        node.hits, node.last_used = row.hits, round(row.used * SECOND)
        node.rows = FilePart(rows, start, stop) if rows is not None else None
        node.window = FilePart(window, start, stop) if window is not None else None
        if row.kind is not None and (state is not None or not self.layout.has_state):
            part = FilePart(state, stop, stop) if state is not None else None
            node.checkpoint = Checkpoint(
                cast(Kind, row.kind), part, node.last_used, row.hits, hint=row.hint
            )
        for each in parts_of(node):
            each.file.nodes.add(node)
        return node

    # What changes in them

    def grow(self, offer: Offer) -> tuple[DiskTree, Node, int]:
        """Add the missing nodes of an offered path. Returns its end, and the known tokens."""
        own = self.of(offer.namespace)
        end = offer.path[-1]
        node, shared = own.tree.walk(offer.data, offer.cuts)
        if offer.exact:
            shared = node.end
        elif shared < node.end and (shared < end.end or end.kind is not None):
            node = self._split(own, node, shared)
        for span in offer.path:
            if span.end > node.end:
                begin = node.end - span.start
                node = own.tree.add(node, span.key[begin * WIDTH :], span.origin)
                node.hits, node.last_used = span.hits, clock()
                own.ids[node] = new_id()
                self.ledger.count(node)
                self._note(own, node)
        return own, node, shared

    def put(
        self,
        own: DiskTree,
        nodes: Sequence[Node],
        what: What,
        arrays: Sealed,
        span: tuple[int, int] | None,
        receipt: Receipt,
    ) -> None:
        """Have a payload written, and give each of the nodes its part."""
        file = File(new_id(), own.id, span, nbytes_of(arrays), None, arrays, receipt)
        file.number, file.nodes = self.changed + 1, {*nodes}
        self.waiting.append(file)
        self.waiting_bytes += file.nbytes
        self.store.plan(file.nbytes)
        for node in nodes:
            self.ledger.count(node, -1)
            if what == "rows":
                node.rows = FilePart(file, node.start, node.end)
            elif what == "window":
                self._release(node, node.window)
                node.window = FilePart(file, node.start, node.end)
                self._note(own, node)  # the index must not name a file that goes
            elif node.checkpoint is not None:
                node.checkpoint.state = FilePart(file, node.end, node.end)
            self.ledger.count(node)

    def put_checkpoint(self, own: DiskTree, node: Node, span: Span) -> None:
        """Note the checkpoint at a node's end. A known one takes the weightier kind."""
        assert span.kind is not None
        held = node.checkpoint
        if held is None:
            held = Checkpoint(span.kind, None, clock(), hits=span.hits, hint=span.hint)
            self.ledger.put_checkpoint(node, held)
            self._note(own, node)
        elif WEIGHTS[span.kind] > WEIGHTS[held.kind]:
            held.kind = span.kind
            self._note(own, node)

    def use(self, own: DiskTree, end: Node) -> None:
        """Note the use of a path, for this process's retention and the next one's."""
        now = clock()
        for node in end.path():
            node.last_used, node.hits = now, node.hits + 1
            self._used[node] = own
        if end.checkpoint is not None:
            end.checkpoint.last_used, end.checkpoint.hits = now, end.checkpoint.hits + 1

    def note_uses(self) -> None:
        """Have the uses since the last call written to the index."""
        self._dirty |= self._used
        self._used.clear()

    def _split(self, own: DiskTree, node: Node, at: int) -> Node:
        self.ledger.count(node, -1)
        for part in parts_of(node):
            part.file.nodes.discard(node)
        upper = own.tree.split(node, at)
        own.ids[upper] = new_id()
        for each in (upper, node):
            self.ledger.count(each)
            self._note(own, each)
            for part in parts_of(each):
                part.file.nodes.add(each)
        return upper

    def evicted(self, item: Item) -> None:
        """Release what retention is about to evict from a node."""
        node = item.node
        own = next(own for own in self if own.tree is tree_of(node))
        if item.what == "leaf":
            self._remove(own, node)
        else:
            state = node.checkpoint.state if node.checkpoint is not None else None
            self._release(node, node.window if item.what == "window" else state)
            self._note(own, node)

    def drop(self, own: DiskTree, node: Node) -> None:
        """Forget a node and all below it. What is not written is to be offered again."""
        for each in reversed(node.subtree()):
            for part in parts_of(each):
                self._return(part.file)
            self.ledger.count(each, -1)
            self._remove(own, each)
            own.tree.remove(each)

    def lose(self, file: File) -> None:
        """Forget what lies in a file that could not be written, or is not what was written."""
        self._return(file)
        for node in [*file.nodes]:
            own = self._known[file.namespace]
            if node not in own.ids:
                continue  # it was dropped with a node above it
            if isinstance(node.rows, FilePart) and node.rows.file is file:
                self.drop(own, node)
                continue
            is_window = isinstance(node.window, FilePart) and node.window.file is file
            self._release(node, *(part for part in parts_of(node) if part.file is file))
            if is_window:
                self.ledger.put_window(node, None)
            else:
                self.ledger.put_checkpoint(node, None)
            self._note(own, node)

    def forget(self) -> None:
        """Forget all trees, and everything that waits."""
        for file in self.waiting:
            if file.nodes:
                self._free(file)
        for own in self:
            for node in own.tree.nodes():
                for part in parts_of(node):
                    part.file.nodes.clear()
            own.tree.clear()
            own.ids.clear()
        self.ledger.held = Held()
        self._dirty.clear()
        self._used.clear()
        self._known.clear()
        self._names.clear()
        self.waiting.clear()
        self.returned.clear()

    def _return(self, file: File) -> None:
        """Have the offer of a file that is not written made again."""
        if file.receipt is not None:
            self.returned.append(file.receipt)
            file.receipt = None

    def _note(self, own: DiskTree, node: Node) -> None:
        self._dirty[node] = own

    def _remove(self, own: DiskTree, node: Node) -> None:
        self._gone.gone_nodes.append(own.ids.pop(node))
        self._release(node, *parts_of(node))

    def _release(self, node: Node, *parts: Any) -> None:
        for part in parts:
            if isinstance(part, FilePart):
                part.file.nodes.discard(node)
                if not part.file.nodes:
                    self._free(part.file)

    def _free(self, file: File) -> None:
        if file is self._writing:
            return  # the end of the write frees it
        self.store.plan(-file.nbytes)
        if file.size is None:
            self.waiting_bytes -= file.nbytes
            file.arrays = file.receipt = None
        else:
            self._gone.gone_files[file.id] = file.nbytes

    # What the writer does

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._dirty or self._gone)

    def next_file(self) -> File | None:
        """Take the file that is to be written next."""
        while self.waiting:
            file = self.waiting.popleft()
            if file.nodes:
                self._writing = file
                return file
        return None

    def written(self, file: File, size: int) -> None:
        """Note that a file is complete. Its bytes are no longer planned."""
        self._writing = None
        file.size = size  # before `arrays` goes: readers look there first, without the lock
        file.arrays = file.receipt = None
        self.waiting_bytes -= file.nbytes
        if not file.nodes:
            self._free(file)
        own = self._known.get(file.namespace)
        if own is not None:
            self._dirty |= dict.fromkeys(file.nodes, own)

    def failed(self, file: File) -> None:
        """Note that a file could not be written."""
        self._writing = None
        if not file.nodes:
            self._free(file)
        self.lose(file)

    def take_changes(self) -> tuple[Changes, int]:
        """Take the changes for the index whose files are complete, with the number of the last
        change among them."""
        first = self._writing or next((file for file in self.waiting if file.nodes), None)
        changes, self._gone = self._gone, Changes()
        self._taken, self._dirty = self._dirty, {}
        owns: dict[int, DiskTree] = {}
        files: dict[int, File] = {}
        for node, own in self._taken.items():
            if node not in own.ids or (self.layout.has_rows and written_id(node.rows) is None):
                continue  # it is gone, or comes again when its file is complete
            owns[own.id] = own
            changes.nodes.append(self._row(own, node))
            files |= {part.file.id: part.file for part in parts_of(node)}
        for file in files.values():
            if file.size is not None:
                start, stop = file.span or (None, None)
                changes.files.append(FileRow(file.id, file.namespace, file.size, start, stop))
        for own in owns.values():
            about = json.dumps(own.about)
            changes.namespaces.append(NamespaceRow(own.id, own.digest, about, time.time()))
        return changes, first.number - 1 if first is not None else self.changed

    def put_back(self, changes: Changes) -> None:
        """Put back changes that the index refused, so that they are taken again."""
        self._dirty = {**self._taken, **self._dirty}
        self._gone.gone_nodes += changes.gone_nodes
        self._gone.gone_files |= changes.gone_files
        self._gone.cleared |= changes.cleared

    def _row(self, own: DiskTree, node: Node) -> NodeRow:
        checkpoint = node.checkpoint
        state = checkpoint.state if checkpoint is not None else None
        is_whole = state is None or written_id(state) is not None
        kind = checkpoint.kind if checkpoint is not None and is_whole else None
        last_used = max(node.last_used, checkpoint.last_used if checkpoint else 0)
        return NodeRow(
            id=own.ids[node],
            namespace=own.id,
            parent=own.ids.get(node.parent) if node.parent is not None else None,
            origin=node.origin,
            kind=kind,
            hits=node.hits,
            used=last_used / SECOND,
            hint=float(checkpoint.hint) if checkpoint is not None else 1.0,
            rows_file=written_id(node.rows),
            window_file=written_id(node.window),
            state_file=written_id(state),
            key=node.key,
        )


def _number(digest: str) -> int:
    """Return the number of a namespace in the index."""
    return int(digest[:15], 16)


def _about(namespace: Namespace) -> dict[str, Any]:
    """Describe a namespace for the index, with a digest instead of the salt."""
    own = {**asdict(namespace), "weights": namespace.weights, "format": FORMAT}
    return {**own, "salt": salt_digest(namespace.salt)}


def salt_digest(salt: str | None) -> str:
    """Return the digest by which the index tells a salt from others."""
    return hashlib.sha256(salt.encode()).hexdigest()[:16] if salt else ""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: many new objects that all stay would start it for nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
