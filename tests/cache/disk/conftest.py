"""Fixtures: an empty store, and one with 60 nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.cache.tiers.disk.store import Store

from .stores import (
    ONE,
    TWO,
    add,
    opened,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def kept(folder: Path) -> Iterator[Store]:
    with opened(folder) as found:
        yield found


@pytest.fixture(scope="module")
def forest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with 60 nodes in two namespaces: `closed`, and `live` with its log."""
    place = tmp_path_factory.mktemp("forest")
    with opened(place / "closed") as kept:
        ids: list[int | None] = [None]
        for n in range(60):
            parent = None if n < 10 else ids[n - 1]
            ids.append(add(kept, n, parent, (ONE, TWO)[n % 2])[0])
        shutil.copytree(place / "closed", place / "live")
    assert (place / "live" / "index.sqlite-wal").stat().st_size > 200_000
    return place
