"""The thread that writes to disk: jobs in order, a bounded queue, no one waits for it."""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from rewarm.errors import RewarmError

from ...tree import Node
from ..base import Offer
from .records import (
    AddNode,
    AddPayload,
    Change,
    NamespaceInfo,
    RemoveNode,
    RemovePayload,
    StoredNode,
    UpdateNode,
)
from .source import Source
from .store import Store

log = logging.getLogger("rewarm")

MOST_WAITING = 256 << 20
"""Bytes that may wait to be written: they are in memory, beside the budget."""
NICE = 10
"""How far the writer stands back behind the threads that run the model."""
REST = 24.0
"""Seconds without work after each second of the processor's time, while others need it."""
LONGEST_REST = 1.0
"""Seconds."""
NEARLY_FULL = 0.75
"""Of what may wait: from there on it does not rest, for what finds no room is never written."""
PAUSE = 30.0
"""Seconds without another try after a failure."""


@dataclass(frozen=True)
class Row:
    """A row of the index, whose payloads have no numbers before they are written."""

    namespace: int
    node: StoredNode
    rows: Source | None
    window: Source | None
    state: Source | None

    def stored(self) -> StoredNode:
        numbers = [
            source.stored.id if source is not None and source.stored is not None else None
            for source in (self.rows, self.window, self.state)
        ]
        # A checkpoint whose state could not be written is none.
        lost = self.state is not None and numbers[2] is None
        kind = None if lost else self.node.kind
        return replace(self.node, kind=kind, rows=numbers[0], window=numbers[1], state=numbers[2])


@dataclass(frozen=True)
class Undo:
    what: Literal["node", "checkpoint", "window"]
    node: Node
    """In the disk's tree, with all below it."""
    offer: Offer
    """Where it came from, to be written another time."""


@dataclass(frozen=True)
class Job:
    """What is done at once: files first, then one transaction of the index."""

    payloads: list[Source] = field(default_factory=list)
    adds: list[Row] = field(default_factory=list)
    updates: list[Row] = field(default_factory=list)
    removes: list[int] = field(default_factory=list)
    frees: list[Source] = field(default_factory=list)
    clears: NamespaceInfo | None = None
    undo: Undo | None = None
    """What is not there after all where this fails. A job without payloads has none: it is tried
    again."""

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.payloads)

    @property
    def frees_nbytes(self) -> int:
        cleared = self.clears.bytes if self.clears is not None else 0
        return cleared + sum(source.nbytes for source in self.frees)


class Writer:
    def __init__(self, store: Store, in_use: Callable[[], bool]) -> None:
        """`in_use` says whether there are requests, which the writer takes time and memory's speed
        from."""
        self.store = store
        self._in_use = in_use
        self.written = 0
        self._jobs: deque[Job] = deque()
        self.waiting = 0
        """Bytes to be written, and bytes that will be free, of jobs that are not over."""
        self.freeing = 0
        self._free = 0
        """What the store could take between the last two jobs. Amid one it is half done."""
        self._put = self._ended = 0
        """How many jobs there were, and how many of them are over."""
        self.failures = 0
        """How often the disk refused."""
        self.rests = 0
        """How often it stood back for them."""
        self._waited_for = 0
        """How many wait for it: then it does not stand back."""
        self._stuck = False
        """Whether a job that must be done waits for the disk to take it."""
        self._closed = False
        self._failed: list[Undo] = []
        self._lost: set[int] = set()
        self._paused_until = 0.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rewarm-disk", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether to write nothing for now: too much waits, or the disk refused."""
        return self.waiting >= MOST_WAITING or self.paused

    @property
    def paused(self) -> bool:
        """Whether the disk refused a moment ago."""
        return time.monotonic() < self._paused_until

    def free_bytes(self) -> int:
        """The bytes that may be written once all that waits is done."""
        with self._changed:
            if self._put == self._ended:
                return self.store.free_bytes()
            return self._free - self.waiting + self.freeing

    def put(self, job: Job) -> None:
        with self._changed:
            if self._closed:
                return
            if self._put == self._ended:
                self._look_for_space()
            self._jobs.append(job)
            self._put += 1
            self.waiting += job.nbytes
            self.freeing += job.frees_nbytes
            self._changed.notify_all()

    def take_failed(self) -> list[Undo]:
        with self._changed:
            failed, self._failed = self._failed, []
            return failed

    def wait(self, timeout: float | None = None) -> bool:
        """Until all that was put before this call is over, or the disk refuses; whether it is."""
        with self._changed:
            last = self._put
            self._waited_for += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._stuck or self._ended >= last, timeout)
            finally:
                self._waited_for -= 1
            return self._ended >= last

    def clear(self) -> None:
        """Forget what waits."""
        with self._changed:
            for job in self._jobs:
                self._count_out(job)
            self._jobs.clear()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            began = time.thread_time()
            self._work(job)
            del job  # what memory let go of meanwhile is not to be held from here
            self._rest(REST * (time.thread_time() - began))

    def _rest(self, seconds: float) -> None:
        """Stand back for requests, where there are any and nothing is urgent."""
        with self._changed:
            if not self._hurried() and self._in_use():
                self.rests += 1
                self._changed.wait_for(self._hurried, min(seconds, LONGEST_REST))

    def _hurried(self) -> bool:
        return self._closed or self._waited_for > 0 or self.waiting > NEARLY_FULL * MOST_WAITING

    def _work(self, job: Job) -> None:
        ended = False
        while not self._done(job) and not ended:
            # The index must come to what the tree is: it has no other way back.
            with self._changed:
                self._stuck = True
                self._changed.notify_all()
                ended = self._changed.wait_for(lambda: self._closed, PAUSE)
        with self._changed:
            self._look_for_space()
            self._count_out(job)
            self._stuck = False
            self._changed.notify_all()

    def _look_for_space(self) -> None:
        try:
            self._free = self.store.free_bytes()
        except OSError:  # the folder is gone, or the store is broken
            self._free = 0

    def _count_out(self, job: Job) -> None:
        self.waiting -= job.nbytes
        self.freeing -= job.frees_nbytes
        self._ended += 1

    def _done(self, job: Job) -> bool:
        """Whether there is nothing left to do for a job, be it that it failed for good."""
        try:
            self._do(job)
        except Exception as error:  # the thread outlives whatever it stumbles over
            if not isinstance(error, (OSError, RewarmError, sqlite3.Error)):
                log.exception("writing to the disk tier failed")
            self._fail(job, error)
            return job.undo is not None or self.store.guard.broken
        return True

    def _do(self, job: Job) -> None:
        if job.clears is not None:
            self.store.clear(namespace=job.clears.id)
        if self._lost:
            job = self._without_lost(job)
        changes: list[Change] = []
        for source in job.payloads:
            if source.arrays is None:
                continue
            if self.store.free_bytes() < source.nbytes:
                self.store.checkpoint()  # the index's log counts as well
            if self.store.free_bytes() < source.nbytes:
                raise OSError(f"no space for {source.nbytes:,} bytes")
            source.stored = self.store.put_payload(source.arrays, source.span)
            self.written += source.stored.nbytes
            changes.append(AddPayload(source.stored))
        changes += [AddNode(row.stored()) for row in job.adds]
        changes += [UpdateNode(row.stored()) for row in job.updates]
        changes += [RemoveNode(number) for number in job.removes]
        changes += [RemovePayload(s.stored.id) for s in job.frees if s.stored is not None]
        by_namespace = (*job.adds, *job.updates)
        if changes:
            self.store.commit(by_namespace[0].namespace if by_namespace else 0, changes)
        for source in job.payloads:
            source.arrays = None

    def _without_lost(self, job: Job) -> Job:
        """What belongs to a node that was never written is not there either."""
        adds = [row for row in job.adds if row.node.parent not in self._lost]
        updates = [row for row in job.updates if not {row.node.id, row.node.parent} & self._lost]
        if len(adds) + len(updates) < len(job.adds) + len(job.updates):
            if job.payloads:
                raise OSError("what it belongs to was not written")
            self._lost.update(row.node.id for row in job.adds if row not in adds)
        return replace(job, adds=adds, updates=updates)

    def _fail(self, job: Job, error: Exception) -> None:
        self.failures += 1
        written = [s.stored.id for s in job.payloads if s.stored is not None]
        if written:
            with suppress(OSError, RewarmError, sqlite3.Error):
                self.store.remove_payloads(written)
            for source in job.payloads:
                source.stored = None
        if not self.paused:
            log.warning("the disk tier writes nothing for %d s: %s", PAUSE, error)
        self._paused_until = time.monotonic() + PAUSE
        if job.undo is None:
            return
        with self._changed:
            self._lost.update(row.node.id for row in job.adds)
            self._failed.append(job.undo)
