"""CUDA kernels for attention, convolutions and joined rows are right, and used where they pay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from rewarm.accel import cuda_attention, cuda_convolution, cuda_rows, replacement
from rewarm.accel.cuda_rows import Heads, RowSpan
from rewarm.cache import PrefixCache
from rewarm.cache.payload import Packing, Rows, chained, join
from tests import zoo
from tests.cache import test_zoo
from tests.runs import CHUNK, Ran, divergence

on_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [mx.bfloat16, mx.float16]
KERNELS = [cuda_attention.agrees, cuda_convolution.agrees, cuda_rows.agrees]


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the checks of all kernels before and after the test."""
    monkeypatch.setattr(replacement, "_warned", set())
    for agrees in KERNELS:
        agrees.cache_clear()
    yield
    for agrees in KERNELS:
        agrees.cache_clear()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, unknown: None) -> None:
    """Pretend that there is a CUDA device. Without one, a kernel fails when it runs."""
    for module in (cuda_attention, cuda_convolution, cuda_rows):
        monkeypatch.setattr(module, "is_cuda", lambda: True)
    if not mx.cuda.is_available():  # with a device, they are installed already
        monkeypatch.setattr(cuda_attention, "_stock", [mx.fast.scaled_dot_product_attention])
        monkeypatch.setattr(cuda_convolution, "_stock", [nn.Conv1d.__call__])
        monkeypatch.setattr(cuda_attention, "is_hopper", lambda: False)


def drawn(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def heads(queries: int, keys: int, dim: int, dtype: mx.Dtype = mx.bfloat16, group: int = 2) -> Any:
    q = drawn(1, 2 * group, queries, dim, seed=1, dtype=dtype)
    k, v = (drawn(1, 2, keys, dim, seed=seed, dtype=dtype) for seed in (2, 3))
    return q, k, v


def reference(q: mx.array, k: mx.array, v: mx.array, scale: float, causal: bool) -> np.ndarray:
    """Compute attention as it is defined, in float64."""
    wide = [np.array(x.astype(mx.float32), np.float64) for x in (q, k, v)]
    queries, keys, values = wide
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
    scores = queries @ keys.swapaxes(-1, -2) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        scores = np.where(np.tri(rows, columns, columns - rows, bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


def distance(found: mx.array, expected: np.ndarray) -> float:
    off = np.array(found.astype(mx.float32), np.float64) - expected
    return float(np.linalg.norm(off) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("shape", "mask", "used"),
    [
        ((64, 100_000, 128), "causal", True),
        ((1024, 3000, 128), "causal", True),
        ((2048, 4096, 128), "causal", False),  # cuDNN's kernel for many is worth its plan
        ((1024, 100_000, 128), "causal", False),
        ((2048, 4096, 256), "causal", True),  # cuDNN has no kernel for such heads
        ((1, 300, 128), None, True),
        ((1, 200, 128), None, False),  # MLX has a kernel of its own
        ((64, 300, 80), "causal", False),
        ((64, 63, 128), "causal", False),
    ],
)
def test_attention_goes_to_the_kernel_where_that_is_faster(
    shape: tuple[int, int, int], mask: str | None, used: bool
) -> None:
    q, k, v = heads(*shape)
    assert cuda_attention.fits(q, k, v, mask) is used
    assert not cuda_attention.fits(q, k, v, mx.ones((1,)))
    assert not cuda_attention.fits(q, k, v[..., :16], mask)
    assert not cuda_attention.fits(*(x.astype(mx.float32) for x in (q, k, v)), mask)


@pytest.mark.usefixtures("pretended")
@pytest.mark.skipif(mx.cuda.is_available(), reason="kernels run here")
@pytest.mark.parametrize("what", ["attention", "convolutions", "rows"])
def test_a_kernel_that_cannot_run_is_left_with_one_line(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "attention": lambda: cuda_attention._attention(
            *heads(5, 300, 64), scale=0.125, mask="causal"
        ),
        "convolutions": lambda: cuda_convolution._convolution(
            nn.Conv1d(8, 8, 4, groups=8), drawn(1, 20, 8)
        ),
        "rows": lambda: cuda_rows.fits(drawn(1, 2, 3, 4), 5),
    }
    with caplog.at_level(logging.INFO, logger="rewarm"):
        for _ in range(3):
            result = ways[what]()
    assert len(caplog.records) == 1
    assert what in caplog.text
    assert "CUDA kernel is no use here" in caplog.text
    if what == "attention":
        right = reference(*heads(5, 300, 64), 0.125, True)
        assert distance(result, right) <= 1e-2
    elif what == "convolutions":
        assert result.shape == (1, 17, 8)
    else:
        assert result is False


@pytest.mark.usefixtures("pretended")
def test_attention_that_the_kernel_does_not_know_is_left_to_mlx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[int, bool]] = []
    stock = cuda_attention._stock[0]

    def attention(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, causal: bool, hopper: bool
    ) -> mx.array:
        launched.append((q.shape[2], causal))
        return stock(q, k, v, scale=scale, mask="causal" if causal else None)

    monkeypatch.setattr(cuda_attention, "attention", attention)
    q, k, v = heads(5, 300, 64)
    attend = cuda_attention._attention
    attend(q, k, v, scale=0.1, mask="causal")
    attend(q, k, v, scale=0.1)
    attend(q[:, :, :1], k, v, scale=0.1)
    checks = [(21, True), (21, False)]  # before the first of a kind
    assert launched == [checks[0], (5, True), checks[1], (5, False), (1, True)]
    launched.clear()
    attend(q, k, v, scale=0.1, mask="causal", sinks=mx.zeros((4,), q.dtype))
    attend(q, k, v, scale=0.1, mask=mx.ones((5, 300), mx.bool_))
    attend(q, k, v, scale=0.1, stream=mx.cpu)
    attend(q, k, v, scale=-0.1)
    assert attend(q[:, :, :0], k, v, scale=0.1).shape == (1, 4, 0, 64)
    for wrong in ((q, k, v[:, :, 1:]), (q, k, v[:, :1]), (mx.concatenate([q, q]), k, v)):
        assert not cuda_attention.fits(*wrong, None)
    assert not launched


@pytest.mark.parametrize("module", [cuda_attention, cuda_convolution])
@pytest.mark.usefixtures("pretended")
def test_they_can_be_switched_off(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARM_ACCEL", "0")
    assert module.install() is False


def test_rows_are_joined_part_by_part_where_it_is_off(
    concatenated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = drawn(1, 2, 3, 4)
    assert cuda_rows.fits(rows, 5)
    monkeypatch.setenv("REWARM_ACCEL", "0")
    assert not cuda_rows.fits(rows, 5)


@pytest.fixture
def concatenated(monkeypatch: pytest.MonkeyPatch, pretended: None) -> list[int]:
    """Replace the kernel for rows by a concatenation, and count the spans of each."""
    parts: list[int] = []

    def launched(given: Any, results: Any, room: int) -> list[mx.array]:
        parts.append(len(given))
        assert len(given) <= cuda_rows.MOST_SPANS
        assert len(results) <= cuda_rows.MOST_RESULTS
        whole = mx.concatenate([p.array[:, :, p.start : p.stop] for p in given], axis=2)
        whole = mx.pad(whole, [(0, 0), (0, 0), (0, room), (0, 0)])
        return [whole[:, h.first : h.first + h.number] for h in results]

    monkeypatch.setattr(cuda_rows, "_launched", launched)
    monkeypatch.setattr(cuda_rows, "agrees", lambda kind: True)
    return parts


def packed(counts: list[int], lengths: list[int]) -> tuple[Rows, list[mx.array]]:
    """Make layers with keys and values of two widths, in segments of these lengths."""
    layers = [
        [drawn(1, n, sum(lengths), 8, seed=i), drawn(1, n, sum(lengths), 6, seed=i + 1000)]
        for i, n in enumerate(counts)
    ]
    packing = Packing.of(layers)
    stops = np.cumsum([0, *lengths]).tolist()
    spans = [
        packing.pack([[a[:, :, b:e] for a in layer] for layer in layers], b, e)
        for b, e in pairwise(stops)
    ]
    rows = chained(spans)
    assert rows is not None
    return rows, [a for layer in layers for a in layer]


@pytest.mark.parametrize(
    ("counts", "lengths", "launches"),
    [
        ([2, 1, 3], [5, 1, 9], [3, 3]),
        ([1], [2] * 300, [256, 44]),
        ([1] * 150, [3, 4], [2, 2, 2, 2]),
    ],
)
def test_a_restore_joins_its_rows_by_the_kernel(
    concatenated: list[int], counts: list[int], lengths: list[int], launches: list[int]
) -> None:
    rows, arrays = packed(counts, lengths)
    wanted = [i for i in range(len(arrays)) if i != 1]
    found = join([rows], [(1, sum(lengths))], wanted, headroom=4)
    for array, i in zip(found, wanted, strict=True):
        assert mx.array_equal(array[:, :, :-4], arrays[i][:, :, 1:])
        assert not array[:, :, -4:].any()
    assert concatenated == launches


def test_rows_that_are_not_as_they_should_be_are_refused() -> None:
    """They raise, which is a miss. A kernel would read the memory behind them."""
    rows, _ = packed([2, 2], [6, 6])
    first, second = rows.segments
    keys, values = second.arrays
    for wrong in (keys[:, :3], keys[:, :, :4], keys.astype(mx.float16), values):
        bad = Rows(rows.packing, (first, replace(second, arrays=(wrong, values))))
        with pytest.raises(ValueError, match="rows 6 to 12"):
            join([bad], [(0, 12)], [0, 2], headroom=0)


@on_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", cuda_attention.HEAD_DIMS)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 256), (1, 5001), (2, 2), (37, 37), (64, 129), (5, 3000), (300, 301), (1024, 2500)],
)
def test_attention_is_right(queries: int, keys: int, dim: int, dtype: mx.Dtype) -> None:
    for group in (1, 2, 5):
        given = heads(queries, keys, dim, dtype, group)
        for causal in (True, False):
            right = reference(*given, dim**-0.5, causal)
            for hopper in ways():
                found = cuda_attention.attention(
                    *given, scale=dim**-0.5, causal=causal, hopper=hopper
                )
                assert distance(found, right) <= 5e-3
    if queries > 1:
        assert distance(found, reference(*given, dim**-0.5, True)) > 5e-3  # a lost mask shows


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("works", [True, False])
def test_many_rows_go_through_products_of_hopper_where_there_are_any(
    is_one: bool, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[bool] = []
    monkeypatch.setattr(cuda_attention, "is_hopper", lambda: is_one)
    monkeypatch.setattr(cuda_attention, "agrees", lambda kind: works or not kind.hopper)
    monkeypatch.setattr(cuda_attention, "attention", lambda *_, hopper, **__: ways.append(hopper))
    for queries in (31, 32):  # of two heads that share a key
        cuda_attention._attention(*heads(queries, 300, 64), scale=0.1, mask="causal")
    assert ways == [False, is_one and works]


def ways() -> list[bool]:
    """Run with the products of Hopper GPUs where there are any, and without them."""
    return [True, False] if cuda_attention.is_hopper() else [False]


@on_cuda
def test_attention_reads_no_more_than_its_keys() -> None:
    """Attention does not read the room that mlx-lm's caches keep for later rows."""
    q, k, v = heads(40, 1000, 128)
    room = mx.full((1, 2, 77, 128), float("nan"), mx.bfloat16)
    k, v = (mx.concatenate([x, room], axis=2) for x in (k, v))
    mx.eval(k, v)
    k, v = k[:, :, :1000], v[:, :, :1000]
    for hopper in ways():
        found = cuda_attention.attention(q, k, v, scale=0.1, causal=True, hopper=hopper)
        assert distance(found, reference(q, k, v, 0.1, True)) <= 5e-3


@on_cuda
def test_attention_takes_arrays_as_they_lie() -> None:
    q, k, v = heads(33, 700, 64)
    for turn in ((0, 2, 1, 3), (0, 1, 3, 2)):
        back = np.argsort(turn).tolist()
        turned = [mx.contiguous(x.transpose(turn)).transpose(back) for x in (q, k, v)]
        for hopper in ways():
            found = cuda_attention.attention(*turned, scale=0.1, causal=True, hopper=hopper)
            assert distance(found, reference(q, k, v, 0.1, True)) <= 5e-3


@on_cuda
def test_attention_of_two_sequences() -> None:
    q, k, v = (mx.concatenate([x, x[:, ::-1] * 0.5]) for x in heads(33, 700, 128, group=3))
    for hopper in ways():
        found = cuda_attention.attention(q, k, v, scale=0.1, causal=True, hopper=hopper)
        assert distance(found, reference(q, k, v, 0.1, True)) <= 5e-3


@on_cuda
def test_attention_with_scores_of_any_size() -> None:
    q, k, v = heads(33, 700, 128)
    for by in (0.0, 30.0, -30.0):
        for hopper in ways():
            found = cuda_attention.attention(q * by, k, v, scale=1.0, causal=True, hopper=hopper)
            assert distance(found, reference(q * by, k, v, 1.0, True)) <= 2e-2


@on_cuda
def test_attention_has_a_gradient() -> None:
    given = heads(33, 40, 64)

    def loss(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return lambda *x: (attend(*x).astype(mx.float32) ** 2).sum()

    ours = mx.grad(
        loss(lambda *x: cuda_attention.attention(*x, scale=0.1, causal=True)), argnums=[0, 1, 2]
    )(*given)
    stock = cuda_attention._stock[0]
    theirs = mx.grad(loss(lambda *x: stock(*x, scale=0.1, mask="causal")), argnums=[0, 1, 2])(
        *given
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert distance(mine, np.array(other.astype(mx.float32), np.float64)) <= 2e-2


@on_cuda
@pytest.mark.parametrize("dtype", [*DTYPES, mx.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_is_right(dtype: mx.Dtype, bias: bool) -> None:
    for channels, taps, length in ((6, 4, 4), (300, 4, 77), (64, 2, 3000)):
        layer = nn.Conv1d(channels, channels, taps, groups=channels, bias=bias)
        layer.set_dtype(dtype)
        x = drawn(2, length, channels, dtype=dtype)
        x64, w64 = (np.array(a.astype(mx.float32), np.float64) for a in (x, layer.weight))
        right = sum(x64[:, i : length - taps + 1 + i] * w64[:, i, 0] for i in range(taps))
        if bias:
            right = right + np.array(layer.bias.astype(mx.float32), np.float64)
        assert distance(cuda_convolution._convolution(layer, x), right) <= (
            1e-6 if dtype == mx.float32 else 5e-3
        )


@on_cuda
def test_a_convolution_has_a_gradient() -> None:
    x, weight = drawn(2, 20, 6), drawn(6, 4, 1, seed=1)
    ours = mx.grad(lambda *a: (cuda_convolution.convolution(*a) ** 2).sum(), argnums=[0, 1])
    theirs = mx.grad(lambda *a: (mx.conv1d(*a, groups=6) ** 2).sum(), argnums=[0, 1])
    for mine, other in zip(ours(x, weight), theirs(x, weight), strict=True):
        assert mx.allclose(mine, other, rtol=1e-4, atol=1e-4)


@on_cuda
@pytest.mark.parametrize(
    ("parts", "results", "width", "dtype"),
    [
        (1, 1, 128, mx.bfloat16),
        (3, 56, 128, mx.bfloat16),
        (17, 5, 24, mx.float16),
        (65, 3, 2, mx.float32),
        (300, 2, 3, mx.uint8),
        (20, 200, 1, mx.bfloat16),
        (9, 2, 1000, mx.float32),
    ],
)
def test_rows_are_joined(parts: int, results: int, width: int, dtype: mx.Dtype) -> None:
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 4, results)
    total = int(counts.sum()) + 1
    given = []
    for _ in range(parts):
        length = int(draw.integers(1, 60))
        array = mx.array(draw.integers(0, 200, (1, total, length, width))).astype(dtype)
        start = int(draw.integers(0, length))
        given.append(RowSpan(array, start, int(draw.integers(start + 1, length + 1))))
    firsts = draw.permutation(total - int(counts.max()))[:results]
    wanted = [
        Heads(int(f), int(n)) for f, n in zip(np.resize(firsts, results), counts, strict=True)
    ]
    whole = mx.concatenate([p.array[:, :, p.start : p.stop] for p in given], axis=2)
    whole = mx.pad(whole, [(0, 0), (0, 0), (0, 7), (0, 0)])
    for found, (first, number) in zip(cuda_rows.joined(given, wanted, 7), wanted, strict=True):
        assert mx.array_equal(found, whole[:, first : first + number])


@on_cuda
def test_the_kernel_for_rows_is_used() -> None:
    rows = drawn(1, 8, 20, 64, dtype=mx.bfloat16)
    assert cuda_rows.fits(rows, 56)
    assert cuda_rows.fits(rows, 300)


@on_cuda
def test_models_run_with_them() -> None:
    assert mx.fast.scaled_dot_product_attention is cuda_attention._attention
    assert nn.Conv1d.__call__ is cuda_convolution._convolution


@on_cuda
@pytest.mark.parametrize(("name", "dim"), [("qwen3", 64), ("qwen3", 128), ("qwen3_5", 256)])
@pytest.mark.parametrize("reuse", ["exact", "fast"])
def test_a_hit_changes_no_answer_with_them(
    name: str, dim: int, reuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This repeats `test_zoo`, whose models have float32 heads that the kernel does not take."""
    launched: list[int] = []
    launch = cuda_attention._launched

    def counted(*given: Any) -> mx.array:
        launched.append(given[0].shape[2])
        return launch(*given)

    monkeypatch.setattr(cuda_attention, "_launched", counted)
    model = zoo.tiny(name, head_dim=dim)
    model.set_dtype(mx.bfloat16)
    cache = PrefixCache(model, memory="64MB", reuse=reuse, chunk=CHUNK)

    def compare(step: str, got: Ran, expected: Ran) -> None:
        if reuse == "exact":
            assert np.array_equal(got.logits, expected.logits), step
        else:
            assert divergence(expected.logits, got.logits) <= 1e-3, step

    resumed = test_zoo.check(model, cache, compare, decode=0)
    assert resumed["repeat"] == resumed["first again"] == 149
    assert launched
