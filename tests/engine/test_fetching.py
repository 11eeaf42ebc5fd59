"""State below memory is fetched while others go on, and computed where that is faster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rewarm.cache import PrefixCache
from rewarm.cache.tiers.fetch import Fetch
from rewarm.engine import Core, EngineParts, PromptPath, Request, fetching, runner
from rewarm.engine.scheduler import MOST_FETCHING
from rewarm.options import EngineOptions
from tests import zoo
from tests.engines import PATIENCE, Collected
from tests.runs import Prompt, joined, prompt, run

NAMES = ["llama", "qwen3_5", "gpt_oss"]


@dataclass
class Held:
    """Fetches whose end reaches the engine only when a test lets it."""

    asked: list[Fetch] = field(default_factory=list)
    """The fetches that an engine began. The cache begins and ends others by itself."""
    waiting: list[tuple[Fetch, Callable[[Fetch], None]]] = field(default_factory=list)
    cancelled: list[Fetch] = field(default_factory=list)
    taken_in: int = 0

    def let_go(self, *, came: bool = True) -> None:
        fetch, call = self.waiting.pop(0)
        if not came:
            fetch.cancel()
        call(fetch)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    cancel, take_in = Fetch.cancel, PrefixCache.take_in

    def on_done(fetch: Fetch, call: Callable[[Fetch], None]) -> None:
        held.asked.append(fetch)
        fetch.future.result(PATIENCE)
        if fetch.tokens:
            held.waiting.append((fetch, call))
        else:
            call(fetch)  # there is nothing to wait for

    def cancelled(fetch: Fetch) -> None:
        if fetch in held.asked:
            held.cancelled.append(fetch)
        cancel(fetch)

    def taken_in(cache: PrefixCache, fetch: Fetch) -> Any:
        held.taken_in += 1
        return take_in(cache, fetch)

    monkeypatch.setattr(Fetch, "on_done", on_done)
    monkeypatch.setattr(Fetch, "cancel", cancelled)
    monkeypatch.setattr(PrefixCache, "take_in", taken_in)
    return held


@contextmanager
def core_over(model: Any, folder: Path, *known: Prompt, **options: int) -> Iterator[Core]:
    """Make a core whose memory is empty, with these prompts on disk."""
    before = PrefixCache(model, memory="64MB", disk=str(folder), chunk=32)
    for tokens in known:
        run(model, before, tokens)
    before.close()
    cache = PrefixCache(model, memory="64MB", disk=str(folder), chunk=32)
    core = Core(EngineParts(model, None, cache), EngineOptions(**options))
    yield core
    core.close()
    cache.verify()
    assert cache.stats().leases == 0
    cache.close()


def ask(core: Core, tokens: Prompt, max_tokens: int = 6) -> tuple[Request, Collected]:
    sink = Collected()
    request = Request(tokens, sink, max_tokens)
    core.submit(request)
    return request, sink


def settle(core: Core) -> None:
    """Turn the core until it has nothing left to do by itself."""
    core.turn()
    while core.wait(0):
        core.turn()


@pytest.mark.parametrize("name", NAMES)
def test_while_a_prompt_is_fetched_others_are_answered(
    name: str, tmp_path: Path, held: Held
) -> None:
    model, below = zoo.tiny(name), prompt(200)
    with core_over(model, tmp_path, below) as core:
        _, fetched = ask(core, joined(below, prompt(9, seed=1)))
        _, other = ask(core, prompt(50, seed=2))
        settle(core)
        assert len(other.tokens) == 6
        assert other.report is not None
        assert not fetched.sampled
        assert not core.wait(0), "it waits for the fetch, and does not turn meanwhile"
        assert core.stats().waiting == 1
        held.let_go()
        settle(core)
        assert len(fetched.tokens) == 6
        assert fetched.report is not None
        assert fetched.report.match.tier == "disk"
        assert fetched.report.match.resume + fetched.report.prefilled == 209
        assert fetched.report.prefilled <= 10
        settle(core)
    with core_over(model, tmp_path / "empty") as cold:
        _, expected = ask(cold, joined(below, prompt(9, seed=1)))
        settle(cold)
    assert fetched.tokens == expected.tokens


def test_what_cannot_be_fetched_is_computed(tmp_path: Path, held: Held) -> None:
    model, below = zoo.tiny("llama"), prompt(200)
    with core_over(model, tmp_path, below) as core:
        _, asked = ask(core, below)
        settle(core)
        held.let_go(came=False)
        settle(core)
        assert asked.prefilled_tokens == 200
        assert len(asked.tokens) == 6


def test_a_fetch_that_takes_longer_than_computing_is_not_waited_for(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PACE", 1e-6)
    model, below = zoo.tiny("llama"), prompt(200)
    with core_over(model, tmp_path, below) as core:
        _, asked = ask(core, below)
        while asked.report is None:
            core.turn()
            core.wait()
        assert asked.prefilled_tokens == 200
        assert (held.taken_in, held.cancelled) == (0, [])
        held.let_go()
        settle(core)
        assert held.taken_in == 1, "later requests may use what came late"
        core.cache.verify()


def test_a_tier_that_is_silent_is_not_waited_for(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds however slow computing seems: the first prompt is timed while MLX compiles."""
    monkeypatch.setattr(runner, "PACE", 1e6)
    monkeypatch.setattr(fetching, "SILENCE", 3 * fetching.TELL_EVERY)
    model, below = zoo.tiny("llama"), prompt(200)
    with core_over(model, tmp_path, below) as core:
        _, asked = ask(core, below)
        until = time.monotonic() + PATIENCE
        while asked.report is None and time.monotonic() < until:
            core.turn()
            core.wait(PATIENCE)
        assert asked.prefilled_tokens == 200


def test_a_request_that_is_cancelled_stops_fetching(tmp_path: Path, held: Held) -> None:
    below = prompt(200)
    with core_over(zoo.tiny("llama"), tmp_path, below) as core:
        request, asked = ask(core, below)
        settle(core)
        core.cancel(request)
        settle(core)
        assert asked.reasons == {0: "cancelled"}
        assert len(held.cancelled) == 1
        held.let_go()
        settle(core)
        assert asked.calls_after_end == 0


def test_only_so_many_prompts_are_fetched_at_once(tmp_path: Path, held: Held) -> None:
    below = [prompt(100, seed=i) for i in range(MOST_FETCHING + 2)]
    with core_over(zoo.tiny("llama"), tmp_path, *below) as core:
        asked = [ask(core, tokens)[1] for tokens in below]
        settle(core)
        assert len(held.waiting) == MOST_FETCHING
        held.let_go()
        settle(core)
        assert len(asked[0].tokens) == 6
        assert len(held.waiting) == MOST_FETCHING
        while held.waiting:
            held.let_go()
            settle(core)
        assert [a.prefilled_tokens for a in asked] == [1] * len(below)


def test_prompts_that_share_a_prefix_fetch_it_once(tmp_path: Path, held: Held) -> None:
    below = prompt(200)
    with core_over(zoo.tiny("llama"), tmp_path, below) as core:
        asked = [ask(core, joined(below, prompt(9, seed=i)))[1] for i in range(1, 4)]
        settle(core)
        assert len(held.waiting) == 1
        while held.waiting:
            held.let_go()
            settle(core)
        assert [a.prefilled_tokens for a in asked] == [10, 9, 9]


def test_a_client_is_told_how_far_a_fetch_is(tmp_path: Path, held: Held) -> None:
    below = prompt(200)
    with core_over(zoo.tiny("llama"), tmp_path, below) as core:
        _, asked = ask(core, below)
        settle(core)
        told = len(asked.fetch_progress)
        assert told == 1
        core.wait()
        core.turn()
        assert len(asked.fetch_progress) == told + 1
        assert {total for _, total in asked.fetch_progress} == {200}


def test_without_a_lower_tier_nothing_is_asked_of_one(held: Held) -> None:
    model = zoo.tiny("llama")
    core = Core(EngineParts(model, None, PrefixCache(model, memory="64MB", chunk=32)))
    _, asked = ask(core, prompt(50))
    settle(core)
    core.close()
    assert len(asked.tokens) == 6
    assert not held.waiting


@pytest.mark.parametrize("what", ["match", "explain", "clear"])
def test_no_turn_waits_for_a_tier_to_answer_a_question(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(200)
    with core_over(zoo.tiny("llama"), tmp_path, tokens) as core:
        answers: list[Any] = []
        begun, free = threading.Event(), threading.Event()
        (tier,) = core.cache.tiers
        name = "forget" if what == "clear" else "find"
        quick = getattr(tier, name)

        def slow(*asked: Any) -> Any:
            begun.set()
            free.wait(5)
            return quick(*asked)

        def ask_it() -> None:
            if what == "clear":
                for deleted in core.clear().result(PATIENCE):
                    deleted.result(PATIENCE)
                answers.append(None)
            else:
                answers.append(getattr(core, what)(PromptPath(tokens)).result(PATIENCE))

        monkeypatch.setattr(tier, name, slow)
        asking = threading.Thread(target=ask_it)
        asking.start()
        while not begun.is_set():
            core.turn()
        core.turn()
        assert not answers, "a turn has waited for the tier"
        free.set()
        while asking.is_alive():
            core.turn()
        assert len(answers) == 1
