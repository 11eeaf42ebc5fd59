"""The one thread that runs the model: admit, one decode step, one chunk of prefill, idle work."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream, wired_limit

from rewarm.cache import PrefixCache
from rewarm.cache.memory import auto_size
from rewarm.cache.model import checked_tokens, context_size, evaluate, vocabulary_size
from rewarm.cache.placement import Boundary
from rewarm.cache.tree import Tokens, encode
from rewarm.errors import ContextExceeded, EngineFault, InvalidOption, NotReady, QueueFull

from .batch import decodes_in_batches, running_bytes
from .request import Finish, Report, Request, Sampled
from .runner import MOST_ROOM, BatchBroken, Runner, Sequence, alternatives
from .sampling import checked
from .scheduler import Job, Scheduler

log = logging.getLogger("rewarm.engine")

State = Literal["loading", "ready", "failing", "stopped"]

MOST_WARM = 64
"""Warm-ahead that waits; beyond it the oldest is forgotten."""

FAILURES = 3
"""Turns in a row that may fail before waiting requests are turned away too."""


class Loaded(NamedTuple):
    """What an engine runs."""

    model: Any
    tokenizer: Any
    cache: PrefixCache


@dataclass(frozen=True)
class EngineOptions:
    max_batch: int = 32
    max_queue: int = 256
    context: int | None = None
    """Lowers the model's own limit."""
    room: int | None = None
    """Bytes that running requests may take together; a share of what is free where not given."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "context", "room"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidOption(f"{name}={value!r}: give 1 or more")


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
        self._runner: Runner | None = None
        self._scheduler = Scheduler(self.options.max_batch, 0)
        self._vocabulary = 0
        self._context = 0
        self._row_bytes, self._fixed_bytes = 0, 0
        self._sequences: dict[int, Sequence] = {}
        self._open: dict[Request, _Open] = {}
        self._numbers = itertools.count(1)
        self._inbox: deque[Sequence] = deque()
        self._cancelled: deque[Request] = deque()
        self._stopping = False
        self._failures = 0
        self._restarts = 0
        self._wake = threading.Condition()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rewarm-engine", daemon=True)

    # From any thread.

    def start(self) -> None:
        self._thread.start()

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
            waiting = len(self._inbox) + sum(
                j.stage == "waiting" and not j.warm for j in list(self._scheduler.jobs.values())
            )
            if waiting + request.n > self.options.max_queue:
                raise QueueFull(
                    f"{waiting} requests are waiting, and the queue takes "
                    f"{self.options.max_queue}: try again soon",
                    retry_after=max(1, math.ceil(waiting / 16)),
                )
            self._open[request] = _Open(remaining=request.n)
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
        jobs = list(self._scheduler.jobs.values())
        stages = [j.stage for j in jobs if not j.warm]
        return EngineStats(
            waiting=stages.count("waiting") + len(self._inbox),
            prefilling=stages.count("prefilling") + stages.count("ready"),
            decoding=stages.count("decoding"),
            warm_waiting=sum(j.warm for j in jobs),
            prefilled_tokens=self._runner.prefilled_tokens if self._runner else 0,
            warm_tokens=self._runner.warm_tokens if self._runner else 0,
            restarts=self._restarts,
        )

    def stop(self, grace: float = 0.0) -> None:
        """Take no more requests; end those that run, after at most `grace` seconds; then stop."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if not self._thread.ident:
            self._state = "stopped"
            return
        self._thread.join(grace)
        for sequence in list(self._sequences.values()):
            if sequence.request is not None:
                self.cancel(sequence.request)
        self._thread.join()

    def _ready(self) -> Loaded:
        if self._loaded is None or self._state != "ready":
            raise NotReady(f"the server is not ready: {self.detail}")
        return self._loaded

    # On the engine's thread.

    def _run(self) -> None:
        try:
            with mx.stream(cast(mx.Stream, generation_stream)):
                self._prepare()
        except BaseException as error:
            log.exception("the model could not be loaded")
            self._state, self.detail = "failing", f"the model could not be loaded: {error}"
            self._settled.set()
            return
        with wired_limit(self._ready().model, cast("list[mx.Stream]", [generation_stream])):
            while self._wait_for_work():
                try:
                    with mx.stream(cast(mx.Stream, generation_stream)):
                        self._turn()
                    if self._failures:
                        self._failures, self._state, self.detail = 0, "ready", ""
                except BaseException as error:
                    self._recover(error)
        self._end_all(NotReady("the server is stopping"))
        self._ready().cache.flush()
        # A stream's thread that is still at work when the process ends would abort it.
        mx.synchronize(cast(mx.Stream, generation_stream))
        mx.clear_streams()
        self._state, self.detail = "stopped", "the server was stopped"

    def _prepare(self) -> None:
        loaded = self._load()
        model, cache = loaded.model, loaded.cache
        evaluate(model)
        self._vocabulary = vocabulary_size(model) or len(loaded.tokenizer)
        limit = context_size(model)
        self._context = min(self.options.context or limit, limit)
        batched = decodes_in_batches(model, cache.blank, self._vocabulary)
        if not batched:
            log.warning(
                "%s decodes one sequence at a time: in a batch its answers would differ",
                type(model).__module__,
            )
        self._row_bytes, self._fixed_bytes = running_bytes(model, cache)
        self._scheduler.room = self.options.room or auto_size()
        self._runner = Runner(model, cache, self._vocabulary, batched=batched)
        self._loaded = loaded
        self._state, self.detail = "ready", ""
        self._settled.set()

    def _wait_for_work(self) -> bool:
        """Blocks while there is nothing to do; false once it is time to go."""
        with self._wake:
            while True:
                if self._inbox or self._cancelled or self._has_requests():
                    return True
                if self._stopping:
                    return False
                if self._scheduler.jobs:
                    return True
                self._wake.wait()

    def _turn(self) -> None:
        self._take_in()
        plan = self._scheduler.plan()
        self._admit(plan.admit)
        if plan.decode:
            self._decode()
        if plan.pause is not None:
            self._pause(plan.pause)
        if plan.prefill is not None:
            self._prefill(self._sequences[plan.prefill])

    def _take_in(self) -> None:
        """New requests, and those that nobody waits for any more."""
        while self._inbox:
            sequence = self._inbox.popleft()
            if sequence.warm:
                self._forget_old_warm_ahead()
            self._sequences[sequence.id] = sequence
            tokens = sequence.prompt
            cache = self._ready().cache
            known = cache.match(tokens, sequence.salt, sequence.boundaries).resume
            size = len(tokens) + min(sequence.max_tokens, MOST_ROOM)
            self._scheduler.add(
                Job(
                    id=sequence.id,
                    data=encode(tokens),
                    stop=len(tokens) - 1,
                    known=known,
                    salt=sequence.salt,
                    nbytes=self._fixed_bytes + self._row_bytes * size,
                    warm=sequence.warm,
                )
            )
        while self._cancelled:
            request = self._cancelled.popleft()
            self._leave([s for s in self._sequences.values() if s.request is request], "cancelled")

    def _admit(self, ids: Iterable[int]) -> None:
        for each in ids:
            sequence = self._sequences.get(each)
            if sequence is None:
                continue  # a batch that broke took it along
            try:
                self._runs().admit(sequence)
                self._scheduler.moved(each, len(sequence.tokens) - 1, "decoding")
            except BatchBroken as broken:
                self._runs().dissolve(broken.ids)
                self._start_over([*broken.ids, each], broken)
            except Exception as error:
                self._fail(sequence, error)

    def _decode(self) -> None:
        decoded = self._runs().decode()
        for ids, error in decoded.failed:
            self._start_over(ids, error)
        ended: dict[Finish, list[Sequence]] = {"stop": [], "length": []}
        for step in decoded.steps:
            sequence = self._sequences[step.id]
            try:
                finish = self._give(sequence, step.token, step.logprobs)
            except Exception as error:
                self._fail(sequence, error)
                continue
            if finish is not None:
                ended[finish].append(sequence)
            elif self._runs().window_is_full(sequence):
                self._runs().store_answer(sequence)
        for reason, sequences in ended.items():
            self._leave(sequences, reason)

    def _give(self, sequence: Sequence, token: int, logprobs: mx.array) -> Finish | None:
        """Hand a token to whoever asked for it; says whether the answer ends with it."""
        request = _requested(sequence)
        if sequence.first_token is None:
            sequence.first_token = time.perf_counter()
        sequence.generated.append(token)
        if request.top_logprobs is None:
            sampled = Sampled(token)
        else:
            sampled = alternatives(logprobs, token, request.top_logprobs)
        if request.sink.token(sequence.choice, sampled) or token in request.end_tokens:
            return "stop"
        return "length" if len(sequence.generated) >= sequence.max_tokens else None

    def _prefill(self, sequence: Sequence) -> None:
        runner = self._runs()
        try:
            if sequence.lease is None:
                runner.start(sequence)
                self._moved(sequence, "prefilling")
            awaited = self._scheduler.jobs[sequence.id].marks
            done = runner.prefill(sequence, awaited)
            self._moved(sequence, "prefilling")
        except Exception as error:
            return self._fail(sequence, error)
        if done and sequence.warm:
            self._leave([sequence], "stop")
        elif done:
            self._moved(sequence, "ready")

    def _moved(self, sequence: Sequence, stage: Literal["prefilling", "ready"]) -> None:
        position = sequence.lease.position if sequence.lease is not None else 0
        self._scheduler.moved(sequence.id, position, stage)
        if sequence.request is not None and not sequence.generated and sequence.choice == 0:
            sequence.request.sink.prefilled(position, len(sequence.prompt))

    def _pause(self, warm: int) -> None:
        """A request goes first. What was warmed stays, and the rest is begun again later."""
        sequence = self._sequences[warm]
        self._runs().leave([sequence])
        job = self._scheduler.jobs[warm]
        self._scheduler.back(warm, job.data, job.stop, job.position)

    def _leave(self, sequences: Collection[Sequence], reason: Finish) -> None:
        """These are done: store, forget, and tell."""
        reports = [s.report() for s in sequences]
        self._runs().leave(sequences)
        for sequence, report in zip(sequences, reports, strict=True):
            self._sequences.pop(sequence.id, None)
            self._scheduler.remove(sequence.id)
            request = sequence.request
            if request is None or request not in self._open:
                continue
            _tell(request.sink.ended, sequence.choice, reason)
            still = self._open[request]
            still.remaining -= 1
            if sequence.choice == 0 or still.report is None:
                still.report = report
            if not still.remaining:
                del self._open[request]
                _tell(request.sink.done, still.report)

    def _start_over(self, ids: Iterable[int], error: Exception) -> None:
        """A batch failed. Its sequences go back to what the tree holds of them and decode alone
        from there: whoever caused it fails alone then, and the others lose nothing."""
        for each in ids:
            sequence = self._sequences[each]
            if sequence.isolated:
                self._fail(sequence, error)
                continue
            log.warning("a batch failed (%s); %s starts over", error, _named(sequence))
            sequence.isolated = True
            self._runs().leave([sequence], keep=False)
            tokens = sequence.tokens
            self._scheduler.back(each, encode(tokens), len(tokens) - 1, 0)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """An error belongs to its request, and ends all of it."""
        log.error("%s failed", _named(sequence), exc_info=error)
        request = sequence.request
        mates = [s for s in self._sequences.values() if request and s.request is request]
        for each in mates or [sequence]:
            self._runs().leave([each], keep=False)
            self._sequences.pop(each.id, None)
            self._scheduler.remove(each.id)
        if request is not None and self._open.pop(request, None) is not None:
            fault = EngineFault(f"the model failed on this request: {type(error).__name__}")
            _tell(request.sink.failed, fault)

    def _recover(self, error: BaseException) -> None:
        """The turn itself failed: begin again with fresh state, and keep who is waiting."""
        log.critical("the engine failed and starts again", exc_info=error)
        self._failures += 1
        self._restarts += 1
        self._state, self.detail = "failing", f"the engine failed: {type(error).__name__}"
        sequences = list(self._sequences.values())
        self._sequences.clear()
        runner, room = self._runs(), self._scheduler.room
        self._runner = Runner(runner.model, runner.cache, runner.vocabulary, batched=runner.batched)
        self._runner.prefilled_tokens = runner.prefilled_tokens
        self._runner.warm_tokens = runner.warm_tokens
        self._scheduler = Scheduler(self.options.max_batch, room)
        again = []
        for sequence in sequences:
            ran = sequence.lease is not None
            if sequence.lease is not None:
                sequence.lease.release()
                sequence.lease = None
            if sequence.warm or self._failures >= FAILURES or (ran and sequence.isolated):
                if sequence.request is not None:
                    self._fail(sequence, EngineFault("the engine failed"))
                continue
            sequence.isolated = ran or sequence.isolated
            again.append(sequence)
        self._inbox.extendleft(reversed(again))

    def _end_all(self, error: Exception) -> None:
        while self._inbox:
            sequence = self._inbox.popleft()
            if sequence.request is not None and self._open.pop(sequence.request, None) is not None:
                _tell(sequence.request.sink.failed, error)

    def _forget_old_warm_ahead(self) -> None:
        waiting = [j.id for j in self._scheduler.jobs.values() if j.warm]
        if len(waiting) >= MOST_WARM:
            self._leave([self._sequences[waiting[0]]], "cancelled")

    def _has_requests(self) -> bool:
        return any(not s.warm for s in self._sequences.values())

    def _runs(self) -> Runner:
        if self._runner is None:
            raise NotReady(f"the server is not ready: {self.detail}")
        return self._runner


@dataclass
class _Open:
    """A request that is not answered yet."""

    remaining: int
    report: Report | None = None
    """Of the first choice: the others resume where it got to."""


def _requested(sequence: Sequence) -> Request:
    if sequence.request is None:
        raise TypeError("warm-ahead has no answer")
    return sequence.request


def _named(sequence: Sequence) -> str:
    name = sequence.request.name if sequence.request is not None else "warm-ahead"
    return f"request {name or sequence.id}"


def _tell(call: Callable[..., None], *details: Any) -> None:
    """A sink that fails has only itself to blame."""
    try:
        call(*details)
    except Exception:
        log.exception("a request's sink failed")
