"""The index: which nodes there are and which file holds what, in SQLite.

SQLite tells a torn page from a whole one only by luck, so every row carries a seal over all its
columns. A row whose seal is broken is not there.
"""

from __future__ import annotations

import gc
import json
import marshal
from collections.abc import Container, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import xxhash

from .database import Database
from .files import Written
from .records import NamespaceInfo, NamespaceRows, PayloadRow, StoredNode, StoredPayload

LARGEST_ID = 1 << 53
"""Larger numbers in an index are damage: they must not push new ones out of range."""

SANE = f"nbytes BETWEEN 0 AND {LARGEST_ID}"
SPACE = "id, digest, about, used"
PAYLOAD = "namespace, id, name, nbytes, checksum, start, stop"
NODE = 'namespace, id, parent, start, key, origin, kind, hits, used, hint, "rows", "window", state'


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


class Index(Database):
    """The rows of a store. A row whose seal is broken is not there."""

    def _survey(self) -> None:
        """Learn what a start needs to know: an index that cannot tell is of no use."""
        with self.transaction():
            self._remove_strays()
        self.last_id = self._last_id()
        self.spaces = self.namespaces()
        self.held = self.payload_bytes()

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


def _int(number: int | None) -> int | None:
    return None if number is None else int(number)


def _has_all(node: StoredNode, payloads: Container[int]) -> bool:
    rows, window, state = node.rows, node.window, node.state
    return (
        (rows is None or rows in payloads)
        and (window is None or window in payloads)
        and (state is None or state in payloads)
    )
