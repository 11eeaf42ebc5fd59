"""The lowest layer of the disk tier: files with checksums, and an index of them.

A file is complete before the index knows it, and gone only after the index has forgotten it. So a
kill at any instant leaves a file without a row, which the next start removes, but never a row
without its file. Whatever is found damaged is as if it had never been stored.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import files
from .files import Arrays, Damaged, Entry
from .folder import LOCK, PAYLOADS, QUARANTINE, FolderHeld, FolderLock, Quarantine, prepare, why_not
from .guard import Guard
from .index import Index
from .records import (
    AddNode,
    AddPayload,
    Change,
    NamespaceInfo,
    NamespaceRows,
    PayloadRow,
    RemoveNode,
    RemovePayload,
    StoreBroken,
    StoredNode,
    StoredPayload,
    StoreError,
    StoreHeld,
    StoreUnusable,
    TokenSpan,
    UpdateNode,
    Verified,
)
from .sweep import Sweeper

log = logging.getLogger("rewarm")

Key = bytes
"""A span's tokens."""


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
        self._ids = threading.Lock()
        self._folder_lock = lock
        self._quarantine = quarantine
        self._payloads = folder / PAYLOADS
        files.make_folder(self._payloads)
        self._pending: dict[int, PayloadRow] = {}
        self._fresh: set[str] = set()
        """Names of files that are being written, or are not yet in the index."""
        self.guard = Guard(folder, quarantine, limit)
        index = self.guard.index
        self._last = index.last_id
        self._files = index.held
        self._spaces = {
            info.id: _Space(info.id, info.digest, json.dumps(info.about)) for info in index.spaces
        }
        self.sweeper = Sweeper(self._payloads, self._known_files, at_once=self.guard.anew)

    @classmethod
    def open(cls, folder: Path, *, limit: int, reserve: int = 1 << 30) -> Store:
        lock = None
        try:
            folder = prepare(Path(folder))
            lock = FolderLock(folder / LOCK)
            return cls(folder, limit, reserve, lock, Quarantine(folder / QUARANTINE, limit))
        except FolderHeld as holder:
            raise StoreHeld(
                f"{folder} is held by {holder}: stop it, or choose another folder"
            ) from None
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, OSError | sqlite3.Error) and not isinstance(error, StoreError):
                raise StoreUnusable(why_not(folder, error)) from error
            raise

    # Reading

    def nodes(self, namespace: int) -> tuple[list[StoredNode], dict[int, StoredPayload]]:
        """The intact part of a namespace, parents before children. The rest is removed."""
        with self.guard.using() as index:
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
        self, payload: StoredPayload, new: Callable[[Sequence[Entry]], Arrays] = files.blank
    ) -> Arrays | None:
        """What was written, in what `new` makes for its arrays, or None."""
        # Without a look into the index, which may wait for the disk just now.
        try:
            self.guard.check_usable()
            return files.read(self._payloads, payload.written, new)
        except StoreBroken:
            return None
        except Damaged as damage:
            self._lose(payload.id, str(damage))
        except OSError as error:
            if files.is_damage(error):
                self._lose(payload.id, os.strerror(error.errno or 0))
            else:
                log.warning("a payload of %s cannot be read now: %s", self.folder, error)
        return None

    def knows(self, payload: StoredPayload) -> bool:
        """Whether a payload that could not be read is still there: it may be readable later."""
        with suppress(StoreError), self.guard.using() as index:
            return payload.id in self._pending or index.payload(payload.id) is not None
        return True

    def _lose(self, id: int, why: str) -> None:
        """Set a damaged payload aside. A row that is damaged itself may name another's file."""
        with suppress(StoreError), self.guard.using() as index:
            row = self._pending.get(id) or index.payload(id)
            if row is None:
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
        return next((i for i, s in self._spaces.items() if s.digest == digest), None)

    def namespace(self, digest: str, about: dict[str, Any]) -> int:
        """The number of a namespace, made if it is new. `about` is for people, and for `clear`."""
        with self.guard.using() as index:
            known = (id for id, space in self._spaces.items() if space.digest == digest)
            space = _Space(next(known, None) or self.next_id(), digest, json.dumps(about))
            with index.transaction():
                index.put_namespace(space.id, digest, space.about, time.time())
            self._spaces = {**self._spaces, space.id: space}  # others read it without a lock
            return space.id

    def put_payload(self, arrays: Arrays, span: TokenSpan | None) -> StoredPayload:
        """Write a file. It is in nobody's way, and gone after a restart, until it is committed."""
        self.guard.check_usable()
        self.sweeper.finish()  # room was asked for without what a kill left
        parts, name = files.encode(arrays), files.new_name()
        self._fresh.add(name)
        try:
            written = files.write(self._payloads, name, parts)
        except BaseException:
            self._fresh.discard(name)
            raise
        row = PayloadRow(self.next_id(), 0, written, span)
        with self.guard.using():
            self._pending[row.id] = row
            self._files += written.nbytes
        return StoredPayload(row.id, written, span)

    def commit(self, namespace: int, changes: Sequence[Change]) -> None:
        """All of it, durably, or nothing. Only what removes may name a namespace that is not."""
        added: list[int] = []
        removed: list[PayloadRow] = []
        with self.guard.using() as index:
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
        with self.guard.using() as index:
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

    # Space

    def bytes(self) -> int:
        """What the store takes on disk: payloads, index, quarantine, and orphans once found."""
        self.guard.check_usable()
        return (
            self._files + self.guard.index.nbytes() + self._quarantine.nbytes + self.sweeper.nbytes
        )

    def free_bytes(self) -> int:
        """How many more bytes may be written now. Negative where there are too many already."""
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize - self.reserve
        return min(self.limit - self.bytes(), free) - self.guard.index.may_grow

    def first_keys(self, namespace: int, most: int) -> list[Key]:
        with self.guard.using() as index:
            return index.first_keys(namespace, most)

    def namespaces(self) -> list[NamespaceInfo]:
        with self.guard.using() as index:
            return index.namespaces()

    def clear(self, *, namespace: int | None = None, where: dict[str, Any] | None = None) -> int:
        """Delete everything, one namespace, or those that `where` describes. Returns bytes freed.

        The quarantine goes as well: it may hold parts of what is to be deleted."""
        before = self.bytes()
        names: list[str] = []
        with self.guard.using() as index:
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
        with self.guard.using() as index:
            index.checkpoint()

    def _recount(self, index: Index) -> None:
        waiting = sum(row.written.nbytes for row in self._pending.values())
        self._files = index.payload_bytes() + waiting

    # Damage

    def verify(
        self, progress: Callable[[int, int], None] | None = None, repair: bool = True
    ) -> Verified:
        """Read everything. With `repair`, what is damaged goes, with all that needs it."""
        with self.guard.using() as index:
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
        with self.guard.using() as index:
            for info in index.namespaces():
                found.append(index.load(info.id, damaged))
                if repair:
                    self._drop(index, found[-1])
        orphans = self.sweeper.find()
        if repair:
            self.sweeper.remove(orphans)
        return Verified(
            nodes=sum(len(part.nodes) for part in found),
            payloads=sum(len(part.payloads) for part in found),
            bytes=sum(p.nbytes for part in found for p in part.payloads.values()),
            damaged=len(damaged),
            dropped=sum(len(part.lost) for part in found),
            orphans=len(orphans) + sum(len(part.unused) for part in found),
        )

    def _intact(self, id: int, repair: bool) -> bool:
        with self.guard.using() as index:
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
        with self.guard.using() as index:
            if index.payload(id) is None:
                return True
        if repair:
            self._lose(id, why)
        return False

    def _drop(self, index: Index, found: NamespaceRows) -> None:
        """Remove what `load` did not find intact, and what only that had use for."""
        for id in found.unused:
            del found.payloads[id]
        with index.transaction():
            index.remove("node", found.lost)
            gone = self._remove_rows(index, [*found.damaged, *found.unused])
        self._recount(index)
        self._unlink(gone)

    def _known_files(self, shard: str) -> set[str]:
        with self.guard.using() as index:
            names = {name + files.SUFFIX for name in index.names(shard)}
            fresh = list(self._fresh)
        return names | {name + end for name in fresh for end in (files.SUFFIX, files.TEMPORARY)}

    def close(self) -> None:
        self.sweeper.stop()
        if self.guard.close():
            self.sweeper.thread.join()
            self._folder_lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
