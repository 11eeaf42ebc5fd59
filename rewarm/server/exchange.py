"""One HTTP request from its arrival to its line in the log; the generation it waits for."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rewarm.errors import RewarmError
from rewarm.generate.generation import Choice, Event, Generation, PromptOver
from rewarm.values import Cost

from .errors import CLIENT_GONE, ApiError, as_api_error

if TYPE_CHECKING:
    from .backend import Backend

log = logging.getLogger("rewarm")
requests_log = logging.getLogger("rewarm.requests")

QUIET = ("cache", "health", "live", "metrics", "page", "schema")
"""Endpoints that are asked all the time: their requests are logged for debugging only."""
SANE_ID = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# These are valid in JSON, but some readers of text take them for line ends.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


@dataclass(eq=False)
class Exchange:
    """A request and its response. It is counted and logged once, when the response is out and the
    engine is done with it."""

    id: str
    endpoint: str
    """A name for the log and the metrics. Unknown paths share one name, or names would pile up."""
    send_on: Send
    on_end: Callable[[Exchange, int], None]
    """Called with the exchange and its status once it is over."""
    status: int | None = None
    """None until a response has begun."""
    problem: str = ""
    size: int = 0
    """Bytes of the body."""
    work: Work | None = None
    began: float = field(default_factory=time.monotonic)
    _closed: bool = False

    async def send(self, message: Message) -> None:
        """Send a part of the response, the first one with the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            # OpenAI's client reads the first, Anthropic's the second.
            headers["x-request-id"] = headers["request-id"] = self.id
        await self.send_on(message)

    def close(self) -> None:
        """Note that the response was sent, or cannot be sent: what still runs has no reader."""
        self._closed = True
        # After a refusal, the generator has already cancelled the prompts that were accepted.
        if self.work is not None and not self.problem:
            self.work.abandon()
        self.finish()

    def finish(self) -> None:
        """Count and log the exchange, if it is over."""
        work = self.work
        if not self._closed or (work is not None and not work.over):
            return
        status = self.status
        if status is None or (work is not None and work.abandoned):
            status = CLIENT_GONE
        self.on_end(self, status)
        quiet = self.endpoint in QUIET and status < 400
        level = logging.DEBUG if quiet else logging.INFO
        if requests_log.isEnabledFor(level):
            requests_log.log(level, "%s %s  %s", status, self.endpoint, self._summary(status))
        self.work = None  # it refers to this exchange

    def _summary(self, status: int) -> str:
        parts = [self.problem]
        if self.work is not None:
            costs, choices = self.work.costs, [c for c in self.work.choices if c.tokens]
            errors = [str(run.error) for run in self.work.runs if run.error is not None]
            parts = [prompt_summary(costs), speed(costs, choices), self.problem, *errors]
        if status == CLIENT_GONE:
            parts.append("the client went away")
        # Some of the text comes from clients, and the log may go to a terminal.
        line = " · ".join(part for part in parts if part)
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def prompt_summary(costs: Sequence[Cost]) -> str:
    """Write the cost of the prompts: `1,532 tokens: 1,500 cached (user), 8 again, 24 new`."""
    if not costs:
        return ""
    figures = token_figures(costs)
    tokens, cached = figures["prompt_tokens"], figures["cached_tokens"]
    again = figures["replayed_tokens"]
    kind = next((cost.resumed_at for cost in costs if cost.resumed_at), None)
    resumed = f" ({kind})" if kind else ""
    new = figures["prefilled_tokens"] - again
    return f"{tokens:,} tokens: {cached:,} cached{resumed}, {again:,} again, {new:,} new"


def token_figures(costs: Sequence[Cost]) -> dict[str, int]:
    """Sum up the tokens of several prompts, by the work that they took."""
    return {
        "prompt_tokens": sum(cost.match.tokens for cost in costs),
        "cached_tokens": sum(cost.match.resume for cost in costs),
        "replayed_tokens": sum(cost.replayed for cost in costs),
        "prefilled_tokens": sum(cost.prefilled for cost in costs),
    }


def speed(costs: Sequence[Cost], choices: Sequence[Choice]) -> str:
    """Write the pace of the answer: `first token 120 ms · 64 tokens at 41/s`."""
    if not choices or not costs:
        return ""
    tokens = sum(c.tokens for c in choices)
    took = max(c.last_at for c in choices) - min(c.first_at for c in choices)
    rate = f" at {(tokens - len(choices)) / took:,.0f}/s" if took > 0 else ""
    return f"first token {min(c.ttft_ms for c in costs):,.0f} ms · {tokens:,} tokens{rate}"


@dataclass
class Exchanges:
    """The outermost middleware. It gives each request its exchange, in `request.state`, and answers
    every error."""

    app: ASGIApp
    endpoint: Callable[[str], str]
    """Gives the name of a path."""
    response: Callable[[ApiError, str, str], Response]
    """Gives the response for an error, a path and a request's id."""
    on_end: Callable[[Exchange, int], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"]
        given = Headers(scope=scope).get("x-request-id", "")
        own = given if SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex[:24]}"
        exchange = Exchange(own, self.endpoint(path), send, self.on_end)
        scope.setdefault("state", {})["exchange"] = exchange
        try:
            await self.app(scope, receive, exchange.send)
        except Exception as error:
            problem = as_api_error(error)
            if problem.status >= 500 and not isinstance(error, (RewarmError, ApiError)):
                log.exception("request %s failed", exchange.id)
            if exchange.status is not None:
                raise
            exchange.problem = problem.message
            response = self.response(problem, path, exchange.id)
            await response(scope, receive, exchange.send)
        finally:
            exchange.close()


@dataclass(eq=False, kw_only=True)
class Work(Generation):
    """The generation of one HTTP request. It belongs to the event loop."""

    exchange: Exchange
    backend: Backend
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: list[Event] = field(default_factory=list)
    """Events that are not read yet."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Wakes the reader."""
    abandoned: bool = False
    """The client has gone."""
    _heard: bool = True
    _timer: asyncio.TimerHandle = field(init=False)

    def send(self, event: Event) -> None:
        """Take an event. Called on the engine's thread."""
        if isinstance(event, PromptOver):
            cost = self.runs[event.run].cost
            if cost is not None and cost.miss is not None:
                return self.backend.describe(self, event, cost.miss)
        self.hand_over(event)

    def hand_over(self, event: Event) -> None:
        """Bring an event to the event loop, from another thread."""
        try:
            self.loop.call_soon_threadsafe(self.deliver, event)
        except RuntimeError:
            log.debug("an answer came after its event loop was closed")

    def deliver(self, event: Event) -> None:
        """Give an event to the reader, if it is still there."""
        run = self.take(event)
        if run is not None:
            self.backend.note_run(self, run)
        self.events.append(event)
        self.news.set()

    def abandon(self) -> None:
        """Stop the work that still runs, since the client has gone or reads no further."""
        if not self.over:
            self.abandoned = True
            self.backend.generator.cancel(self)

    async def batches(self, keep_alive: float) -> AsyncIterator[list[Event]]:
        """Give events as they come, those that came together in one list. An empty list means that
        none came for at least `keep_alive` seconds."""
        # One timer for the stream: a timeout around every wait would cost more than the event.
        self._tick(keep_alive)
        try:
            while self.events or not self.over:
                await self.news.wait()
                self.news.clear()
                batch, self.events = self.events, []
                self._heard = True
                yield batch
        finally:
            self._timer.cancel()

    def _tick(self, keep_alive: float) -> None:
        if not self._heard:
            self.news.set()
        self._heard = False
        self._timer = self.loop.call_later(keep_alive, self._tick, keep_alive)

    async def wait_for_end(self, receive: Receive) -> bool:
        """Wait until all of it is over; False where the client went away before."""
        left = asyncio.ensure_future(_disconnect(receive))
        left.add_done_callback(lambda _: self.news.set())
        try:
            while not (self.over or left.done()):
                await self.news.wait()
                self.news.clear()
            return self.over
        finally:
            left.cancel()

    def raise_error(self) -> None:
        """Raise the error that prevented the answer, if there is one."""
        for run in self.runs:
            if run.error is not None:
                raise as_api_error(run.error)
        if any(choice.finish == "cancelled" for choice in self.choices):
            raise ApiError(503, "the server is stopping: try again later", code="not_ready")


async def _disconnect(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return sendable(encoded(content))


def sendable(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a model can write half a surrogate pair


def encoded(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def data(body: Any, event: str | None = None) -> str:
    """Write one server-sent event."""
    head = f"event: {event}\n" if event else ""
    text = encoded(body)
    if not text.isascii():
        text = text.translate(LINE_ENDS)
    return f"{head}data: {text}\n\n"
