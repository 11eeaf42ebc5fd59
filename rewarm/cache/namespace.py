"""The namespace of a prompt's state: everything that must be equal for two prompts to share it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from .layer_kinds import leaves


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
