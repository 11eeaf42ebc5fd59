"""The one thread that runs the model, and the way in from all others."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream, wired_limit

from rewarm import accel
from rewarm.cache import PrefixCache
from rewarm.cache.identity import evaluate
from rewarm.cache.memory import auto_size
from rewarm.cache.model import checked_tokens, context_size, vocabulary_size
from rewarm.errors import (
    CannotLoad,
    ContextExceeded,
    InvalidOption,
    NotReady,
    QueueFull,
    RewarmError,
)
from rewarm.options import EngineOptions
from rewarm.values import Boundary, Tokens

from .decode.batch import decodes_in_batches, running_bytes
from .decode.sampling import checked
from .loop import Loop
from .rehearsal import rehearse
from .request import Request
from .runner import Runner, Sequence
from .scheduler import Scheduler

log = logging.getLogger("rewarm.engine")

State = Literal["loading", "ready", "failing", "stopped"]

FAILURES = 3
"""Turns in a row that may fail before waiting requests are turned away too."""

PATIENCE = 2.0
"""Seconds of trying the model out after which a line says what takes so long."""

QUIET = (1.0, 10.0)
"""Seconds without work after which the durable part of the cache, and then all of it, goes to
disk."""

LAST_STEPS = 10.0
"""Seconds that a thread has at most for what is left to do once its work is over."""


class Loaded(NamedTuple):
    """What an engine runs."""

    model: Any
    tokenizer: Any
    cache: PrefixCache


@dataclass(frozen=True)
class EngineStats:
    waiting: int
    prefilling: int
    decoding: int
    warm_waiting: int
    prefilled_tokens: int
    """Prompt tokens computed for requests since the start; warm-ahead apart."""
    warm_tokens: int
    restarts: int


class Engine:
    """Takes requests from any thread, and answers through their sinks.

    `load` runs on the engine's thread, so that everything lazy in a model is evaluated there.
    """

    def __init__(self, load: Callable[[], Loaded], options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self.detail = "the model is being loaded"
        self._load = load
        self._state: State = "loading"
        self._loaded: Loaded | None = None
        self._vocabulary = 0
        self._context = 0
        self._loop: Loop
        self._numbers = itertools.count(1)
        self._inbox: deque[Sequence] = deque()
        self._cancelled: deque[Request] = deque()
        self._stopping = False
        self._deadline: float | None = None
        self._failures = 0
        self._restarts = 0
        self._wake = threading.Condition()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rewarm-engine", daemon=True)

    # From any thread.

    def start(self) -> None:
        """Load and run; more than once is as good as once."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> State:
        """Until the model is loaded, or has failed to."""
        self._settled.wait(timeout)
        return self.state

    @property
    def state(self) -> State:
        if (
            self._state in ("ready", "loading")
            and self._thread.ident
            and not self._thread.is_alive()
        ):
            return "failing"
        return self._state

    @property
    def failed_to_load(self) -> bool:
        return self._settled.is_set() and self._loaded is None

    @property
    def model(self) -> Any:
        return self._ready().model

    @property
    def tokenizer(self) -> Any:
        return self._ready().tokenizer

    @property
    def cache(self) -> PrefixCache:
        return self._ready().cache

    @property
    def context(self) -> int:
        """The most tokens that prompt and answer may have together."""
        self._ready()
        return self._context

    def submit(self, request: Request) -> None:
        """Queue a request, or say at once why it cannot be answered."""
        self._ready()
        tokens = checked_tokens(request.tokens, self._vocabulary)
        checked(request.sampling, self._vocabulary)
        for name, value in (("max_tokens", request.max_tokens), ("n", request.n)):
            if not isinstance(value, int) or value < 1:
                raise InvalidOption(f"{name}={value!r}: give a whole number, 1 or more")
        if request.n > self.options.max_batch:
            raise InvalidOption(f"n={request.n}: at most {self.options.max_batch} answers at once")
        left = self._context - len(tokens)
        if left < 1:
            raise ContextExceeded(
                f"the prompt has {len(tokens):,} tokens, and the context is {self._context:,}: "
                "shorten the prompt"
            )
        answers = [
            Sequence(
                id=next(self._numbers),
                prompt=tokens,
                request=request,
                choice=choice,
                boundaries=tuple(request.boundaries),
                marks=tuple(request.marks),
                salt=request.salt,
                max_tokens=min(request.max_tokens, left),
            )
            for choice in range(request.n)
        ]
        with self._wake:
            if self._stopping:
                raise NotReady("the server is stopping")
            waiting = self.stats().waiting
            if waiting + request.n > self.options.max_queue:
                raise QueueFull(
                    f"{waiting} requests are waiting, and the queue takes "
                    f"{self.options.max_queue}: try again soon",
                    retry_after=max(1, math.ceil(waiting / 16)),
                )
            self._inbox.extend(answers)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Stop a request within one chunk or one step. What was computed is kept."""
        with self._wake:
            self._cancelled.append(request)
            self._wake.notify()

    def warm(
        self, tokens: Tokens, boundaries: Ordered[Boundary] = (), salt: str | None = None
    ) -> None:
        """Prefill all of these tokens once there is nothing else to do."""
        if self._state != "ready" or not len(tokens) or len(tokens) >= self._context:
            return
        # The last token of a prompt is left to its first decode step; here that is nobody's.
        prompt = np.append(checked_tokens(tokens, self._vocabulary), np.int32(0))
        sequence = Sequence(next(self._numbers), prompt, boundaries=tuple(boundaries), salt=salt)
        with self._wake:
            self._inbox.append(sequence)
            self._wake.notify()

    def stats(self) -> EngineStats:
        self._ready()
        runner, jobs = self._loop.runner, list(self._loop.scheduler.jobs.values())
        stages = [j.stage for j in jobs if not j.warm]
        return EngineStats(
            waiting=stages.count("waiting") + sum(not s.warm for s in list(self._inbox)),
            prefilling=stages.count("prefilling") + stages.count("ready"),
            decoding=stages.count("decoding"),
            warm_waiting=sum(j.warm for j in jobs) + sum(s.warm for s in list(self._inbox)),
            prefilled_tokens=runner.prefilled_tokens,
            warm_tokens=runner.warm_tokens,
            restarts=self._restarts,
        )

    def stop(self, grace: float = 0.0) -> None:
        """Take no more requests; those that run end by themselves, or by force after `grace`
        seconds; then the thread ends."""
        with self._wake:
            self._stopping = True
            self._deadline = time.monotonic() + grace
            self._wake.notify()
        if self._thread.ident:
            self._thread.join()
            _await_end(self._thread)
        else:
            self._state, self.detail = "stopped", "the server was stopped"

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise NotReady(f"the server is not ready: {self.detail}")
        return self._loaded

    # On the engine's thread.

    def _run(self) -> None:
        try:
            with mx.stream(cast(mx.Stream, generation_stream)):
                self._prepare()
        except BaseException as error:
            known = isinstance(error, RewarmError)  # says by itself what is wrong
            log.error("the model could not be loaded", exc_info=None if known else error)
            self._state, self.detail = "failing", f"the model could not be loaded: {error}"
            self._settled.set()
            _end_streams()
            return
        with wired_limit(self._ready().model, cast("list[mx.Stream]", [generation_stream])):
            while self._wait_for_work():
                try:
                    with mx.stream(cast(mx.Stream, generation_stream)):
                        self._hand_over()
                        self._loop.turn()
                    if self._failures:
                        self._failures, self._state, self.detail = 0, "ready", ""
                except BaseException as error:
                    self._restart(error)
        self._finish()

    def _prepare(self) -> None:
        loaded = self._load()
        accel.install()
        model, cache = loaded.model, loaded.cache
        evaluate(model)
        self._vocabulary = vocabulary_size(model) or len(loaded.tokenizer)
        limit = context_size(model)
        self._context = min(self.options.context or limit, limit)
        with self._trying_out():
            try:
                batched = decodes_in_batches(model, cache.blank, self._vocabulary)
            except Exception as error:
                # Nothing else has run it yet: its config fits its weights, and makes no sense.
                raise CannotLoad(f"it fails when it is run ({error})") from error
            if not batched:
                log.warning(
                    "%s decodes one sequence at a time: in a batch its answers would differ",
                    type(model).__module__,
                )
            runner = Runner(model, cache, self._vocabulary, running_bytes(model, cache), batched)
            cache.attach(owned=True)
            if self.options.rehearse:
                self._rehearse(runner)
        gc.collect()  # a cache is a circle of references, and memory is measured next
        room = self.options.room or auto_size()
        self._loop = Loop(runner, Scheduler(self.options.max_batch, room))
        self._loaded = loaded
        self._state, self.detail = "ready", ""
        self._settled.set()

    def _rehearse(self, runner: Runner) -> None:
        try:
            rehearse(runner)
        except Exception:
            log.exception("a first prompt could not be tried out; the first ones will be slow")

    @contextmanager
    def _trying_out(self) -> Iterator[None]:
        """All that MLX compiles for a request, it compiles in here."""
        self.detail = "the model is being tried out"
        slow = threading.Timer(
            PATIENCE,
            log.info,
            ["%s; on the first start on a machine this compiles, once", self.detail],
        )
        slow.daemon = True
        slow.start()
        try:
            yield
        finally:
            slow.cancel()

    def _wait_for_work(self) -> bool:
        """Blocks while there is nothing to do; false once it is time to go."""
        waits = deque(QUIET)
        while True:
            quiet = waits.popleft() if waits else None
            with self._wake:
                if self._wake.wait_for(self._wanted, quiet):
                    return self._has_requests() or not self._stopping
            # A crash now would lose what was never written. First what is sure to be asked again:
            # the rest of a chat that goes on would soon be written anew.
            if not self._ready().cache.flush(wait=False, durable=bool(waits)) and not waits:
                waits.append(QUIET[-1])

    def _wanted(self) -> bool:
        return self._has_requests() or self._stopping or self._loop.has_work

    def _has_requests(self) -> bool:
        return bool(self._inbox or self._cancelled or self._loop.has_requests)

    def _hand_over(self) -> None:
        """What other threads left here since the last turn."""
        while self._inbox:
            sequence = self._inbox.popleft()
            try:
                self._loop.take(sequence)
            except Exception as error:
                self._loop.fail(sequence, error)
        while self._cancelled:
            self._loop.cancel(self._cancelled.popleft())
        if self._stopping and self._deadline is not None and time.monotonic() >= self._deadline:
            self._loop.close()

    def _restart(self, error: BaseException) -> None:
        """A turn failed as a whole: go on with a fresh loop, and with whoever can wait."""
        log.critical("the engine failed and starts again", exc_info=error)
        self._failures += 1
        self._restarts += 1
        self._state, self.detail = "failing", f"the engine failed: {type(error).__name__}"
        again = self._loop.restart(error, keep=self._failures < FAILURES)
        with self._wake:
            self._inbox.extendleft(reversed(again))

    def _finish(self) -> None:
        self._loop.close()
        self._ready().cache.flush()
        with mx.stream(cast(mx.Stream, generation_stream)):
            evaluate(self._ready().model)  # what is left lazy could never be evaluated elsewhere
        _end_streams()
        self._state, self.detail = "stopped", "the server was stopped"


def _end_streams() -> None:
    """Wait for what this thread gave to MLX: a process that ends meanwhile aborts, or never ends.

    A load that failed may have left work behind, too."""
    with suppress(RuntimeError):  # what fails there belongs to nobody any more
        mx.synchronize(cast(mx.Stream, generation_stream))
    mx.clear_streams()


def _await_end(thread: threading.Thread) -> None:
    """Wait until the system has ended a thread that was joined.

    Up to Python 3.12, `join` returns before. The thread then frees what MLX keeps for each thread
    (the random key, which every new model uses) and takes Python's lock for it. Where Python is
    ending by then, glibc aborts the process: "terminate called without an active exception"."""
    deadline = time.monotonic() + LAST_STEPS
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0.001)
