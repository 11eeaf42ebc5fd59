"""Prompts of the same salt that the folder holds for other models, or in another form.

They are of no use to this one, and never change while it has the folder: looked at once, and only
for saying why a prompt is not known."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from rewarm.values import Tokens

from ...tree import agreement, encode
from .records import NamespaceInfo
from .store import Store

MOST = 1024
"""Beginnings of paths that are remembered of each namespace."""


class ForeignNamespaces:
    """Safe to use from any thread."""

    def __init__(self, store: Store, is_ours: Callable[[NamespaceInfo], bool]) -> None:
        self._store = store
        self._is_ours = is_ours
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
            if not self._is_ours(space):
                keys = self._store.first_keys(space.id, MOST)
                found.setdefault(str(space.about.get("salt", "")), []).extend(keys)
        return found
