"""The library way in: a model, its tokenizer and a cache, with no server."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from rewarm.cache import Lease, PrefixCache
from rewarm.cache.placement import Kind
from rewarm.cache.tree import Tokens
from rewarm.errors import InvalidOption, InvalidPrompt
from rewarm.prompt import Answer, ChatRenderer, Message, Prompt

MOST_ROOM = 4096
"""Tokens of an answer that a restored cache has room for; a longer one grows by copying."""


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
        top_p: float = 0.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float | None = None,
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
        stops = [stop] if isinstance(stop, str) else list(stop)
        _check_options(max_tokens, temperature, top_p, top_k, min_p, stops)
        sampler = make_sampler(temp=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
        try:
            processors = make_logits_processors(repetition_penalty=repetition_penalty)
        except ValueError as error:
            raise InvalidOption(f"repetition_penalty={repetition_penalty!r}: {error}") from error
        ready = self._prompt(prompt, tools, template or {})
        # What the user writes opens no thinking: only the generation prompt does.
        opening = ready.tokens[ready.generation :]
        answer = Answer(self.tokenizer, opening, tools=tools, stop=stops)
        run = _Run(self, ready, max_tokens, salt, on_prefill, cancel or threading.Event())
        return run.events(answer, sampler, processors, logprobs)

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
    """One request: acquire, prefill in chunks, decode, commit."""

    session: Session
    prompt: Prompt
    max_tokens: int
    salt: str | None
    on_prefill: Callable[[int, int], None] | None
    cancel: threading.Event

    def events(
        self, answer: Answer, sampler: Any, processors: Any, logprobs: bool
    ) -> Iterator[Event]:
        began = time.perf_counter()
        cache, tokenizer = self.session.cache, self.session.tokenizer
        tokens: list[int] = []
        chosen: list[float] = []
        first_token = None
        finish = "cancelled"
        lease = cache.acquire(
            self.prompt.tokens,
            salt=self.salt,
            boundaries=self.prompt.boundaries,
            room=min(self.max_tokens, MOST_ROOM),
        )
        with lease, wired_limit(self.session.model, cast("list[mx.Stream]", [generation_stream])):
            started = time.perf_counter()
            self._prefill(lease)
            prefilled = time.perf_counter()
            if lease.position == len(self.prompt.tokens) - 1 and not self.cancel.is_set():
                steps = self._decode(lease, sampler, processors)
                # Where a step fails or is interrupted, the caches may be ahead of what it gave.
                in_step = True
                try:
                    for token, distribution in steps:
                        in_step = False
                        if first_token is None:
                            first_token = time.perf_counter()
                        tokens.append(token)
                        if logprobs:
                            chosen.append(float(distribution[token]))
                        piece = answer.add(token)
                        ended = piece.stop is not None or token in tokenizer.eos_token_ids
                        last = ended or len(tokens) >= self.max_tokens
                        if last:
                            finish = "stop" if ended else "length"
                        yield Event(
                            piece.text, piece.reasoning, token, chosen[-1] if chosen else None
                        )
                        if last or self.cancel.is_set():
                            break
                        if self._window_is_full(len(tokens)):
                            self._commit_answer(lease, tokens)
                        in_step = True
                finally:
                    steps.close()
                    if not in_step:
                        self._commit_answer(lease, tokens, checkpoint="answer")
        rest = answer.finish()
        if rest.stop is not None:
            finish = "stop"
        if finish == "stop" and answer.calls:
            finish = "tool_calls"
        match = lease.match
        # The last prompt token is computed by the first decode step.
        computed = match.tokens if tokens else lease.position
        reply = Reply(
            text=answer.text,
            reasoning=answer.reasoning,
            tool_calls=answer.calls,
            tokens=tokens,
            finish_reason=finish,
            usage=Usage(
                prompt_tokens=match.tokens,
                cached_tokens=match.resume,
                replayed_tokens=match.replay,
                prefilled_tokens=computed - match.resume,
                completion_tokens=len(tokens),
            ),
            timings=Timings(
                match_ms=lease.match_ms,
                restore_ms=lease.restore_ms,
                prefill_ms=(prefilled - started) * 1e3,
                ttft_ms=((first_token or prefilled) - began) * 1e3,
            ),
            logprobs=chosen if logprobs else None,
            miss=match.reason,
        )
        yield Event(rest.text, rest.reasoning, reply=reply)

    def _prefill(self, lease: Lease) -> None:
        """Everything but the last token, chunk by chunk; each is stored as soon as it is done."""
        model, cache = self.session.model, self.session.cache
        prompt = mx.array(lease.tokens)
        self._progress(lease)
        for cut in lease.cuts:
            if self.cancel.is_set():
                return self._keep(lease)
            with mx.stream(generation_stream):
                model(prompt[lease.position : cut.stop][None], cache=lease.caches)
                mx.eval([c.state for c in lease.caches])
            cache.commit(lease, cut.stop, checkpoint=cut.checkpoint)
            self._progress(lease)

    def _keep(self, lease: Lease) -> None:
        """The prefill ends here, too early: leave a checkpoint, or recurrent layers lose it all."""
        if lease.position:
            self.session.cache.commit(lease, lease.position, checkpoint="end")

    def _decode(
        self, lease: Lease, sampler: Any, processors: list[Any]
    ) -> Generator[tuple[int, mx.array], None, None]:
        known = mx.array(lease.tokens[:-1])

        def with_prompt(processor: Any) -> Any:
            # mlx-lm shows processors what it prefilled itself: here only the last token.
            return lambda tokens, logits: processor(mx.concatenate([known, tokens]), logits)

        steps: Any = generate_step(
            mx.array(lease.tokens[-1:]),
            self.session.model,
            max_tokens=self.max_tokens,
            sampler=sampler,
            logits_processors=[with_prompt(p) for p in processors],
            prompt_cache=lease.caches,
        )
        return cast("Generator[tuple[int, mx.array], None, None]", steps)

    def _window_is_full(self, decoded: int) -> bool:
        """Whether the next step overwrites a row that was not stored yet."""
        window = self.session.cache.layout.shortest_window
        return bool(window) and decoded % max(window - 1, 1) == 0

    def _commit_answer(
        self, lease: Lease, tokens: list[int], checkpoint: Kind | None = None
    ) -> None:
        """mlx-lm has run the model on every token it gave out: the caches stand after the last."""
        lease.extend(tokens[len(lease.tokens) - len(self.prompt.tokens) :])
        self.session.cache.commit(lease, len(lease.tokens), origin="decode", checkpoint=checkpoint)

    def _progress(self, lease: Lease) -> None:
        if self.on_prefill is None:
            return
        try:
            self.on_prefill(lease.position, len(self.prompt.tokens))
        except BaseException:
            self._keep(lease)
            raise


def _check_options(
    max_tokens: int, temperature: float, top_p: float, top_k: int, min_p: float, stop: list[str]
) -> None:
    for name, whole, least in (("max_tokens", max_tokens, 1), ("top_k", top_k, 0)):
        if not isinstance(whole, int) or whole < least:
            raise InvalidOption(f"{name}={whole!r}: give a whole number, {least} or more")
    for name, value, most in (
        ("temperature", temperature, math.inf),
        ("top_p", top_p, 1.0),
        ("min_p", min_p, 1.0),
    ):
        if not isinstance(value, (int, float)) or not 0 <= value <= most:
            limits = "0 or more" if most == math.inf else f"0 to {most:g}"
            raise InvalidOption(f"{name}={value!r}: give a number, {limits}")
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
