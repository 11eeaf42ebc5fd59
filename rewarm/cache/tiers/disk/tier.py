"""The disk tier: what memory holds, or once held, on disk.

It has trees of its own, of the same nodes as memory's, whose payloads are files. A path is on disk
from its first token on, so whatever is found there can be restored from there alone. All changes of
the index and all writing are jobs for one thread, in order; a payload that is still to be written
is read from where it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from rewarm.errors import BrokenInvariant
from rewarm.values import Namespace, Tokens

from ...find import Query, find, parting
from ...layout import Layout
from ...payload import Rows, chained
from ...pins import Pin
from ...retention import Retention
from ...tree import Node
from ..base import Browsed, FetchCancelled, Found, Offer, Span, Take, Tier, TierStats, resolved
from ..seal import Sealer
from .foreign import ForeignNamespaces
from .source import OnDisk, Source
from .space import DiskSpace
from .store import Store
from .trees import SECOND, DiskTree, DiskTrees
from .writer import Writer

READERS = 4
GROUP = 4 << 20
"""Bytes up to which nodes that are written together share a file: opening one takes as long as
reading a few hundred kilobytes."""
GROUP_SHARE = 64
"""A file never takes more than this part of the limit for being shared: it goes as a whole."""


@dataclass(frozen=True)
class Handle:
    """The place in a disk tree that a `Found` of this tier stands for."""

    own: DiskTree
    node: Node
    at: int
    known: int


class DiskTier(Tier):
    """A folder that outlives the process. Its trees belong to whoever has its lock."""

    name = "disk"

    def __init__(
        self,
        store: Store,
        layout: Layout,
        policy: Retention,
        namespace: Namespace,
        *,
        model: str,
        grid: str,
        in_use: Callable[[], bool] = lambda: False,
    ) -> None:
        """`model` and `grid` are the model and the reuse mode, as people call them. `in_use` says
        whether there are requests, which writing would slow down."""
        self.store = store
        self.layout = layout
        self.writer = Writer(store, in_use)
        self.loads = 0
        self.trees = DiskTrees(store, self.writer, layout, namespace, model=model, grid=grid)
        self._foreign = ForeignNamespaces(store, self.trees.is_ours)
        self._space = DiskSpace(store, self.writer, self.trees, layout, policy)
        self._readers = ThreadPoolExecutor(READERS, "rewarm-disk-read")
        self._group = min(GROUP, store.limit // GROUP_SHARE)
        self._lock = threading.RLock()
        self._returned: list[Offer] = []
        """Offers that could not be written, to be made another time."""

    # Reading

    def find(self, query: Query) -> Future[Found | None]:
        with self._lock:
            return resolved(self._found(query))

    def _found(self, query: Query) -> Found | None:
        self._undo_failed()
        own = self.trees.known(query.namespace)
        if own is None:
            return None
        point = find(own.tree, query)
        checkpoint = point.node.checkpoint if point.node.end == point.at else None
        handle = Handle(own, point.node, point.at, query.known)
        return Found(
            point.at,
            sum(source.nbytes for source in self._wanted(handle)),
            handle,
            checkpoint.kind if checkpoint is not None else None,
            checkpoint.hint if checkpoint is not None else 1.0,
            point.match.shared,
            point.junction,
            point.match.reason,
            parting(own.tree, query),
        )

    def _wanted(self, handle: Handle) -> dict[Source, Node]:
        """The payloads to load, each with the first node that is in it."""
        end = handle.node
        first = self.layout.reach(handle.at)
        found: dict[Source, Node] = {}
        for node in list(end.path())[::-1]:
            windowed = node.end > first or node.start < self.layout.kept
            checkpoint = node.checkpoint if node is end and node.end == handle.at else None
            for part in (
                node.rows if node.end > handle.known else None,
                node.window if windowed else None,
                checkpoint.state if checkpoint is not None else None,
            ):
                if isinstance(part, OnDisk):
                    found.setdefault(part.source, node)
        return found

    def fetch(self, found: Found, take: Take) -> Future[None]:
        handle: Handle = found.handle
        done: Future[None] = Future()
        with self._lock:
            wanted = self._wanted(handle)
            # What is put into memory may push other things out of it, down to here.
            pin = Pin(handle.own.tree, handle.node)
            pin.take()
        lost: list[Node] = []
        left = len(wanted)

        def read(source: Source, node: Node) -> None:
            nonlocal left
            try:
                arrays = source.load(self.store)
                if arrays is None or not take(arrays):
                    lost.append(node)
            except FetchCancelled:
                pass
            finally:
                with self._lock:
                    left -= 1
                    if not left:
                        self._fetched(handle, pin, lost)
                        done.set_result(None)

        for source, node in wanted.items():
            self._readers.submit(read, source, node)
        if not wanted:
            with self._lock:
                self._fetched(handle, pin, lost)
            done.set_result(None)
        return done

    def _fetched(self, handle: Handle, pin: Pin, lost: Sequence[Node]) -> None:
        pin.drop()
        if not lost:
            path = list(handle.node.path())
            self.loads += sum(node.end > handle.known for node in path)
            for node in path:
                self.trees.use(node, is_end=node is handle.node)
        for node in lost:
            if self._is_gone(node):
                self.trees.drop(handle.own, node)

    def _is_gone(self, node: Node) -> bool:
        """True where a part of a node was damaged; one that only cannot be read now is kept."""
        state = node.checkpoint.state if node.checkpoint is not None else None
        sources = [p.source for p in (node.rows, node.window, state) if isinstance(p, OnDisk)]
        return any(s.stored is not None and not self.store.knows(s.stored) for s in sources)

    def foreign(self, prompt: Tokens, salt: str | None) -> int:
        return self._foreign.shared(prompt, salt)

    # Writing

    def offer(self, offers: Sequence[Offer]) -> list[Offer]:
        with self._lock:
            self._undo_failed()
            refused = [offer for offer in offers if not self._keep(offer)]
            self.trees.write_uses()
            refused, self._returned = [*self._returned, *refused], []
            return refused

    def _keep(self, offer: Offer) -> bool:
        """Have a path written, as far as it is not yet. False where there is no room for it."""
        own = self.trees.of(offer.namespace)
        receipt = replace(offer, path=())  # what waits to be written must not hold all of it
        end = offer.path[-1]
        at = own.tree.walk(offer.data, offer.cuts)
        upper, shared = at.node, at.shared
        if offer.exact:
            shared = upper.end
        elif shared < upper.end and (shared < end.end or end.kind is not None):
            upper = self.trees.split(own, upper, shared)
        seal = Sealer(offer)
        for group in self._groups([span for span in offer.path if span.end > shared]):
            added = self._add(own, upper, group, receipt, seal)
            if added is None:
                return False
            upper = added
        if self.layout.has_window:
            self._keep_windows(own, upper, offer.path, receipt, seal)
        return end.kind is None or self._keep_checkpoint(own, upper, end, receipt, seal)

    def _groups(self, spans: list[Span]) -> Iterator[list[Span]]:
        """Spans that continue one another, divided into what goes into one file."""
        group: list[Span] = []
        size = 0
        for span in spans:
            nbytes = span.rows.nbytes if span.rows is not None else 0
            if group and (size + nbytes > self._group or not _alike(group[0].rows, span.rows)):
                yield group
                group, size = [], 0
            group.append(span)
            size += nbytes
        if group:
            yield group

    def _add(
        self, own: DiskTree, parent: Node, spans: list[Span], receipt: Offer, seal: Sealer
    ) -> Node | None:
        """Nodes for the tokens of some spans from the end of `parent` on."""
        rows = None
        parts = []
        if self.layout.has_rows:
            rows = chained([span.rows for span in spans if span.rows is not None])
            rows = rows.part(parent.end, spans[-1].end) if rows is not None else None
            if rows is None or (rows.start, rows.stop) != (parent.end, spans[-1].end):
                return None
            parts.append(Source((rows.start, rows.stop), arrays=seal.rows("rows", rows, spans)))
        for span in spans:
            window = span.window.part(parent.end, span.end) if span.window is not None else None
            if window is not None:
                parts.append(self._window(window, span, seal))
        if self.writer.full or not self._space.make(sum(s.nbytes for s in parts), [parent]):
            return None
        return self.trees.grow(own, parent, spans, parts, receipt)

    def _window(self, window: Rows, span: Span, seal: Sealer) -> Source:
        arrays = seal.rows("window", window, [span])
        return Source((window.start, window.stop), arrays=arrays)

    def _keep_windows(
        self, own: DiskTree, lower: Node, path: Sequence[Span], receipt: Offer, seal: Sealer
    ) -> None:
        """Windows that came to memory after their rows."""
        in_memory = {(span.start, span.end): span for span in path}
        for node in lower.path():
            span = in_memory.get((node.start, node.end))
            has = node.window.start if node.window is not None else node.end
            if span is None or span.window is None or span.window.start >= has:
                continue
            source = self._window(span.window, span, seal)
            if self.writer.full or not self._space.make(source.nbytes, [lower]):
                return
            self.trees.put_window(own, node, source, span.window, receipt)

    def _keep_checkpoint(
        self, own: DiskTree, lower: Node, span: Span, receipt: Offer, seal: Sealer
    ) -> bool:
        assert span.kind is not None
        at = lower if lower.end == span.end else self.trees.split(own, lower, span.end)
        if at.checkpoint is not None:
            self.trees.raise_kind(at, at.checkpoint, span.kind)
            return True
        source = None
        if span.state is not None:
            source = Source(None, arrays=seal.state(span.state, span))
            if self.writer.full or not self._space.make(source.nbytes, [at]):
                return False
        self.trees.put_checkpoint(own, at, span, source, receipt)
        return True

    def _undo_failed(self) -> None:
        """Take what could not be written out of the trees."""
        for undo in self.writer.take_failed():
            self.trees.undo(undo)
            self._returned.append(undo.offer)

    def flush(self, deadline: float | None) -> bool:
        timeout = deadline - time.monotonic() if deadline is not None else None
        failures = self.writer.failures
        done = self.writer.wait(timeout)
        return done and not self.writer.paused and self.writer.failures == failures

    def forget(self, weights: Collection[str]) -> None:
        with self._lock:
            self.writer.clear()
            self.writer.wait()
            self._undo_failed()
            self._returned.clear()
            self.trees.forget()
            self._space.forget()
            for each in {*weights, *self.trees.weights}:
                self.store.clear(where={"weights": each})

    def verify(self) -> None:
        found = self.store.verify(repair=False)
        if not found.clean:
            raise BrokenInvariant(f"the disk tier is not as it was written: {found}")

    def close(self) -> None:
        self.writer.close()
        self._readers.shutdown()
        self.store.close()

    # On any thread

    def stats(self) -> TierStats:
        return TierStats(
            budget=self.store.limit,
            kinds={"files": self._nbytes()},
            evictions={"any": self._space.evictions},
            reads=self.loads,
            written=self.writer.written,
            unwritten=self.writer.waiting,
            paused=self.writer.paused,
        )

    def _nbytes(self) -> int:
        """The bytes that the store takes on disk."""
        try:
            return self.store.bytes()
        except OSError:
            return 0

    def browse(self) -> Browsed:
        held = self.trees.ledger.held
        with self._lock:
            return Browsed(self.trees.by_namespace(), self._lock, (held.nodes, held.total), SECOND)


def _alike(a: Rows | None, b: Rows | None) -> bool:
    return a is not None and b is not None and a.packing == b.packing
