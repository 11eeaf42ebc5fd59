"""Recurrences token by token, as mlx-lm has them off Metal, and as `rewarm.accel` does them.

.venv/bin/python tools/bench_accel.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import rewarm  # noqa: F401  (loads the BLAS, before mlx)

# isort: split
import mlx.core as mx
from mlx_lm.models import bailing_moe_linear, jamba, mamba, recurrent_gemma, rwkv7
from mlx_lm.models.gated_delta import gated_delta_ops

from rewarm.accel import delta, heap, scans

Pair = tuple[str, Callable[[], Any], Callable[[], Any]]


def gated_delta() -> Iterator[Pair]:
    for tokens, heads, dim in (512, 4, 64), (1024, 8, 64), (512, 4, 128), (1024, 8, 128):
        for gates in (1, tokens, heads), (1, tokens, heads, dim):
            q, k, v = mx.random.normal((3, 1, tokens, heads, dim)) * dim**-0.5
            g, beta = mx.random.uniform(0.9, 1, gates), mx.random.uniform(0, 1, gates[:3])
            given = (q, k, v, g, beta)
            each = "head" if len(gates) == 3 else "key"
            name = f"delta, a gate for each {each}: {tokens} tokens, {heads} heads of {dim}"
            yield (
                name,
                lambda given=given: gated_delta_ops(*given),
                lambda given=given: delta.chunked(*given),
            )


def others(tokens: int = 512) -> Iterator[Pair]:
    heads, dim, width = 8, 64, 2560
    r, k, v, a = mx.random.normal((4, 1, tokens, heads, dim)) * dim**-0.5
    w = mx.random.uniform(0.55, 1, r.shape)
    time_mixing: Any = type("TimeMixing", (), {"num_heads": heads, "head_dim": dim})()
    loop = rwkv7.Rwkv7TimeMixing._wkv7
    yield (
        f"RWKV-7: {heads} heads of {dim}",
        lambda: loop(time_mixing, r, w, k, v, -a, a, None),
        lambda: scans.wkv7(r, w, k, v, -a, a, None),
    )
    rows = [x.swapaxes(1, 2) for x in (r, k, v)]
    g = -mx.arange(1.0, heads + 1) / heads
    gla = bailing_moe_linear.recurrent_gla
    yield (
        f"lightning attention: {heads} heads of {dim}",
        lambda: gla(*rows, g, 0.125),
        lambda: scans._gla(*rows, g, 0.125),
    )
    x, gate = mx.random.normal((1, tokens, width)), mx.random.uniform(0.5, 1, (1, tokens, width))
    scan = recurrent_gemma.rnn_scan
    yield (
        f"RG-LRU: {width} wide",
        lambda: scan(x, gate, None),
        lambda: scans._rnn_scan(x, gate, None),
    )
    args = mamba.ModelArgs(
        model_type="mamba",
        vocab_size=8,
        hidden_size=384,
        intermediate_size=768,
        state_size=16,
        num_hidden_layers=1,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=24,
    )
    block = mamba.MambaBlock(args)
    layer = mx.random.normal((1, tokens, 384))
    sequence = mamba.MambaBlock._process_sequence
    yield (
        "a Mamba layer: 768 wide, 16 states",
        lambda: sequence(block, layer, None, None),
        lambda: scans._mamba_sequence(block, layer, None, None),
    )
    mixer = jamba.JambaMambaMixer(
        jamba.ModelArgs(
            model_type="jamba",
            hidden_size=384,
            intermediate_size=768,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            attn_layer_offset=0,
            attn_layer_period=2,
            expert_layer_offset=0,
            expert_layer_period=2,
            mamba_d_conv=4,
            mamba_d_state=16,
            mamba_expand=2,
            num_experts=1,
            num_experts_per_tok=1,
            rms_norm_eps=1e-6,
            max_position_embeddings=4096,
            vocab_size=8,
        )
    )
    wide = mx.random.normal((1, tokens, 768))
    rates, step = -mx.exp(mixer.A_log), jamba.JambaMambaMixer.ssm_step
    yield (
        "a Jamba layer: 768 wide, 16 states",
        lambda: step(mixer, wide, rates),
        lambda: scans._jamba_step(mixer, wide, rates),
    )


def best(call: Callable[[], Any], rounds: int) -> float:
    """Milliseconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    heap.install()  # for both
    print(f"{'ms, the least of ' + str(rounds):<62}{'loop':>8}{'chunks':>8}{'times':>7}")
    for name, loop, chunks in (*gated_delta(), *others()):
        mx.eval(loop(), chunks())
        slow, fast = best(loop, rounds), best(chunks, rounds)
        print(f"{name:<62}{slow:8.1f}{fast:8.1f}{slow / fast:7.1f}", flush=True)


if __name__ == "__main__":
    main()
