"""The lowest layer of the disk tier: files with checksums, and an index of them.

A file is complete before the index knows it, and gone only after the index has forgotten it. So a
kill at any instant leaves a file without a row, which the next start removes, but never a row
without its file. Whatever is found damaged is as if it had never been stored.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rewarm.errors import RewarmError

from . import files
from .files import Arrays, Damaged, FolderLock, Held, Quarantine
from .index import (
    FORMAT,
    FULL,
    NOT_DAMAGE,
    Index,
    Loaded,
    NamespaceInfo,
    PayloadRow,
    StoredNode,
    StoredPayload,
    code_of,
)

__all__ = [
    "FORMAT",
    "AddNode",
    "AddPayload",
    "Change",
    "NamespaceInfo",
    "RemoveNode",
    "RemovePayload",
    "Store",
    "StoreBroken",
    "StoreError",
    "StoreHeld",
    "StoreUnusable",
    "StoredNode",
    "StoredPayload",
    "UpdateNode",
    "Verified",
]

log = logging.getLogger("rewarm")

SUSPECT = "suspect"
"""A file that tells the next start of damage that a quick check does not see."""
SWEEP_AFTER = 5.0
"""Seconds from opening to the look for orphans: whoever opened has better things to read first."""


Key = bytes


class StoreError(RewarmError, OSError):
    """What a store could not do."""


class StoreHeld(StoreError):
    """A folder that another process has open."""


class StoreUnusable(StoreError):
    """A folder in which no store can be kept."""


class StoreBroken(StoreError):
    """A store whose index turned out to be damaged: it says nothing more, so nothing wrong."""


@dataclass(frozen=True)
class AddNode:
    node: StoredNode


@dataclass(frozen=True)
class UpdateNode:
    """All columns. A node that is not there, because it was damaged, stays away."""

    node: StoredNode


@dataclass(frozen=True)
class RemoveNode:
    id: int


@dataclass(frozen=True)
class AddPayload:
    """Make a file known that `put_payload` wrote."""

    payload: StoredPayload


@dataclass(frozen=True)
class RemovePayload:
    id: int


Change = AddNode | UpdateNode | RemoveNode | AddPayload | RemovePayload


@dataclass(frozen=True)
class Verified:
    """What is intact, and what was not."""

    nodes: int
    payloads: int
    bytes: int
    damaged: int
    """Payloads whose file or row is not what was written."""
    dropped: int
    """Nodes that are damaged or need what is."""
    orphans: int
    """Files that no row knows, and payloads of no node."""

    @property
    def clean(self) -> bool:
        return not (self.damaged or self.dropped or self.orphans)


@dataclass(frozen=True)
class _Space:
    id: int
    digest: str
    about: str


class Store:
    """Payload files and their index, in one folder, for one process. Safe to use from threads."""

    def __init__(
        self, folder: Path, limit: int, reserve: int, lock: FolderLock, quarantine: Quarantine
    ) -> None:
        self.folder = folder
        self.limit = limit
        self.reserve = reserve
        self.broken = False
        self._closed = False
        self._lock = threading.RLock()
        self._ids = threading.Lock()
        self._folder_lock = lock
        self._quarantine = quarantine
        self._payloads = folder / "payloads"
        files.make_folder(self._payloads)
        self._pending: dict[int, PayloadRow] = {}
        self._fresh: set[str] = set()
        """Names of files that are being written, or are not yet in the index."""
        self._orphaned = 0
        self._index, anew = self._open_index(folder / "index.sqlite")
        self._last = self._index.last_id
        self._files = self._index.held
        self._spaces = {
            info.id: _Space(info.id, info.digest, json.dumps(info.about))
            for info in self._index.spaces
        }
        self._stop = threading.Event()
        self._sweeper = threading.Thread(
            target=self._sweep,
            args=(0.0 if anew else SWEEP_AFTER,),
            name="rewarm-sweep",
            daemon=True,
        )
        self._sweeper.start()

    @classmethod
    def open(cls, folder: Path, *, limit: int, reserve: int = 1 << 30) -> Store:
        folder = Path(folder).absolute()
        lock = None
        try:
            _prepare(folder)
            lock = FolderLock(folder / "lock")
            return cls(folder, limit, reserve, lock, Quarantine(folder / "quarantine", limit))
        except Held as holder:
            raise StoreHeld(
                f"{folder} is held by {holder}: stop it, or choose another folder"
            ) from None
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, OSError | sqlite3.Error) and not isinstance(error, StoreError):
                raise StoreUnusable(_why_not(folder, error)) from error
            raise

    def _open_index(self, path: Path) -> tuple[Index, bool]:
        marker = self.folder / SUSPECT
        if path.exists():
            try:
                if marker.exists():
                    raise Damaged("it was found damaged while in use")
                return Index.open(path), False
            except Damaged as damage:
                done = self._quarantine.take(*Index.parts(path))
                log.warning(
                    "the index %s cannot be used (%s): %s; it begins anew", path, damage, done
                )
        for leftover in Index.parts(path)[1:]:
            leftover.unlink(missing_ok=True)
        Index.create(path)
        marker.unlink(missing_ok=True)
        return Index.open(path), True

    @contextmanager
    def _using(self) -> Iterator[Index]:
        with self._lock:
            self._check_usable()
            try:
                yield self._index
            except sqlite3.DatabaseError as error:
                raise self._failed(error) from error

    def _check_usable(self) -> None:
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

    # Reading

    def nodes(self, namespace: int) -> tuple[list[StoredNode], dict[int, StoredPayload]]:
        """The intact part of a namespace, parents before children. The rest is removed."""
        with self._using() as index:
            found = index.load(namespace)
            if found.lost or found.damaged:
                self._drop(index, found)
                log.warning(
                    "%d nodes of %s are damaged or lack a part: dropped",
                    len(found.lost),
                    self.folder,
                )
        return found.nodes, found.payloads

    def read(
        self, payload: StoredPayload, scratch: npt.NDArray[np.uint8] | None = None
    ) -> Arrays | None:
        """What was written, or None; in `scratch`, where that is given and large enough."""
        if scratch is not None and len(scratch) < payload.nbytes:
            scratch = None
        try:
            with self._using() as index:
                row = self._pending.get(payload.id) or index.payload(payload.id)
        except StoreBroken:
            return None
        if row is None:
            return None
        try:
            if row.intact:
                return files.read(self._payloads, row.written, scratch)
            self._lose(row, "its row is another")
        except Damaged as damage:
            self._lose(row, str(damage))
        except OSError as error:
            if files.is_damage(error):
                self._lose(row, os.strerror(error.errno or 0))
            else:
                log.warning("a payload of %s cannot be read now: %s", self.folder, error)
        return None

    def knows(self, payload: StoredPayload) -> bool:
        """Whether a payload that could not be read is still there: it may be readable later."""
        with suppress(StoreError), self._using() as index:
            return payload.id in self._pending or index.payload(payload.id) is not None
        return True

    def _lose(self, row: PayloadRow, why: str) -> None:
        """Set a damaged payload aside. A row that is damaged itself may name another's file."""
        with suppress(StoreError), self._using() as index:
            known = self._pending.get(row.id) or index.payload(row.id)
            if known is None:
                return  # removed while it was read
            done = "its row is removed"
            if row.intact:
                done = self._quarantine.take(Path(files.place(self._payloads, row.written.name)))
            with index.transaction():
                self._remove_rows(index, [row.id])
            self._count_out(index, [row])
            log.warning("a payload of %s is damaged (%s): %s", self.folder, why, done)

    # Writing

    def next_id(self) -> int:
        """Larger than any before it, and than any in the index."""
        with self._ids:
            self._last += 1
            return self._last

    def known_namespace(self, digest: str) -> int | None:
        """The number of a namespace, if there is one."""
        with self._lock:
            return next((i for i, s in self._spaces.items() if s.digest == digest), None)

    def namespace(self, digest: str, about: dict[str, Any]) -> int:
        """The number of a namespace, made if it is new. `about` is for people, and for `clear`."""
        with self._using() as index:
            known = (id for id, space in self._spaces.items() if space.digest == digest)
            space = _Space(next(known, None) or self.next_id(), digest, json.dumps(about))
            with index.transaction():
                index.put_namespace(space.id, digest, space.about, time.time())
            self._spaces[space.id] = space
            return space.id

    def put_payload(self, arrays: Arrays, meta: dict[str, Any]) -> StoredPayload:
        """Write a file. It is in nobody's way, and gone after a restart, until it is committed."""
        self._check_usable()
        text, parts, name = json.dumps(meta), files.encode(arrays), files.new_name()
        self._fresh.add(name)
        try:
            written = files.write(self._payloads, name, parts)
        except BaseException:
            self._fresh.discard(name)
            raise
        row = PayloadRow(self.next_id(), 0, written, text)
        with self._lock:
            self._pending[row.id] = row
            self._files += written.nbytes
        return StoredPayload(row.id, written.nbytes, json.loads(text))

    def commit(self, namespace: int, changes: Sequence[Change]) -> None:
        """All of it, durably, or nothing. Only what removes may name a namespace that is not."""
        added: list[int] = []
        removed: list[PayloadRow] = []
        with self._using() as index:
            with index.transaction():
                for change in changes:
                    if isinstance(change, AddNode | UpdateNode | AddPayload):
                        self._keep_space(index, namespace)
                    match change:
                        case AddNode(node):
                            index.put_node(namespace, node, new=True)
                        case UpdateNode(node):
                            index.put_node(namespace, node, new=False)
                        case RemoveNode(id):
                            index.remove("node", [id])
                        case AddPayload(payload):
                            index.add_payload(self._written(payload, namespace))
                            added.append(payload.id)
                        case RemovePayload(id):
                            removed += self._remove_rows(index, [id])
            for id in added:
                self._fresh.discard(self._pending.pop(id).written.name)
            self._count_out(index, removed)
        self._unlink(removed)

    def remove_payloads(self, ids: Iterable[int]) -> None:
        with self._using() as index:
            with index.transaction():
                removed = self._remove_rows(index, ids)
            self._count_out(index, removed)
        self._unlink(removed)

    def _keep_space(self, index: Index, namespace: int) -> None:
        """A namespace that was cleared is there again as soon as it is used."""
        space = self._spaces.get(namespace)
        if space is None:
            raise StoreError(f"there is no namespace {namespace} in {self.folder}")
        if not index.has_namespace(namespace):
            index.put_namespace(space.id, space.digest, space.about, time.time())

    def _written(self, payload: StoredPayload, namespace: int) -> PayloadRow:
        row = self._pending.get(payload.id)
        if row is None:
            raise StoreError(f"payload {payload.id} was not written here, or is known already")
        return replace(row, namespace=namespace)

    def _remove_rows(self, index: Index, ids: Iterable[int]) -> list[PayloadRow]:
        found = [self._pending.get(id) or index.payload(id) for id in ids]
        rows = [row for row in found if row is not None]
        index.remove("payload", [row.id for row in rows])
        return rows

    def _count_out(self, index: Index, rows: Iterable[PayloadRow]) -> None:
        for row in rows:
            if self._pending.pop(row.id, None) is not None:
                self._fresh.discard(row.written.name)
            if row.intact:
                self._files -= row.written.nbytes
            else:
                self._recount(index)

    def _unlink(self, rows: Iterable[PayloadRow]) -> None:
        for row in rows:
            if row.intact:  # otherwise its name may be another's; the sweep finds the file
                files.remove(self._payloads, row.written.name)

    # Room

    def bytes(self) -> int:
        """What the store takes on disk: payloads, index, quarantine, and orphans once found."""
        self._check_usable()
        return self._files + self._index.nbytes() + self._quarantine.nbytes + self._orphaned

    def room(self) -> int:
        """How many more bytes may be written now. Negative where there are too many already."""
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize - self.reserve
        return min(self.limit - self.bytes(), free)

    def first_keys(self, namespace: int, most: int) -> list[Key]:
        with self._using() as index:
            return index.first_keys(namespace, most)

    def namespaces(self) -> list[NamespaceInfo]:
        with self._using() as index:
            return index.namespaces()

    def clear(self, *, namespace: int | None = None, where: dict[str, Any] | None = None) -> int:
        """Delete everything, one namespace, or those that `where` describes. Returns bytes freed.

        The quarantine goes as well: it may hold parts of what is to be deleted."""
        before = self.bytes()
        names: list[str] = []
        with self._using() as index:
            with index.transaction():
                for info in index.namespaces():
                    asked = namespace is None or info.id == namespace
                    if asked and (where or {}).items() <= info.about.items():
                        names += index.clear(info.id)
            self._recount(index)
            index.checkpoint()
            self._quarantine.clear()
        for name in names:
            files.remove(self._payloads, name)
        return before - self.bytes()

    def checkpoint(self) -> None:
        """Move the index's log into the index, and give back what neither needs."""
        with self._using() as index:
            index.checkpoint()

    def _recount(self, index: Index) -> None:
        waiting = sum(row.written.nbytes for row in self._pending.values())
        self._files = index.payload_bytes() + waiting

    # Damage

    def verify(
        self, progress: Callable[[int, int], None] | None = None, repair: bool = True
    ) -> Verified:
        """Read everything. With `repair`, what is damaged goes, with all that needs it."""
        with self._using() as index:
            if problem := index.check():
                raise sqlite3.DatabaseError(problem)
            ids = index.payload_ids()
        damaged = set()
        for done, id in enumerate(ids, 1):
            if not self._intact(id, repair):
                damaged.add(id)
            if progress is not None:
                progress(done, len(ids))
        found = []
        with self._using() as index:
            for info in index.namespaces():
                found.append(index.load(info.id, damaged))
                if repair:
                    self._drop(index, found[-1])
        orphans = self._orphans()
        if repair:
            self._remove_orphans(orphans)
        return Verified(
            nodes=sum(len(part.nodes) for part in found),
            payloads=sum(len(part.payloads) for part in found),
            bytes=sum(p.nbytes for part in found for p in part.payloads.values()),
            damaged=len(damaged),
            dropped=sum(len(part.lost) for part in found),
            orphans=len(orphans) + sum(len(part.unused) for part in found),
        )

    def _intact(self, id: int, repair: bool) -> bool:
        with self._using() as index:
            row = index.payload(id)
        if row is None:
            return True  # removed meanwhile
        why = "its row is another"
        try:
            if row.intact:
                files.check(self._payloads, row.written)
                return True
        except Damaged as damage:
            why = str(damage)
        except OSError as error:
            if not files.is_damage(error):
                raise
            why = os.strerror(error.errno or 0)
        with self._using() as index:
            if index.payload(id) is None:
                return True
        if repair:
            self._lose(row, why)
        return False

    def _drop(self, index: Index, found: Loaded) -> None:
        """Remove what `load` did not find intact, and what only that had use for."""
        for id in found.unused:
            del found.payloads[id]
        with index.transaction():
            index.remove("node", found.lost)
            gone = self._remove_rows(index, [*found.damaged, *found.unused])
        self._recount(index)
        self._unlink(gone)

    def _orphans(self) -> list[Path]:
        found = []
        for paths in files.shards(self._payloads):
            # Listed first and asked for then: a file that is neither fresh nor known by now is old.
            with self._using() as index:
                known = index.names(paths[0].parent.name) if paths else set()
                for path in paths:
                    complete = path.suffix == files.SUFFIX
                    if path.stem not in self._fresh and not (complete and path.stem in known):
                        found.append(path)
        return found

    def _remove_orphans(self, paths: Iterable[Path]) -> None:
        sizes = {path: files.size_of(path) for path in paths}
        self._orphaned = sum(sizes.values())
        for path, size in sizes.items():
            if self._stop.is_set():
                return
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self._orphaned -= size

    def _sweep(self, after: float) -> None:
        if not self._stop.wait(after):
            with suppress(StoreError, OSError):
                self._remove_orphans(self._orphans())

    # The end

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            if self._closed:
                return
            if not self.broken:
                with suppress(StoreError), self._using() as index:
                    index.checkpoint()
            self._closed = True
            with suppress(sqlite3.Error):
                self._index.close()
        self._sweeper.join()
        self._folder_lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prepare(folder: Path) -> None:
    made = not folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A folder of somebody else's things keeps its mode: what we put into it is closed anyway.
    if made or not any(folder.iterdir()) or (folder / "lock").exists():
        with suppress(PermissionError):
            folder.chmod(0o700)


def _why_not(folder: Path, error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EEXIST, errno.ENOTDIR):
        why = "it is not a folder: choose another place"
    elif code in (errno.EACCES, errno.EPERM):
        why = "there is no permission to write in it: change its owner or mode, or choose another"
    elif code == errno.EROFS:
        why = "its file system is read-only: choose another folder"
    elif code == errno.ENOSPC:
        why = "its disk is full: make room, or choose another folder"
    elif code in (errno.ENOLCK, errno.ENOTSUP):
        why = "its file system has no locks: choose a folder on a local disk"
    else:
        why = f"{error}: choose another folder"
    return f"no cache can be kept in {folder}: {why}"
