"""An engine's turns depend on its messages, and on nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rewarm.cache import PrefixCache
from rewarm.cache.tiers.fetch import Fetch
from rewarm.engine import Core, EngineParts, Request, runner
from rewarm.engine.messages import (
    Cancel,
    Fetched,
    FetchLate,
    Message,
    PromptPath,
    Question,
    Submit,
    Warm,
)
from rewarm.options import EngineOptions
from rewarm.values import Boundary, Sampling
from tests import zoo
from tests.engines import Collected
from tests.runs import joined, prompt, run
from tests.sets import SOAK

NAMES = ["llama", "qwen3_5", "gpt_oss"]
BELOW = [prompt(150, seed=90 + i) for i in range(3)]
"""Prompts that are on disk from the start."""


@dataclass
class Copied:
    """The requests of one run over a recording, by number."""

    sinks: dict[int, Collected] = field(default_factory=dict)

    def of(self, message: Message) -> Message:
        """Copy a message for another engine."""
        if isinstance(message, Submit):
            sink = self.sinks.setdefault(message.request.id, Collected())
            return replace(message, request=replace(message.request, sink=sink))
        if isinstance(message, Question):
            return replace(message, answer=Future())
        return message

    def said(self) -> dict[int, Any]:
        return {
            number: ({c: sink.tokens_of(c) for c in sink.sampled}, sink.reasons, sink.error is None)
            for number, sink in self.sinks.items()
        }


@dataclass
class Recorded:
    turns: list[list[Message]]
    digest: str
    said: dict[int, Any]
    evictions: int


def made_core(model: Any, folder: Path) -> Core:
    """Make a core with little memory, over a folder that knows some prompts."""
    seeded = PrefixCache(model, memory="4MB", disk=str(folder), chunk=32)
    for tokens in BELOW:
        run(model, seeded, tokens)
    seeded.close()
    cache = PrefixCache(model, memory="1MB", disk=str(folder), chunk=32)
    return Core(EngineParts(model, None, cache), EngineOptions(max_batch=6))


class Program:
    """A program that drives a core at random, and remembers the messages of every turn."""

    def __init__(self, core: Core, seed: int) -> None:
        self.core = core
        self.random = Random(seed)
        self.turns: list[list[Message]] = []
        self.copied = Copied()
        self.requests: list[Request] = []
        self.held: list[tuple[Fetch, Callable[[Fetch], None]]] = []
        """Fetches whose end the core has not been told yet."""
        self.follow = core.follow
        core.follow = self.recorded  # type: ignore[method-assign]

    def run(self, steps: int) -> None:
        acts: Sequence[Callable[[], object]] = (
            *[self.ask] * 6,
            *[self.core.turn] * 12,
            *[self.deliver] * 3,
            self.be_late,
            self.cancel,
            self.warm,
            self.mark_idle,
            self.look,
            self.resize,
            self.clear,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Fetch, "on_done", lambda fetch, call: self.held.append((fetch, call)))
            # Only `be_late` says that a fetch is late, and no clock.
            patch.setattr(runner, "LEAST_TIMED", 1 << 30)
            self.core._loop.runner.pace = 60.0
            for _ in range(steps):
                self.random.choice(acts)()
            while self.core.wait(0) or self.core.has_requests:
                self.core.turn()
                self.deliver()

    def recorded(self, messages: Sequence[Message], taken: Callable[[], object]) -> None:
        self.turns.append(list(messages))
        self.follow(messages, taken)

    def prompt(self) -> Any:
        head = self.random.choice(
            [BELOW[self.random.randrange(3)], prompt(60, seed=self.random.randrange(4))]
        )
        tail = prompt(self.random.randrange(1, 90), seed=self.random.randrange(8))
        return joined(head[: self.random.choice([40, 150])], tail)

    def ask(self) -> None:
        random = self.random
        tokens = self.prompt()
        seed = random.choice([None, random.randrange(100)])
        warmth = random.choice([0.0, 1.0])
        request = Request(
            tokens,
            Collected(),
            random.randrange(1, 12),
            Sampling(temperature=warmth, seed=seed),
            n=random.choice([1, 1, 1, 2, 3]),
            boundaries=[Boundary(40, "system")],
            salt=random.choice([None, None, "a"]),
        )
        self.copied.sinks[request.id] = request.sink  # type: ignore[assignment]
        self.requests.append(request)
        self.core.submit(request)

    def cancel(self) -> None:
        if self.requests:
            self.core.cancel(self.random.choice(self.requests[-4:]))

    def warm(self) -> None:
        self.core.warm(PromptPath(self.prompt()))

    def mark_idle(self) -> None:
        self.core.mark_idle(PromptPath(self.prompt()))

    def deliver(self) -> None:
        """Tell the core that a fetch has ended. One in three has failed."""
        if self.held:
            fetch, call = self.held.pop(self.random.randrange(len(self.held)))
            if self.random.random() < 1 / 3:
                fetch.cancel()
            call(fetch)

    def be_late(self) -> None:
        jobs = self.core._loop.scheduler.jobs.values()
        fetching = [j.id for j in jobs if j.stage == "fetching"]
        if fetching:
            self.core.post(FetchLate(self.random.choice(fetching)))

    def resize(self) -> None:
        self.core.resize(self.random.choice(["1MB", "2MB"]))

    def clear(self) -> None:
        if self.random.random() < 0.1:
            self.core.clear(give_back=False)

    def look(self) -> None:
        self.core.match(PromptPath(self.prompt()))
        self.core.explain(PromptPath(self.prompt()))


def record(model: Any, folder: Path, seed: int, steps: int = 80) -> Recorded:
    core = made_core(model, folder)
    program = Program(core, seed)
    program.run(steps)
    told = Recorded(
        program.turns, core.cache.digest(), program.copied.said(), core.cache.stats().evictions
    )
    core.close()
    core.cache.verify()
    core.cache.close()
    return told


def replay(model: Any, folder: Path, turns: list[list[Message]]) -> tuple[str, dict[int, Any]]:
    core = made_core(model, folder)
    copied = Copied()
    for messages in turns:
        core.follow([copied.of(m) for m in messages], lambda: None)
    told = core.cache.digest(), copied.said()
    core.close()
    core.cache.close()
    return told


@pytest.mark.parametrize("seed", range(50 if SOAK else 1))
@pytest.mark.parametrize("name", NAMES)
def test_recorded_messages_give_the_same_tree_and_tokens_again(name: str, seed: int) -> None:
    model = zoo.tiny(name)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        told = record(model, Path(one), seed)
        assert replay(model, Path(other), told.turns) == (told.digest, told.said)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(zoo.tiny("qwen3_5"), tmp_path_factory.mktemp("disk"), seed=1, steps=300)


def test_such_programs_evict_cancel_fetch_and_draw(recorded: Recorded) -> None:
    messages = [m for turn in recorded.turns for m in turn]
    asked = [m.request for m in messages if isinstance(m, Submit)]
    fetched = [m.came for m in messages if isinstance(m, Fetched)]
    reasons = {r for _, reasons, _ in recorded.said.values() for r in reasons.values()}
    assert recorded.evictions > 10
    called = {m.call.func for m in messages if isinstance(m, Question)}
    assert {type(m) for m in messages} >= {Cancel, FetchLate, Warm}
    assert called >= {PrefixCache.clear, PrefixCache.mark_idle, PrefixCache.resize}
    assert fetched.count(True) > 3
    assert fetched.count(False) > 3
    assert reasons == {"length", "cancelled"}
    assert {r.n for r in asked} == {1, 2, 3}
    assert all(r.sampling.seed is not None for r in asked)


def another_seed(message: Message) -> Message:
    assert isinstance(message, Submit)
    sampling = replace(message.request.sampling, seed=12345)
    return replace(message, request=replace(message.request, sampling=sampling))


def failed(message: Message) -> Message:
    assert isinstance(message, Fetched)
    return replace(message, came=False)


DIFFERENCES: dict[str, tuple[Callable[[Message], bool], Callable[[Message], Message | None]]] = {
    "another seed": (
        lambda m: isinstance(m, Submit) and m.request.sampling.temperature > 0,
        another_seed,
    ),
    "a cancel is lost": (lambda m: isinstance(m, Cancel), lambda m: None),
    "warm-ahead is lost": (lambda m: isinstance(m, Warm), lambda m: None),
    "fetches fail": (lambda m: isinstance(m, Fetched) and m.came, failed),
}


@pytest.mark.parametrize("planted", list(DIFFERENCES)[:: 1 if SOAK else 3])
def test_a_planted_difference_shows(planted: str, recorded: Recorded, tmp_path: Path) -> None:
    concerned, change = DIFFERENCES[planted]
    turns = [
        [new for m in turn if (new := change(m) if concerned(m) else m) is not None]
        for turn in recorded.turns
    ]
    told = replay(zoo.tiny("qwen3_5"), tmp_path, turns)
    assert told != (recorded.digest, recorded.said)
