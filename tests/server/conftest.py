"""A server for each file of tests, and a client that finds its cache empty."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from .servers import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server that does nothing but what it is asked to."""
    with running(warm_ahead=False) as started:
        yield started


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    """A client of the server, whose cache is empty."""
    with server.client() as client:
        client.delete("/v1/cache")
        server.engine.requests.clear()
        yield client
