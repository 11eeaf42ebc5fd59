"""The thread that writes to disk: files first, then the index. It rests during requests."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .parts import File
from .trees import DiskTrees

log = logging.getLogger("rewarm")

MOST_WAITING = 256 << 20
"""Bytes that may wait to be written: they are in memory, beside the budget."""
NICE = 10
"""The niceness of the writer's thread: the threads that run the model go first."""
REST = 24.0
"""Seconds without work after each second of the processor's time, while there are requests."""
LONGEST_REST = 1.0
"""The longest rest in seconds."""
NEARLY_FULL = 0.75
"""The share of `MOST_WAITING` above which it does not rest: a full queue refuses offers."""
PAUSE = 30.0
"""Seconds without another try after a failure."""
SWEEP_AFTER = 5.0
"""Seconds from the start to the sweep of what a kill left, or fewer if something is to be written:
before that, other reads matter more."""


class Writer:
    """Writes what is new in the trees. A failure is noted in the trees, and never raised."""

    def __init__(
        self, trees: DiskTrees, changed: threading.Condition, in_use: Callable[[], bool]
    ) -> None:
        """`changed` is the tier's lock, and tells of new work. `in_use` says whether there are
        requests: the writer takes time and memory bandwidth from them."""
        self.written = 0
        """Bytes since the start."""
        self.rests = 0
        """The number of rests."""
        self._store = trees.store
        self._trees = trees
        self._changed = changed
        self._in_use = in_use
        self._stuck = False
        """True while the index refuses changes."""
        self._closed = False
        self._paused_until = 0.0
        self._thread = threading.Thread(target=self._run, name="rewarm-disk", daemon=True)
        self._thread.start()

    @property
    def paused(self) -> bool:
        """True where the disk refused a moment ago."""
        return time.monotonic() < self._paused_until

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all that has changed before this call is on disk, or is to be offered again.
        False where the index refuses changes, or time is over."""
        done = threading.Event()
        with self._changed:
            self._trees.waiting.append(done)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stuck or done.is_set(), timeout)
            return done.is_set()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        self._wait_for_work(0.0 if self._store.index.is_new else SWEEP_AFTER)
        if self._trees.has_work or not self._closed:
            with suppress(OSError):
                self._store.sweep()
        while self._wait_for_work(None):
            began = time.thread_time()
            # The index must get all changes: it differs from the trees until then.
            self._stuck = not self._work()
            with self._changed:
                self._changed.notify_all()
                pause = self._paused_until - time.monotonic()
                if self._stuck and self._changed.wait_for(lambda: self._closed, pause):
                    return
                self._stuck = False
            self._rest(REST * (time.thread_time() - began))

    def _wait_for_work(self, timeout: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._trees.has_work or self._closed, timeout)
            return self._trees.has_work

    def _rest(self, seconds: float) -> None:
        with self._changed:
            if not self._is_urgent() and self._in_use():
                self.rests += 1
                self._changed.wait_for(self._is_urgent, min(seconds, LONGEST_REST))

    def _is_urgent(self) -> bool:
        nearly_full = self._trees.waiting_bytes > NEARLY_FULL * MOST_WAITING
        is_waited_for = any(isinstance(job, threading.Event) for job in self._trees.waiting)
        return self._closed or nearly_full or is_waited_for

    def _work(self) -> bool:
        """Write the next file, and tell the index. False where the index refused."""
        with self._changed:
            job = self._trees.next_job()
        if isinstance(job, File):
            self._write(job)
        try:
            self._commit()
        except Exception as error:
            self._refused(error)
            return False
        if isinstance(job, threading.Event):
            job.set()
        return True

    def _write(self, file: File) -> None:
        try:
            if self._store.free_bytes() < file.nbytes:
                self._commit()  # removals make room
            if self._store.free_bytes() < file.nbytes:
                self._store.index.checkpoint()  # the index's log counts as well
            if self._store.free_bytes() < file.nbytes:
                raise OSError(errno.ENOSPC, f"no space for {file.nbytes:,} bytes")
            size = self._store.write(file.id, file.arrays or {}, file.nbytes)
        except Exception as error:
            self._refused(error)
            with self._changed:
                self._trees.failed(file)
            return
        self.written += size
        with self._changed:
            self._trees.written(file, size)

    def _commit(self) -> None:
        with self._changed:
            changes = self._trees.take_changes()
        try:
            if changes:
                self._store.commit(changes)
        except Exception:
            with self._changed:
                self._trees.put_back(changes)
            raise

    def _refused(self, error: Exception) -> None:
        if not isinstance(error, (OSError, sqlite3.Error)):
            log.error("writing to the disk tier failed", exc_info=error)
        elif not self.paused:
            log.warning("the disk tier writes nothing for %d s: %s", PAUSE, error)
        pause = PAUSE if not self._store.index.broken else threading.TIMEOUT_MAX
        self._paused_until = time.monotonic() + pause
