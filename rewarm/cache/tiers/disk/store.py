"""The store: payload files and the index of them, in one folder, for one process.

A file is complete before the index knows it, and gone only after the index has forgotten it. So a
kill at any instant leaves a file without a row, which the next start removes, but never a row
without its file. What is found damaged counts as never stored.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..base import Sealed
from ..codec import Received
from ..seal import is_whole
from . import files
from .errors import Damaged, StoreError, StoreUnusable
from .folder import PAYLOADS, FolderLock, Quarantine, make_folder, prepare, size_of, why_not
from .index import Changes, Index, NamespaceInfo

log = logging.getLogger("rewarm")


@dataclass(frozen=True)
class Verified:
    """The result of reading everything."""

    nodes: int
    files: int
    bytes: int
    damaged: int
    """Files that are not what was written."""
    dropped: int
    """Nodes that are damaged or need something damaged."""
    orphans: int
    """Files that no row knows, or that no node has."""

    @property
    def clean(self) -> bool:
        return not (self.damaged or self.dropped or self.orphans)


class Store(AbstractContextManager["Store"]):
    """A store for several threads. To read, or to ask for space, never waits for a transaction."""

    def __init__(self, folder: Path, limit: int, reserve: int, lock: FolderLock) -> None:
        self.folder = folder
        self.limit = limit
        self.reserve = reserve
        """Bytes of the disk that are left free for others."""
        self._folder_lock = lock
        self._quarantine = Quarantine(folder, limit)
        self._payloads = folder / PAYLOADS
        make_folder(self._payloads)
        self.index = Index(folder, self._quarantine, limit)
        self._fresh: set[int] = set()
        """Files that are being written, or that the index does not know yet."""
        self._count = threading.Lock()
        self._nbytes = sum(info.bytes for info in self.index.at_start)
        """Bytes of payload files. The index gives them until `sweep` has counted the files."""
        self._planned = 0

    @classmethod
    def open(cls, folder: Path, *, limit: int, reserve: int = 1 << 30) -> Self:
        lock = None
        try:
            folder = prepare(Path(folder))
            lock = FolderLock(folder)
            return cls(folder, limit, reserve, lock)
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, OSError | sqlite3.Error) and not isinstance(error, StoreError):
                raise StoreUnusable(why_not(folder, error)) from error
            raise

    # Space

    def bytes(self) -> int:
        """Return the bytes of payloads, index and quarantine."""
        self.index.check_usable()
        return self._nbytes + self.index.nbytes + self._quarantine.nbytes

    def free_bytes(self) -> int:
        """Return the bytes that can be written now."""
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize - self.reserve
        return min(self.limit - self.bytes(), free) - self.index.may_grow

    def unplanned_bytes(self) -> int:
        """Return the bytes that can be written once everything that is planned is done."""
        return self.free_bytes() - self._planned

    def plan(self, nbytes: int) -> None:
        """Count in bytes that will be written, or, below zero, bytes that will be removed."""
        self._settle(0, -nbytes)

    def _settle(self, nbytes: int, planned: int) -> None:
        with self._count:
            self._nbytes += nbytes
            self._planned -= planned

    # Files

    def write(self, id: int, arrays: Sealed, planned: int = 0) -> int:
        """Write a file and return its size. A restart removes it unless it is committed.

        `planned` bytes had been counted in for it."""
        self.index.check_usable()
        self._fresh.add(id)
        try:
            size = files.write(self._payloads, id, arrays)
        except BaseException:
            self._fresh.discard(id)
            raise
        self._settle(size, planned)
        return size

    def read(self, id: int, size: int) -> Received:
        """Read a file. Only its form is checked.

        Raises `Damaged`, and `OSError` where it cannot be read now."""
        self.index.check_usable()
        return files.read(self._payloads, id, size)

    def set_aside(self, id: int, why: object) -> None:
        """Move a damaged file into the quarantine. The caller removes its row."""
        path = Path(files.place(self._payloads, id))
        size = size_of(path)
        done = self._quarantine.take(path)
        self._settle(-size, 0)
        log.warning("a payload of %s is damaged (%s): %s", self.folder, why, done)

    # Rows

    def commit(self, changes: Changes) -> None:
        """Make all changes durable, or none; then remove the files that are gone."""
        cleared = self.index.commit(changes)
        self._fresh.difference_update(row.id for row in changes.files)
        for id, planned in changes.gone_files.items():
            self._settle(-self._remove(id), -planned)
        freed = sum(map(self._remove, cleared))
        self._settle(-freed, -sum(changes.cleared.values()))

    def _remove(self, id: int) -> int:
        self._fresh.discard(id)
        return files.remove(files.place(self._payloads, id))

    def clear(self, matches: Callable[[NamespaceInfo], bool] = lambda info: True) -> int:
        """Delete the namespaces that match, and the quarantine. Returns the bytes freed.

        The quarantine may hold parts of what is to be deleted."""
        before = self.bytes()
        self.commit(Changes(cleared={i.id: 0 for i in self.index.namespaces() if matches(i)}))
        self.index.checkpoint()
        self._quarantine.clear()
        return before - self.bytes()

    # Damage

    def verify(
        self, progress: Callable[[int, int], object] = lambda done, total: None, repair: bool = True
    ) -> Verified:
        """Read everything. With `repair`, remove what is damaged, with all that needs it."""
        sizes = self.index.file_sizes()
        damaged = set()
        for done, (id, size) in enumerate(sizes.items(), 1):
            why = self._damage(id, size)
            if why is not None:
                damaged.add(id)
                if repair:
                    self.set_aside(id, why)
            progress(done, len(sizes))
        found = [self.index.load(info.id, damaged) for info in self.index.namespaces()]
        lost = [id for part in found for id in part.lost]
        unused = {id for part in found for id in part.unused}
        if repair and (lost or unused):
            self.commit(Changes(gone_nodes=lost, gone_files=dict.fromkeys(unused, 0)))
        orphans = self._orphans()
        if repair:
            self.sweep()
        kept = [file for part in found for file in part.files.values()]
        return Verified(
            nodes=sum(len(part.nodes) for part in found),
            files=len(kept),
            bytes=sum(file.nbytes for file in kept),
            damaged=len(damaged),
            dropped=len(lost),
            orphans=len(orphans) + len(unused - damaged),
        )

    def _damage(self, id: int, size: int) -> str | None:
        try:
            if is_whole(self.read(id, size)):
                return None
            why = "its checksum is another"
        except Damaged as damage:
            why = str(damage)
        return why if id in self.index.file_sizes() else None  # removed meanwhile

    def _orphans(self) -> list[Path]:
        # Files are listed before rows are read: so a file without a row is not a new one.
        found = [*files.stored(self._payloads)]
        known = self.index.file_sizes().keys() | self._fresh
        return [path for path in found if int(path.stem, 16) not in known]

    def sweep(self) -> None:
        """Remove the files that a kill left, and count the bytes of all files.

        The index does not count such files, so they go before anything is written. Otherwise, in a
        loop of crashes, each process would fill the disk beside what the earlier ones left."""
        for path in self._orphans():
            files.remove(path)
        nbytes = sum(map(size_of, files.stored(self._payloads)))
        with self._count:
            self._nbytes = nbytes

    def close(self) -> None:
        self.index.close()
        self._folder_lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()
