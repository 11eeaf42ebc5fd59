"""The index: which nodes there are and which file holds what, in SQLite.

SQLite tells a torn page from a whole one only by luck, so every row carries a seal over all its
columns. A row whose seal is broken is not there.
"""

from __future__ import annotations

import gc
import json
import marshal
import os
import sqlite3
from collections.abc import Container, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

import xxhash

from .files import Damaged, Written, size_of, sync_folder
from .records import NamespaceInfo, NamespaceRows, PayloadRow, StoredNode, StoredPayload

FORMAT = 2
"""The version of files and index. A store of another one is set aside."""
APPLICATION = 0x5265776D
LARGEST_ID = 1 << 53
"""Larger numbers in an index are damage: they must not push new ones out of range."""
PAGE = 8192
"""Keys are a few kilobytes long."""
FEWEST_LOG_PAGES, MOST_LOG_PAGES = 8, 256
"""How long the log grows before it is moved into the index."""
LOG_SHARE = 64
"""The log takes at most about this part of a store's limit."""

BUSY, LOCKED, NOMEM, IOERR, FULL, CANTOPEN = 5, 6, 7, 10, 13, 14
SHORT_READ = 522
NOT_DAMAGE = {BUSY, LOCKED, NOMEM, IOERR, FULL, CANTOPEN}
"""What SQLite says where the machine is at fault, not the database."""

SANE = f"nbytes BETWEEN 0 AND {LARGEST_ID}"
SPACE = "id, digest, about, used"
PAYLOAD = "namespace, id, name, nbytes, checksum, start, stop"
NODE = 'namespace, id, parent, start, key, origin, kind, hits, used, hint, "rows", "window", state'

SCHEMA = (
    "CREATE TABLE namespace (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE,"
    " about TEXT NOT NULL, used REAL NOT NULL, seal BLOB NOT NULL)",
    "CREATE TABLE payload (id INTEGER PRIMARY KEY, namespace INTEGER NOT NULL,"
    " name TEXT NOT NULL UNIQUE, nbytes INTEGER NOT NULL, checksum BLOB NOT NULL,"
    " seal BLOB NOT NULL, start INTEGER, stop INTEGER)",
    # The key comes last: it may be long, and most questions are about what is before it.
    "CREATE TABLE node (id INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, parent INTEGER,"
    " start INTEGER NOT NULL, origin TEXT NOT NULL, kind TEXT, hits INTEGER NOT NULL,"
    ' used REAL NOT NULL, hint REAL NOT NULL, "rows" INTEGER, "window" INTEGER, state INTEGER,'
    " seal BLOB NOT NULL, key BLOB NOT NULL)",
    "CREATE INDEX payload_namespace ON payload (namespace)",
    "CREATE INDEX node_namespace ON node (namespace)",
)


def seal(values: tuple[Any, ...]) -> bytes:
    # Marshal's version 2 is plain: the same values are the same bytes, whatever Python writes them.
    return xxhash.xxh3_64_digest(marshal.dumps(values, 2))


@contextmanager
def no_collection() -> Iterator[None]:
    """Making many objects that all stay sets the collector off again and again, for nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def code_of(error: sqlite3.Error) -> int:
    """Return SQLite's result code, or 1 where the error is not SQLite's own."""
    code: int = getattr(error, "sqlite_errorcode", 1)
    return code if code == SHORT_READ else code & 0xFF


class Index:
    """One connection. Whoever calls holds the store's lock; what SQLite raises is for the store."""

    def __init__(self, path: Path, connection: sqlite3.Connection, log_pages: int) -> None:
        self.path = path
        self.log_pages = log_pages
        self._db = connection
        self._files = [os.fspath(part) for part in self.parts(path)[:2]]

    @staticmethod
    def parts(path: Path) -> list[Path]:
        """The files of an index. A log without its database must not meet another one."""
        return [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))]

    @classmethod
    def create(cls, path: Path) -> None:
        """Complete under its name, or not there at all."""
        temporary = path.with_name(path.name + ".new")
        for part in cls.parts(temporary):
            part.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(fd, 0o600)
        os.close(fd)
        db = sqlite3.connect(temporary, isolation_level=None)
        try:
            db.execute(f"PRAGMA page_size = {PAGE}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("BEGIN")
            for statement in SCHEMA:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            db.execute("COMMIT")
        finally:
            db.close()
        os.rename(temporary, path)
        sync_folder(path.parent)

    @classmethod
    def open(cls, path: Path, limit: int) -> Index:
        """For a store that may take `limit` bytes.

        Raises `Damaged` for an index that cannot be used, and `OSError` or `sqlite3.Error` for one
        that can perhaps be used another time."""
        os.close(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        try:
            wanted = limit // LOG_SHARE // PAGE
            index = cls(path, db, min(max(wanted, FEWEST_LOG_PAGES), MOST_LOG_PAGES))
            index._prepare(db)
            index._survey()
        except sqlite3.Error as error:
            db.close()
            if code_of(error) in NOT_DAMAGE:
                raise
            raise Damaged(str(error)) from error
        except BaseException:
            db.close()
            raise
        return index

    def _prepare(self, db: sqlite3.Connection) -> None:
        # A text that is no longer UTF-8 breaks its row's seal; it must not break the query.
        db.text_factory = methodcaller("decode", "utf-8", "replace")
        # The store's lock keeps others out, so the log needs no shared memory. Before any reading.
        db.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        if (application, version) != (APPLICATION, FORMAT):
            raise Damaged(f"it is of format {version}, and this version reads format {FORMAT}")
        for setting in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "fullfsync = ON",
            "checkpoint_fullfsync = ON",
            f"wal_autocheckpoint = {self.log_pages}",
            f"journal_size_limit = {self.log_pages * PAGE}",
            "secure_delete = FAST",
            "cell_size_check = ON",
            "trusted_schema = OFF",
        ):
            db.execute(f"PRAGMA {setting}").fetchall()
        found = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL")}
        if found != set(SCHEMA):
            raise Damaged("its tables are others")
        if problem := _quick_check(db):
            raise Damaged(problem)

    def _survey(self) -> None:
        """What a start needs to know: an index that cannot tell is of no use."""
        with self.transaction():
            self._remove_strays()
        self.last_id = self._last_id()
        self.spaces = self.namespaces()
        self.held = self.payload_bytes()

    def check(self) -> str | None:
        """What is wrong with the database as such."""
        return _quick_check(self._db)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()

    def checkpoint(self) -> None:
        """Give free pages back, and empty the log."""
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        if free > max(self.log_pages // 2, pages // 4):
            self._db.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def nbytes(self) -> int:
        return sum(size_of(part) for part in self._files)

    @property
    def may_grow(self) -> int:
        """Bytes that it may take beyond `nbytes` without anybody's asking: a log that is full is
        moved into the index, and goes on beside it."""
        return 2 * self.log_pages * PAGE

    # What there is

    def _last_id(self) -> int:
        """The largest number that a row has or refers to: none above it was ever read."""
        columns = ("id", "parent", '"rows"', '"window"', "state")
        largest = ", ".join(f"MAX(CASE WHEN {c} < {LARGEST_ID} THEN {c} END)" for c in columns)
        found = [*self._db.execute(f"SELECT {largest} FROM node").fetchone()]
        for table in ("namespace", "payload"):
            question = f"SELECT MAX(id) FROM {table} WHERE id < {LARGEST_ID}"
            found += self._db.execute(question).fetchone()
        return max(int(n or 0) for n in found)

    def payload_bytes(self) -> int:
        question = f"SELECT SUM(nbytes) FROM payload WHERE {SANE}"
        return int(self._db.execute(question).fetchone()[0] or 0)

    def payload_ids(self) -> list[int]:
        return [i for (i,) in self._db.execute("SELECT id FROM payload ORDER BY id")]

    def names(self, shard: str) -> set[str]:
        """Of the payloads whose names begin with these two digits."""
        question = "SELECT name FROM payload WHERE name >= ? AND name < ?"
        return {name for (name,) in self._db.execute(question, (shard, shard + "g"))}

    def has_namespace(self, id: int) -> bool:
        question = "SELECT 1 FROM namespace WHERE id = ?"
        return self._db.execute(question, (id,)).fetchone() is not None

    def payload(self, id: int) -> PayloadRow | None:
        question = f"SELECT {PAYLOAD}, seal FROM payload WHERE id = ?"
        row = self._db.execute(question, (id,)).fetchone()
        if row is None:
            return None
        namespace, id, name, nbytes, checksum, start, stop, mark = row
        intact = mark == seal(row[:-1])
        span = None if start is None else (start, stop)
        return PayloadRow(id, namespace, Written(name, nbytes, checksum), span, intact)

    def load(self, namespace: int, missing: Set[int] = frozenset()) -> NamespaceRows:
        """`missing`: payloads to be taken as gone."""
        with no_collection():
            found = NamespaceRows()
            self._load_payloads(found, namespace, missing)
            self._load_nodes(found, namespace)
        return found

    def _load_payloads(self, found: NamespaceRows, namespace: int, missing: Set[int]) -> None:
        question = f"SELECT {PAYLOAD}, seal FROM payload WHERE namespace = ?"
        for row in self._db.execute(question, (namespace,)):
            space, id, name, nbytes, checksum, start, stop, mark = row
            if mark != seal(row[:-1]) or space != namespace:
                found.damaged.append(id)
            elif id not in missing:
                span = None if start is None else (start, stop)
                found.payloads[id] = StoredPayload(id, Written(name, nbytes, checksum), span)

    def _load_nodes(self, found: NamespaceRows, namespace: int) -> None:
        children: dict[int | None, list[StoredNode]] = {}
        everything = []
        question = f"SELECT {NODE}, seal FROM node WHERE namespace = ?"
        for row in self._db.execute(question, (namespace,)):
            everything.append(row[1])
            if row[-1] == seal(row[:-1]) and row[0] == namespace:
                children.setdefault(row[2], []).append(StoredNode(*row[1:-1]))
        kept, payloads = found.nodes, found.payloads
        level = children.get(None, [])
        while level:
            whole = [node for node in level if _has_all(node, payloads)]
            kept += whole
            level = [child for node in whole for child in children.get(node.id, ())]
        if len(kept) < len(everything):
            found.lost = list(set(everything) - {node.id for node in kept})
        used = {i for node in kept for i in (node.rows, node.window, node.state)}
        found.unused = [i for i in payloads if i not in used]

    def first_keys(self, namespace: int, most: int) -> list[bytes]:
        """The spans that the paths of a namespace begin with, the last used ones first."""
        question = (
            f"SELECT {NODE}, seal FROM node WHERE namespace = ? AND parent IS NULL"
            " ORDER BY used DESC LIMIT ?"
        )
        rows = self._db.execute(question, (namespace, most))
        return [row[4] for row in rows if row[-1] == seal(row[:-1])]

    def namespaces(self) -> list[NamespaceInfo]:
        nodes = "SELECT namespace, COUNT(*) FROM node GROUP BY namespace"
        files = (
            f"SELECT namespace, COUNT(*), SUM(nbytes) FROM payload WHERE {SANE} GROUP BY namespace"
        )
        node_counts = dict(self._db.execute(nodes).fetchall())
        held = {namespace: rest for namespace, *rest in self._db.execute(files)}
        found = []
        for id, digest, about, used, mark in self._db.execute(
            f"SELECT {SPACE}, seal FROM namespace"
        ):
            if mark == seal((id, digest, about, used)):
                payloads, nbytes = held.get(id, (0, 0))
                count = node_counts.get(id, 0)
                info = NamespaceInfo(id, digest, json.loads(about), count, payloads, nbytes, used)
                found.append(info)
        return found

    # Changes, inside a transaction

    def put_namespace(self, id: int, digest: str, about: str, used: float) -> None:
        self._insert("namespace", SPACE, (id, digest, about, used))

    def add_payload(self, row: PayloadRow) -> None:
        w = row.written
        start, stop = row.span or (None, None)
        values = (row.namespace, row.id, w.name, w.nbytes, w.checksum, _int(start), _int(stop))
        self._insert("payload", PAYLOAD, values)

    def put_node(self, namespace: int, node: StoredNode, *, new: bool) -> None:
        n = node
        # Exactly what will be read back, and nothing that only looks like it: the seal is over it.
        head = (namespace, int(n.id), _int(n.parent), int(n.start), bytes(n.key))
        about = (str(n.origin), n.kind and str(n.kind), int(n.hits))
        numbers = (float(n.used) + 0.0, float(n.hint) + 0.0)
        values = (*head, *about, *numbers, _int(n.rows), _int(n.window), _int(n.state))
        if new:
            self._insert("node", NODE, values)
            return
        columns = ", ".join(f"{column} = ?" for column in (*NODE.split(", "), "seal"))
        where = "WHERE id = ? AND namespace = ?"
        self._db.execute(
            f"UPDATE node SET {columns} {where}", (*values, seal(values), n.id, namespace)
        )

    def _insert(self, table: str, columns: str, values: tuple[Any, ...]) -> None:
        how = "INSERT OR REPLACE" if table == "namespace" else "INSERT"
        marks = ", ".join("?" * (len(values) + 1))
        question = f"{how} INTO {table} ({columns}, seal) VALUES ({marks})"
        self._db.execute(question, (*values, seal(values)))

    def remove(self, table: str, ids: Iterable[int]) -> None:
        self._db.executemany(f"DELETE FROM {table} WHERE id = ?", [(i,) for i in ids])

    def _remove_strays(self) -> None:
        """Namespaces whose row is damaged go with all that is theirs, as does what is in none."""
        intact = {info.id for info in self.namespaces()}
        for table, column in (("namespace", "id"), ("node", "namespace"), ("payload", "namespace")):
            known = self._db.execute(f"SELECT {column} FROM {table} GROUP BY {column}")
            strays = [(space,) for (space,) in known.fetchall() if space not in intact]
            self._db.executemany(f"DELETE FROM {table} WHERE {column} = ?", strays)

    def clear(self, namespace: int) -> list[str]:
        """Returns the names of the files that are nobody's now."""
        question = "SELECT name FROM payload WHERE namespace = ?"
        names = [name for (name,) in self._db.execute(question, (namespace,))]
        for table in ("payload", "node"):
            self._db.execute(f"DELETE FROM {table} WHERE namespace = ?", (namespace,))
        self._db.execute("DELETE FROM namespace WHERE id = ?", (namespace,))
        return names


def _quick_check(db: sqlite3.Connection) -> str | None:
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    return None if found == "ok" else " ".join(str(found).split())


def _int(number: int | None) -> int | None:
    return None if number is None else int(number)


def _has_all(node: StoredNode, payloads: Container[int]) -> bool:
    rows, window, state = node.rows, node.window, node.state
    return (
        (rows is None or rows in payloads)
        and (window is None or window in payloads)
        and (state is None or state in payloads)
    )
