"""An error names the value and what to do, and nothing is lost by it."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import rewarm
from rewarm import PrefixCache, Session
from rewarm.errors import (
    CacheClosed,
    InvalidOption,
    InvalidPrompt,
    ModelMismatch,
    RewarmError,
    UnsupportedModel,
)
from tests import zoo
from tests.runs import CHUNK, prompt, run
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([], "empty"),
        (np.array([], dtype=np.int32), "empty"),
        ([1, 2, 512], "token 512 is outside the vocabulary \\(0 to 511\\)"),
        ([1, -1], "token -1 "),
        ([1, 1 << 40], "outside the vocabulary"),
        ([1.5, 2.0], "whole numbers"),
        ([[1, 2], [3, 4]], "flat"),
        (["a"], "whole numbers"),
        ([[1, 2], [3]], "flat"),
        (None, "flat"),
    ],
)
def test_a_prompt_that_no_model_can_run(tokens: Any, says: str) -> None:
    cache = PrefixCache(zoo.tiny("llama"), memory="64MB", chunk=CHUNK)
    run(cache.model, cache, prompt(50))
    for ask in (cache.match, cache.acquire):
        with pytest.raises(InvalidPrompt, match=says):
            ask(tokens)
    cache.verify()
    assert cache.match(prompt(50)).resume == 49
    assert cache.stats().leases == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": 0}, "memory=0"),
        ({"memory": "plenty"}, "memory='plenty'"),
        ({"memory": "12KB"}, "too small"),
        ({"reuse": "maybe"}, "reuse='maybe'"),
        ({"chunk": 3}, "chunk=3"),
        ({"kv_bits": 7}, "kv_bits=7"),
        ({"disk_size": "lots"}, "disk_size="),
    ],
)
def test_an_option_that_means_nothing(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        PrefixCache(zoo.tiny("llama"), **options)


def test_a_closed_cache_says_so_and_running_requests_still_finish() -> None:
    model = zoo.tiny("llama")
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK)
    lease = cache.acquire(prompt(50))
    cache.close()
    cache.close()
    model(mx.array(prompt(50)[:32])[None], cache=lease.caches)
    cache.commit(lease, 32)
    lease.release()
    for use in (cache.stats, cache.verify, cache.clear, cache.flush):
        with pytest.raises(CacheClosed, match="closed"):
            use()
    with pytest.raises(CacheClosed, match="closed"):
        cache.match(prompt(5))


def test_a_cache_of_another_model_is_refused() -> None:
    cache = PrefixCache(tiny_model(seed=0), memory="64MB")
    with pytest.raises(ModelMismatch, match="another model"):
        Session(tiny_model(seed=1), tiny_tokenizer(), cache)
    Session(tiny_model(seed=0), tiny_tokenizer(), cache)  # equal weights are accepted
    other = PrefixCache(zoo.tiny("llama"), memory="64MB")
    with other.acquire(prompt(20)) as lease, pytest.raises(ModelMismatch, match="another cache"):
        cache.commit(lease, 10)


def test_a_model_without_any_cache_is_refused() -> None:
    class Bare(nn.Module):
        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            return tokens

    with pytest.raises(UnsupportedModel, match="Bare offers no prompt cache"):
        PrefixCache(Bare(), memory="64MB")


def test_a_model_with_an_unknown_cache_runs_without_reuse_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sealed:
        """A cache class that delegates to a real cache, and shows none of its attributes."""

        __slots__ = ("_inner",)

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            if name in ("state", "__dict__"):
                raise AttributeError(name)
            return getattr(self._inner, name)

    from mlx_lm.models.cache import KVCache

    model = zoo.tiny("llama")
    with caplog.at_level(logging.WARNING, logger="rewarm"):
        cache = PrefixCache(
            model, memory="64MB", make_cache=lambda: [Sealed(KVCache()) for _ in range(4)]
        )
        for _ in range(2):
            with cache.acquire(prompt(50)) as lease:
                assert (lease.position, lease.cost.match.reason) == (0, "disabled")
                model(mx.array(prompt(50)[:49])[None], cache=lease.caches)
                cache.commit(lease, 49, checkpoint="end")
    assert caplog.text.count("reuse is off") == 1
    assert "Sealed" in caplog.text
    assert cache.stats().entries == 0


@pytest.mark.parametrize("stop", [-1, 51, 10_000])
def test_a_commit_outside_the_prompt_is_refused(stop: int) -> None:
    cache = PrefixCache(zoo.tiny("llama"), memory="64MB", chunk=CHUNK)
    with cache.acquire(prompt(50)) as lease, pytest.raises(InvalidOption, match="stop="):
        cache.commit(lease, stop)
    cache.verify()


def test_session_errors_name_what_is_wrong() -> None:
    session = Session(tiny_model(), tiny_tokenizer())
    with pytest.raises(InvalidPrompt, match="empty"):
        session.chat([])
    with pytest.raises(InvalidPrompt, match="empty"):
        session.generate("")
    with pytest.raises(InvalidPrompt, match="role and content"):
        session.generate(["a", "b"])
    for options, says in (
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 2}, "top_p=2"),
        ({"stop": [""]}, "stop=''"),
        ({"repetition_penalty": -1}, "repetition_penalty=-1"),
    ):
        with pytest.raises(InvalidOption, match=says):
            session.generate("a", **options)
    with pytest.raises(InvalidPrompt, match="NoneType"):
        session.generate(None)
    with pytest.raises(InvalidPrompt, match="content is missing"):
        session.chat([{"role": "user"}])
    with pytest.raises(InvalidOption, match="neither a folder nor"):
        rewarm.load("no such model")
    assert session.generate("a", max_tokens=1).tokens


def test_every_error_can_be_caught_by_one_name() -> None:
    for error in (InvalidPrompt, InvalidOption, UnsupportedModel, ModelMismatch, CacheClosed):
        assert issubclass(error, RewarmError)
