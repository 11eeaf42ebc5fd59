"""The index in use: by one thread at a time, and by nobody once it turned out to be damaged."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .database import FULL, NOT_DAMAGE, code_of
from .files import Damaged
from .folder import INDEX, SUSPECT, Quarantine
from .index import Index
from .records import StoreBroken, StoreError

log = logging.getLogger("rewarm")


class Guard:
    def __init__(self, folder: Path, quarantine: Quarantine, limit: int) -> None:
        self.folder = folder
        self.broken = False
        self.anew = False
        """Whether there was no index that could be used."""
        self._closed = False
        self._lock = threading.RLock()
        self.index = self._open(folder / INDEX, quarantine, limit)

    def _open(self, path: Path, quarantine: Quarantine, limit: int) -> Index:
        marker = self.folder / SUSPECT
        if path.exists():
            try:
                if marker.exists():
                    raise Damaged("it was found damaged while in use")
                return Index.open(path, limit)
            except Damaged as damage:
                done = quarantine.take(*Index.parts(path))
                log.warning(
                    "the index %s cannot be used (%s): %s; it begins anew", path, damage, done
                )
        self.anew = True
        for leftover in Index.parts(path)[1:]:
            leftover.unlink(missing_ok=True)
        Index.create(path)
        marker.unlink(missing_ok=True)
        return Index.open(path, limit)

    @contextmanager
    def using(self) -> Iterator[Index]:
        """The index, for this thread alone. What SQLite raises becomes a `StoreError`."""
        with self._lock:
            self.check_usable()
            try:
                yield self.index
            except sqlite3.DatabaseError as error:
                raise self._failed(error) from error

    def check_usable(self) -> None:
        if self.broken:
            raise StoreBroken(f"the index of {self.folder} failed before: restart to go on")
        if self._closed:
            raise StoreError(f"the store {self.folder} is closed")

    def _failed(self, error: sqlite3.DatabaseError) -> StoreError:
        code = code_of(error)
        if code == FULL:
            full = StoreError(f"the disk of {self.folder} is full: the index stays as it was")
            full.errno = errno.ENOSPC
            return full
        if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
            return StoreError(f"the index of {self.folder} refused a change: {error}")
        self.broken = True
        if code not in NOT_DAMAGE:
            with suppress(OSError):
                (self.folder / SUSPECT).touch(mode=0o600)
        text = f"the index of {self.folder} cannot be used any more ({error})"
        log.error("%s: nothing is read from it or written until a restart", text)
        return StoreBroken(f"{text}: restart to go on")

    def close(self) -> bool:
        """False where that was done before."""
        with self._lock:
            if self._closed:
                return False
            with suppress(StoreError), self.using() as index:
                index.checkpoint()
            self._closed = True
            with suppress(sqlite3.Error):
                self.index.close()
            return True
