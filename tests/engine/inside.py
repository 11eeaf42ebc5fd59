"""Look into an engine: the requests that run in it.

Tests of later rooms use this for what no method of an engine shows."""

from __future__ import annotations

from rewarm.engine import Engine, Request


def running_requests(server: Engine) -> list[Request]:
    sequences = list(server.core._loop.scheduler.jobs.values())
    return [s.request for s in sequences if not s.warm]


def is_idle(server: Engine) -> bool:
    """Check that nothing runs, and that nothing waits for an answer."""
    loop = server.core._loop
    return not loop.scheduler.jobs and not loop.requests
