"""Fixtures: a server for each file of tests, and a client that finds its cache empty."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from .servers import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Start a server without warm-ahead."""
    with running(warm_ahead=False) as started:
        yield started


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    """Return a client of the server, with an empty cache."""
    with server.client() as client:
        client.delete("/v1/cache")
        server.engine.requests.clear()
        yield client
