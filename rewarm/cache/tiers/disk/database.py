"""The database that an index lies in: how it is made, opened and closed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Self

from .files import Damaged, size_of, sync_folder

FORMAT = 2
"""The version of files and index. A store of another one is set aside."""
APPLICATION = 0x5265776D
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


def code_of(error: sqlite3.Error) -> int:
    """Return SQLite's result code, or 1 where the error is not SQLite's own."""
    code: int = getattr(error, "sqlite_errorcode", 1)
    return code if code == SHORT_READ else code & 0xFF


class Database:
    """One connection. The caller holds the store's lock; what SQLite raises is for the store."""

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
    def open(cls, path: Path, limit: int) -> Self:
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
        """Learn what a start needs to know: what cannot tell is of no use."""

    def check(self) -> str | None:
        """Say what is wrong with the database as such, if anything is."""
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


def _quick_check(db: sqlite3.Connection) -> str | None:
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    return None if found == "ok" else " ".join(str(found).split())
