"""The trees on disk, as they will be once all that waits is written.

Every change is one of a tree and a job for the writer, in the same order."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from rewarm.values import Kind, Namespace, Origin

from ...layout import Layout
from ...ledger import Held, Ledger
from ...payload import Rows
from ...placement import WEIGHTS
from ...tree import WIDTH, Checkpoint, ChunkTree, Node, Tree, tree_of
from ...worth import Item
from ..base import Offer, Span
from ..seal import FORMAT, digest_of
from .index import no_collection
from .records import NamespaceInfo, StoredNode
from .source import OnDisk, Source
from .store import Store
from .writer import Job, Row, Undo, Writer

UNLIMITED = 1 << 60
SECOND = 1000
"""Of the clock here: many things are written in a second, and which of them came last matters."""


def clock() -> int:
    return int(time.time() * SECOND)


@dataclass(eq=False)
class DiskTree:
    """A namespace's tree, and the number each of its nodes has in the index."""

    tree: Tree
    namespace: int
    ids: dict[Node, int] = field(default_factory=dict)


class DiskTrees:
    def __init__(
        self,
        store: Store,
        writer: Writer,
        layout: Layout,
        namespace: Namespace,
        *,
        model: str,
        grid: str,
    ) -> None:
        self.store = store
        self.layout = layout
        self._bases = {namespace.salted(None)}
        """Every namespace that this process has used, but for the salt."""
        self._for_people = {"name": model, "grid": grid}
        self.ledger = Ledger(UNLIMITED, UNLIMITED)
        self._writer = writer
        self._chunked = grid.startswith("exact")
        self._known: dict[int, DiskTree] = {}
        """By the number of their namespace: the salts of those that nobody asked for yet are not
        known."""
        self._numbers: dict[Namespace, int] = {}
        self._used: set[Node] = set()

    def __iter__(self) -> Iterator[DiskTree]:
        return iter(self._known.values())

    @property
    def weights(self) -> set[str]:
        """The digests of the weights that this process has used."""
        return {base.weights for base in self._bases}

    def known(self, namespace: Namespace) -> DiskTree | None:
        """A namespace's tree, if anything was ever stored for it."""
        if namespace not in self._numbers:
            number = self.store.known_namespace(digest_of(namespace))
            if number is None:
                return None
            self._number(namespace, number)
        return self._read(self._numbers[namespace])

    def of(self, namespace: Namespace) -> DiskTree:
        if namespace not in self._numbers:
            about = {**_about(namespace), **self._for_people}
            self._number(namespace, self.store.namespace(digest_of(namespace), about))
        return self._read(self._numbers[namespace])

    def _number(self, namespace: Namespace, number: int) -> None:
        self._numbers[namespace] = number
        self._bases.add(namespace.salted(None))

    def by_namespace(self) -> dict[Namespace, Tree]:
        """Those that were read since the start; the index may have more."""
        known = self._known
        return {name: known[n].tree for name, n in self._numbers.items() if n in known}

    def read_all(self) -> None:
        """The trees of every salt, asked for or not: together they have the disk."""
        for info in self.store.namespaces():
            if self.is_ours(info):
                self._read(info.id)

    def is_ours(self, info: NamespaceInfo) -> bool:
        """Whether another salt is all that can tell a namespace from those of this process."""
        return any(
            all(info.about.get(k) == v for k, v in _about(base).items() if k != "salt")
            for base in self._bases
        )

    def _read(self, number: int) -> DiskTree:
        """The tree as the index has it."""
        if number in self._known:
            return self._known[number]
        own = DiskTree(ChunkTree() if self._chunked else Tree(), number)
        with no_collection():
            self._build(own)
        self._known[number] = own
        return own

    def _build(self, own: DiskTree) -> None:
        rows, payloads = self.store.nodes(own.namespace)
        sources: dict[int, Source] = {}

        def part(number: int | None, start: int, stop: int) -> OnDisk | None:
            if number is None:
                return None
            source = sources.get(number)
            if source is None:
                payload = payloads[number]
                source = sources[number] = Source(payload.span, payload)
            first, last = source.span or (start, stop)
            return OnDisk(source, max(start, first), min(stop, last))

        nodes: dict[int | None, tuple[Node, int]] = {None: (own.tree.root, 0)}
        for row in rows:
            parent, start = nodes.get(row.parent, (None, 0))
            if parent is None or row.start != start:
                continue
            end = start + len(row.key) // WIDTH
            if parent.children and own.tree.child(parent, row.key, 0, end - start) is not None:
                continue  # a row that should have been removed
            if self.layout.has_rows and row.rows is None:
                continue
            origin: Origin = "decode" if row.origin == "decode" else "prefill"
            node = own.tree.add(parent, row.key, origin)
            node.hits, node.last_used = row.hits, round(row.used * SECOND)
            node.rows = part(row.rows, start, end)
            if row.window is not None:
                node.window = part(row.window, start, end)
            whole = row.state is not None or not self.layout.has_state
            if row.kind is not None and row.kind in WEIGHTS and whole:
                state = part(row.state, end, end)
                node.checkpoint = Checkpoint(
                    cast(Kind, row.kind), state, node.last_used, hits=row.hits, hint=row.hint
                )
            nodes[row.id] = node, end
            own.ids[node] = row.id
            self.ledger.count(node)

    # Changes

    def grow(
        self, own: DiskTree, parent: Node, spans: Sequence[Span], parts: list[Source], offer: Offer
    ) -> Node:
        """Nodes below `parent`, each below the last, for spans that continue one another.

        The first source holds the rows of all, where the model has any, and the rest a window each.
        Returns the last."""
        windows = iter(parts[1:] if self.layout.has_rows else parts)
        first, added = None, []
        for span in spans:
            begin = max(span.start, parent.end)
            parent = own.tree.add(parent, span.key[(begin - span.start) * WIDTH :], span.origin)
            parent.hits, parent.last_used = span.hits, clock()
            if self.layout.has_rows:
                parent.rows = OnDisk(parts[0], begin, span.end)
            if span.window is not None:
                parent.window = OnDisk(next(windows), max(span.window.start, begin), span.end)
            own.ids[parent] = self.store.next_id()
            self.ledger.count(parent)
            first = first or parent
            added.append(self._row(own, parent))
        undo = Undo("node", first or parent, offer)
        self._writer.put(Job(payloads=parts, adds=added, undo=undo))
        return parent

    def put_window(
        self, own: DiskTree, node: Node, source: Source, window: Rows, offer: Offer
    ) -> None:
        gone = self._released(node.window)
        self.ledger.put_window(node, OnDisk(source, window.start, window.stop))
        undo = Undo("window", node, offer)
        self._writer.put(Job([source], updates=[self._row(own, node)], frees=gone, undo=undo))

    def put_checkpoint(
        self,
        own: DiskTree,
        node: Node,
        span: Span,
        source: Source | None,
        offer: Offer,
    ) -> None:
        state = OnDisk(source, node.end, node.end) if source is not None else None
        assert span.kind is not None
        kept = Checkpoint(span.kind, state, clock(), hits=span.hits, hint=span.hint)
        self.ledger.put_checkpoint(node, kept)
        parts = [source] if source is not None else []
        undo = Undo("checkpoint", node, offer) if parts else None
        self._writer.put(Job(payloads=parts, updates=[self._row(own, node)], undo=undo))

    def split(self, own: DiskTree, node: Node, at: int) -> Node:
        self.ledger.count(node, -1)
        upper = own.tree.split(node, at)
        self.ledger.count(upper)
        self.ledger.count(node)
        own.ids[upper] = self.store.next_id()
        rows = [self._row(own, upper), self._row(own, node)]
        self._writer.put(Job(adds=rows[:1], updates=rows[1:]))
        return upper

    def use(self, node: Node, is_end: bool) -> None:
        now = clock()
        node.last_used, node.hits = now, node.hits + 1
        if node.checkpoint is not None and is_end:
            node.checkpoint.last_used, node.checkpoint.hits = now, node.checkpoint.hits + 1
        self._used.add(node)

    def raise_kind(self, node: Node, checkpoint: Checkpoint, kind: Kind) -> None:
        """A checkpoint that is also one of a weightier kind."""
        if WEIGHTS[kind] > WEIGHTS[checkpoint.kind]:
            checkpoint.kind = kind
            self._used.add(node)

    def write_uses(self) -> None:
        """For the next process's retention."""
        for own in self:
            rows = [self._row(own, node) for node in self._used if node in own.ids]
            if rows:
                self._writer.put(Job(updates=rows))
        self._used.clear()

    def drop(self, own: DiskTree, node: Node) -> None:
        """Forget a node and all below it."""
        if node not in own.ids:
            return
        below = [node]
        for each in below:
            below.extend(each.children.values())
        removes, frees = [], []
        for each in reversed(below):
            self.ledger.count(each, -1)
            number = own.ids.pop(each, None)
            self._used.discard(each)
            state = each.checkpoint.state if each.checkpoint is not None else None
            frees += self._released(each.rows, each.window, state)
            if number is not None:
                removes.append(number)
            own.tree.remove(each)
        self._writer.put(Job(removes=removes, frees=frees))

    def evicted(self, item: Item) -> None:
        """Retention's choice: rows of the index go, and the files that nobody else has."""
        own = next(o for o in self if o.tree is tree_of(item.node))
        node = item.node
        state = node.checkpoint.state if node.checkpoint is not None else None
        if item.what == "leaf":
            number = own.ids.pop(node)
            self._used.discard(node)
            gone = self._released(node.rows, node.window, state)
            self._writer.put(Job(removes=[number], frees=gone))
            return
        # The row goes on without it, in the same transaction.
        row = self._row(own, node)
        if item.what == "checkpoint":
            row = replace(row, node=replace(row.node, kind=None), state=None)
            gone = self._released(state)
        else:
            row = replace(row, window=None)
            gone = self._released(node.window)
        self._writer.put(Job(updates=[row], frees=gone))

    def undo(self, undo: Undo) -> None:
        """What could not be written was never there."""
        own = next((o for o in self if undo.node in o.ids), None)
        if own is None:
            return
        if undo.what == "node":
            self.drop(own, undo.node)
        elif undo.what == "checkpoint" and undo.node.checkpoint is not None:
            self._released(undo.node.checkpoint.state)
            self.ledger.put_checkpoint(undo.node, None)
        elif undo.what == "window":
            self._released(undo.node.window)
            self.ledger.put_window(undo.node, None)

    def forget(self) -> None:
        for own in self:
            own.tree.clear()
        self._known.clear()
        self._numbers.clear()
        self._used.clear()
        self.ledger.held = Held()

    def _released(self, *parts: Any) -> list[Source]:
        """The payloads that no node has any more."""
        sources = [p.source for p in parts if isinstance(p, OnDisk)]
        for source in sources:
            source.users -= 1
        return [source for source in sources if source.users <= 0]

    def _row(self, own: DiskTree, node: Node) -> Row:
        checkpoint = node.checkpoint
        state = checkpoint.state if checkpoint is not None else None
        stored = StoredNode(
            id=own.ids[node],
            parent=own.ids.get(node.parent) if node.parent is not None else None,
            start=node.start,
            key=node.key,
            origin=node.origin,
            kind=checkpoint.kind if checkpoint is not None else None,
            hits=node.hits,
            used=max(node.last_used, checkpoint.last_used if checkpoint else 0) / SECOND,
            hint=checkpoint.hint if checkpoint is not None else 1.0,
            rows=None,
            window=None,
            state=None,
        )
        return Row(own.namespace, stored, *(_source(p) for p in (node.rows, node.window, state)))


def _about(namespace: Namespace) -> dict[str, Any]:
    """A namespace as the index describes it: of the salt, a digest."""
    salt = namespace.salt and hashlib.sha256(namespace.salt.encode()).hexdigest()[:16]
    own = {**asdict(namespace), "weights": namespace.weights, "salt": salt}
    return {**own, "format": FORMAT}


def _source(part: Any) -> Source | None:
    return part.source if isinstance(part, OnDisk) else None
