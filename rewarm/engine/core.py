"""The engine without its thread: it takes messages, and does one turn at a time."""

from __future__ import annotations

import gc
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from rewarm import accel
from rewarm.cache import PrefixCache
from rewarm.cache.core import budget_of
from rewarm.cache.identity import evaluate
from rewarm.cache.memory import auto_size
from rewarm.cache.model import checked_tokens, context_size, vocabulary_size
from rewarm.cache.views.miss import Missed
from rewarm.errors import CannotLoad, ContextExceeded, InvalidOption, NotReady, QueueFull
from rewarm.options import EngineOptions
from rewarm.values import Match

from .decode.batch import Batch
from .decode.sampling import checked
from .loop import EngineStats, Loop
from .messages import Cancel, Close, Inbox, Message, PromptPath, Question, Submit, Warm
from .request import Request, Running
from .runner import Runner
from .scheduler import Scheduler
from .trial import decodes_in_batches, rehearse, running_bytes

log = logging.getLogger("rewarm.engine")

T = TypeVar("T")

STREAM = cast(mx.Stream, generation_stream)
"""The stream that all work of an engine runs on."""


UNBOUNDED = 1 << 31
"""More tokens than any prompt has."""


class EngineParts(NamedTuple):
    """The parts that an engine is made of."""

    model: Any
    tokenizer: Any
    cache: PrefixCache


class Core:
    """The core takes requests from any thread, and answers through their sinks when it is turned.

    Its owner makes it, turns it and closes it, all on one thread:

        while not answered:
            core.turn()
            core.wait()

    A turn that raises leaves the running requests in an unknown state: call `recover` before the
    next one. The methods that post a message may be called from any thread.
    """

    def __init__(
        self,
        parts: EngineParts,
        options: EngineOptions | None = None,
        *,
        owned: bool = False,
        bounded: bool = True,
        decoder: type[Batch] = Batch,
    ) -> None:
        """`owned`: no other code holds or changes the model. Only then are first prompts rehearsed.
        `bounded`: prompts longer than the model's context are refused. Where `max_batch` is 1, no
        batch is tried out."""
        self.options = options or EngineOptions()
        self.model, self.tokenizer, self.cache = parts
        self.stopping = False
        self._inbox = Inbox()
        with mx.stream(STREAM):
            accel.install()
            evaluate(self.model)
            self._vocabulary = vocabulary_size(self.model) or len(self.tokenizer)
            limit = context_size(self.model) if bounded else UNBOUNDED
            self.context = min(self.options.context or limit, limit)
            """The most tokens that prompt and answer may have together."""
            runner = self._made_runner(decoder)
            self.cache.attach(owned=owned)
            if owned:
                if self.options.rehearse:
                    rehearse(runner, self._vocabulary)
                gc.collect()  # a cache has circular references, and memory is measured next
            most, memory = self.options.max_batch, self.options.running_memory or auto_size()
            window = self.cache.layout.shortest_window
            scheduler = Scheduler[Running](most, memory, self.cache.chunk, window, decoder.most)
            # The loop gets no method of this core: that would be a circle of references, which
            # keeps the core and its cache until the garbage collector runs.
            self._loop = Loop(runner, scheduler, self._inbox)

    def _made_runner(self, decoder: type[Batch]) -> Runner:
        model, cache, several = self.model, self.cache, self.options.max_batch > 1
        try:
            batched = several and decodes_in_batches(model, cache.blank, self._vocabulary)
        except Exception as error:
            # The model runs here for the first time. Its config fits the weights, but is wrong.
            raise CannotLoad(f"it fails when it is run ({error})") from error
        if several and not batched:
            log.warning(
                "%s decodes one sequence at a time: in a batch its answers would differ",
                type(model).__module__,
            )
        return Runner(model, cache, running_bytes(model, cache), batched, decoder)

    # From any thread.

    def submit(self, request: Request) -> None:
        """Queue a request. Raises an error at once if it cannot be answered."""
        tokens = checked_tokens(request.tokens, self._vocabulary)
        checked(request.sampling, self._vocabulary)
        for name, value in (("max_tokens", request.max_tokens), ("n", request.n)):
            if not isinstance(value, int) or value < 1:
                raise InvalidOption(f"{name}={value!r}: give a whole number, 1 or more")
        if request.n > self.options.max_batch:
            raise InvalidOption(f"n={request.n}: at most {self.options.max_batch} answers at once")
        left = self.context - len(tokens)
        if left < 1:
            raise ContextExceeded(
                f"the prompt has {len(tokens):,} tokens, and the context is {self.context:,}: "
                "shorten the prompt"
            )
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        request = replace(
            request, tokens=tokens, sampling=sampling, max_tokens=min(request.max_tokens, left)
        )
        with self._inbox.changed:
            waiting = self.stats().waiting
            if waiting + request.n > self.options.max_queue:
                raise QueueFull(
                    f"{waiting} requests are waiting, and the queue takes "
                    f"{self.options.max_queue}: try again soon",
                    retry_after=max(1, math.ceil(waiting / 16)),
                )
            pace = self._loop.runner.pace if self.cache.tiers else None
            self.post(Submit(request, time.perf_counter(), pace))

    def cancel(self, request: Request) -> None:
        """Stop a request within one chunk or one step. What was computed is kept."""
        self._inbox.post(Cancel(request.id))

    def warm(self, path: PromptPath) -> None:
        """Prefill all of these tokens once there is nothing else to do."""
        if not self.stopping and 0 < len(path.tokens) < self.context:
            self._inbox.post(Warm(self._checked(path)))

    def mark_idle(self, path: PromptPath) -> None:
        """Say that the chat which this prompt belongs to waits for a person."""
        if not self.stopping:
            given = vars(self._checked(path))
            self._inbox.post(Question(partial(PrefixCache.mark_idle, **given)))

    def match(self, path: PromptPath) -> Future[Match]:
        """Find how much of a prompt could be reused at the next turn. Waits for lower tiers."""
        given = vars(self._checked(path))
        below = self.cache.ask_tiers(**given)
        return self._ask(partial(PrefixCache.match, **given, tiers=below))

    def explain(self, path: PromptPath, other_salts: Sequence[str] = ()) -> Future[Missed]:
        """Find why no more of a prompt could be reused at the next turn. Waits for lower tiers."""
        given = vars(self._checked(path))
        below, others = self.cache.ask_tiers(**given), tuple(other_salts)
        return self._ask(partial(PrefixCache.miss, **given, tiers=below, other_salts=others))

    def clear(self, *, give_back: bool = True) -> Future[Sequence[Future[None]]]:
        """Forget everything that is stored. Running requests go on, and store nothing more. The
        result has a future for each deletion that lower tiers still have to do."""
        return self._ask(partial(PrefixCache.clear, give_back=give_back, wait=False))

    def resize(self, memory: int | str) -> Future[None]:
        """Give the cache another budget. It evicts the excess at once, except what is in use."""
        return self._ask(partial(PrefixCache.resize, memory=budget_of(memory)))

    def post(self, message: Message) -> None:
        """Leave a message for the next turn."""
        with self._inbox.changed:
            if self.stopping:
                raise NotReady("the server is stopping")
            self._inbox.post(message)

    def stop(self, grace: float = 0.0) -> None:
        """Take no more messages. What runs ends by itself, or by force after `grace` seconds."""
        with self._inbox.changed:
            self.stopping = True
            self._inbox.post(Close(), grace)

    def stats(self) -> EngineStats:
        """Count what runs and what waits."""
        return self._loop.stats(self._inbox.waiting())

    # On the owner's thread.

    @property
    def has_requests(self) -> bool:
        """Say whether a request is not answered yet."""
        return bool(self._loop.requests or self._inbox.waiting())

    def wait(self, timeout: float | None = None) -> bool:
        """Block until there is work or the core is to stop; False where it took too long."""
        if self._loop.has_work:
            return True
        return self._inbox.wait(lambda: self.stopping and not self._loop.requests, timeout)

    def turn(self) -> None:
        """Take what was posted, and bring everything that runs one step on."""
        self.follow(self._inbox.waiting(), self._inbox.taken)

    def follow(self, messages: Sequence[Message], taken: Callable[[], object]) -> None:
        """Take one turn over these messages, and no others. `taken` is called after each.

        Another core of the same model does the same turns when it follows with the same messages,
        list by list."""
        with mx.stream(STREAM):
            for message in messages:
                try:
                    self._loop.take(message)
                finally:
                    taken()
            self._loop.turn()

    def recover(self, error: BaseException, *, keep: bool = True) -> None:
        """Go on after a turn that raised, with nothing running. Requests that can start over do so,
        and the others fail with the error. Without `keep`, all fail."""
        self._loop.restart(error, keep=keep)

    def close(self) -> None:
        """End everything. The core must not be used any more; its cache may be."""
        with self._inbox.changed:
            self.stopping = True
            left = self._inbox.waiting()
        with mx.stream(STREAM):
            self._loop.take(Close())
            evaluate(self.model)  # another thread could never evaluate what is still lazy
        for message in left:
            if isinstance(message, Question) and not message.answer.done():
                message.answer.set_exception(NotReady("the server was stopped"))

    def _ask(self, call: Callable[[PrefixCache], T]) -> Future[T]:
        question = Question(call)
        self.post(question)
        return question.answer

    def _checked(self, path: PromptPath) -> PromptPath:
        tokens = checked_tokens(path.tokens, self._vocabulary)
        return PromptPath(tokens, tuple(path.boundaries), path.salt)
