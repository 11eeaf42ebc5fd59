"""The library way in: a model, its tokenizer and a cache, with no server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from rewarm import accel
from rewarm.cache import PrefixCache
from rewarm.engine.decode.batch import Step
from rewarm.engine.decode.sampling import checked
from rewarm.engine.request import Request, Silent
from rewarm.engine.runner import Runner
from rewarm.engine.runner import Sequence as Runnable
from rewarm.errors import InvalidOption, InvalidPrompt
from rewarm.prompt.parse.answer import Answer
from rewarm.prompt.render.renderer import ChatRenderer, Prompt
from rewarm.values import Cost, Message, Sampling, Tokens

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Usage:
    """Tokens. `cached + prefilled == prompt`, unless the prefill was cancelled."""

    prompt_tokens: int
    cached_tokens: int
    replayed_tokens: int
    prefilled_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timings:
    match_ms: float
    restore_ms: float
    prefill_ms: float
    ttft_ms: float


@dataclass(frozen=True)
class Reply:
    text: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    tokens: list[int]
    finish_reason: str
    """"stop", "length", "tool_calls" or "cancelled"."""
    usage: Usage
    timings: Timings
    logprobs: list[float] | None = None
    miss: str | None = None
    """Why not more of the prompt was reused; None where all of it was."""


@dataclass(frozen=True)
class Event:
    """A step of a stream: text or reasoning as it comes. The last one carries the reply, and what
    was held back until the answer had ended."""

    text: str = ""
    reasoning: str = ""
    token: int | None = None
    logprob: float | None = None
    reply: Reply | None = None


class Session:
    """Generates with a model, and never computes a known prompt prefix again."""

    def __init__(self, model: Any, tokenizer: Any, cache: PrefixCache | None = None) -> None:
        accel.install()
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache if cache is not None else PrefixCache(model)
        self.cache.check_model(model)
        self.renderer = ChatRenderer(tokenizer)

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
    ) -> Iterator[Event]:
        """Answer messages, or continue a text or tokens, event by event.

        `template` goes to the chat template (`{"enable_thinking": False}`). `on_prefill` is told
        the prompt tokens done and in all after every chunk. To stop early, set `cancel` or close
        the iterator: what was computed stays in the cache.
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
        vocabulary = self.cache.vocabulary
        checked(sampling, vocabulary)
        stops = [stop] if isinstance(stop, str) else list(stop)
        _check_options(max_tokens, stops)
        ready = self._prompt(prompt, tools, template or {})
        # What the user writes opens no thinking: only the generation prompt does.
        opening = ready.tokens[ready.generation :]
        run = _Run(
            Runner(self.model, self.cache, vocabulary),
            Request(ready.tokens, Silent(), max_tokens, sampling, boundaries=ready.boundaries),
            Answer(self.tokenizer, opening, tools=tools, stop=stops),
            frozenset(self.tokenizer.eos_token_ids),
            salt,
            logprobs,
            on_prefill,
            cancel or threading.Event(),
        )
        return run.events()

    def _prompt(
        self, prompt: str | Sequence[Any] | Tokens, tools: Any, template: dict[str, Any]
    ) -> Prompt:
        if isinstance(prompt, str):
            bos = self.tokenizer.bos_token
            special = bos is None or not prompt.startswith(bos)
            tokens = self.tokenizer.encode(prompt, add_special_tokens=special)
            return Prompt(np.asarray(tokens))
        if not isinstance(prompt, (list, tuple, np.ndarray)):
            raise InvalidPrompt(
                f"a prompt is a text, tokens, or messages, not a {type(prompt).__name__}"
            )
        if len(prompt) and isinstance(prompt[0], dict):
            # The grid of `exact` stands on the boundaries of every turn.
            every_turn = self.cache.reuse == "exact"
            chat = cast("list[Message]", list(prompt))
            return self.renderer.render(chat, tools, every_turn=every_turn, **template)
        if len(prompt) and isinstance(prompt[0], str):
            raise InvalidPrompt("a prompt is a text, tokens, or messages with role and content")
        return Prompt(np.asarray(prompt))


@dataclass
class _Run:
    """One request: start, prefill in chunks, decode; what was computed is stored on the way."""

    runner: Runner
    request: Request
    answer: Answer
    end_tokens: frozenset[int]
    salt: str | None
    logprobs: bool
    on_prefill: Callable[[int, int], None] | None
    cancel: threading.Event

    def events(self) -> Iterator[Event]:
        runner, answer, model = self.runner, self.answer, self.runner.model
        sequence = self._sequence()
        finish = "cancelled"
        chosen: list[float] = []
        # Where a step fails or is interrupted, the caches may be ahead of what it gave.
        sound = True
        with wired_limit(model, cast("list[mx.Stream]", [generation_stream])):
            try:
                if self._prefill(sequence):
                    sound = False
                    self._on_stream(runner.open, sequence)
                    while True:
                        step = self._step()
                        sound = True
                        sequence.give(step.token)
                        if self.logprobs:
                            chosen.append(float(step.logprobs[step.token]))
                        piece = answer.add(step.token)
                        ended = piece.stop is not None or step.token in self.end_tokens
                        last = ended or len(sequence.generated) >= self.request.max_tokens
                        if last:
                            finish = "stop" if ended else "length"
                        logprob = chosen[-1] if chosen else None
                        yield Event(piece.text, piece.reasoning, step.token, logprob)
                        if last or self.cancel.is_set():
                            break
                        if runner.window_is_full(sequence):
                            self._on_stream(runner.store_answer, sequence)
                        sound = False
            finally:
                report = sequence.report()
                self._on_stream(runner.leave, [sequence], keep=sound)
        rest = answer.finish()
        if rest.stop is not None:
            finish = "stop"
        if finish == "stop" and answer.calls:
            finish = "tool_calls"
        reply = self._reply(sequence.generated, finish, report, chosen)
        yield Event(rest.text, rest.reasoning, reply=reply)

    def _sequence(self) -> Runnable:
        request = self.request
        return Runnable(
            id=0,
            prompt=request.tokens,
            request=request,
            boundaries=tuple(request.boundaries),
            salt=self.salt,
            max_tokens=request.max_tokens,
        )

    def _prefill(self, sequence: Runnable) -> bool:
        """Everything but the last token; whether that was done."""
        self._on_stream(self.runner.start, sequence)
        self._progress(sequence)
        while not self.cancel.is_set():
            before = sequence.position
            done = self._on_stream(self.runner.prefill, sequence)
            if sequence.position > before:
                self._progress(sequence)
            if done:
                return not self.cancel.is_set()
        return False

    def _step(self) -> Step:
        decoded = self._on_stream(self.runner.decode)
        for _, error in decoded.failed:
            raise error
        return decoded.steps[0]

    def _on_stream(self, do: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Not around a `yield`: the caller's own work would run there too."""
        with mx.stream(cast(mx.Stream, generation_stream)):
            return do(*args, **options)

    def _progress(self, sequence: Runnable) -> None:
        if self.on_prefill is not None:
            self.on_prefill(sequence.position, len(sequence.prompt))

    def _reply(self, tokens: list[int], finish: str, report: Cost, chosen: list[float]) -> Reply:
        match = report.match
        return Reply(
            text=self.answer.text,
            reasoning=self.answer.reasoning,
            tool_calls=self.answer.calls,
            tokens=tokens,
            finish_reason=finish,
            usage=Usage(
                prompt_tokens=match.tokens,
                cached_tokens=match.resume,
                replayed_tokens=match.replay,
                prefilled_tokens=report.prefilled,
                completion_tokens=len(tokens),
            ),
            timings=Timings(
                match_ms=report.match_ms,
                restore_ms=report.restore_ms,
                prefill_ms=report.prefill_ms,
                ttft_ms=report.ttft_ms,
            ),
            logprobs=chosen if self.logprobs else None,
            miss=report.miss.reason if report.miss is not None else None,
        )


def _check_options(max_tokens: int, stop: list[str]) -> None:
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise InvalidOption(f"max_tokens={max_tokens!r}: give a whole number, 1 or more")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidOption(f"stop={text!r}: give texts that are not empty")


def _last(events: Iterator[Event]) -> Reply:
    reply = None
    for event in events:
        reply = event.reply or reply
    if reply is None:
        raise RuntimeError("the stream ended without a reply")
    return reply
