"""Prefill with random weights: the delta rule alone, a layer's parts, whole models, the roofline.

.venv/bin/python tools/bench_prefill.py [--parts rule,layer,models] [--seconds 300] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rewarm  # noqa: F401  (loads the BLAS, before mlx)

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache

from rewarm import accel
from rewarm.accel import delta
from rewarm.accel.device import is_cuda
from rewarm.bench.archs import build, config, parameters
from rewarm.bench.models import dtype
from rewarm.bench.profiles import profile

STEP = 2048
"""Tokens a call of the model, as mlx-lm and Rewarm prefill."""

WARM_UP = 64

Row = dict[str, Any]


class Bench:
    def __init__(self, seconds: float, rounds: int, out: Path | None) -> None:
        self.began = time.perf_counter()
        self.seconds, self.rounds, self.out = seconds, rounds, out
        self.rows: list[Row] = []

    def is_over(self) -> bool:
        return time.perf_counter() - self.began > self.seconds

    def add(self, **row: Any) -> None:
        """Said and kept at once: whoever stops the run has what was measured."""
        self.rows.append(row)
        print("  ".join(f"{name}={_short(value)}" for name, value in row.items()), flush=True)
        if self.out:
            self.out.write_text(json.dumps(self.rows, indent=1))

    def best(self, call: Callable[[], Any], times: int = 1) -> float:
        """Seconds: the least of all rounds, the first of them apart. `times` calls are one go, so
        that waiting for the device counts little."""
        found = []
        for _ in range(self.rounds + 1):
            began = time.perf_counter()
            mx.eval([call() for _ in range(times)])
            found.append((time.perf_counter() - began) / times)
            if self.is_over():
                break
        return min(found[1:] or found)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shape_of(name: str) -> Row:
    made = config(name)
    text: Row = made.get("text_config", made)
    return text


@contextmanager
def using(rule: delta.Rule) -> Iterator[None]:
    before = gated_delta.gated_delta_ops
    gated_delta.gated_delta_ops = rule
    try:
        yield
    finally:
        gated_delta.gated_delta_ops = before


def ways() -> dict[str, delta.Rule]:
    """How the rule is computed; the last one is what Rewarm does."""
    stock = delta._stock or gated_delta.gated_delta_ops
    return {"mlx-lm": stock, "chunks": delta.chunked, "rewarm": delta._installed}


def matmul_rate(bench: Bench, size: int) -> float:
    """FLOP/s of a large product: the roof."""
    a, b = (mx.random.normal((size, size)).astype(dtype()) for _ in range(2))
    mx.eval(a, b)
    return 2.0 * size**3 / bench.best(lambda: a @ b, 5)


def rule(bench: Bench, models: list[str], lengths: list[int], stock_lengths: list[int]) -> None:
    """The recurrence alone, as a layer of the model calls it."""
    for name in models:
        text = shape_of(name)
        heads, key_heads = text["linear_num_value_heads"], text["linear_num_key_heads"]
        dim = text["linear_key_head_dim"]
        for way, call in ways().items():
            for tokens in stock_lengths[:1] if way == "mlx-lm" else [1, *lengths]:
                if bench.is_over():
                    return
                q, k = (mx.random.normal((1, tokens, key_heads, dim)) * dim**-0.5 for _ in "qk")
                v = mx.random.normal((1, tokens, heads, text["linear_value_head_dim"]))
                g = mx.random.uniform(0.9, 1, (1, tokens, heads))
                beta = mx.random.uniform(0, 1, g.shape)
                state = mx.zeros((1, heads, v.shape[-1], dim))
                given = [*(x.astype(dtype()) for x in (q, k, v)), g, beta.astype(dtype()), state]
                mx.eval(given)
                took = bench.best(lambda given=given, call=call: call(*given))
                bench.add(
                    part="rule",
                    model=name,
                    way=way,
                    tokens=tokens,
                    ms=took * 1e3,
                    us_a_token=took / tokens * 1e6,
                )


def layer(bench: Bench, models: list[str], tokens: int) -> None:
    """Where a layer's time goes."""
    for name in models:
        text = shape_of(name)
        model = build(name, dtype())
        layers = getattr(model, "language_model", model).model.layers
        x = mx.random.normal((1, tokens, text["hidden_size"])).astype(dtype())
        mx.eval(x, layers[0].parameters(), layers[-1].parameters())
        net = layers[0].linear_attn
        wide = mx.concatenate([net.in_proj_qkv(x)[:, :3], net.in_proj_qkv(x)], axis=1)
        weight = net.conv1d.weight[..., 0].T

        def shifted(wide: mx.array = wide, weight: mx.array = weight) -> mx.array:
            return nn.silu(sum(wide[:, i : i + tokens] * weight[i] for i in range(len(weight))))

        heads = net.in_proj_qkv(x)[..., : net.key_dim].reshape(1, tokens, net.num_k_heads, -1)
        out = net.in_proj_z(x).reshape(1, tokens, net.num_v_heads, -1)
        mx.eval(wide, weight, heads, out)
        parts: dict[str, Callable[[], Any]] = {
            "the whole layer": lambda layers=layers, x=x: layers[0](x),
            "MLP": lambda layers=layers, x=x: layers[0].mlp(x),
            "projections": lambda net=net, x=x, out=out: (
                net.in_proj_qkv(x),
                net.in_proj_z(x),
                net.in_proj_b(x),
                net.in_proj_a(x),
                net.out_proj(out.reshape(1, tokens, -1)),
            ),
            "convolution": lambda net=net, wide=wide: nn.silu(net.conv1d(wide)),
            "… as shifted products": shifted,
            "… compiled": mx.compile(shifted),
            "norms of q and k": lambda heads=heads: gated_delta.normalize_qk(
                heads, heads, inv_scale=0.1, eps=1e-6
            ),
            "gated norm": lambda net=net, out=out: net.norm(out, out),
            "a layer of attention": lambda layers=layers, x=x: layers[-1](x, mask="causal"),
        }
        for part, call in parts.items():
            if bench.is_over():
                return
            took = bench.best(call, 3)
            bench.add(part=part, model=name, tokens=tokens, us=took * 1e6)
        del model, layers, net
        mx.clear_cache()


def prefill(model: Any, tokens: mx.array) -> list[Any]:
    """As mlx-lm does: in steps, without the logits of any token but the last."""
    caches = list(make_prompt_cache(model))
    count = tokens.shape[1]
    for start in range(0, count - 1, STEP):
        model(tokens[:, start : min(start + STEP, count - 1)], cache=caches)
        mx.eval([cache.state for cache in caches])
    mx.eval(model(tokens[:, -1:], cache=caches))
    return caches


def whole(
    bench: Bench, models: list[str], lengths: list[int], stock_lengths: list[int], roof: float
) -> None:
    for name in models:
        text = shape_of(name)
        counts = profile(name)
        hybrid = "linear_num_value_heads" in text
        model = build(name, dtype())
        mx.eval(model.parameters())
        size = sum(value.size for value in parameters(model).values())
        for way, call in ways().items() if hybrid else [("attention", delta.chunked)]:
            sizes = stock_lengths if way == "mlx-lm" else lengths
            for tokens in sizes:
                if bench.is_over():
                    return
                flops = counts.prefill_flops(0, tokens)
                if hybrid:  # a multiplication and three multiplications with an addition
                    state = text["linear_num_value_heads"] * text["linear_key_head_dim"]
                    linear = sum(hasattr(x, "linear_attn") for x in model.layers)
                    flops += 7.0 * tokens * linear * state * text["linear_value_head_dim"]
                prompt = mx.random.randint(0, text["vocab_size"], (1, tokens))
                took = []
                with using(call):
                    if way == "mlx-lm":  # which takes long: a short prompt, then once
                        prefill(model, prompt[:, :WARM_UP])
                    for _ in range(1 if way == "mlx-lm" else bench.rounds + 1):
                        began = time.perf_counter()
                        caches = prefill(model, prompt)
                        took.append(time.perf_counter() - began)
                        if bench.is_over():
                            break
                    one = decode(model, caches) if tokens == sizes[0] else 0
                seconds = statistics.median(took[1:] or took)
                row = {"decode_ms": one * 1e3} if one else {}
                bench.add(
                    part="model",
                    model=name,
                    parameters=size,
                    way=way,
                    tokens=tokens,
                    tokens_s=tokens / seconds,
                    seconds=[round(x, 4) for x in took],
                    tflops=flops / seconds / 1e12,
                    of_matmul=flops / seconds / roof,
                    **row,
                )
                del caches
                mx.clear_cache()
        del model
        mx.clear_cache()


def decode(model: Any, caches: list[Any], tokens: int = 32) -> float:
    """Seconds a token."""
    token = mx.zeros((1, 1), mx.int32)
    times = []
    for _ in range(tokens):
        began = time.perf_counter()
        token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
        mx.eval(token)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default="rule,layer,models")
    parser.add_argument("--hybrid", default="qwen3.5-0.6b,qwen3.5-9b")
    parser.add_argument("--attention", default="qwen3-0.6b,qwen3-8b", help="beside the hybrid ones")
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--stock-lengths", default="512", help="for mlx-lm's way")
    parser.add_argument("--matmul", type=int, default=8192, help="size of the product for the roof")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540, help="start nothing after this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hybrid, attention = options.hybrid.split(","), options.attention.split(",")
    lengths, stock = (
        [int(x) for x in given.split(",")] for given in (options.lengths, options.stock_lengths)
    )
    bench = Bench(options.seconds, options.rounds, options.json)
    accel.install()
    roof = matmul_rate(bench, options.matmul)
    bench.add(part="roof", device=str(mx.default_device()), kernel=is_cuda(), tflops=roof / 1e12)
    parts = options.parts.split(",")
    if "rule" in parts:
        rule(bench, hybrid, lengths, stock)
    if "layer" in parts:
        layer(bench, hybrid, min(STEP, lengths[0]))
    if "models" in parts:
        order = [x for pair in zip(hybrid, attention, strict=False) for x in pair]
        whole(bench, order, lengths, stock, roof)
    if bench.is_over():
        print(f"{options.seconds:g} s are over: not all was measured", file=sys.stderr)


if __name__ == "__main__":
    main()
