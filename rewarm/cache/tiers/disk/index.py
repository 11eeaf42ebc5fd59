"""The index: the nodes on disk and the files that hold their payloads, in SQLite.

No row needs to be trusted. A payload is sealed, so a wrong row leads to a payload that does not
fit, and costs a miss. Ids are random, so a damaged id leads to nothing.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from rewarm.values import Kind, Origin

from ...tree import WIDTH
from .database import Database

LARGEST = 1 << 53
"""Sizes, counts and times beyond this are damage."""
ORIGINS, KINDS = {*get_args(Origin)}, {None, *get_args(Kind)}


class FileRow(NamedTuple):
    id: int
    namespace: int
    nbytes: int
    start: int | None
    """The first token that it holds something for. A checkpoint's file has none."""
    stop: int | None

    @property
    def span(self) -> tuple[int, int] | None:
        return (self.start, self.stop) if self.start is not None and self.stop is not None else None


class NodeRow(NamedTuple):
    id: int
    namespace: int
    parent: int | None
    """None for a child of the root."""
    origin: Origin
    kind: Kind | None
    """The kind of its checkpoint, where it has one."""
    hits: int
    used: float
    hint: float
    rows_file: int | None
    window_file: int | None
    state_file: int | None
    """None as well where rows hold everything."""
    key: bytes

    @property
    def files(self) -> tuple[int, ...]:
        found = (self.rows_file, self.window_file, self.state_file)
        return tuple(id for id in found if id is not None)


@dataclass(frozen=True)
class NamespaceInfo:
    """A namespace and the size of what is stored for it."""

    id: int
    digest: str
    about: dict[str, Any]
    """The namespace for people. The salt is a digest."""
    used: float = 0.0
    """`time.time()` of the last change."""
    nodes: int = 0
    files: int = 0
    bytes: int = 0


@dataclass
class Stored:
    """The nodes of a namespace that can be used, and what cannot be."""

    nodes: list[NodeRow]
    """Parents come before children."""
    files: dict[int, FileRow]
    """The files of these nodes."""
    lost: list[int]
    """Nodes that are damaged or lack a file, and those below them."""
    unused: list[int]
    """Files that no node can use."""


@dataclass
class Changes:
    """The changes of one transaction."""

    namespaces: list[NamespaceInfo] = field(default_factory=list)
    """Namespaces that are new or that something has changed in."""
    files: list[FileRow] = field(default_factory=list)
    nodes: list[NodeRow] = field(default_factory=list)
    """Nodes that are new or have changed."""
    gone_nodes: list[int] = field(default_factory=list)
    gone_files: dict[int, int] = field(default_factory=dict)
    """The files to remove, with the bytes that were counted as free for each."""
    cleared: dict[int, int] = field(default_factory=dict)
    """The namespaces to remove whole, with the bytes that were counted as free for each."""

    def __bool__(self) -> bool:
        return bool(self.files or self.nodes or self.gone_nodes or self.gone_files or self.cleared)


def new_id() -> int:
    return secrets.randbits(63)


class Index(Database):
    """The rows of a store."""

    def _prepare(self, db: sqlite3.Connection) -> None:
        super()._prepare(db)
        # The rows of a namespace whose own row is damaged would never be asked for.
        for table in ("file", "node"):
            db.execute(f"DELETE FROM {table} WHERE namespace NOT IN (SELECT id FROM namespace)")
        self.at_start = _namespaces(db)
        """The namespaces at the time when it was opened."""

    def namespaces(self) -> list[NamespaceInfo]:
        with self.using() as db:
            return _namespaces(db)

    def file_sizes(self) -> dict[int, int]:
        with self.using() as db:
            return dict(db.execute("SELECT id, nbytes FROM file"))

    def load(self, namespace: int, missing: Container[int] = ()) -> Stored:
        """Read a namespace as if these files were `missing`."""
        with self.using() as db:
            found = db.execute("SELECT * FROM file WHERE namespace = ?", (namespace,))
            files = {file.id: file for file in map(FileRow._make, found)}
            found = db.execute("SELECT * FROM node WHERE namespace = ?", (namespace,))
            nodes = {node.id: node for node in map(NodeRow._make, found)}
        whole = {id: f for id, f in files.items() if id not in missing and _is_sound_file(f)}
        children: dict[int | None, list[NodeRow]] = {}
        for node in filter(_is_sound, nodes.values()):
            children.setdefault(node.parent, []).append(node)
        kept: list[NodeRow] = []
        level = children.get(None, [])
        while level:
            level = [node for node in level if all(id in whole for id in node.files)]
            kept += level
            level = [child for node in level for child in children.get(node.id, ())]
        lost = nodes.keys() - {node.id for node in kept}
        used = {id: whole[id] for node in kept for id in node.files}
        return Stored(kept, used, [*lost], [*files.keys() - used])

    def first_keys(self, namespace: int, most: int) -> list[bytes]:
        """Return the spans that the paths of a namespace begin with, the last used ones first."""
        question = (
            "SELECT key FROM node WHERE namespace = ? AND parent IS NULL"
            " AND typeof(key) = 'blob' ORDER BY used DESC LIMIT ?"
        )
        with self.using() as db:
            return [key for (key,) in db.execute(question, (namespace, most))]

    def commit(self, changes: Changes) -> list[int]:
        """Make all changes durable, or none. Returns the files of the namespaces that went."""
        with self.using() as db, db:  # the connection ends the transaction
            db.execute("BEGIN IMMEDIATE")
            cleared: list[int] = []
            for namespace in changes.cleared:
                question = "DELETE FROM file WHERE namespace = ? RETURNING id"
                cleared += [id for (id,) in db.execute(question, (namespace,))]
                db.execute("DELETE FROM node WHERE namespace = ?", (namespace,))
                db.execute("DELETE FROM namespace WHERE id = ?", (namespace,))
            now = time.time()
            rows = [(i.id, i.digest, json.dumps(i.about), now) for i in changes.namespaces]
            _put(db, "namespace", rows)
            _put(db, "file", changes.files)
            _put(db, "node", changes.nodes)
            for table, ids in (("node", changes.gone_nodes), ("file", changes.gone_files)):
                db.executemany(f"DELETE FROM {table} WHERE id = ?", [(id,) for id in ids])
        return cleared


def _namespaces(db: sqlite3.Connection) -> list[NamespaceInfo]:
    question = (
        "SELECT own.*, (SELECT COUNT(*) FROM node WHERE namespace = own.id),"
        " COUNT(file.id), IFNULL(SUM(file.nbytes), 0) FROM namespace AS own LEFT JOIN file"
        f" ON file.namespace = own.id AND nbytes BETWEEN 0 AND {LARGEST} GROUP BY own.id"
    )
    found = []
    for id, digest, text, used, *counts in db.execute(question):
        try:
            about = dict(json.loads(text))
        except (ValueError, TypeError):
            about = {}
        last = used if isinstance(used, float) and 0 <= used < LARGEST else 0.0
        found.append(NamespaceInfo(id, str(digest), about, last, *counts))
    return found


def _put(db: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    if rows:
        marks = ", ".join("?" * len(rows[0]))
        db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)


def _is_sound(node: NodeRow) -> bool:
    """True where all values of a row are possible ones: then even a wrong row does no harm."""
    return (
        isinstance(node.key, bytes)
        and 0 < len(node.key) == len(node.key) // WIDTH * WIDTH
        and node.origin in ORIGINS
        and node.kind in KINDS
        and (node.kind is not None or node.state_file is None)
        and isinstance(node.hits, int)
        and 0 <= node.hits < LARGEST
        and all(isinstance(n, float) and 0 <= n < LARGEST for n in (node.used, node.hint))
        and node.hint > 0
    )


def _is_sound_file(file: FileRow) -> bool:
    start, stop = file.start, file.stop
    spans = start is None and stop is None
    if isinstance(start, int) and isinstance(stop, int):
        spans = 0 <= start < stop < LARGEST
    return spans and isinstance(file.nbytes, int) and 0 <= file.nbytes < LARGEST
