"""The trees on disk. All that is known of a node on disk is in the node itself.

The trees are as the disk will be once everything that waits is written. The index follows them:
`take_changes` gives the rows of the nodes that have changed, as far as their files are complete.
"""

from __future__ import annotations

import gc
import threading
from collections import deque

from rewarm.values import Namespace

from ...layout import Layout
from ...ledger import Held, Ledger
from ...placement import WEIGHTS
from ...tree import NOWHERE, WIDTH, Checkpoint, ChunkTree, Node, Tree, tree_of
from ...worth import Item
from ..base import Offer, Receipt, Sealed
from ..seal import PathPayload, digest_of
from .index import Changes, FileRow, NamespaceInfo, NodeRow, new_id
from .parts import SECOND, DiskTree, File, FilePart, about_of, clock, file_of, files_of, nbytes_of
from .store import Store

UNLIMITED = 1 << 60


class DiskTrees:
    """All trees of this model on disk. Every method is called under the tier's lock."""

    def __init__(
        self, store: Store, layout: Layout, namespace: Namespace, *, model: str, grid: str
    ) -> None:
        """`model` and `grid` are the model and the reuse mode, as people call them."""
        self.store = store
        self.layout = layout
        self.ledger = Ledger(UNLIMITED, UNLIMITED)
        self.waiting: deque[File | threading.Event] = deque()
        """Files to be written, in the order of the offers. Those that no node has are skipped. An
        event is set once all that came before it is on disk."""
        self.waiting_bytes = 0
        self.returned: list[Receipt] = []
        """Offers that could not be kept after all."""
        self.bases = {namespace.salted(None)}
        """Every namespace that this process has used, without the salt."""
        self._writing: File | None = None
        self._gone = Changes()
        """The rows to remove from the index."""
        self._dirty: dict[Node, DiskTree] = {}
        """Nodes that are new to the index, or differ from their rows in it."""
        self._used: dict[Node, DiskTree] = {}
        """Nodes that were only used. No write is made for them alone."""
        self._taken: dict[Node, DiskTree] = {}
        """The dirty nodes of the current transaction."""
        self._for_people = {"name": model, "grid": grid}
        self._tree_kind = ChunkTree if grid.startswith("exact") else Tree
        self._stored = {info.id: info for info in store.index.at_start}
        """The namespaces that were stored at the start, and not read or removed since."""
        self._known: dict[int, DiskTree] = {}
        """The trees that were read, by the number of their namespace."""

    # Which trees there are

    def known(self, namespace: Namespace) -> DiskTree | None:
        """Return a namespace's tree, if anything was ever stored for it."""
        id = _number(digest_of(namespace))
        return self.of(namespace) if id in self._known or id in self._stored else None

    def of(self, namespace: Namespace) -> DiskTree:
        digest = digest_of(namespace)
        own = self._known.get(_number(digest))
        if own is None:
            about = {**about_of(namespace), **self._for_people}
            own = self._read(NamespaceInfo(_number(digest), digest, about))
        if own.tree.namespace != namespace:  # the index does not reveal salts
            own.tree.namespace = namespace
            self.bases.add(namespace.salted(None))
        return own

    def by_namespace(self) -> dict[Namespace, Tree]:
        """Return the trees that were asked for since the start. The index may have more."""
        trees = {own.tree.namespace: own.tree for own in self._known.values()}
        trees.pop(NOWHERE, None)
        return trees

    def read_all(self) -> None:
        """Read the trees of every salt, asked for or not: they share the disk."""
        for info in [i for i in self._stored.values() if self.is_ours(i)]:
            self._read(info)

    def is_ours(self, info: NamespaceInfo) -> bool:
        """True where a namespace is one of this process, perhaps with another salt."""
        about = {**info.about, "salt": ""}
        return any(about_of(base).items() <= about.items() for base in self.bases)

    def strangers(self) -> list[NamespaceInfo]:
        """Return the namespaces of others, with the longest unused first."""
        others = [i for i in self._stored.values() if i.bytes and not self.is_ours(i)]
        return sorted(others, key=lambda info: info.used)

    def clear(self, stranger: NamespaceInfo) -> None:
        del self._stored[stranger.id]
        self._gone.cleared[stranger.id] = stranger.bytes
        self.store.plan(-stranger.bytes)

    def _read(self, info: NamespaceInfo) -> DiskTree:
        own = DiskTree(self._tree_kind(), info)
        if info.id in self._stored:
            # Many new objects that all stay would start the garbage collector for nothing.
            collects = gc.isenabled()
            gc.disable()
            try:
                self._build(own)
            finally:
                if collects:
                    gc.enable()
        self._known[info.id] = own
        self._stored.pop(info.id, None)
        return own

    def _build(self, own: DiskTree) -> None:
        """Make the nodes that the index has. What cannot be used is to be removed."""
        stored = self.store.index.load(own.info.id)
        files: dict[int | None, File] = {
            id: File(id, own, row.span, row.nbytes, row.nbytes) for id, row in stored.files.items()
        }
        nodes: dict[int | None, Node] = {None: own.tree.root}
        for row in stored.nodes:
            node = self._node(own, nodes.get(row.parent), row, files)
            if node is None:
                self._gone.gone_nodes.append(row.id)
            else:
                nodes[row.id] = node
                self._count(node)
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
        rows, window, state = map(files.get, (row.rows_file, row.window_file, row.state_file))
        if any(file and not file.overlaps(start, stop) for file in (rows, window)):
            return None
        if state is not None and state.span is not None:
            return None
        node = own.tree.add(parent, row.key, row.origin)
        node.number, node.hits, node.last_used = row.id, row.hits, round(row.used * SECOND)
        node.rows = FilePart(rows, start, stop) if rows is not None else None
        node.window = FilePart(window, start, stop) if window is not None else None
        if row.kind is not None and (state is not None or not self.layout.has_state):
            part = FilePart(state, stop, stop) if state is not None else None
            node.checkpoint = Checkpoint(row.kind, part, node.last_used, row.hits, hint=row.hint)
        return node

    # What changes in them

    def grow(self, offer: Offer) -> tuple[DiskTree, Node, int]:
        """Add the missing nodes of an offered path. Returns its end, and the known tokens."""
        own = self.of(offer.namespace)
        end = offer.path[-1]
        node, shared = own.tree.walk(offer.data, offer.cuts)
        if not own.tree.splits:
            shared = node.end
        elif shared < node.end and (shared < end.end or end.checkpoint is not None):
            node = self._split(own, node, shared)
        for each in offer.path:
            if each.end > node.end:
                begin = node.end - each.start
                node = own.tree.add(node, each.key[begin * WIDTH :], each.origin)
                node.number, node.hits, node.last_used = new_id(), each.hits, clock()
                self._count(node)
                self._dirty[node] = own
        return own, node, shared

    def put(
        self, own: DiskTree, nodes: list[Node], payload: PathPayload, arrays: Sealed, offer: Offer
    ) -> None:
        """Have a payload written, and give each of the nodes its part."""
        span = (payload.start, payload.stop) if payload.what != "state" else None
        file = File(new_id(), own, span, nbytes_of(arrays), None, arrays, offer.receipt)
        self.waiting.append(file)
        self.waiting_bytes += file.nbytes
        self.store.plan(file.nbytes)
        if payload.what == "state":
            self.put_checkpoint(own, nodes[-1], offer.path[-1])
        for node in nodes:
            self.ledger.count(node, -1)
            part = FilePart(file, node.start, node.end)
            if payload.what == "rows":
                node.rows = part
            elif payload.what == "window":
                self._release(node, file_of(node.window))
                node.window = part
                self._dirty[node] = own  # the index must not name a file that goes
            elif node.checkpoint is not None:
                node.checkpoint.state = part
            self._count(node)

    def put_checkpoint(self, own: DiskTree, node: Node, offered: Node) -> None:
        """Note the checkpoint at a node's end. A known one takes the weightier kind."""
        known, new = node.checkpoint, offered.checkpoint
        assert new is not None
        if known is None:
            taken = Checkpoint(new.kind, None, clock(), hits=offered.hits, hint=new.hint)
            self.ledger.put_checkpoint(node, taken)
            self._dirty[node] = own
        elif WEIGHTS[new.kind] > WEIGHTS[known.kind]:
            known.kind = new.kind
            self._dirty[node] = own

    def use(self, own: DiskTree, end: Node) -> None:
        """Note the use of a path, for this process's retention and the next one's."""
        now = clock()
        for node in end.path():
            node.touch(now)
            self._used[node] = own
        if end.checkpoint is not None:
            end.checkpoint.touch(now)

    def _count(self, node: Node) -> None:
        """Count a node, and note it in the files that it has a part of."""
        self.ledger.count(node)
        for file in files_of(node):
            file.nodes.add(node)

    def _split(self, own: DiskTree, node: Node, at: int) -> Node:
        self.ledger.count(node, -1)
        for file in files_of(node):
            file.nodes.discard(node)
        upper = own.tree.split(node, at)
        upper.number = new_id()
        for each in (upper, node):
            self._count(each)
            self._dirty[each] = own
        return upper

    def evicted(self, item: Item) -> None:
        """Release what retention is about to evict from a node."""
        node = item.node
        file = file_of(node.window if item.what == "window" else node.state)
        if item.what == "leaf":
            self._remove(node)
        elif file is not None:
            self._dirty[node] = file.own
            self._release(node, file)

    def drop(self, node: Node) -> None:
        """Forget a node and all below it. What is not written is to be offered again."""
        tree = tree_of(node)
        for each in reversed(node.subtree()):
            for file in files_of(each):
                self._return(file)
            self.ledger.count(each, -1)
            self._remove(each)
            tree.remove(each)

    def lose(self, file: File) -> None:
        """Forget what lies in a file that could not be written, or is not what was written."""
        self._return(file)
        for node in [*file.nodes]:
            if node.parent is None:
                continue  # it was dropped with a node above it
            if file_of(node.rows) is file:
                self.drop(node)
                continue
            self._dirty[node] = file.own
            self._release(node, file)
            if file_of(node.window) is file:
                self.ledger.put_window(node, None)
            else:
                self.ledger.put_checkpoint(node, None)

    def forget(self) -> None:
        """Forget all trees, and everything that waits."""
        for own in self._known.values():
            for node in own.tree.nodes():
                for file in files_of(node):
                    self._release(node, file)
            own.tree.clear()
        self.ledger.held = Held()
        for known in (self._dirty, self._used, self._known, self.waiting, self.returned):
            known.clear()

    def _return(self, file: File) -> None:
        """Have the offer of a file that is not written made again."""
        if file.receipt is not None:
            self.returned.append(file.receipt)
            file.receipt = None

    def _remove(self, node: Node) -> None:
        self._gone.gone_nodes.append(node.number)
        for file in files_of(node):
            self._release(node, file)

    def _release(self, node: Node, file: File | None) -> None:
        if file is not None:
            file.nodes.discard(node)
            if not file.nodes:
                self._free(file)

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

    def next_job(self) -> File | threading.Event | None:
        """Take the file that is to be written next, or the event that comes before it."""
        while self.waiting:
            job = self.waiting.popleft()
            if isinstance(job, threading.Event):
                return job
            if job.nodes:
                self._writing = job
                return job
        return None

    def written(self, file: File, size: int) -> None:
        """Note that a file is complete. Its bytes are no longer planned."""
        self._writing = None
        file.size = size  # before `arrays` goes: readers look there first, without the lock
        file.arrays = file.receipt = None
        self.waiting_bytes -= file.nbytes
        if not file.nodes:
            self._free(file)
        self._dirty |= dict.fromkeys(file.nodes, file.own)

    def failed(self, file: File) -> None:
        """Note that a file could not be written."""
        self._writing = None
        if not file.nodes:
            self._free(file)
        self.lose(file)

    def take_changes(self) -> Changes:
        """Take the changes for the index whose files are complete."""
        changes, self._gone = self._gone, Changes()
        self._taken, self._dirty, self._used = {**self._used, **self._dirty}, {}, {}
        owns, files = set[DiskTree](), set[File]()
        for node, own in self._taken.items():
            row = own.row(node)
            if node.parent is None or (self.layout.has_rows and row.rows_file is None):
                continue  # it is gone, or comes again when its file is complete
            changes.nodes.append(row)
            owns.add(own)
            files.update(files_of(node))
        changes.namespaces += [own.info for own in owns]
        for file in files:
            if file.size is not None:
                start, stop = file.span or (None, None)
                changes.files.append(FileRow(file.id, file.own.info.id, file.size, start, stop))
        return changes

    def put_back(self, changes: Changes) -> None:
        """Put back changes that the index refused, so that they are taken again."""
        self._dirty = {**self._taken, **self._dirty}
        self._gone.gone_nodes += changes.gone_nodes
        self._gone.gone_files |= changes.gone_files
        self._gone.cleared |= changes.cleared


def _number(digest: str) -> int:
    """Return the number of a namespace in the index."""
    return int(digest[:15], 16)
