"""The CUDA source of the gated delta rule is right, and planted faults show, without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from rewarm.accel import cuda, delta
from tests.accel.test_cuda import arrays
from tests.accel.test_delta import Case, Inputs, by_token, distance, inputs, outputs, spoiled
from tests.sets import SOAK

from .emulation import emulated, needs_a_compiler

pytestmark = needs_a_compiler

SMALL = Case(33, beta=2, key_heads=1, key_dim=128, value_dim=16)
"""Three tiles of tokens, or five where each key has its gate; the last one is not full."""

INPUTS = ("q", "k", "v", "g", "beta", "state_in")

each_gate = pytest.mark.parametrize("by_key", [False, True], ids=["per_head", "per_key"])


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Emulate kernels in the place of MLX's."""
    monkeypatch.setattr(cuda, "kernel", emulated)
    cuda._kernel.cache_clear()
    yield
    cuda._kernel.cache_clear()


def run(given: Inputs) -> tuple[mx.array, mx.array]:
    return cuda.in_steps(*arrays(given), given.state, given.mask)


def assert_right(given: Inputs) -> None:
    y, state = run(given)
    right_y, right_state = by_token(given)
    assert y.dtype == given.q.dtype
    assert state.dtype == mx.float32
    assert not mx.isnan(y).any().item()  # those of masked tokens are written, too
    tolerance = 1e-5 if y.dtype == mx.float32 else 1e-2
    assert distance(outputs(y, given.mask), right_y) <= tolerance
    assert distance(state, right_state) <= 1e-5


@each_gate
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])
def test_every_length_is_right(length: int, by_key: bool) -> None:
    assert_right(inputs(replace(SMALL, length=length, by_key=by_key)))


FORMS = [
    (32, 16, (8, 1)),
    (32, 32, (8, 2)),
    (64, 32, (8, 2)),
    (96, 48, (8, 1)),
    (128, 8, (16, 1)),
    (128, 16, (16, 2)),
    (128, 32, (16, 4)),
    (160, 16, (8, 1)),
    (192, 16, (16, 2)),
    (224, 16, (8, 1)),
    (256, 4, (32, 1)),
    (256, 24, (32, 2)),
    (256, 16, (32, 4)),
]


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "form", "by_key"),
    [
        (*each, by_key)
        for i, each in enumerate(FORMS)
        for by_key in (False, True)
        if SOAK or i % 2 == by_key
    ],
)
def test_every_form_is_right(
    key_dim: int,
    value_dim: int,
    form: tuple[int, int],
    by_key: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "FULL", 1)  # as many rows to a lane as many heads would give
    assert cuda.form(key_dim, value_dim, heads=4) == form
    case = Case(37, by_key, shared_by=2, key_dim=key_dim, value_dim=value_dim)
    assert_right(inputs(case))


@each_gate
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("masked", [0.0, 0.3, 1.0])
def test_batches_masks_and_gates_of_zero_are_right(
    masked: float, with_state: bool, by_key: bool
) -> None:
    case = replace(SMALL, gates=(0.0, 1.0), zeros=0.1, batch=2, shared_by=2, length=41)
    assert_right(inputs(replace(case, masked=masked, with_state=with_state, by_key=by_key)))


@each_gate
def test_masked_tokens_leave_the_state_untouched(by_key: bool) -> None:
    given = inputs(replace(SMALL, by_key=by_key, masked=1.0))
    _, state = run(given)
    assert mx.array_equal(state, given.state).item()


@each_gate
def test_what_lies_in_a_masked_place_does_not_matter(by_key: bool) -> None:
    assert_right(spoiled(inputs(replace(SMALL, by_key=by_key, masked=0.3))))


@each_gate
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_numbers_of_half_the_size_are_right(dtype: mx.Dtype, by_key: bool) -> None:
    given = inputs(replace(SMALL, by_key=by_key)).rounded(dtype)
    assert_right(given)
    assert_right(replace(given, g=given.g.astype(dtype)))


@each_gate
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("names", [*zip(INPUTS), INPUTS], ids=" ".join)
@pytest.mark.parametrize("off_by", [1, 2])
def test_inputs_may_begin_anywhere(
    off_by: int,
    names: tuple[str, ...],
    dtype: mx.Dtype,
    by_key: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    off = dict.fromkeys(names, off_by)
    monkeypatch.setattr(cuda, "kernel", functools.partial(emulated, off_by=off))
    given = inputs(replace(SMALL, length=9, by_key=by_key)).rounded(dtype)
    assert_right(replace(given, g=given.g.astype(dtype)))


@each_gate
def test_a_prompt_that_is_cut_after_whole_fours_has_the_same_bits(by_key: bool) -> None:
    given = inputs(replace(SMALL, by_key=by_key))
    whole, whole_state = run(given)
    for cut in (4, 16, 32):
        first, state = run(given.cut(0, cut))
        last, state = run(replace(given.cut(cut, 33), state=state))
        assert mx.array_equal(mx.concatenate([first, last], axis=1), whole).item()
        assert mx.array_equal(state, whole_state).item()


def test_a_prompt_has_the_same_bits_in_a_batch_as_alone() -> None:
    given = inputs(replace(SMALL, batch=2, key_heads=2))
    assert given.state is not None
    y, state = run(given)
    alone = replace(given, **{name: x[1:] for name, x in vars(given).items() if x is not None})
    for one, both in zip(run(alone), (y, state), strict=True):
        assert mx.array_equal(one, both[1:]).item()


@each_gate
@pytest.mark.parametrize("masked", [False, True])
def test_the_check_before_first_use_finds_it_right(masked: bool, by_key: bool) -> None:
    numbers = (mx.bfloat16, mx.bfloat16, mx.float32, mx.bfloat16)
    kind = cuda.DeltaVariant(*numbers, 64, 32, heads=2, by_key=by_key, masked=masked)
    assert cuda.agrees.__wrapped__(delta.chunked, kind)


def change(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    assert old in cuda.SOURCE
    monkeypatch.setattr(cuda, "SOURCE", cuda.SOURCE.replace(old, new))


@each_gate
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rewarm::wait_for_the_half(HALF);", ""),
        ("__syncthreads();", ""),
        ("tile % 2", "0"),  # a tile overwrites the one that is being read
    ],
)
def test_a_missing_barrier_is_found(
    old: str, new: str, by_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, old, new)
    with pytest.raises(AssertionError):
        assert_right(inputs(replace(SMALL, by_key=by_key)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("write[0][t] *= at(four.left, t)", ""),
        ("read *= four.decay[mine]", ""),
        ("COUNTS;", "true;"),
    ],
)
def test_a_wrong_rule_is_found(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, old, new)
    with pytest.raises(AssertionError):
        assert_right(inputs(replace(SMALL, masked=0.3)))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("__syncthreads();  // it is brought", "// it is brought", "wait for ever"),
        ("if (token < TILE)", "if (true)", "out of bounds"),
        ("&& is_there", "", "outside of its arrays"),
        ("(BY_KEY ? 1024 : 2048) / Dk", "64", "48 KB"),
    ],
)
def test_what_a_gpu_might_not_survive_is_found(
    old: str, new: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, old, new)
    with pytest.raises(RuntimeError, match=found):
        run(inputs(replace(SMALL, key_dim=96)))


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("q", "is_aligned(q, sizeof(Four<T>))"),
        ("k", "is_aligned(k, sizeof(Four<T>))"),
        ("g", "is_aligned(g, sizeof(Four<G>))"),
        ("state_in", "is_aligned(state_in, 16)"),
    ],
)
def test_a_read_that_is_not_aligned_is_found(
    name: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, old, "true")
    monkeypatch.setattr(cuda, "kernel", functools.partial(emulated, off_by={name: 1}))
    with pytest.raises(RuntimeError, match="not aligned"):
        run(inputs(replace(SMALL, by_key=True)))


HERE = "const int i = blockIdx.x * blockDim.x + threadIdx.x;"


def each(x: mx.array, dtype: mx.Dtype, source: str, **template: int) -> mx.array:
    """Run a kernel with a thread for each number of x."""
    (y,) = emulated("each", ["x"], ["y"], HERE + source)(
        inputs=[x],
        template=[("T", dtype), *template.items()],
        grid=(x.size, 1, 1),
        threadgroup=(min(x.size, 256), 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[dtype],
    )
    return y


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_numbers_are_rounded_as_mlx_does(dtype: mx.Dtype) -> None:
    every = mx.arange(1 << 16).astype(mx.uint16).view(dtype)
    whole = each(every, mx.float32, "y[i] = static_cast<float>(x[i]);")
    assert mx.array_equal(whole, every.astype(mx.float32), equal_nan=True).item()

    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    between = (whole + mx.concatenate([whole[1:], whole[:1]])) / 2  # halfway between neighbours
    for x in (mx.array(random.view(np.float32)), between, mx.array([0.0, -0.0])):
        found = each(x, dtype, "y[i] = static_cast<T>(x[i]);")
        assert mx.array_equal(found, x.astype(dtype), equal_nan=True).item()


def test_shapes_and_constants_are_those_of_the_launch() -> None:
    x = mx.zeros((5, 3, 8))
    source = "y[i] = i < 3 ? x_shape[i] : i < 6 ? x_strides[i - 3] : (YES ? SIZE : -1);"
    found = each(x, mx.int32, source, YES=True, SIZE=7)
    assert found.reshape(-1)[:7].tolist() == [5, 3, 8, 24, 8, 1, 7]


def test_a_number_that_is_not_written_is_none() -> None:
    y = each(mx.zeros(512), mx.float32, "if (i != 290) y[i] = 1;")
    assert mx.isnan(y).tolist() == [i == 290 for i in range(512)]


def test_a_block_does_not_know_what_another_one_shared() -> None:
    source = "__shared__ float kept[256]; y[i] = kept[threadIdx.x]; kept[threadIdx.x] = 1;"
    assert mx.isnan(each(mx.zeros(512), mx.float32, source)).all().item()


def test_a_shuffle_that_only_some_come_to_is_found() -> None:
    with pytest.raises(RuntimeError, match="no part"):
        each(mx.zeros(32), mx.float32, "if (i > 3) y[i] = __shfl_xor_sync(-1, i * 1.0f, 4);")
