"""The engine, and all that the endpoints share. Prompts are made off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request

from rewarm.engine import Engine
from rewarm.generate.generation import PromptOver, PromptRun
from rewarm.generate.generator import Generator
from rewarm.generate.why.advisor import Advisor
from rewarm.generate.why.labels import Labels
from rewarm.options import ServerOptions
from rewarm.values import Miss

from .admin.activity import Activity
from .admin.metrics import Metrics
from .admin.tree_view import TreeView
from .auth import body_of
from .errors import ApiError
from .exchange import Exchange, Work
from .fields import ParsedRequest

log = logging.getLogger("rewarm")

T = TypeVar("T")
THREADS = 4
LARGE = 1 << 20
"""Bodies of more bytes are handled one at a time on a thread of their own: they take seconds, and
others take milliseconds."""


class Backend:
    def __init__(self, engine: Engine, options: ServerOptions, generating: Iterable[str]) -> None:
        self.engine = engine
        self.options = options
        self.metrics = Metrics(engine, options.model_name, generating)
        self.activity = Activity()
        self.generator = Generator(engine, options, self.metrics.between.observe)
        self.advisor = Advisor(self.generator)
        self._pool = ThreadPoolExecutor(THREADS, "rewarm-prompt")
        self._large = ThreadPoolExecutor(1, "rewarm-large-prompt")
        # One thread does both in order: a request that was already remembered would be compared
        # with itself.
        self._explaining = ThreadPoolExecutor(1, "rewarm-explain")

    @cached_property
    def tree(self) -> TreeView:
        return TreeView(self.engine.core.cache, Labels(self.generator.renderer))

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Serve, then stop the threads."""
        yield
        for pool in (self._pool, self._large, self._explaining):
            pool.shutdown(wait=False, cancel_futures=True)

    async def read(
        self, request: Request, parse: Callable[[bytes, ServerOptions], ParsedRequest]
    ) -> ParsedRequest:
        """Parse a request's body, off the event loop: it may be large."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page can have any browser send other types without asking the server first.
        if kind != "application/json":
            wanted = "send JSON, with `Content-Type: application/json`"
            raise ApiError(415, f"the content type is {kind[:80]!r}: {wanted}")
        body = await body_of(request, self.options.max_body)
        request.state.exchange.size = len(body)
        return await self.off_loop(request, parse, body, self.options)

    async def off_loop(self, request: Request, do: Callable[..., T], *args: Any) -> T:
        """Call a function on one of the server's own threads."""
        pool = self._pool_for(request.state.exchange)
        return await asyncio.get_running_loop().run_in_executor(pool, do, *args)

    async def begin(self, request: Request, asked: ParsedRequest) -> Work:
        """Start the answer to a request. Raises the errors of the engine's `submit`."""
        exchange: Exchange = request.state.exchange
        work = Work(asked.prompt, asked.options, exchange=exchange, backend=self)
        await self.off_loop(request, self.generator.prepare, work, work.send)
        exchange.work = work
        self.activity.add(work)
        self.generator.submit(work)
        return work

    async def wait_for_descriptions(self) -> None:
        """Wait until every request answered so far is described and remembered."""
        await asyncio.get_running_loop().run_in_executor(self._explaining, lambda: None)

    def describe(self, work: Work, over: PromptOver, miss: Miss) -> None:
        """Deliver the end of a prompt once its miss is described. Called on the engine's thread."""
        run = work.runs[over.run]
        run.miss = {"reason": miss.reason}

        def explain() -> None:
            try:
                run.miss = self.advisor.described(miss, run.prompt, work.chat, work.options.salt)
            except Exception:
                log.exception("a miss could not be described")
            work.hand_over(over)

        try:
            self._explaining.submit(explain)
        except RuntimeError:  # the server is stopping
            work.hand_over(over)

    def note_run(self, work: Work, run: PromptRun) -> None:
        """Take note of a prompt that is answered, or has failed."""
        exchange = work.exchange
        self.metrics.count_run(run, exchange.endpoint)
        exchange.finish()
        if work.chat is not None and run.error is None:
            with suppress(RuntimeError):  # the server is stopping
                self._explaining.submit(self.advisor.remember, exchange.id, work, run)
                self._pool_for(exchange).submit(self.generator.answered, work, run)

    def note_end(self, exchange: Exchange, status: int) -> None:
        """Take note of an exchange that is over."""
        self.metrics.count_response(exchange.endpoint, status)
        if exchange.work is not None:
            self.activity.finish(exchange.work, status)

    def _pool_for(self, exchange: Exchange) -> ThreadPoolExecutor:
        return self._large if exchange.size > LARGE else self._pool
