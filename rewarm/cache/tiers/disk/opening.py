"""Opening the disk tier: whatever stands in the way, the cache goes on without it."""

from __future__ import annotations

import logging
from pathlib import Path

from rewarm.values import Namespace

from ...layout import Layout
from ...retention import Retention
from .records import StoreError
from .store import Store
from .tier import DiskTier

log = logging.getLogger("rewarm")


def open_tier(
    folder: Path,
    limit: int,
    layout: Layout,
    policy: Retention,
    *,
    namespace: Namespace,
    name: str,
    grid: str,
) -> DiskTier | None:
    try:
        store = Store.open(folder, limit=limit)
    except StoreError as error:
        log.warning("there is no disk tier: %s", error)
        return None
    return DiskTier(store, layout, policy, namespace, name=name, grid=grid)
