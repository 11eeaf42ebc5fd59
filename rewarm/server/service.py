"""From what an API asks for to work for the engine. Prompts are made off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from rewarm.engine.engine import Engine
from rewarm.engine.request import Request
from rewarm.generate.advice import Told
from rewarm.generate.collect import Choice, Collector, Done, Event
from rewarm.generate.labels import Labels
from rewarm.generate.reasons import described
from rewarm.generate.remembered import Asked, Remembered
from rewarm.options import ServerOptions
from rewarm.prompt.messages import normalised
from rewarm.prompt.parse.answer import Answer
from rewarm.prompt.render.renderer import ChatRenderer, Prompt
from rewarm.values import Message, Miss, Sampling

from .admin.activity import Activity
from .admin.metrics import Metrics
from .admin.tree_view import TreeView
from .errors import bad_request
from .exchange import Exchange
from .texts import TokenTexts
from .work import Run, Work

log = logging.getLogger("rewarm")

T = TypeVar("T")
THREADS = 4
ASKED_AGAIN = 2.0
"""The retention hint of a `prompt_cache_key`, and of a mark that shall last an hour."""
LARGE = 1 << 20
"""Bytes of a body that is worked on apart, one at a time: it takes seconds, and others do not."""


@dataclass(frozen=True)
class Chat:
    """A chat in the form that templates know, whatever API it came by."""

    messages: list[Message]
    delivered: Callable[[Choice], Message]
    """An answer as the client will send it back, in the form of `messages`."""
    tools: list[Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    """The answer goes on with the last message."""
    marks: tuple[int, ...] = ()
    """Messages after which a checkpoint is wanted; -1: after system and tools."""
    must_call: bool = False
    """The answer has to call a tool."""


@dataclass(frozen=True)
class Wanted:
    """How to answer."""

    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    one_call: bool = False
    salt: str | None = None
    hint: float = 1.0
    stream: bool = False


class Service:
    """The engine with what the APIs need around it."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.metrics = Metrics(engine, options.model_name)
        self.activity = Activity()
        self._pool = ThreadPoolExecutor(THREADS, "rewarm-prompt")
        self._large = ThreadPoolExecutor(1, "rewarm-large-prompt")
        # One thread: what is said of a request is said before the request itself is remembered.
        self._explaining = ThreadPoolExecutor(1, "rewarm-explain")
        self.remembered = Remembered()

    # Known once the model is loaded: until then the engine raises NotReady.

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @cached_property
    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer)

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    @cached_property
    def tree(self) -> TreeView:
        return TreeView(self.engine.cache, Labels(self.renderer))

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        return frozenset(int(token) for token in self.tokenizer.eos_token_ids)

    def close(self) -> None:
        for pool in (self._pool, self._large, self._explaining):
            pool.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, exchange: Exchange, do: Callable[..., T], *args: Any) -> T:
        pool = self._pool_for(exchange)
        return await asyncio.get_running_loop().run_in_executor(pool, do, *args)

    async def explained(self) -> None:
        """Until all that was answered so far is described and remembered."""
        await asyncio.get_running_loop().run_in_executor(self._explaining, lambda: None)

    def described(
        self, miss: Miss, prompt: Prompt, chat: Chat | None, salt: str | None
    ) -> dict[str, Any]:
        """A miss in words and figures, for the tenant whose prompt it is. Not on the event loop:
        it may have to read a long message."""
        cache = self.engine.cache
        if miss.reason == "cold":
            held = cache.foreign(prompt.tokens, salt)
            if held > miss.shared:
                miss = replace(miss, reason="other_model", held=held)
        messages = normalised(chat.messages) if chat is not None else None
        return described(miss, prompt, self.tokenizer, messages, chat.tools if chat else None)

    def _pool_for(self, exchange: Exchange) -> ThreadPoolExecutor:
        """Large requests are worked on one at a time: the others need not wait for them."""
        return self._large if exchange.size > LARGE else self._pool

    async def answer_chat(self, exchange: Exchange, chat: Chat, wanted: Wanted) -> Work:
        """Have a chat answered. Raises what `Engine.submit` does."""
        prompt, choices = await self.off_loop(exchange, self._chat_prompt, chat, wanted)
        work = self._work(exchange, chat, wanted.salt)
        opening: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        if chat.must_call:
            opening = tuple(self.tokenizer.tool_call_start_tokens)
            after = self._end_of_thinking(prompt)
        self._add(work, chat, prompt, choices, wanted, opening, after)
        return self._submitted(work)

    async def continue_texts(
        self, exchange: Exchange, prompts: Sequence[str | Sequence[int]], wanted: Wanted
    ) -> Work:
        """Have texts, or tokens, continued: several in one request."""
        ready = await self.off_loop(exchange, self._text_prompts, prompts, wanted)
        work = self._work(exchange, None, wanted.salt)
        for prompt, choices in ready:
            self._add(work, None, prompt, choices, wanted)
        return self._submitted(work)

    def render(self, chat: Chat) -> Prompt:
        return self.renderer.render(
            chat.messages,
            chat.tools,
            every_turn=self._every_turn,
            continue_final=chat.continue_final,
            marks=chat.marks,
            **{**self.options.template_options, **chat.template},
        )

    @property
    def _every_turn(self) -> bool:
        """The grid of `exact` stands on the boundaries of every turn."""
        return self.engine.cache.reuse == "exact"

    def _chat_prompt(self, chat: Chat, wanted: Wanted) -> tuple[Prompt, list[Choice]]:
        if chat.must_call and not self.tokenizer.has_tool_calling:
            raise bad_request(
                "tool_choice: this model's tool calls cannot be recognised, so none can be "
                'required; use "auto" or "none"',
                "tool_choice",
            )
        prompt = self.render(chat)
        answers = [
            Answer(
                self.tokenizer,
                # What the user writes opens no thinking: only the generation prompt does.
                prompt.tokens[prompt.generation :],
                tools=chat.tools,
                stop=wanted.stop,
                continued=chat.continue_final,
            )
            for _ in range(wanted.n)
        ]
        return prompt, [Choice(answer) for answer in answers]

    def _text_prompts(
        self, prompts: Sequence[str | Sequence[int]], wanted: Wanted
    ) -> list[tuple[Prompt, list[Choice]]]:
        ready = []
        for given in prompts:
            prompt = Prompt(np.asarray(self.tokens_of(given), dtype=np.int32))
            answers = [
                Answer(self.tokenizer, prompt.tokens, stop=wanted.stop, raw=True)
                for _ in range(wanted.n)
            ]
            ready.append((prompt, [Choice(answer) for answer in answers]))
        return ready

    def tokens_of(self, given: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(given, str):
            return given
        bos = self.tokenizer.bos_token
        special = bos is None or not given.startswith(bos)
        tokens: Sequence[int] = self.tokenizer.encode(given, add_special_tokens=special)
        return tokens

    def _end_of_thinking(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens that end the thinking, where the prompt leaves it open."""
        if not self.tokenizer.has_thinking:
            return ()
        tokens = prompt.tokens[prompt.generation :].tolist()
        if self.tokenizer.rfind_think_start(tokens) > self.tokenizer.rfind_think_end(tokens):
            return tuple(self.tokenizer.think_end_tokens)
        return ()

    def ended(self, exchange: Exchange, status: int) -> None:
        """An exchange is over, whatever came of it."""
        self.metrics.responded(exchange.endpoint, status)
        self.activity.ended(exchange, status)

    def _work(self, exchange: Exchange, chat: Chat | None, salt: str | None) -> Work:
        def over(run: Run) -> None:
            self.metrics.ran(run, exchange.endpoint)
            exchange.ran(run)
            if chat is not None:
                self._remember(exchange, run, chat)
                self._say_who_waits(exchange, run)
                self._warm_ahead(exchange, run, chat)

        work = Work(lambda run: self.engine.cancel(run.request), over)
        exchange.work, exchange.salt = work, salt
        self.activity.began(exchange)
        return work

    def _deliver(self, work: Work, chat: Chat | None, event: Event) -> None:
        """A run is over once it is known why it missed what it missed."""
        if not isinstance(event, Done) or event.report.miss is None:
            return work.deliver(event)
        run, miss = work.runs[event.run], event.report.miss
        loop = asyncio.get_running_loop()

        def told(reading: Future[dict[str, Any]]) -> None:
            failed = reading.cancelled() or reading.exception() is not None
            if failed and not reading.cancelled():
                log.error("a miss could not be described", exc_info=reading.exception())
            run.miss = {"reason": miss.reason} if failed else reading.result()
            work.deliver(event)

        try:
            reading = self._explaining.submit(
                self.described, miss, run.prompt, chat, run.request.salt
            )
        except RuntimeError:  # the server is stopping
            run.miss = {"reason": miss.reason}
            return work.deliver(event)

        def back(done: Future[dict[str, Any]]) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(told, done)

        reading.add_done_callback(back)

    def _remember(self, exchange: Exchange, run: Run, chat: Chat) -> None:
        if run.report is None or run.error is not None:
            return

        def remember() -> None:
            messages = list(chat.messages)
            if len(run.choices) == 1 and run.choices[0].finish in ("stop", "tool_calls"):
                messages.append(chat.delivered(run.choices[0]))
            told = Told(normalised(messages), chat.tools or ())
            prompt = run.prompt
            self.remembered.add(
                Asked(exchange.id, run.request.salt, told, prompt.tokens, prompt.generation)
            )

        with suppress(RuntimeError):  # the server is stopping
            self._explaining.submit(remember)

    def _add(
        self,
        work: Work,
        chat: Chat | None,
        prompt: Prompt,
        choices: list[Choice],
        wanted: Wanted,
        opening: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
    ) -> None:
        collector = Collector(
            choices,
            lambda event: self._deliver(work, chat, event),
            asyncio.get_running_loop(),
            run=len(work.runs),
            stream=wanted.stream,
            logprobs=wanted.top_logprobs is not None,
            one_call=wanted.one_call,
            end_tokens=self.end_tokens,
            between=self.metrics.between.observe,
        )
        # What the prompt leaves of the context; a prompt that leaves nothing is the engine's to
        # refuse.
        left = max(1, self.engine.context - len(prompt.tokens))
        request = Request(
            tokens=prompt.tokens,
            sink=collector,
            max_tokens=min(wanted.max_tokens or self.options.max_answer, left),
            sampling=wanted.sampling,
            n=wanted.n,
            boundaries=prompt.boundaries,
            marks=prompt.marks,
            top_logprobs=wanted.top_logprobs,
            end_tokens=self.end_tokens,
            opening=opening,
            opens_after=after,
            salt=wanted.salt,
            hint=wanted.hint,
        )
        work.runs.append(Run(request, prompt, collector))

    def _submitted(self, work: Work) -> Work:
        """All of it, or nothing."""
        wanted = sum(run.request.n for run in work.runs)
        most = self.engine.options.max_queue
        if wanted > most:
            raise bad_request(f"{wanted} answers at once: the queue takes {most}; ask for fewer")
        for i, run in enumerate(work.runs):
            try:
                self.engine.submit(run.request)
            except Exception:
                for earlier in work.runs[:i]:
                    self.engine.cancel(earlier.request)
                del work.runs[i:]
                raise
        return work

    def _say_who_waits(self, exchange: Exchange, run: Run) -> None:
        """A tool's result comes in seconds, a person's next message in minutes."""
        if all(choice.finish == "stop" for choice in run.choices):
            waits, asked = self.engine.cache.mark_idle, run.request
            with suppress(RuntimeError):  # the server is stopping
                pool = self._pool_for(exchange)
                pool.submit(waits, asked.tokens, asked.salt, asked.boundaries)

    def _warm_ahead(self, exchange: Exchange, run: Run, chat: Chat) -> None:
        """Have the next turn's prompt computed while the client reads."""
        choices = run.choices
        done = len(choices) == 1 and choices[0].finish in ("stop", "tool_calls")
        if self.options.warm_ahead and run.error is None and done:
            try:
                self._pool_for(exchange).submit(self._warm, run, chat)
            except RuntimeError:
                log.debug("no warm-ahead: the server is stopping")

    def _warm(self, run: Run, chat: Chat) -> None:
        try:
            answer = chat.delivered(run.choices[0])
            before = list(chat.messages)
            if chat.continue_final:
                begun = before.pop()
                answer["content"] = f"{begun.get('content') or ''}{answer['content']}"
            prompt = self.renderer.ahead(
                [*before, answer],
                chat.tools,
                every_turn=self._every_turn,
                **{**self.options.template_options, **chat.template},
            )
            if prompt is not None:
                self.engine.warm(prompt.tokens, prompt.boundaries, run.request.salt)
        except Exception:
            log.debug("no warm-ahead for this answer", exc_info=True)
