"""Opening the disk tier: whatever stands in the way, the cache goes on without it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from ..layout import Layout
from ..retention import Retention
from .store import FORMAT, Store, StoreError
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
    grid: str,
) -> DiskTier | None:
    try:
        store = Store.open(folder, limit=limit)
    except StoreError as error:
        log.warning("there is no disk tier: %s", error)
        return None
    source: str | None = getattr(model, "rewarm_source", None)
    began = time.monotonic()
    about = {
        "weights": weights_digest(model, source, adapter, folder),
        "adapter": "in weights",
        "grid": grid,
        "format": FORMAT,
        "name": source or type(model).__module__,
    }
    if time.monotonic() - began > 2:
        log.info(
            "read the weights once, in %.0f s, to tell this model from others",
            time.monotonic() - began,
        )
    return DiskTier(store, layout, policy, about)
