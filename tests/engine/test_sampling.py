"""The filters of a sampled request are mlx-lm's, for any value."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from rewarm.engine.decode.sampling import min_p, top_k, top_p
from tests.sets import SOAK

SHARES = (0.01, 0.3, 0.5, 0.9, 0.999) if SOAK else (0.01, 0.5, 0.999)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("ours", "theirs", "values"),
    [(top_p, apply_top_p, SHARES), (min_p, apply_min_p, SHARES), (top_k, apply_top_k, (1, 7, 99))],
)
def test_a_filter_keeps_the_tokens_that_mlx_lm_keeps(
    ours: Any, theirs: Any, values: tuple[float, ...], dtype: mx.Dtype
) -> None:
    for seed, spread in enumerate((0.1, 1.0, 8.0)):
        logits = mx.random.normal((4, 100), key=mx.random.key(seed)) * spread
        logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(dtype)
        for value in values:
            assert mx.array_equal(ours(logprobs, value), theirs(logprobs, value))


@pytest.mark.parametrize("ours", [top_p, min_p, top_k])
def test_a_filter_rules_out_tokens(ours: Any) -> None:
    logprobs = mx.log(mx.array([[0.6, 0.3, 0.1]]))
    value = 2 if ours is top_k else 0.4 if ours is min_p else 0.8
    assert ours(logprobs, value).tolist()[0][2] == -float("inf")
    assert mx.array_equal(ours(logprobs, value)[0, :2], logprobs[0, :2])
