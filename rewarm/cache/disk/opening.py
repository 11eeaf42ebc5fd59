"""Opening the disk tier: whatever stands in the way, the cache goes on without it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..layers import leaves
from ..layout import Layout
from ..retention import Retention
from .index import FORMAT
from .records import StoreError
from .store import Store
from .tier import DiskTier
from .weights import weights_digest

log = logging.getLogger("rewarm")


def open_tier(
    folder: Path,
    limit: int,
    layout: Layout,
    policy: Retention,
    *,
    model: Any,
    adapter: str,
    caches: list[Any],
    grid: str,
) -> DiskTier | None:
    """`caches` are blank ones: their form tells what can be restored into them."""
    try:
        store = Store.open(folder, limit=limit)
    except StoreError as error:
        log.warning("there is no disk tier: %s", error)
        return None
    try:
        source: str | None = getattr(model, "rewarm_source", None)
        about = {
            "weights": weights_digest(model, source, adapter, folder),
            # An adapter that is a folder is told by its files, and may be moved.
            "adapter": "" if Path(adapter).is_dir() else adapter,
            "caches": _form(leaves(caches)),
            "grid": grid,
            "format": FORMAT,
            "name": source or type(model).__module__,
        }
        return DiskTier(store, layout, policy, about)
    except Exception as error:
        store.close()
        log.warning("there is no disk tier: the model cannot be told from others: %s", error)
        return None


def _form(caches: Sequence[Any]) -> str:
    """What kind of caches a model has, and with which settings, as one short text."""
    plain = (bool, int, float, str, type(None))
    described = [
        f"{type(c).__qualname__} "
        + repr(sorted((k, v) for k, v in vars(c).items() if isinstance(v, plain)))
        for c in caches
    ]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
