"""One HTTP request from its arrival to its line in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .work import Run, Work

requests_log = logging.getLogger("rewarm.requests")

ENDPOINTS = {
    "/": "page",
    "/health": "health",
    "/metrics": "metrics",
    "/openapi.json": "schema",
    "/v1/cache": "cache",
    "/v1/cache/explain": "explain",
    "/v1/live": "live",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count",
    "/v1/models": "models",
}
QUIET = ("cache", "health", "live", "metrics", "page", "schema")
CLIENT_GONE = 499


def endpoint(path: str) -> str:
    """A name for the log and the metrics; unknown paths share one, or they would pile up."""
    if path.startswith("/page/"):
        return "page"
    return "models" if path.startswith("/v1/models/") else ENDPOINTS.get(path, "other")


@dataclass(eq=False)
class Exchange:
    """Counted and logged once, when the response is out and the engine is done with it."""

    id: str
    path: str
    finished: Callable[[Exchange, int], None] = lambda exchange, status: None
    """Told of the exchange and its status once it is over."""
    status: int | None = None
    """None until a response has begun."""
    problem: str = ""
    size: int = 0
    """Bytes of the body."""
    work: Work | None = None
    salt: str | None = None
    """Whose prompts it has. Known once there is work."""
    began: float = field(default_factory=time.monotonic)
    _done: list[Run] = field(default_factory=list)
    _closed: bool = False
    _logged: bool = False

    @property
    def endpoint(self) -> str:
        return endpoint(self.path)

    def ran(self, run: Run) -> None:
        self._done.append(run)
        self._finish()

    def close(self) -> None:
        """The response was sent, or there is nobody to send it to."""
        self._closed = True
        self._finish()

    def _finish(self) -> None:
        running = self.work is not None and not self.work.over
        if not self._closed or running or self._logged:
            return
        self._logged = True
        status = self.status
        if status is None or (self.work is not None and self.work.abandoned):
            status = CLIENT_GONE
        self.finished(self, status)
        quiet = self.endpoint in QUIET and status < 400
        level = logging.DEBUG if quiet else logging.INFO
        if requests_log.isEnabledFor(level):
            requests_log.log(level, "%s %s  %s", status, self.endpoint, self._summary(status))

    def _summary(self, status: int) -> str:
        parts = [prompt_summary(self._done), speed(self._done), self.problem]
        parts += [str(run.error) for run in self._done if run.error is not None]
        if status == CLIENT_GONE:
            parts.append("the client went away")
        # Clients have a say in some of it, and the log goes to a terminal.
        line = " · ".join(part for part in parts if part)
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def prompt_summary(runs: list[Run]) -> str:
    """What the prompts cost: `1,532 tokens: 1,500 cached (user), 8 again, 24 new`."""
    reports = [run.report for run in runs if run.report is not None]
    if not reports:
        return ""
    tokens = sum(r.match.tokens for r in reports)
    cached = sum(r.match.resume for r in reports)
    again = sum(min(r.match.replay, r.prefilled) for r in reports)
    new = sum(r.prefilled for r in reports) - again
    where = next((r.resumed_at for r in reports if r.resumed_at), None)
    resumed = f" ({where})" if where else ""
    return f"{tokens:,} tokens: {cached:,} cached{resumed}, {again:,} again, {new:,} new"


def speed(runs: list[Run]) -> str:
    """How the answer came: `first token 120 ms · 64 tokens at 41/s`."""
    choices = [c for run in runs for c in run.choices if c.tokens]
    firsts = [run.report.ttft_ms for run in runs if run.report is not None]
    if not choices or not firsts:
        return ""
    tokens = sum(c.tokens for c in choices)
    took = max(c.last_at for c in choices) - min(c.first_at for c in choices)
    rate = f" at {(tokens - len(choices)) / took:,.0f}/s" if took > 0 else ""
    return f"first token {min(firsts):,.0f} ms · {tokens:,} tokens{rate}"
