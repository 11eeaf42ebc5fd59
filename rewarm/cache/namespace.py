"""The namespace of a prompt's state: everything that must be equal for two prompts to share it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .layers import leaves


@dataclass(frozen=True)
class Namespace:
    base: str
    """What computes: an identity, or a name within this process where none was taken."""
    adapter: str = ""
    """A name that the user gave; the arrays of an adapter are part of `base`."""
    kv: str = "plain"
    """The form of the K/V: "plain", or its bits and group size."""
    layout: str = ""
    """A digest of the kinds of caches that the model has."""
    rank: str = ""
    """The share of a model that is spread over several processes."""
    salt: str = ""

    @property
    def weights(self) -> str:
        """The digest of the weights alone, where an identity was taken."""
        return self.base.partition("-")[0]

    def salted(self, salt: str | None) -> Namespace:
        return replace(self, salt=salt or "")


def form_of(caches: Sequence[Any]) -> str:
    """A digest of the kinds of caches that a model has, and their settings."""
    plain = (bool, int, float, str, type(None))
    described = [
        f"{type(c).__qualname__} "
        + repr(
            sorted((k, v) for k, v in getattr(c, "__dict__", {}).items() if isinstance(v, plain))
        )
        for c in leaves(list(caches))
    ]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
