"""Operations that are replaced on a Linux x86 CPU give what MLX's own give."""

from __future__ import annotations

import ast
import logging
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations, iquestloopcoder, step3p5
from mlx_lm.models.cache import make_prompt_cache

from rewarm.accel import cpu, replacement
from rewarm.accel.replacement import MODELS, Replacement
from tests import zoo
from tests.accel.test_delta import distance


def normal(*shape: int, seed: int = 3, scale: float = 1.0) -> mx.array:
    random = np.random.default_rng(seed)
    return mx.array((random.standard_normal(shape) * scale).astype(np.float32))


def test_silu_is_right_to_the_last_digits() -> None:
    x = np.linspace(-100, 100, 200_001).astype(np.float32)
    exact = x.astype(np.float64)
    exact = exact / (1 + np.exp(-exact))
    found = np.array(cpu.silu(mx.array(x))).astype(np.float64)
    assert np.all(np.abs(found - exact) <= 3e-7 * np.abs(x))
    assert cpu.silu(mx.array(x).astype(mx.bfloat16)).dtype == mx.bfloat16
    assert cpu.silu(mx.array([float("inf")])).item() == float("inf")


def test_the_exponential_is_right_to_the_last_digits() -> None:
    x = np.linspace(-87, 0, 100_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    found = np.array(cpu.exp(mx.array(x))).astype(np.float64)
    assert np.max(np.abs(found / exact - 1)) <= 2e-7
    assert cpu.exp(mx.array([0.0])).item() == pytest.approx(1, abs=2e-7)
    assert 0 <= cpu.exp(mx.array([-1e30])).item() < 1e-37


@pytest.mark.parametrize("taps", [2, 4])
def test_a_depthwise_convolution_is_right(taps: int) -> None:
    x, weight = normal(2, 50, 24), normal(24, taps, 1)
    right = mx.conv1d(x, weight, groups=24)
    assert distance(cpu.convolution(x, weight), np.array(right).astype(np.float64)) <= 1e-6
    x, weight = x.astype(mx.bfloat16), weight.astype(mx.bfloat16)
    right = mx.conv1d(x.astype(mx.float32), weight.astype(mx.float32), groups=24)
    found = cpu.convolution(x, weight)
    assert found.dtype == mx.bfloat16
    assert distance(found, np.array(right).astype(np.float64)) <= 1.8e-3  # rounded once


ATTENTIONS = [
    # tokens, context, heads, key heads, mask
    (64, 64, 4, 4, "causal"),
    (100, 300, 4, 2, "causal"),
    (9, 5000, 6, 2, "causal"),
    (40, 40, 4, 1, None),
    (40, 90, 4, 2, "boolean"),
    (600, 700, 4, 2, "added"),
]


@pytest.mark.parametrize(("tokens", "context", "heads", "key_heads", "kind"), ATTENTIONS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_attention_is_right(
    tokens: int, context: int, heads: int, key_heads: int, kind: str | None, dtype: mx.Dtype
) -> None:
    q = normal(2, heads, tokens, 32, scale=3)
    k, v = normal(2, 2, key_heads, context, 32, seed=4)
    mask: mx.array | str | None = kind
    if kind in ("boolean", "added"):
        mask = mx.tril(mx.ones((tokens, context)), k=context - tokens) > 0
        mask = mask if kind == "boolean" else mx.where(mask, normal(tokens, context), -mx.inf)
    stock = cpu._stock.get("attention", mx.fast.scaled_dot_product_attention)
    right = stock(q, k, v, scale=0.2, mask=mask)
    found = cpu.attention(*(x.astype(dtype) for x in (q, k, v)), scale=0.2, mask=mask)
    assert found.dtype == dtype
    tolerance = 2e-6 if dtype == mx.float32 else 2e-2
    assert distance(found, np.array(right).astype(np.float64)) <= tolerance


def test_a_gradient_passes_through_attention() -> None:
    q, k, v = normal(3, 1, 2, 20, 16)

    def loss(rule: Any, q: mx.array) -> mx.array:
        total: mx.array = (rule(q, k, v, scale=0.25, mask="causal") ** 2).sum()
        return total

    stock = cpu._stock.get("attention", mx.fast.scaled_dot_product_attention)
    right = np.array(mx.grad(loss, 1)(stock, q)).astype(np.float64)
    assert distance(mx.grad(loss, 1)(cpu.attention, q), right) <= 1e-4


linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="only slow on Linux x86"
)


@pytest.fixture
def mlx_untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test MLX and mlx-lm without our functions, and undo what it installs."""
    stock = cpu._stock
    monkeypatch.setattr(nn, "silu", stock.get("silu", nn.silu))
    convolution = stock.get("convolution", nn.Conv1d.__call__)
    monkeypatch.setattr(nn.Conv1d, "__call__", convolution)
    attention = stock.get("attention", mx.fast.scaled_dot_product_attention)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    for module, place in with_ours():
        monkeypatch.setattr(module, place.name, stock[place.name])
    monkeypatch.setattr(cpu, "_stock", {})
    monkeypatch.setattr(replacement, "_warned", set())
    monkeypatch.delenv("REWARM_ACCEL", raising=False)
    yield
    for module, place in with_ours():
        if place.name not in stock:
            setattr(module, place.name, cpu._stock[place.name])


def with_ours() -> list[tuple[ModuleType, Replacement]]:
    """List the modules of mlx-lm that have a function of ours."""
    loaded = [each for name, each in sys.modules.items() if name.startswith(MODELS)]
    return [(m, p) for m in loaded for p in cpu.COMPILED if getattr(m, p.name, 0) is p.ours]


def layers() -> tuple[mx.array, ...]:
    """Call every operation that is replaced as a model does, and some that must not be replaced."""
    x = normal(1, 40, 24)
    many, other = normal(2, 1, 40, cpu.MANY // 40 + 1)
    heads = normal(1, 2, 40, 16)
    depthwise, padded, full = (
        nn.Conv1d(24, 24, 4, groups=24),
        nn.Conv1d(24, 24, 4, groups=24, padding=3),
        nn.Conv1d(24, 24, 4),
    )
    for i, module in enumerate((depthwise, padded, full)):
        module.weight = normal(*module.weight.shape, seed=i)
        module.bias = normal(24, seed=i)
    attend = mx.fast.scaled_dot_product_attention
    return (
        nn.silu(x),
        nn.silu(many),
        activations.swiglu(x, x),
        activations.swiglu(many, other),
        activations.precise_swiglu(x, x, x),
        activations.precise_swiglu(many, many, other),
        iquestloopcoder._silu_mul(x, x),
        iquestloopcoder._silu_mul(many, other),
        step3p5.clamped_swiglu(x, x, 0.5),
        step3p5.clamped_swiglu(many, other, 0.5),
        *(module(x) for module in (depthwise, padded, full)),
        depthwise(x[:, :4]),
        attend(heads, heads, heads, scale=0.25, mask="causal"),
        attend(heads, heads, heads, scale=0.25, sinks=mx.zeros(2)),
        attend(heads[:, :, :1], heads, heads, scale=0.25),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of our functions that were called."""
    found: list[str] = []

    def counting(name: str, ours: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            found.append(name)
            return ours(*args, **options)

        return counted

    for name in ("silu", "swiglu", "convolution", "attention"):
        monkeypatch.setattr(cpu, name, counting(name, getattr(cpu, name)))
    return found


@linux_x86
def test_installed_operations_give_what_mlx_gives(mlx_untouched: None, calls: list[str]) -> None:
    before = layers()
    assert cpu.install()
    assert cpu.install()
    assert nn.silu is cpu._silu
    assert not calls
    for ours, theirs in zip(layers(), before, strict=True):
        assert distance(ours, np.array(theirs).astype(np.float64)) <= 2e-6
    others = [name for name in calls if name != "silu"]  # which is also called to compile SwiGLU
    assert others == ["swiglu"] * 3 + ["convolution", "attention"]
    assert calls.count("silu") >= 2


@linux_x86
def test_on_a_gpu_mlx_keeps_its_operations_after_all(
    mlx_untouched: None, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu.install()
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    mx.eval(layers())
    assert not calls


@linux_x86
@pytest.mark.parametrize("first", ["a token", "many tokens"])
@pytest.mark.parametrize("name", ["qwen3_5", "iquestloopcoder"])
def test_a_single_token_goes_through_mlx_own_operations(
    name: str, first: str, mlx_untouched: None, calls: list[str]
) -> None:
    """MLX's are fewer, so decoding is no slower, whatever input the model saw first."""
    model = zoo.tiny(name)
    assert cpu.install()
    caches = make_prompt_cache(model)

    def used(tokens: int) -> set[str]:
        calls.clear()
        mx.eval(model(mx.ones((1, tokens), mx.int32), cache=caches))
        return set(calls)

    for tokens in (1, 512) if first == "a token" else (512, 1):
        if tokens == 1:
            assert not used(1)
        else:
            assert {"swiglu", "attention"} <= used(512)


def test_all_that_mlx_lm_compiles_around_silu_is_known() -> None:
    """Otherwise the first input of such a function would decide the bits of all later ones."""
    known = {(place.module, place.name) for place in cpu.COMPILED}
    folder = Path(activations.__file__).parent
    found = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            compiled = any("mx.compile" in ast.unparse(each) for each in node.decorator_list)
            if compiled and "nn.silu" in ast.unparse(node):
                found.add((file.stem, node.name))
    assert found == known


def odd_ones() -> list[mx.array]:
    """Mixed types, and more queries than keys, go to MLX's own."""
    heads, x = normal(1, 2, 40, 16), normal(1, 40, 24)
    fewer = heads[:, :, :20]
    depthwise = nn.Conv1d(24, 24, 4, groups=24)
    depthwise.weight = normal(*depthwise.weight.shape)
    attend = mx.fast.scaled_dot_product_attention
    return [
        depthwise(x.astype(mx.float16)),
        attend(heads.astype(mx.float16), heads, heads, scale=0.25),
        attend(heads, fewer, fewer, scale=0.25, mask="causal"),
    ]


@linux_x86
def test_what_ours_does_not_know_is_left_to_mlx(mlx_untouched: None, calls: list[str]) -> None:
    before = odd_ones()
    assert cpu.install()
    for ours, theirs in zip(odd_ones(), before, strict=True):
        assert ours.dtype == theirs.dtype
        assert mx.array_equal(ours, theirs, equal_nan=True)
    assert not calls


@linux_x86
def test_what_mlx_refuses_stays_refused(mlx_untouched: None) -> None:
    assert cpu.install()
    heads = normal(1, 2, 40, 16)
    attend = mx.fast.scaled_dot_product_attention
    with pytest.raises(ValueError, match="mask"):
        attend(heads, heads, heads, scale=0.25, mask="another")
    with pytest.raises(ValueError, match="batch"):
        attend(heads, mx.concatenate([heads, heads]), heads, scale=0.25)


@linux_x86
@pytest.mark.parametrize("change", ["another signature", "gone"])
def test_an_unknown_swiglu_is_left_alone_with_one_line(
    change: str,
    mlx_untouched: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def other(x: mx.array) -> mx.array:
        return x

    if change == "gone":
        monkeypatch.delattr(activations, "swiglu")
    else:
        monkeypatch.setattr(activations, "swiglu", other)
    with caplog.at_level(logging.INFO, logger="rewarm"):
        assert cpu.install()
        assert cpu.install()
    assert len(caplog.records) == 1
    assert "swiglu stays as it is" in caplog.text
    assert getattr(activations, "swiglu", other) is other


@linux_x86
def test_who_wraps_ours_is_left_alone(mlx_untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.install()
    ours = activations.swiglu

    def wrapped(gate: mx.array, x: mx.array) -> mx.array:
        return ours(gate, x)

    monkeypatch.setattr(activations, "swiglu", wrapped)
    monkeypatch.setitem(sys.modules, f"{MODELS}blocked", None)
    assert cpu.install()
    assert activations.swiglu is wrapped
    assert activations.swiglu(mx.ones(4), mx.ones(4)).shape == (4,)


@pytest.mark.parametrize("why", ["switched off", "macOS", "another machine"])
def test_elsewhere_mlx_keeps_its_operations(
    why: str, mlx_untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin" if why == "macOS" else "linux")
    machine = "aarch64" if why == "another machine" else "x86_64"
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if why == "switched off":
        monkeypatch.setenv("REWARM_ACCEL", "0")
    assert not cpu.install()
    assert nn.silu is not cpu._silu
