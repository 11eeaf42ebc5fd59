"""Prompts of the same salt that the folder holds for other models, or in another form.

They are of no use to this one, and never change while it has the folder: looked at once, and only
for saying why a prompt is not known."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from rewarm.cache.tree import Tokens, agreement, encode

from .store import Store

MOST = 1024
"""Beginnings of paths that are remembered of each namespace."""


class Others:
    """Safe to use from any thread."""

    def __init__(self, store: Store, about: dict[str, Any]) -> None:
        self._store = store
        self._own = _form(about)
        self._keys: dict[str, list[bytes]] | None = None
        """By the digest of the salt."""
        self._lock = threading.Lock()

    def shared(self, prompt: Tokens, salt: str | None) -> int:
        """How many tokens of a prompt another namespace of this salt has, at least: the spans that
        paths begin with are compared."""
        digest = hashlib.sha256(salt.encode()).hexdigest()[:16] if salt else ""
        data = encode(prompt)
        return max((agreement(key, data) for key in self._known().get(digest, ())), default=0)

    def _known(self) -> dict[str, list[bytes]]:
        with self._lock:
            if self._keys is None:
                try:
                    self._keys = self._read()
                except OSError:
                    return {}  # a store that is broken has said so
            return self._keys

    def _read(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        for space in self._store.namespaces():
            if _form(space.about) != self._own:
                keys = self._store.first_keys(space.id, MOST)
                found.setdefault(str(space.about.get("salt", "")), []).extend(keys)
        return found


def _form(about: dict[str, Any]) -> dict[str, Any]:
    """What tells namespaces apart besides the salt."""
    return {name: value for name, value in about.items() if name not in ("salt", "name")}
