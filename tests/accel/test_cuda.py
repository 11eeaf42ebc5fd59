"""The CUDA kernel of the gated delta rule is right, and is used where it should be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from rewarm.accel import cuda, cuda_attention, delta, replacement
from tests.accel.test_delta import (
    Case,
    Inputs,
    by_token,
    distance,
    inputs,
    off_metal,
    outputs,
    sampled,
)

on_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")

KNOWN = Case(100, key_dim=64, value_dim=32, shared_by=2)


def arrays(given: Inputs) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    return given.q, given.k, given.v, given.g, given.beta


def rule(given: Inputs) -> delta.Rule:
    return delta.rule_for(*arrays(given), given.mask)


@pytest.fixture
def on_a_cpu() -> Iterator[None]:
    with mx.stream(mx.cpu):
        yield


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the checks of the kernel before and after the test."""
    monkeypatch.setattr(replacement, "_warned", set())
    cuda.agrees.cache_clear()
    yield
    cuda.agrees.cache_clear()


@off_metal
@pytest.mark.usefixtures("on_a_cpu")
def test_on_a_cpu_the_kernel_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "in_steps", None)
    given = inputs(KNOWN)
    assert rule(given) is delta.chunked
    y, _ = delta._installed(*arrays(given), given.state)
    assert y.shape == given.v.shape


@pytest.mark.parametrize(
    ("case", "known"),
    [
        (Case(1, key_dim=128, value_dim=128), True),
        (Case(9, key_dim=96, value_dim=48, by_key=True), True),
        (Case(9, key_dim=256, value_dim=16), True),
        (Case(9, key_dim=100, value_dim=16), False),
        (Case(9, key_dim=16, value_dim=16), False),
        (Case(9, key_dim=512, value_dim=16), False),  # more state than there are registers
        (Case(9, key_dim=128, value_dim=20), False),
    ],
)
def test_the_kernel_knows_some_shapes(case: Case, known: bool) -> None:
    given = inputs(case)
    assert cuda._takes(*arrays(given)) is known
    assert cuda._takes(*arrays(given.rounded(mx.bfloat16))) is known
    assert not cuda._takes(*arrays(replace(given, k=given.k.astype(mx.bfloat16))))
    assert not cuda._takes(*arrays(replace(given, g=mx.ones((*given.v.shape[:3], 1)))))
    three = mx.ones((*given.v.shape[:2], 3, given.v.shape[3]))  # values of 3 heads, keys of 2
    assert not cuda._takes(*arrays(replace(given, v=three)))
    assert not cuda._takes(*arrays(replace(given, g=given.g > 0)))


@pytest.mark.parametrize("key_dim", range(32, 257, 32))
@pytest.mark.parametrize(
    ("heads", "value_dim"), [(1, 16), (4, 48), (16, 128), (32, 128), (64, 256)]
)
def test_a_state_is_shared_out_without_a_rest(key_dim: int, heads: int, value_dim: int) -> None:
    form = cuda.form(key_dim, value_dim, heads)
    assert form is not None
    assert value_dim % form.block == 0
    assert key_dim % (4 * form.lanes) == 0
    assert form.lanes % (4 * form.rows) == 0  # sums of four tokens of each row are put together
    assert form.rows == 1 or key_dim * form.rows // form.lanes <= 32  # numbers in registers


def test_many_heads_have_more_rows_to_a_thread_and_few_have_more_blocks() -> None:
    assert cuda.form(128, 128, heads=16) == (16, 2)
    assert cuda.form(128, 128, heads=32) == (16, 4)


@pytest.mark.usefixtures("on_a_cpu", "unknown")
def test_a_kernel_that_cannot_run_is_left_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "is_cuda", lambda: True)  # there is none, so the kernel fails
    with caplog.at_level(logging.INFO, logger="rewarm"):
        for case in (KNOWN, replace(KNOWN, by_key=True), replace(KNOWN, masked=0.2)):
            given = inputs(case)
            y, state = delta._installed(*arrays(given), given.state, given.mask)
            right, right_state = by_token(given)
            assert distance(outputs(y, given.mask), right) <= 1e-5
            assert distance(state, right_state) <= 1e-5
    assert len(caplog.records) == 1
    assert "in chunks" in caplog.text
    assert "CUDA kernel" in caplog.text


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("wrong", ["outputs", "state", "not a number"])
def test_a_kernel_that_is_wrong_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kernel(*given: Any) -> tuple[mx.array, mx.array]:
        y, state = delta.chunked(*given)
        by = float("nan") if wrong == "not a number" else 1.05
        return (y, state * by) if wrong == "state" else (y * by, state)

    monkeypatch.setattr(cuda, "is_cuda", lambda: True)
    monkeypatch.setattr(cuda, "in_steps", kernel)
    with caplog.at_level(logging.INFO, logger="rewarm"):
        assert rule(inputs(KNOWN)) is delta.chunked
        assert rule(inputs(KNOWN)) is delta.chunked
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("unknown")
def test_a_kernel_that_agrees_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    def kernel(*given: Any) -> tuple[mx.array, mx.array]:
        checked.append(given[0].shape[1])
        return delta.chunked(*given)

    monkeypatch.setattr(cuda, "is_cuda", lambda: True)
    monkeypatch.setattr(cuda, "in_steps", kernel)
    for case in (KNOWN, replace(KNOWN, length=1), replace(KNOWN, length=5000)):
        assert rule(inputs(case).rounded(mx.bfloat16)) is kernel
    assert checked == [cuda.CHECKED]
    assert rule(inputs(replace(KNOWN, masked=0.2))) is kernel
    assert checked == [cuda.CHECKED] * 2  # another kernel is checked once, too


def test_a_gradient_passes_through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm trains through this function, and MLX knows no gradient of a kernel."""

    def launched(inputs: list[mx.array], **_: Any) -> list[mx.array]:
        return [mx.stop_gradient(x) for x in delta.chunked(*inputs)]

    if not mx.cuda.is_available():
        monkeypatch.setattr(cuda, "_kernel", lambda masked: launched)
    given = inputs(replace(KNOWN, length=40, masked=0.2))

    def loss(rule: delta.Rule, v: mx.array, beta: mx.array) -> mx.array:
        y, state = rule(given.q, given.k, v, given.g, beta, given.state, given.mask)
        total: mx.array = (outputs(y, given.mask) ** 2).sum() + state.sum()
        return total

    for wanted in (1, 2):
        ours = mx.grad(loss, wanted)(cuda.in_steps, given.v, given.beta)
        right = mx.grad(loss, wanted)(delta.chunked, given.v, given.beta)
        assert distance(ours, np.array(right).astype(np.float64)) <= 1e-2
        assert float(mx.abs(ours).max()) > 0


def test_kernels_that_differ_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX finds what it compiled, in memory and on disk, by name."""
    names: list[str] = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda name, **_: names.append(name))
    for masked, source in ((False, "a"), (True, "COUNTS"), (False, "b"), (False, "a")):
        monkeypatch.setattr(cuda, "SOURCE", source)
        cuda._kernel.__wrapped__(masked)
    assert len(set(names)) == 3
    assert names[0] == names[3]


def assert_right(given: Inputs, tolerance: float) -> None:
    y, state = cuda.in_steps(*arrays(given), given.state, given.mask)
    right_y, right_state = by_token(given)
    assert y.dtype == given.q.dtype
    assert state.dtype == mx.float32
    assert not mx.isnan(y).any().item()
    assert distance(outputs(y, given.mask), right_y) <= tolerance
    assert distance(state, right_state) <= tolerance


@on_cuda
@pytest.mark.parametrize("case", list(sampled()), ids=lambda case: f"{case.seed}-{case.length}")
def test_the_kernel_gives_what_the_rule_gives(case: Case) -> None:
    case = replace(
        case, key_dim=-(-case.key_dim // 32) * 32, value_dim=-(-case.value_dim // 16) * 16
    )
    assert_right(inputs(case), 1e-5)
    assert_right(inputs(case).rounded(mx.bfloat16), 1e-2)


@on_cuda
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 300, 4096])
def test_every_length_is_right(length: int, by_key: bool) -> None:
    case = Case(length, by_key, (0.0, 1.0), beta=2, key_heads=1, key_dim=128, value_dim=16)
    assert_right(inputs(case), 1e-5)


@on_cuda
def test_a_prompt_that_is_cut_after_four_tokens_or_eight_or_twelve_has_the_same_bits() -> None:
    given = inputs(replace(KNOWN, length=150))
    whole, whole_state = cuda.in_steps(*arrays(given), given.state)
    for cut in (4, 16, 100, 148):
        first, state = cuda.in_steps(*arrays(given.cut(0, cut)), given.state)
        last, state = cuda.in_steps(*arrays(given.cut(cut, 150)), state)
        assert mx.array_equal(mx.concatenate([first, last], axis=1), whole).item()
        assert mx.array_equal(state, whole_state).item()


@on_cuda
def test_on_a_cuda_device_it_is_the_kernel() -> None:
    for case in (KNOWN, replace(KNOWN, by_key=True), replace(KNOWN, masked=0.2)):
        for dtype in (mx.float32, mx.bfloat16):
            assert rule(inputs(case).rounded(dtype)) is cuda.in_steps


@pytest.mark.parametrize(("given", "found"), [(None, "0"), ("1", "1")])
def test_mlx_is_told_not_to_give_up_on_many_shapes_unless_somebody_said_otherwise(
    given: str | None, found: str
) -> None:
    name = "MLX_ENABLE_CACHE_THRASHING_CHECK"
    environ = {key: value for key, value in os.environ.items() if key != name}
    if given is not None:
        environ[name] = given
    program = f"import os, rewarm, mlx.core; print(os.environ[{name!r}])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == found


@on_cuda
def test_a_thousand_lengths_of_prompts_are_no_failure() -> None:
    """They are more than twice the plans that MLX keeps."""
    planned = cuda_attention._stock[0]
    queries = mx.random.normal((1, 2, 4, 64)).astype(mx.bfloat16)
    keys = mx.random.normal((1, 2, 1100, 64)).astype(mx.bfloat16)
    for length in range(100, 1100):
        k = keys[:, :, :length]
        out = planned(queries, k, k, scale=0.1, mask="causal")
        assert mx.isfinite(out).all().item(), length
