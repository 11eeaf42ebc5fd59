"""The engine tries out prompts before the first request."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from rewarm.cache import PrefixCache
from rewarm.engine import core, trial
from rewarm.engine.decode.batch import Batch
from rewarm.engine.runner import Runner
from tests import zoo
from tests.engines import answer, engine
from tests.runs import prompt


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
def test_prompts_are_tried_out_before_anybody_asks(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rehearsal compiles all that a request runs, also the restore of a hit. Nothing is kept."""
    restored: list[int] = []
    used: weakref.WeakSet[PrefixCache] = weakref.WeakSet()
    built = PrefixCache.acquire

    def acquire(cache: PrefixCache, *given: Any, **options: Any) -> Any:
        lease = built(cache, *given, **options)
        restored.append(lease.cost.match.resume)
        used.add(cache)
        return lease

    monkeypatch.setattr(PrefixCache, "acquire", acquire)
    with engine(zoo.tiny(name), rehearse=True) as server:
        assert len(restored) == 3
        assert restored[0] == 0
        many, few = trial.MANY, trial.FEW
        longest = trial.REHEARSED_ON_CPU
        assert longest - 2 * (many + few) <= restored[1] < longest - many
        assert longest - 2 * few <= restored[2] < longest - few
        assert server.core.stats().prefilled_tokens == 0
        assert server.core.cache.stats().held == 0
        assert not used
        assert answer(server, prompt(60)).prefilled_tokens == 60
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("where", ["__init__", "step", "join"])
def test_a_rehearsal_that_fails_is_logged(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler")

    rehearse = trial.rehearse

    def rehearsed(given: Runner, vocabulary: int) -> None:
        with monkeypatch.context() as during:
            during.setattr(Batch, where, fail)
            rehearse(given, vocabulary)

    monkeypatch.setattr(core, "rehearse", rehearsed)
    with engine(zoo.tiny("llama"), rehearse=True) as server:
        assert answer(server, prompt(60)).prefilled_tokens == 60
    assert "no compiler" in caplog.text
