"""Recurrences other than the delta rule agree with the same token by token in float64."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models.cache import make_prompt_cache

from rewarm.accel import delta, replacement, scans
from rewarm.accel.replacement import Replacement
from tests import zoo
from tests.accel.test_delta import distance, off_metal

Array = npt.NDArray[np.float64]
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 64, 100, 257]
GATES = [(0.0, 0.01), (0.5, 1.0), (0.999, 1.0), (0.0, 1.0)]


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[Array]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=shape).astype(np.float32).astype(np.float64) for shape in shapes]


def gates(shape: tuple[int, ...], between: tuple[float, float]) -> Array:
    drawn = np.random.default_rng(7).uniform(*between, size=shape)
    return drawn.astype(np.float32).astype(np.float64)


def given(*arrays: Array) -> list[mx.array]:
    return [mx.array(each.astype(np.float32)) for each in arrays]


@pytest.mark.parametrize("between", GATES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", [(6,), (scans.WIDE + 1,)], ids=["narrow", "wide"])
def test_a_scan_gives_what_the_loop_gives(
    width: tuple[int, ...], length: int, between: tuple[float, float]
) -> None:
    x, h = drawn((2, length, *width), (2, *width))
    a = gates(x.shape, between)
    got, last = scans.scan(*given(a, x, h))
    expected = np.empty_like(x)
    for t in range(length):
        expected[:, t] = h = a[:, t] * h + x[:, t]
    assert distance(got, expected) <= 1e-5
    assert distance(last, h) <= 1e-5


@pytest.mark.parametrize("between", GATES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("stretch", [delta.STRETCH, 1], ids=["whole", "stretches"])
def test_wkv7_gives_what_the_rule_gives(
    length: int, between: tuple[float, float], stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "STRETCH", stretch)
    shape = (2, length, 3, 16)
    r, k, v, a, state = drawn(*[shape] * 4, (2, 3, 16, 16))
    a /= np.linalg.norm(a, axis=-1, keepdims=True)
    w, rate = gates(shape, between), gates(shape, (0.0, 1.0))
    a, b = -a, a * rate
    got, last = scans.wkv7(*given(r, w, k, v, a, b, state))
    expected = np.empty_like(v)
    for t in range(length):
        u = state @ a[:, t, ..., None]
        state = (
            state * w[:, t, :, None] + u @ b[:, t, :, None] + v[:, t, ..., None] * k[:, t, :, None]
        )
        expected[:, t] = (state @ r[:, t, ..., None])[..., 0]
    assert distance(got, expected) <= 1e-5
    assert distance(last, state) <= 1e-5


@pytest.mark.parametrize("length", [n for n in LENGTHS if n >= scans.PAYS])
@pytest.mark.parametrize("with_state", [True, False])
def test_lightning_attention_gives_what_the_rule_gives(length: int, with_state: bool) -> None:
    q, k, v, h = drawn((2, 3, length, 8), (2, 3, length, 8), (2, 3, length, 12), (2, 3, 8, 12))
    log_gates = np.array([-0.001, -0.5, -9.0])
    state = mx.array(h.astype(np.float32)) if with_state else None
    h *= with_state
    got, last = scans._gla(*given(q, k, v, log_gates), 0.25, state)
    expected = np.empty_like(v)
    decay = np.exp(log_gates.astype(np.float32).astype(np.float64))[:, None, None]
    for t in range(length):
        h = h * decay + k[:, :, t, :, None] * v[:, :, t, None]
        expected[:, :, t] = (0.25 * q[:, :, t, None] @ h)[:, :, 0]
    assert distance(got, expected) <= 1e-5
    assert distance(last, h) <= 1e-5


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test mlx-lm without our functions."""
    put = {}
    for place in scans.REPLACED:
        module = sys.modules.get(f"mlx_lm.models.{place.module}")
        if module is not None:
            owner, name = owner_of(place)
            if name in scans._stock:
                put[place] = getattr(owner, name)
                setattr(owner, name, scans._stock[name])
    monkeypatch.setattr(replacement, "_warned", set())
    monkeypatch.delenv("REWARM_ACCEL", raising=False)
    yield
    for place in put:
        owner, name = owner_of(place)
        setattr(owner, name, place.ours)


def owner_of(place: Replacement) -> tuple[Any, str]:
    owner: Any = sys.modules[f"mlx_lm.models.{place.module}"]
    *path, name = place.name.split(".")
    for each in path:
        owner = getattr(owner, each)
    return owner, name


def logits(model: Any, tokens: mx.array, *cuts: int) -> Array:
    """Compute the outputs of all tokens, prefilled up to each cut in turn."""
    caches = make_prompt_cache(model)
    found = [model(tokens[:, a:b], cache=caches) for a, b in zip((0, *cuts), cuts, strict=False)]
    return np.array(mx.concatenate(found, axis=1)).astype(np.float64)


@off_metal
@pytest.mark.parametrize("place", scans.REPLACED, ids=lambda p: p.module)
def test_a_model_gives_the_same_logits_however_its_prompt_is_cut(
    place: Replacement, untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARM_ACCEL", "0")
    model = zoo.tiny(place.module)
    drawn = np.random.default_rng(0).integers(1, zoo.vocabulary(place.module), (2, 120))
    tokens = mx.array(drawn)
    owner, name = owner_of(place)
    assert getattr(owner, name) is not place.ours
    expected = logits(model, tokens, 120)
    monkeypatch.delenv("REWARM_ACCEL")
    assert scans.install()
    assert getattr(owner, name) is place.ours
    for cuts in ((120,), (50, 51, 53, 70, 120)):
        assert distance(mx.array(logits(model, tokens, *cuts)), expected) <= 1e-5


@off_metal
def test_another_mlx_lm_is_left_alone_with_one_line(
    untouched: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlx_lm.models import recurrent_gemma

    def other(x: mx.array, decay: mx.array) -> None: ...

    monkeypatch.setattr(recurrent_gemma, "rnn_scan", other)
    with caplog.at_level(logging.INFO, logger="rewarm"):
        scans.install()
        scans.install()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "recurrent_gemma" in caplog.text
    assert "x, decay" in caplog.text
    assert recurrent_gemma.rnn_scan is other
