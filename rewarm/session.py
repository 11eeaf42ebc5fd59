"""Use Rewarm as a library: a model, its tokenizer and a cache, with no server and no thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from rewarm import accel
from rewarm.cache import PrefixCache
from rewarm.engine import Core, EngineParts
from rewarm.engine.core import STREAM
from rewarm.engine.decode.sampling import checked
from rewarm.errors import InvalidOption, InvalidPrompt
from rewarm.generate.generation import Delta, Event, Prefilled, PromptOver, Reading
from rewarm.generate.generator import Generator
from rewarm.generate.options import GenerationOptions
from rewarm.options import EngineOptions
from rewarm.prompt.chat import Chat, Text, chat_of
from rewarm.values import Cost, Sampling, Tokens


class Usage(NamedTuple):
    """Counts of tokens. `cached + prefilled == prompt`, unless the prefill was cancelled."""

    prompt_tokens: int
    cached_tokens: int
    replayed_tokens: int
    prefilled_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Reply:
    text: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    tokens: list[int]
    finish_reason: str
    """"stop", "length", "tool_calls" or "cancelled"."""
    usage: Usage
    timings: Cost
    """The cost of the prompt, with `match_ms`, `restore_ms`, `prefill_ms` and `ttft_ms`."""
    logprobs: list[float] | None = None

    @property
    def miss(self) -> str | None:
        """The reason why no more of the prompt was reused; None where all of it was."""
        return self.timings.miss.reason if self.timings.miss is not None else None


@dataclass(frozen=True)
class StreamEvent:
    """A step of a stream, with its new text or reasoning. The last event carries the reply, and the
    text that was held back until the answer ended."""

    text: str = ""
    reasoning: str = ""
    token: int | None = None
    logprob: float | None = None
    reply: Reply | None = None


class Session:
    """A session generates with a model, and never computes a known prompt prefix again.

    Everything runs on the caller's own thread, which turns the engine's loop until there is an
    event.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: PrefixCache | None = None) -> None:
        accel.install()
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache if cache is not None else PrefixCache(model)
        self.cache.check_model(model)
        # A session gives one answer at a time, so no batch has to be tried out.
        parts = EngineParts(model, tokenizer, self.cache)
        self._core = Core(parts, EngineOptions(max_batch=1), bounded=False)
        self._generator = Generator(self._core)
        self._last: Reading | None = None

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, **options: Any
    ) -> Reply:
        """Answer a chat. Takes the options of `stream`."""
        return _last(self.stream(messages, tools, **options))

    def generate(self, prompt: str | Sequence[int] | Tokens, **options: Any) -> Reply:
        """Continue a text or tokens. Takes the options of `stream`."""
        return _last(self.stream(prompt, **options))

    def stream(
        self,
        prompt: str | Sequence[Any] | Tokens,
        tools: list[Any] | None = None,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: bool = False,
        salt: str | None = None,
        template: dict[str, Any] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[StreamEvent]:
        """Answer messages, or continue a text or tokens, event by event.

        `template` goes to the chat template (`{"enable_thinking": False}`). `on_prefill` is called
        with the number of prompt tokens done and of all, at the start and after every chunk. To
        stop early, set `cancel` or close the iterator: what was computed stays in the cache.
        """
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias or {},
            seed=seed,
        )
        checked(sampling, self.cache.vocabulary)
        stops = [stop] if isinstance(stop, str) else list(stop)
        _check_options(max_tokens, stops)
        options = GenerationOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            stop=tuple(stops),
            top_logprobs=0 if logprobs else None,
            salt=salt,
            stream=True,
            every_token=True,
        )
        generation = Reading(_asked(prompt, tools, template or {}), options)
        self._generator.prepare(generation, partial(_put, generation))
        return self._events(generation, on_prefill, cancel)

    def prepare(self) -> None:
        """Compute the beginning of the next turn's prompt on this thread. Where it is interrupted,
        what was stored by then stays."""
        if self._last is None:
            return
        self._generator.answered(self._last, self._last.runs[0])
        with wired_limit(self.model, [STREAM]):
            while self._core.stats().warm_waiting:
                self._generator.turn()

    def _events(
        self,
        generation: Reading,
        on_prefill: Callable[[int, int], None] | None,
        cancel: threading.Event | None,
    ) -> Iterator[StreamEvent]:
        rest = nothing = StreamEvent()
        self._generator.submit(generation)
        events = self._generator.events(generation, cancel)
        # The memory is wired once for all turns: this takes longer than a token.
        with wired_limit(self.model, [STREAM]), closing(events):
            for event in events:
                if isinstance(event, Delta):
                    text, reasoning = event.text, event.reasoning
                    for sampled in event.sampled:
                        yield StreamEvent(text, reasoning, sampled.token, sampled.logprob)
                    rest = nothing if event.sampled else StreamEvent(text, reasoning)
                elif isinstance(event, Prefilled) and on_prefill is not None:
                    on_prefill(event.done, event.total)
        (run,) = generation.runs
        if run.error is not None:
            raise run.error.__cause__ or run.error
        self._last = generation
        yield replace(rest, reply=_reply(generation))


def _asked(prompt: Any, tools: list[Any] | None, template: dict[str, Any]) -> Chat | Text:
    if isinstance(prompt, str):
        return Text([prompt])
    if not isinstance(prompt, (list, tuple, np.ndarray)):
        raise InvalidPrompt(
            f"a prompt is a text, tokens, or messages, not a {type(prompt).__name__}"
        )
    if len(prompt) and isinstance(prompt[0], dict):
        return chat_of(list(prompt), tools, template=template)
    if len(prompt) and isinstance(prompt[0], str):
        raise InvalidPrompt("a prompt is a text, tokens, or messages with role and content")
    return Text([cast("Sequence[int]", prompt)])


def _put(generation: Reading, event: Event) -> None:
    error = generation.runs[0].error
    if isinstance(event, PromptOver) and error is not None:
        # The engine reports a failure while it handles the exception that the model raised. The
        # model ran on the caller's thread, so the caller gets that exception.
        error.__cause__ = sys.exc_info()[1]
    generation.events.put(event)


def _reply(generation: Reading) -> Reply:
    (choice,), (cost,) = generation.choices, generation.costs
    answer = choice.answer
    logprobs = [s.logprob for s in choice.sampled if s.logprob is not None]
    return Reply(
        text=answer.text,
        reasoning=answer.reasoning,
        tool_calls=answer.calls,
        tokens=[s.token for s in choice.sampled],
        finish_reason=choice.finish,
        usage=Usage(
            prompt_tokens=cost.match.tokens,
            cached_tokens=cost.match.resume,
            replayed_tokens=cost.replayed,
            prefilled_tokens=cost.prefilled,
            completion_tokens=choice.tokens,
        ),
        timings=cost,
        logprobs=logprobs if generation.options.top_logprobs is not None else None,
    )


def _check_options(max_tokens: int, stop: list[str]) -> None:
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise InvalidOption(f"max_tokens={max_tokens!r}: give a whole number, 1 or more")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidOption(f"stop={text!r}: give texts that are not empty")


def _last(events: Iterator[StreamEvent]) -> Reply:
    """Read a stream to its end, where the reply is."""
    return next(event.reply for event in events if event.reply is not None)
