"""The gated delta rule in chunks, against the rule token by token in float64."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models import gated_delta

from rewarm.accel import delta, replacement
from tests.sets import SOAK

Array = npt.NDArray[np.float64]

off_metal = pytest.mark.skipif(mx.metal.is_available(), reason="mlx-lm has a kernel for Metal")


@dataclass(frozen=True)
class Case:
    length: int
    by_key: bool = False
    gates: tuple[float, float] = (0.5, 1.0)
    zeros: float = 0.0
    """The share of gates that are exactly 0."""
    beta: float = 1.0
    batch: int = 1
    key_heads: int = 2
    shared_by: int = 1
    key_dim: int = 32
    value_dim: int = 24
    same_keys: bool = False
    with_state: bool = True
    masked: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array | None
    mask: mx.array | None

    def cut(self, start: int, stop: int) -> Inputs:
        parts = {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta", "mask")}
        cut = {name: x if x is None else x[:, start:stop] for name, x in parts.items()}
        return replace(self, **cut)

    def rounded(self, dtype: mx.Dtype) -> Inputs:
        parts = {name: getattr(self, name).astype(dtype) for name in ("q", "k", "v", "beta")}
        return replace(self, **parts)

    def run(self) -> tuple[mx.array, mx.array]:
        return delta.chunked(self.q, self.k, self.v, self.g, self.beta, self.state, self.mask)


def inputs(case: Case) -> Inputs:
    random = np.random.default_rng([case.seed, case.length])
    heads = case.key_heads * case.shared_by
    tokens = (case.batch, case.length)

    def array(x: Any) -> mx.array:
        return mx.array(np.asarray(x, dtype=np.float32))

    q, k = random.standard_normal((2, *tokens, case.key_heads, case.key_dim))
    if case.same_keys:
        k[:] = k[:, :1]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = random.uniform(*case.gates, (*tokens, heads, *[case.key_dim] * case.by_key))
    g[random.random(g.shape) < case.zeros] = 0
    state = random.standard_normal((case.batch, heads, case.value_dim, case.key_dim))
    return Inputs(
        q=array(q * case.key_dim**-0.5),
        k=array(k),
        v=array(random.standard_normal((*tokens, heads, case.value_dim))),
        g=array(g),
        beta=array(random.uniform(0, case.beta, (*tokens, heads))),
        state=array(state) if case.with_state else None,
        mask=mx.array(random.random(tokens) >= case.masked) if case.masked else None,
    )


def by_token(given: Inputs) -> tuple[Array, Array]:
    """Compute the rule as it is defined. A masked token's output stays 0."""

    def array(x: mx.array) -> Array:
        return np.array(x.astype(mx.float32)).astype(np.float64)

    q, k, v, g, beta = map(array, (given.q, given.k, given.v, given.g, given.beta))
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    mask = np.ones(v.shape[:2], bool) if given.mask is None else np.array(given.mask)
    y = np.zeros(v.shape)
    states = np.zeros((v.shape[0], *v.shape[2:], k.shape[-1]))
    if given.state is not None:
        states += array(given.state)
    for b, t in np.argwhere(mask):
        state = states[b] * (g[b, t, :, None, None] if g.ndim == 3 else g[b, t, :, None])
        read = (state @ k[b, t, :, :, None])[..., 0]
        write = (v[b, t] - read) * beta[b, t, :, None]
        states[b] = state + write[..., None] * k[b, t, :, None]
        y[b, t] = (states[b] @ q[b, t, :, :, None])[..., 0]
    return y, states


def distance(found: mx.array, right: Array) -> float:
    difference = np.array(found.astype(mx.float32)).astype(np.float64) - right
    size = np.linalg.norm(right) or 1.0  # all may be masked
    return float(np.linalg.norm(difference) / size)


def outputs(found: mx.array, mask: mx.array | None) -> mx.array:
    return found if mask is None else mx.where(mask[..., None, None], found, 0)


def assert_right(given: Inputs, tolerance: float) -> None:
    y, state = given.run()
    right_y, right_state = by_token(given)
    assert y.shape == given.v.shape
    assert y.dtype == given.q.dtype
    assert state.dtype == mx.float32
    assert not mx.isnan(y).any().item()
    assert distance(outputs(y, given.mask), right_y) <= tolerance
    assert distance(state, right_state) <= tolerance


def spoiled(given: Inputs) -> Inputs:
    """Put NaN and infinity in every masked place."""
    assert given.mask is not None
    place = given.mask[..., None, None]
    return replace(given, k=mx.where(place, given.k, mx.nan), v=mx.where(place, given.v, mx.inf))


@pytest.mark.parametrize("by_key", [False, True])
def test_what_lies_in_a_masked_place_does_not_matter(by_key: bool) -> None:
    assert_right(spoiled(inputs(Case(70, by_key, masked=0.3))), 1e-5)


def sampled() -> Iterator[Case]:
    """Draw random shapes and gates of every kind."""
    random = np.random.default_rng(11)
    gates = [(0.0, 1.0), (0.0, 1e-3), (0.0, 1e-30), (0.99, 1.0), (1.0, 1.0), (0.9, 1.0)]
    longest = 4096 if SOAK else 200
    for i in range(600 if SOAK else 36):
        yield Case(
            length=int(np.exp(random.uniform(0, np.log(longest)))),
            by_key=bool(i % 2),
            gates=gates[i % len(gates)],
            zeros=float(random.choice([0, 0.05])),
            beta=float(random.choice([1, 2])),
            batch=int(random.integers(1, 3)),
            key_heads=int(random.integers(1, 4)),
            shared_by=int(random.integers(1, 4)),
            key_dim=int(random.choice([8, 16, 32, 64, 100, 128])),
            value_dim=int(random.choice([4, 16, 48, 64, 128])),
            same_keys=bool(random.integers(2)),
            with_state=bool(random.integers(2)),
            masked=float(random.choice([0, 0, 0.3])),
            seed=i,
        )


@pytest.mark.parametrize("case", list(sampled()), ids=lambda case: f"{case.seed}-{case.length}")
def test_chunks_give_what_the_rule_gives(case: Case) -> None:
    assert_right(inputs(case), 1e-5)
    assert_right(inputs(case).rounded(mx.bfloat16), 1e-2)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("length", [*range(1, 68), 127, 129] if SOAK else [1, 2, 3, 17, 33, 63, 65])
def test_every_length_is_right(length: int, by_key: bool) -> None:
    assert_right(inputs(Case(length, by_key)), 1e-5)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("gates", [(0.999, 1.0), (0.0, 1.0), (0.0, 1e-4)])
def test_long_sequences_stay_right(gates: tuple[float, float], by_key: bool) -> None:
    assert_right(inputs(Case(4096, by_key, gates, key_heads=1, beta=2)), 1e-5)


@pytest.mark.parametrize("by_key", [False, True])
def test_a_repeated_key_is_right(by_key: bool) -> None:
    """The powers of A are at their largest here, and a plain product of them would fail."""
    case = Case(256, by_key, gates=(1.0, 1.0), same_keys=True)
    given = replace(inputs(case), beta=mx.full((1, 256, 2), 1.9))
    assert_right(given, 1e-5)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_every_chunk_length_is_right(
    chunk: int, by_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CPU_CHUNK", "SMALL_CPU_CHUNK", "GPU_CHUNK"):
        monkeypatch.setattr(delta, name, chunk)
    assert_right(inputs(Case(300, by_key, (0.0, 1.0), 0.05, beta=2, shared_by=2)), 1e-5)


@pytest.mark.parametrize("by_key", [False, True])
def test_a_prompt_in_stretches_is_right(by_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are cut as on a CPU, where those of a long prompt are larger than its caches."""
    parts = [slice(0, 64), slice(64, 69), slice(69, 70), slice(70, 150)]
    monkeypatch.setattr(delta, "stretches", lambda length, width: iter(parts))
    assert_right(inputs(Case(150, by_key, batch=2, shared_by=2, masked=0.2)), 1e-5)


def test_stretches_are_all_of_a_prompt_and_no_larger_than_they_may_be() -> None:
    for width in (1, 512, 4096, 2**20):
        for length in (1, 31, 32, 33, 1000):
            parts = list(delta.stretches(length, width))
            assert [t for part in parts for t in range(length)[part]] == list(range(length))
            if mx.default_device() == mx.cpu:
                longest = len(range(length)[parts[0]])
                assert longest <= max(delta.CPU_CHUNK, delta.STRETCH // width)


@pytest.mark.parametrize("by_key", [False, True])
def test_gates_of_zero_forget_everything(by_key: bool) -> None:
    given = inputs(Case(100, by_key, gates=(0.0, 0.0)))
    assert_right(given, 1e-5)
    y, state = given.run()
    other_y, other_state = replace(given, state=None).run()
    assert mx.array_equal(y, other_y).item()
    assert mx.array_equal(state, other_state).item()


@pytest.mark.parametrize("by_key", [False, True])
def test_a_sequence_in_two_calls_is_the_same(by_key: bool) -> None:
    given = inputs(Case(150, by_key, batch=2, shared_by=2, masked=0.2))
    right_y, right_state = by_token(given)
    for cut in (1, 31, 32, 100, 149):
        first_y, state = given.cut(0, cut).run()
        last_y, state = replace(given.cut(cut, 150), state=state).run()
        y = outputs(mx.concatenate([first_y, last_y], axis=1), given.mask)
        assert distance(y, right_y) <= 1e-5
        assert distance(state, right_state) <= 1e-5


def test_the_states_of_all_chunks_are_not_held_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """For heads as wide as these, the states would be most of a prefill's memory."""
    for name, value in {"SMALL_CPU_CHUNK": 16, "GPU_CHUNK": 16, "STRETCH": 2**30}.items():
        monkeypatch.setattr(delta, name, value)
    given = inputs(Case(512, key_heads=2, shared_by=4, key_dim=128, value_dim=128))
    mx.eval(given.q, given.k, given.v, given.g, given.beta, given.state)
    assert given.state is not None
    states = given.state.nbytes * 512 // 16
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(given.run())
    assert mx.get_peak_memory() - before < 2 * states


def test_masked_tokens_leave_the_state_untouched() -> None:
    given = inputs(Case(70, batch=2))
    mask = mx.array([[False] * 70, [True] * 33 + [False] * 37])
    _, state = replace(given, mask=mask).run()
    assert given.state is not None
    assert mx.array_equal(state[0], given.state[0]).item()
    _, right = by_token(given.cut(0, 33))
    assert distance(state[1], right[1]) <= 1e-5


def test_a_gradient_passes_through() -> None:
    """mlx-lm trains through this function."""
    given = inputs(Case(40))

    def loss(rule: Any, v: mx.array, beta: mx.array) -> mx.array:
        y, _ = rule(given.q, given.k, v, given.g, beta, given.state)
        total: mx.array = (y * y).sum()
        return total

    stock = stock_rule()
    for wanted in (1, 2):
        ours = mx.grad(loss, wanted)(delta.chunked, given.v, given.beta)
        right = mx.grad(loss, wanted)(stock, given.v, given.beta)
        assert distance(ours, np.array(right).astype(np.float64)) <= 1e-4


def stock_rule() -> delta.Rule:
    """Return mlx-lm's own rule, even where an earlier test has replaced it."""
    return delta._stock.get("gated_delta_ops", gated_delta.gated_delta_ops)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> delta.Rule:
    """Give the test mlx-lm without our functions, and undo what it installs."""
    stock = stock_rule()
    monkeypatch.setattr(gated_delta, "gated_delta_ops", stock)
    monkeypatch.setattr(delta, "_stock", {})
    monkeypatch.setattr(replacement, "_warned", set())
    monkeypatch.delenv("REWARM_ACCEL", raising=False)
    return stock


def through_mlx_lm(given: Inputs) -> tuple[mx.array, mx.array]:
    heads = given.v.shape[2]
    a, b = (mx.zeros((*given.v.shape[:2], heads)) for _ in range(2))
    found: tuple[mx.array, mx.array] = gated_delta.gated_delta_update(
        *(given.q, given.k, given.v, a, b), mx.zeros(heads), mx.zeros(heads), given.state
    )
    return found


@off_metal
def test_install_is_what_mlx_lm_then_runs(
    untouched: delta.Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(Case(100))
    before = through_mlx_lm(given)
    assert delta.install()
    calls = []

    def counted(*args: Any) -> tuple[mx.array, mx.array]:
        calls.append(args[0].shape[1])
        return chunked(*args)

    chunked = delta.chunked
    monkeypatch.setattr(delta, "chunked", counted)
    after = through_mlx_lm(given)
    assert calls == [100]
    for ours, theirs in zip(after, before, strict=True):
        assert distance(ours, np.array(theirs).astype(np.float64)) <= 1e-5


@off_metal
def test_a_single_token_goes_the_old_way(
    untouched: delta.Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert delta.install()
    monkeypatch.setattr(delta, "chunked", None)
    given = inputs(Case(1, key_heads=16, key_dim=128, value_dim=128))
    y, state = through_mlx_lm(given)
    assert y.shape == given.v.shape
    assert state.shape == (1, 16, 128, 128)


@off_metal
def test_install_twice_is_install_once(untouched: delta.Rule) -> None:
    assert delta.install()
    first = gated_delta.gated_delta_ops
    assert first is not untouched
    assert delta.install()
    assert gated_delta.gated_delta_ops is first
    assert delta._stock == {"gated_delta_ops": untouched}


@pytest.mark.parametrize("value", ["0", "off"])
def test_install_is_switched_off(
    value: str, untouched: delta.Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARM_ACCEL", value)
    assert not delta.install()
    assert gated_delta.gated_delta_ops is untouched


def test_on_metal_nothing_is_installed(
    untouched: delta.Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert not delta.install()
    assert gated_delta.gated_delta_ops is untouched


@off_metal
@pytest.mark.parametrize("change", ["another signature", "gone"])
def test_an_unknown_mlx_lm_is_left_alone_with_one_line(
    change: str,
    untouched: delta.Rule,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def other(q: mx.array, k: mx.array, v: mx.array, decay: mx.array) -> None: ...

    if change == "gone":
        monkeypatch.delattr(gated_delta, "gated_delta_ops")
    else:
        monkeypatch.setattr(gated_delta, "gated_delta_ops", other)
    with caplog.at_level(logging.INFO, logger="rewarm"):
        assert not delta.install()
    assert len(caplog.records) == 1
    assert "token by token" in caplog.text
    assert getattr(gated_delta, "gated_delta_ops", other) is other


def test_importing_rewarm_changes_nothing_in_mlx_lm() -> None:
    program = (
        "import sys, rewarm, rewarm.accel.cpu, rewarm.accel.delta, mlx.core as mx, mlx.nn as nn\n"
        "assert 'mlx_lm' not in sys.modules\n"
        "assert nn.silu is not rewarm.accel.cpu._silu\n"
        "assert 'rewarm' not in nn.Conv1d.__call__.__module__\n"
        "assert 'rewarm' not in str(mx.fast.scaled_dot_product_attention)\n"
        "from mlx_lm.models import activations, gated_delta as found\n"
        "assert activations.swiglu is not rewarm.accel.cpu._swiglu\n"
        "assert found.gated_delta_ops.__module__ == found.__name__, found.gated_delta_ops\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
