"""The disk tier keeps what memory holds, or once held, in a folder that outlives the process.

Its trees have the same nodes as memory's, with parts of files as payloads. A path is on disk from
its first token on, so it can be restored from disk alone. One thread writes. A payload that is not
written yet is read from the queue of that thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from rewarm.errors import BrokenInvariant
from rewarm.values import Tokens

from ...find import Query, find, parting
from ...payload import Rows
from ...pins import Pin
from ...retention import Evictor
from ...tree import Node, agreement, encode
from ...worth import Appraiser, Retention
from ..base import Browsed, FetchCancelled, Found, Offer, Receipt, Take, Tier, TierStats, resolved
from ..seal import PathDigest, PathPayload, payloads, sealed_payload
from .errors import Damaged, StoreBroken
from .parts import SECOND, DiskTree, File, clock, file_of, nbytes_of, salt_digest
from .trees import UNLIMITED, DiskTrees
from .writer import MOST_WAITING, Writer

log = logging.getLogger("rewarm")

READERS = 4
GROUP = 4 << 20
"""Bytes up to which nodes that are written together share a file: opening one takes as long as
reading a few hundred kilobytes."""
GROUP_SHARE = 64
"""A shared file takes at most the limit divided by this: it is removed only as a whole."""
MARGIN = 16 << 10
"""Bytes that the waiting files may take beyond their estimates."""
FRESH = 60 * SECOND
"""The time in which a node that was written or read is not removed while there is an older one.
Otherwise it would be written for nothing, and a `flush` that returned would promise little."""
AT_ONCE = 64
"""Nodes that are appraised at a time while there is room."""
MOST_BEGINNINGS = 1024
"""The number of beginnings of paths to remember of each namespace of another model."""


@dataclass(frozen=True)
class Handle:
    """The place in a disk tree that a `Found` of this tier stands for."""

    own: DiskTree
    node: Node
    known: int


class DiskTier(Tier):
    """The trees in one folder, which no other process uses meanwhile."""

    name = "disk"

    def __init__(self, trees: DiskTrees, policy: Retention, in_use: Callable[[], bool]) -> None:
        """`in_use` says whether there are requests, which writing would slow down."""
        self.trees, self.store, self.layout = trees, trees.store, trees.layout
        self._reads = 0
        self._changed = threading.Condition()
        """The lock of the trees and of what is to be written. No file is touched under it."""
        self._evictor = Evictor(
            policy,
            trees.ledger,
            clock,
            Appraiser(self.layout.longest_window, self.layout.has_state),
            on_evict=trees.evicted,
            by_request=False,
            unit=SECOND,
            fresh=FRESH,
        )
        self._fetches = ThreadPoolExecutor(READERS, "rewarm-disk-fetch")
        self._readers = ThreadPoolExecutor(READERS, "rewarm-disk-read")
        self._group = min(GROUP, self.store.limit // GROUP_SHARE)
        self._beginnings: dict[str, list[bytes]] | None = None
        self.writer = Writer(trees, self._changed, in_use)

    @contextmanager
    def _entered(self) -> Iterator[DiskTrees]:
        """Give the trees to this thread alone, and then tell the writer what has changed."""
        with self._changed:
            yield self.trees
            if self.trees.has_work:
                self._changed.notify_all()

    # Reading

    def find(self, query: Query) -> Future[Found | None]:
        with self._entered() as trees:
            own = trees.known(query.namespace)
            if own is None:
                return resolved(None)
            point = find(own.tree, query)
            handle = Handle(own, point.node, query.known)
            nbytes = sum(file.nbytes for file in self._wanted(handle, point.at))
            checkpoint = point.node.checkpoint if point.node.end == point.at else None
            found = Found(
                point.at,
                nbytes,
                handle,
                shared=point.match.shared,
                junction=point.junction,
                reason=point.match.reason,
                parting=parting(own.tree, query),
            )
            if checkpoint is not None:
                found = replace(found, kind=checkpoint.kind, hint=checkpoint.hint)
            return resolved(found)

    def _wanted(self, handle: Handle, resume: int) -> list[File]:
        """List the files to read, in the order of the path."""
        first = self.layout.reach(resume)
        found: dict[File | None, None] = {}
        for node in list(handle.node.path())[::-1]:
            windowed = node.end > first or node.start < self.layout.kept
            resumes = node is handle.node and node.end == resume
            found[file_of(node.rows) if node.end > handle.known else None] = None
            found[file_of(node.window) if windowed else None] = None
            found[file_of(node.state) if resumes else None] = None
        return [file for file in found if file is not None]

    def fetch(self, found: Found, take: Take) -> Future[None]:
        handle: Handle = found.handle
        with self._changed:
            wanted = self._wanted(handle, found.resume)
            # What this brings may evict other things from memory, and they may need space here.
            pin = Pin(handle.own.tree, handle.node)
        return self._fetches.submit(self._fetch, handle, wanted, pin, take)

    def _fetch(self, handle: Handle, wanted: Sequence[File], pin: Pin, take: Take) -> None:
        try:
            whole = [*self._readers.map(lambda file: self._read(file, take), wanted)]
        finally:
            with self._changed:
                pin.drop()
        with self._entered() as trees:
            for file, is_whole in zip(wanted, whole, strict=True):
                if not is_whole:
                    trees.lose(file)
            if all(whole) and handle.node.parent is not None:
                self._reads += sum(node.end > handle.known for node in handle.node.path())
                trees.use(handle.own, handle.node)

    def _read(self, file: File, take: Take) -> bool:
        """Give a payload from the queue or from its file to `take`. False where it is damaged."""
        try:
            arrays = file.arrays  # before `size`: the writer sets them the other way round
            if arrays is None and file.size is not None:
                arrays = self.store.read(file.id, file.size)
            if arrays is None or take(arrays):
                return True
            why = "it is not what was written"
        except (FetchCancelled, StoreBroken):
            return True
        except Damaged as damage:
            why = str(damage)
        except OSError as error:
            log.warning("a payload of %s cannot be read now: %s", self.store.folder, error)
            return True
        if file.nodes and file.size is not None:
            self.store.set_aside(file.id, why)
        return False

    def foreign(self, prompt: Tokens, salt: str | None) -> int:
        """Compare a prompt with the first spans of the paths of other models."""
        if self._beginnings is None:
            # They never change while this process has the folder.
            self._beginnings = {}
            for info in self.trees.strangers():
                keys = self.store.index.first_keys(info.id, MOST_BEGINNINGS)
                self._beginnings.setdefault(str(info.about.get("salt", "")), []).extend(keys)
        data = encode(prompt)
        keys = self._beginnings.get(salt_digest(salt), [])
        return max((agreement(key, data) for key in keys), default=0)

    # Writing

    def offer(self, offers: Sequence[Offer]) -> list[Receipt]:
        with self._entered() as trees:
            refused = [offer.receipt for offer in offers if not self._keep(offer)]
            refused, trees.returned = [*trees.returned, *refused], []
            return refused

    def _keep(self, offer: Offer) -> bool:
        """Have the new part of a path written. False where there is no room for it."""
        own, end, known = self.trees.grow(offer)
        by_end = {node.end: node for node in end.path()}
        path = PathDigest(offer)
        pin = Pin(own.tree, end)
        try:
            for payload in payloads(offer, known, self._group):
                nodes = [by_end[stop] for stop in payload.ends if stop in by_end]
                missing = self._missing(nodes, payload)
                if missing is None:
                    continue
                if self.writer.paused or self.trees.waiting_bytes >= MOST_WAITING:
                    return False
                arrays = sealed_payload(path, missing)
                if not self._make_room(nbytes_of(arrays)):
                    return False
                self.trees.put(own, nodes, missing, arrays, offer)
            if offer.path[-1].checkpoint is not None:
                self.trees.put_checkpoint(own, end, offer.path[-1])
            return True
        finally:
            pin.drop()
            bare = [node for node in by_end.values() if node.rows is None]
            if bare and self.layout.has_rows:
                self.trees.drop(bare[-1])  # there was no room for its rows

    def _missing(self, nodes: Sequence[Node], payload: PathPayload) -> PathPayload | None:
        """Return the part of a payload that these nodes do not have."""
        if not nodes or (payload.what == "state" and nodes[-1].checkpoint is not None):
            return None
        if payload.what == "window" and isinstance(payload.value, Rows):
            first, last = nodes[0], nodes[-1]
            has = last.window.start if last.window is not None else last.end
            part = payload.value.part(first.start, last.end)
            if part is None or part.start >= has:
                return None
            return replace(payload, value=part, start=part.start)
        return payload

    def _make_room(self, nbytes: int) -> bool:
        """Make space for so many bytes by the time that they are written. Pinned nodes stay.
        Payloads of other models go first, then those that memory's policy chooses."""
        if self._lacking(nbytes) <= 0:
            # File a few new nodes each time: to file all of them on a full disk would take seconds.
            self._evictor.take_in(AT_ONCE)
            return True
        for stranger in self.trees.strangers():
            name = stranger.about.get("name", stranger.digest)
            log.info("the disk tier is full: what %s has in it goes", name)
            self.trees.clear(stranger)
            if self._lacking(nbytes) <= 0:
                return True
        self.trees.read_all()
        # An eviction may free less than it seems: two nodes may share a file.
        while (lacking := self._lacking(nbytes)) > 0:
            before = self._evictor.evictions
            self._evictor.trim(self.trees.ledger.held.total - lacking)
            if self._evictor.evictions == before:
                return False
        return True

    def _lacking(self, nbytes: int) -> int:
        try:
            return nbytes + MARGIN - self.store.unplanned_bytes()
        except OSError:  # the folder is gone, or the store is broken: there is no space at all
            return UNLIMITED

    def flush(self, deadline: float | None) -> bool:
        timeout = deadline - time.monotonic() if deadline is not None else None
        return self.writer.wait(timeout) and not self.writer.paused

    def forget(self, weights: Collection[str]) -> None:
        with self._entered() as trees:
            ours = {*weights, *(base.weights for base in trees.bases)}
            trees.forget()
            self._evictor.forget()
        self.writer.wait()
        self.store.clear(lambda info: info.about.get("weights") in ours)

    def verify(self) -> None:
        self.writer.wait()
        found = self.store.verify(repair=False)
        if not found.clean:
            raise BrokenInvariant(f"the disk tier is not as it was written: {found}")

    def close(self) -> None:
        self.writer.close()
        self._fetches.shutdown()
        self._readers.shutdown()
        self.store.close()

    # On any thread

    def stats(self) -> TierStats:
        nbytes = 0
        with suppress(OSError):  # the folder is gone, or the store is broken
            nbytes = self.store.bytes()
        return TierStats(
            budget=self.store.limit,
            kinds={"files": nbytes},
            evictions={"any": self._evictor.evictions},
            reads=self._reads,
            written=self.writer.written,
            unwritten=self.trees.waiting_bytes,
            paused=self.writer.paused,
        )

    def browse(self) -> Browsed:
        held = self.trees.ledger.held
        with self._changed:
            trees, version = self.trees.by_namespace(), (held.nodes, held.total)
        return Browsed(trees, self._changed, version, SECOND)
