"""The engine without a thread: messages in, one turn at a time."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from rewarm import accel
from rewarm.cache import PrefixCache
from rewarm.cache.identity import evaluate
from rewarm.cache.memory import auto_size
from rewarm.cache.model import checked_tokens, context_size, vocabulary_size
from rewarm.cache.views.miss import Missed
from rewarm.errors import CannotLoad, ContextExceeded, InvalidOption, NotReady, QueueFull
from rewarm.options import EngineOptions, parse_size
from rewarm.values import Boundary, Match, Tokens

from .decode.base import Decoder
from .decode.batch import Batch
from .decode.check import decodes_in_batches, running_bytes
from .decode.sampling import checked
from .inbox import Inbox
from .loop import EngineStats, Loop
from .messages import (
    Cancel,
    Clear,
    Close,
    Explain,
    FindMatch,
    MarkIdle,
    Message,
    Path,
    Resize,
    Submit,
    Warm,
    refuse,
)
from .request import Request
from .runner import Runner
from .scheduler import Scheduler

log = logging.getLogger("rewarm.engine")

UNBOUNDED = 1 << 31
"""Tokens that no prompt has."""


class Loaded(NamedTuple):
    """What an engine runs."""

    model: Any
    tokenizer: Any
    cache: PrefixCache


class Core:
    """Takes requests from any thread, and answers through their sinks when it is turned.

    Its owner makes it, turns it and closes it, all on one thread:

        while not answered:
            core.turn()
            if not core.has_work:
                core.wait()

    A turn that raises leaves the running requests in an unknown state: call `recover` before the
    next one. The methods that post a message may be called from any thread.
    """

    def __init__(
        self,
        loaded: Loaded,
        options: EngineOptions | None = None,
        *,
        owned: bool = False,
        follows: bool = False,
        bounded: bool = True,
        decoder: type[Decoder] = Batch,
        rehearse: Callable[[Runner], None] = lambda runner: None,
    ) -> None:
        """`owned`: nobody else has the model, or changes it. `follows`: it is turned by `follow`
        alone, and posts no message by itself. `bounded`: what is longer than the model's context is
        refused. `rehearse` is called with a runner before memory is
        measured. Where `max_batch` is 1, no batch is tried out."""
        self.options = options or EngineOptions()
        self.model, self.tokenizer, self.cache = loaded
        self.on_turn: Callable[[Sequence[Message]], None] = lambda messages: None
        """Called before each turn with the messages that it takes. Given to `follow`, one list
        after the other, these make another core of the same model do the same."""
        self._inbox = Inbox()
        self._stopping = False
        with _stream():
            self._loop = self._made(owned, follows, bounded, decoder, rehearse)

    def _made(
        self,
        owned: bool,
        follows: bool,
        bounded: bool,
        decoder: type[Decoder],
        rehearse: Callable[[Runner], None],
    ) -> Loop:
        accel.install()
        model, cache = self.model, self.cache
        evaluate(model)
        self._vocabulary = vocabulary_size(model) or len(self.tokenizer)
        limit = context_size(model) if bounded else UNBOUNDED
        self.context = min(self.options.context or limit, limit)
        """The most tokens that prompt and answer may have together."""
        several = self.options.max_batch > 1
        try:
            batched = several and decodes_in_batches(model, cache.blank, self._vocabulary)
        except Exception as error:
            # Nothing else has run it yet: its config fits its weights, and makes no sense.
            raise CannotLoad(f"it fails when it is run ({error})") from error
        if several and not batched:
            log.warning(
                "%s decodes one sequence at a time: in a batch its answers would differ",
                type(model).__module__,
            )
        runner = Runner(
            model, cache, self._vocabulary, running_bytes(model, cache), batched, decoder
        )
        cache.attach(owned=owned)
        rehearse(runner)
        room = self.options.room or auto_size()
        window = cache.layout.shortest_window
        scheduler = Scheduler(
            self.options.max_batch, room, cache.chunk, window, runner.decoder.most
        )
        # Not a method of this core: the core and its cache are freed once nobody uses them, without
        # waiting for a collector.
        return Loop(runner, scheduler, _unheard if follows else self._inbox.post)

    # From any thread.

    def submit(self, request: Request) -> None:
        """Queue a request, or say at once why it cannot be answered."""
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

    def warm(
        self, tokens: Tokens, boundaries: Sequence[Boundary] = (), salt: str | None = None
    ) -> None:
        """Prefill all of these tokens once there is nothing else to do."""
        if not self._stopping and 0 < len(tokens) < self.context:
            self._inbox.post(Warm(self._path(tokens, boundaries, salt)))

    def mark_idle(
        self, tokens: Tokens, boundaries: Sequence[Boundary] = (), salt: str | None = None
    ) -> None:
        """Say that the chat which this prompt belongs to waits for a person."""
        if not self._stopping:
            self._inbox.post(MarkIdle(self._path(tokens, boundaries, salt)))

    def match(
        self, tokens: Tokens, boundaries: Sequence[Boundary] = (), salt: str | None = None
    ) -> Future[Match]:
        """How much of a prompt could be reused, as of the next turn."""
        message = FindMatch(self._path(tokens, boundaries, salt))
        self.post(message)
        return message.answer

    def explain(
        self,
        tokens: Tokens,
        boundaries: Sequence[Boundary] = (),
        salt: str | None = None,
        *,
        other_salts: Sequence[str] = (),
    ) -> Future[Missed]:
        """Why not more of a prompt could be reused, as of the next turn."""
        message = Explain(self._path(tokens, boundaries, salt), tuple(other_salts))
        self.post(message)
        return message.answer

    def clear(self, *, give_back: bool = True) -> Future[None]:
        """Forget everything that is stored. Running requests go on, and store nothing more."""
        message = Clear(give_back)
        self.post(message)
        return message.answer

    def resize(self, memory: int | str) -> Future[None]:
        """Give the cache another budget; what no longer fits goes at once, except what is used."""
        message = Resize(parse_size(memory) if memory != "auto" else auto_size())
        self.post(message)
        return message.answer

    def post(self, message: Message) -> None:
        """Leave a message for the next turn."""
        with self._inbox.changed:
            if self._stopping:
                raise NotReady("the server is stopping")
            self._inbox.post(message)

    def stop(self, grace: float = 0.0) -> None:
        """Take no more messages. What runs ends by itself, or by force after `grace` seconds."""
        with self._inbox.changed:
            self._stopping = True
            self._inbox.post(Close(), at=time.monotonic() + grace)

    def stats(self) -> EngineStats:
        """The figures of the last turn, with what was posted since."""
        with self._inbox.changed:
            return self._loop.stats.expecting(self._inbox.waiting())

    # On the owner's thread.

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def has_requests(self) -> bool:
        """Somebody waits for an answer."""
        return self._loop.has_requests or bool(self._inbox.waiting())

    @property
    def has_work(self) -> bool:
        """Another turn would do something."""
        return self._loop.has_work or bool(self._inbox.waiting())

    def wait(self, timeout: float | None = None) -> bool:
        """Block until there is work or the core is to stop; False where it took too long."""
        loop = self._loop
        return self._inbox.wait(
            lambda: loop.has_work or (self._stopping and not loop.has_requests), timeout
        )

    def turn(self) -> None:
        """Take what was posted, and bring everything that runs one step on."""
        with self._inbox.changed:
            messages = self._inbox.take()
            self._loop.stats = self._loop.stats.expecting(messages)
        self.follow(messages)

    def follow(self, messages: Sequence[Message]) -> None:
        """Take one turn over these messages, and no others."""
        self.on_turn(messages)
        left = deque(messages)
        try:
            with _stream():
                while left:
                    self._loop.take(left.popleft())
                self._loop.turn()
        except BaseException:
            self._inbox.put_back(left)
            raise

    def recover(self, error: BaseException, *, keep: bool = True) -> None:
        """Go on after a turn that raised, with nothing running. Whoever can start over does so;
        the others fail with the error, and all of them where not `keep`."""
        self._loop.restart(error, keep=keep)

    def close(self) -> None:
        """End everything. The core must not be used any more; its cache may be."""
        with self._inbox.changed:
            self._stopping = True
            left = self._inbox.take()
        with _stream():
            self._loop.take(Close())
            evaluate(self.model)  # what is left lazy could never be evaluated elsewhere
        for message in left:
            refuse(message, NotReady("the server was stopped"))

    def _path(self, tokens: Tokens, boundaries: Sequence[Boundary], salt: str | None) -> Path:
        return Path(checked_tokens(tokens, self._vocabulary), tuple(boundaries), salt)


def _stream() -> mx.StreamContext:
    return mx.stream(cast(mx.Stream, generation_stream))


def _unheard(message: Message, at: float | None = None) -> None:
    """Post nothing: a core that follows another one is told of the end of its fetches, too."""
