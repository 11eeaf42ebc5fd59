"""The database of a store's index: how it is made, opened, guarded and closed."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from operator import methodcaller
from pathlib import Path

from .errors import Damaged, StoreBroken, StoreError
from .folder import INDEX, SUSPECT, Quarantine, size_of, sync_folder

log = logging.getLogger("rewarm")

FORMAT = 3
"""The version of files and index. A store of another version is set aside."""
APPLICATION = 0x5265776D
PAGE = 8192
"""Keys are a few kilobytes long."""
FEWEST_LOG_PAGES, MOST_LOG_PAGES = 8, 256
"""The bounds of the number of pages at which the log is moved into the index."""
LOG_SHARE = 64
"""The log takes at most about a store's limit divided by this."""

NOT_DAMAGE = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
}
"""SQLite's result codes that blame the machine, not the database."""

SCHEMA = (
    "CREATE TABLE namespace (id INTEGER PRIMARY KEY, digest TEXT NOT NULL, about TEXT NOT NULL,"
    " used REAL NOT NULL)",
    "CREATE TABLE file (id INTEGER PRIMARY KEY, namespace INTEGER NOT NULL,"
    " nbytes INTEGER NOT NULL, start INTEGER, stop INTEGER)",
    # The key comes last: it may be long, and most questions are about what is before it.
    "CREATE TABLE node (id INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, parent INTEGER,"
    " origin TEXT NOT NULL, kind TEXT, hits INTEGER NOT NULL, used REAL NOT NULL,"
    " hint REAL NOT NULL, rows_file INTEGER, window_file INTEGER, state_file INTEGER,"
    " key BLOB NOT NULL)",
    "CREATE INDEX file_namespace ON file (namespace)",
    "CREATE INDEX node_namespace ON node (namespace)",
)


def parts(path: Path) -> list[Path]:
    """List the files of a database. A log must not be used with another database."""
    return [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))]


class Database:
    """One SQLite file. One thread uses it at a time, and none once it turned out to be damaged."""

    def __init__(self, folder: Path, quarantine: Quarantine, limit: int) -> None:
        """`limit` is the number of bytes that the whole store may take.

        A database that is damaged is set aside. Raises `OSError` or `sqlite3.Error` for one that
        can perhaps be used another time."""
        self.folder = folder
        self.path = folder / INDEX
        self.log_pages = min(max(limit // LOG_SHARE // PAGE, FEWEST_LOG_PAGES), MOST_LOG_PAGES)
        self.may_grow = 2 * self.log_pages * PAGE
        """The bytes that it may take beyond `nbytes` at any time: a full log is moved into the
        database, and its file stays as large."""
        self.broken = False
        self.is_new = False
        """True where there was no database that could be used."""
        self._closed = False
        self._lock = threading.RLock()
        self._files = [os.fspath(part) for part in parts(self.path)[:2]]
        self._db = self._open(quarantine)

    def _open(self, quarantine: Quarantine) -> sqlite3.Connection:
        marker = self.folder / SUSPECT
        if self.path.exists():
            try:
                if marker.exists():
                    raise Damaged("it was found damaged while in use")
                return self._connect()
            except Damaged as damage:
                done = quarantine.take(*parts(self.path))
                log.warning(
                    "the index %s cannot be used (%s): %s; it begins anew", self.path, damage, done
                )
        self.is_new = True
        for leftover in parts(self.path)[1:]:
            leftover.unlink(missing_ok=True)
        self._create()
        marker.unlink(missing_ok=True)
        return self._connect()

    def _create(self) -> None:
        """Make a database that is complete under its name, or not there at all."""
        temporary = self.path.with_name(self.path.name + ".new")
        for part in parts(temporary):
            part.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(fd, 0o600)
        os.close(fd)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            for statement in (
                *(f"PRAGMA page_size = {PAGE}", "PRAGMA auto_vacuum = INCREMENTAL", "BEGIN"),
                *SCHEMA,
                f"PRAGMA application_id = {APPLICATION}",
                f"PRAGMA user_version = {FORMAT}",
                "COMMIT",
            ):
                db.execute(statement)
        os.rename(temporary, self.path)
        sync_folder(self.folder)

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=10)
        try:
            self._prepare(db)
        except BaseException as error:
            db.close()
            if isinstance(error, sqlite3.Error) and code_of(error) not in NOT_DAMAGE:
                raise Damaged(str(error)) from error
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        # A text that is no longer UTF-8 is a wrong value; it must not break the query.
        db.text_factory = methodcaller("decode", "utf-8", "replace")
        # The folder's lock keeps others out, so the log needs no shared memory.
        # This must be set before the first read.
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
        (problem,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            raise Damaged(" ".join(str(problem).split()))

    @contextmanager
    def using(self) -> Iterator[sqlite3.Connection]:
        """Give the connection to this thread alone. An error of SQLite becomes a `StoreError`."""
        with self._lock:
            self.check_usable()
            try:
                yield self._db
            except sqlite3.DatabaseError as error:
                raise self._failed(error) from error

    def check_usable(self) -> None:
        """Raise a `StoreError` once the database is closed or damaged. It takes no lock."""
        if self.broken:
            raise StoreBroken(f"the index of {self.folder} failed before: restart to go on")
        if self._closed:
            raise StoreError(f"the store {self.folder} is closed")

    def _failed(self, error: sqlite3.DatabaseError) -> StoreError:
        code = code_of(error)
        if code == sqlite3.SQLITE_FULL:
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

    def close(self) -> None:
        with self._lock:
            with suppress(StoreError):
                self.checkpoint()
            self._closed = True
            with suppress(sqlite3.Error):
                self._db.close()

    def checkpoint(self) -> None:
        """Give free pages back, and move the log into the database."""
        with self.using() as db:
            (free,) = db.execute("PRAGMA freelist_count").fetchone()
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            if free > max(self.log_pages // 2, pages // 4):
                db.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @property
    def nbytes(self) -> int:
        return sum(size_of(part) for part in self._files)


def code_of(error: sqlite3.Error) -> int:
    """Return SQLite's result code, or 1 where the error is not SQLite's own."""
    code: int = getattr(error, "sqlite_errorcode", 1)
    return code if code == sqlite3.SQLITE_IOERR_SHORT_READ else code & 0xFF
