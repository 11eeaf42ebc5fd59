"""The keys that clients send. Each key is a tenant: it sees its own prompts and figures only.

Nothing here imports a model library."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
import tomllib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rewarm.errors import InvalidOption

LABEL = b"rewarm tenant"
"""It sets this use of a key's digest apart from any other."""
FIELDS = frozenset({"name", "key", "sha256", "admin", "salt", "requests_per_minute"})
MINUTE = 60.0


@dataclass(frozen=True)
class Key:
    """A key of the server. The key itself is not kept, only its digest."""

    name: str
    digest: bytes = field(repr=False)
    admin: bool = False
    """It sees and deletes everything."""
    tenant: str | None = field(default=None, repr=False)
    """The salt of its state; None for a lone key, whose state needs none."""
    requests_per_minute: int | None = None

    def salt(self, chosen: str | None) -> str | None:
        """Put a salt that the client chose inside the key's own."""
        if self.tenant is None or chosen is None:
            return self.tenant or chosen
        return f"{self.tenant}/{chosen}"

    def owns(self, salt: str | None) -> bool:
        """Say whether a prompt with this salt is the key's own."""
        if self.tenant is None:
            return True
        return salt is not None and salt.partition("/")[0] == self.tenant


ANYBODY = Key("", b"", admin=True)
"""Every client, where the server asks for no key."""


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def tenant_of(secret: bytes) -> str:
    """Make the salt of a key from its digest, or from the salt that several keys share."""
    return hmac.new(secret, LABEL, hashlib.sha256).hexdigest()


class KeyChanges(NamedTuple):
    """The difference between two readings of the keys."""

    added: Sequence[Key]
    removed: Sequence[Key]
    """Keys that are gone, or whose name, salt or rights have changed."""


class KeyRing:
    """All keys of a server. Safe to use from several threads."""

    def __init__(self, given: Sequence[str] = (), path: Path | None = None) -> None:
        """`given` are keys of the command line, and `path` is a file with more."""
        self._given = given
        self._path = path
        self._lock = threading.Lock()
        self._read_from: tuple[int, ...] = ()
        self._taken: dict[str, deque[float]] = {}
        self.keys: Sequence[Key] = ()
        self.reload()

    def __bool__(self) -> bool:
        return bool(self._given) or self._path is not None

    def find(self, given: str) -> Key | None:
        """Find the key that a client has sent. All are compared, so the time tells nothing."""
        digest, found = digest_of(given), None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def named(self, name: str) -> Key | None:
        return next((key for key in self.keys if key.name == name), None)

    def wait_for(self, key: Key) -> float:
        """Count a request of a key. Returns the seconds until it may send one; 0 for now."""
        if key.requests_per_minute is None:
            return 0.0
        now = time.monotonic()
        with self._lock:
            taken = self._taken.setdefault(key.name, deque())
            while taken and taken[0] <= now - MINUTE:
                taken.popleft()
            if len(taken) >= key.requests_per_minute:
                return taken[0] + MINUTE - now
            taken.append(now)
        return 0.0

    def has_changed(self) -> bool:
        """Say whether the file is another than the one that was read."""
        return self._path is not None and _version(self._path) != self._read_from

    def reload(self) -> KeyChanges:
        """Read the keys again. Where the file is wrong, the keys stay, and this raises
        InvalidOption."""
        before = self.keys
        version = _version(self._path) if self._path is not None else ()
        tables = [{"name": f"key-{i}", "key": key} for i, key in enumerate(self._given, 1)]
        if self._path is not None:
            tables += _tables(self._path)
        self.keys = _keys(tables, self._path)
        self._read_from = version
        return KeyChanges(
            [key for key in self.keys if key not in before],
            [key for key in before if key not in self.keys],
        )


def _version(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _tables(path: Path) -> list[dict[str, Any]]:
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidOption(f"keys={str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(f"keys={str(path)!r} is not TOML: {error}") from error
    tables = given.pop("keys", None)
    if given or not isinstance(tables, list) or not tables:
        raise InvalidOption(
            f"keys={str(path)!r} needs a table [[keys]] for each key, and nothing else"
        )
    return tables


def _keys(tables: Iterable[Mapping[str, Any]], path: Path | None) -> list[Key]:
    tables = list(tables)
    keys: list[Key] = []
    for number, table in enumerate(tables, 1):
        try:
            keys.append(_key(table, lone=len(tables) == 1))
        except ValueError as error:
            raise InvalidOption(f"keys={str(path)!r}, key {number}: {error}") from error
    for what, seen in (("name", [k.name for k in keys]), ("key", [k.digest for k in keys])):
        for i, each in enumerate(seen):
            if each in seen[:i]:
                raise InvalidOption(f"keys={str(path)!r}, key {i + 1}: another has the same {what}")
    return keys


def _key(table: Mapping[str, Any], *, lone: bool) -> Key:
    if not isinstance(table, dict):
        raise ValueError("it is no table: write [[keys]]")
    if unknown := sorted(table.keys() - FIELDS):
        raise ValueError(f"{unknown[0]!r} is unknown: give {', '.join(sorted(FIELDS))}")
    for name, kind in (("name", str), ("key", str), ("sha256", str), ("salt", str)):
        if not isinstance(table.get(name, ""), kind) or table.get(name, "x") == "":
            raise ValueError(f"{name} is a text that is not empty")
    if "name" not in table:
        raise ValueError("it needs a name")
    if ("key" in table) == ("sha256" in table):
        raise ValueError("it needs either key or sha256")
    if "key" in table:
        digest = digest_of(table["key"])
    elif re.fullmatch("[0-9a-fA-F]{64}", table["sha256"]):
        digest = bytes.fromhex(table["sha256"])
    else:
        raise ValueError("sha256 has 64 hexadecimal digits")
    limit = table.get("requests_per_minute")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"requests_per_minute={limit!r}: give a whole number, 1 or more")
    if type(table.get("admin", False)) is not bool:
        raise ValueError("admin is true or false")
    shared = table.get("salt")
    tenant = tenant_of(shared.encode() if shared is not None else digest)
    return Key(
        name=table["name"],
        digest=digest,
        admin=table.get("admin", lone),
        tenant=None if lone and shared is None else tenant,
        requests_per_minute=limit,
    )
