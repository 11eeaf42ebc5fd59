"""What one HTTP request has the engine do, followed to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive

from rewarm.engine.request import Request
from rewarm.generate.collect import Choice, Collector, Done, Event, Failed
from rewarm.prompt.render.renderer import Prompt
from rewarm.values import Cost


@dataclass(eq=False)
class Run:
    """One prompt: its request, and what came of it."""

    request: Request
    prompt: Prompt
    collector: Collector
    report: Cost | None = None
    error: Exception | None = None
    miss: dict[str, Any] | None = None
    """Why not more of the prompt was reused, in words and figures."""

    @property
    def choices(self) -> list[Choice]:
        return self.collector.choices

    @property
    def over(self) -> bool:
        return self.report is not None or self.error is not None


@dataclass(eq=False)
class Work:
    """The runs of one HTTP request. Lives on the event loop."""

    cancel_run: Callable[[Run], None]
    on_over: Callable[[Run], None]
    """Called once for every run, whether or not somebody still waits for it."""
    runs: list[Run] = field(default_factory=list)
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    """None: nothing happened for a while."""
    abandoned: bool = False
    """The client has gone."""

    @property
    def over(self) -> bool:
        return all(run.over for run in self.runs)

    @property
    def choices(self) -> list[Choice]:
        return [choice for run in self.runs for choice in run.choices]

    def deliver(self, event: Event) -> None:
        if isinstance(event, (Done, Failed)):
            run = self.runs[event.run]
            if isinstance(event, Done):
                run.report = event.report
            else:
                run.error = event.error
            self.on_over(run)
        self.events.put_nowait(event)

    def abandon(self) -> None:
        """Nobody waits any more: what still runs is stopped."""
        for run in self.runs:
            if not run.over:
                self.abandoned = True
                self.cancel_run(run)

    async def batches(self, keep_alive: float) -> AsyncIterator[list[Event]]:
        """Events as they come, those that came together in one list; an empty list where there was
        none for at least `keep_alive` seconds."""
        loop = asyncio.get_running_loop()
        heard = False
        timer = loop.call_later(keep_alive, lambda: tick())

        # One timer for the stream: a timeout around every wait would cost more than the event.
        def tick() -> None:
            nonlocal heard, timer
            if not heard and self.events.empty():
                self.events.put_nowait(None)
            heard = False
            timer = loop.call_later(keep_alive, tick)

        try:
            while not (self.over and self.events.empty()):
                batch = [await self.events.get()]
                while not self.events.empty():
                    batch.append(self.events.get_nowait())
                heard = True
                yield [event for event in batch if event is not None]
        finally:
            timer.cancel()

    async def finished(self, receive: Receive) -> bool:
        """Wait for the end of it all; False where the client went away before."""

        async def drain() -> None:
            while not self.over:
                await self.events.get()

        drained = asyncio.ensure_future(drain())
        left = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({drained, left}, return_when=asyncio.FIRST_COMPLETED)
            return self.over
        finally:
            drained.cancel()
            left.cancel()
            self.abandon()


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
