"""The scenario `recurrences`: recurrences and layers alone, by mlx-lm and by Rewarm."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import bailing_moe_linear, gated_delta, jamba, mamba, recurrent_gemma, rwkv7

from rewarm import accel
from rewarm.accel import delta

from .archs import dtype, random_model, text_config
from .bench import Bench
from .figures import Spread, milliseconds, ratios
from .scenario import Archs, at_least, scenario

nn: Any = importlib.import_module("mlx.nn")  # mypy does not see its names, which come by a star

REPEATED = 5
"""Calls that are timed together on a GPU, so that waiting for it counts little."""


class Compared(NamedTuple):
    """One computation, and the functions that do it, by the name of the way."""

    name: str
    ways: dict[str, Callable[[], Any]]


@scenario(rounds=5)
def recurrences(
    bench: Bench,
    archs: Archs = "",
    tokens: Annotated[int, at_least(8, "Tokens of a prompt.")] = 512,
) -> None:
    """Recurrences alone, as mlx-lm's loops and in Rewarm's forms."""
    # The shapes of a model with a delta rule are measured too, and its layers in parts.
    models = [arch for arch in archs.split(",") if arch]
    looped = _functions()
    accel.install()
    ours = _functions()
    found = [*_delta_rules(models, tokens, looped, ours), *_others(tokens, looped, ours)]
    sheet = bench.result.sheet(
        "ms, the least; the ratio is the median", "recurrence", "way", "ms:.2f", "mlx-lm / it"
    )
    for name, ways in bench.each("recurrences", found):
        took: dict[str, list[float]] = {way: [] for way in ways}
        for call in ways.values():
            mx.eval(call())
        for _, way in bench.in_turns(name, list(ways), bench.rounds):
            took[way].append(_timed(ways[way]))
        for way, values in took.items():
            sheet.add(name, way, min(values), ratios(values, took["mlx-lm"]))
    for arch in models:
        _layer(bench, arch, tokens)


def _timed(call: Callable[[], Any]) -> float:
    """Measure the milliseconds of one call."""
    times = 1 if mx.default_device() == mx.cpu else REPEATED
    return milliseconds(lambda: mx.eval([call() for _ in range(times)])) / times


PLACES = {
    "delta": (gated_delta, "gated_delta_ops"),
    "rwkv7": (rwkv7.Rwkv7TimeMixing, "_wkv7"),
    "gla": (bailing_moe_linear, "recurrent_gla"),
    "rg_lru": (recurrent_gemma, "rnn_scan"),
    "mamba": (mamba.MambaBlock, "_process_sequence"),
    "jamba": (jamba.JambaMambaMixer, "ssm_step"),
}
"""The functions of mlx-lm that Rewarm replaces."""

Functions = dict[str, Callable[..., Any]]


def _functions() -> Functions:
    return {name: getattr(owner, attribute) for name, (owner, attribute) in PLACES.items()}


def _both(name: str, looped: Functions, ours: Functions, key: str, *given: Any) -> Compared:
    mx.eval([x for x in given if isinstance(x, mx.array)])
    return Compared(
        name, {"mlx-lm": partial(looped[key], *given), "rewarm": partial(ours[key], *given)}
    )


def _delta_rules(
    archs: Sequence[str], tokens: int, looped: Functions, ours: Functions
) -> Iterator[Compared]:
    shapes = [(tokens, heads, heads, dim) for heads in (4, 8) for dim in (64, 128)]
    for arch in archs:
        text = text_config(arch)
        names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")
        shapes += [(count, *(text[name] for name in names)) for count in (1, tokens)]
    for count, keys, heads, dim in shapes:
        q, k = mx.random.normal((2, 1, count, keys, dim)).astype(dtype()) * dim**-0.5
        v = mx.random.normal((1, count, heads, dim)).astype(dtype())
        beta = mx.random.uniform(0, 1, (1, count, heads)).astype(dtype())
        gates: dict[str, tuple[int, ...]] = {"head": (1, count, heads)}
        if keys == heads:
            gates["key"] = (1, count, heads, dim)
        for each, shape in gates.items():
            g = mx.random.uniform(0.9, 1, shape)
            name = f"delta, a gate for each {each}: {count} tokens, {heads} heads of {dim}"
            found = _both(name, looped, ours, "delta", q, k, v, g, beta)
            found.ways["chunks"] = partial(delta.chunked, q, k, v, g, beta)
            yield found


def _others(tokens: int, looped: Functions, ours: Functions) -> Iterator[Compared]:
    heads, dim, wide = 8, 64, 2560
    r, k, v, a = mx.random.normal((4, 1, tokens, heads, dim)) * dim**-0.5
    w = mx.random.uniform(0.55, 1, r.shape)
    mixing = type("TimeMixing", (), {"num_heads": heads, "head_dim": dim})()
    of_heads = f"{tokens} tokens, {heads} heads of {dim}"
    yield _both(f"RWKV-7: {of_heads}", looped, ours, "rwkv7", mixing, r, w, k, v, -a, a, None)
    g = -mx.arange(1.0, heads + 1) / heads
    rows = [x.swapaxes(1, 2) for x in (r, k, v)]
    yield _both(f"lightning attention: {of_heads}", looped, ours, "gla", *rows, g, 0.125)
    x, gate = mx.random.normal((1, tokens, wide)), mx.random.uniform(0.5, 1, (1, tokens, wide))
    yield _both(f"RG-LRU: {tokens} tokens, {wide} wide", looped, ours, "rg_lru", x, gate, None)
    block = mamba.MambaBlock(
        mamba.ModelArgs(
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
    )
    states = f"{tokens} tokens, 768 wide, 16 states"
    layer = mx.random.normal((1, tokens, 384))
    yield _both(f"a Mamba layer: {states}", looped, ours, "mamba", block, layer, None, None)
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
    x = mx.random.normal((1, tokens, 768))
    rates = -mx.exp(mixer.A_log)
    yield _both(f"a Jamba layer: {states}", looped, ours, "jamba", mixer, x, rates)


def _layer(bench: Bench, arch: str, tokens: int) -> None:
    """Measure the parts of a recurrent layer, and a layer of attention."""
    model = random_model(arch)
    layers = getattr(model, "language_model", model).model.layers
    first, net = layers[0], layers[0].linear_attn
    x = mx.random.normal((1, tokens, text_config(arch)["hidden_size"])).astype(dtype())
    mixed = net.in_proj_qkv(x)
    wide = mx.concatenate([mixed[:, :3], mixed], axis=1)
    heads = mixed[..., : net.key_dim].reshape(1, tokens, net.num_k_heads, -1)
    out = net.in_proj_z(x).reshape(1, tokens, net.num_v_heads, -1)
    mx.eval(wide, heads, out)
    projections = (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
    parts: dict[str, Callable[[], Any]] = {
        "the whole layer": lambda: first(x),
        "MLP": lambda: first.mlp(x),
        "projections": lambda: (
            *(project(x) for project in projections),
            net.out_proj(out.reshape(1, tokens, -1)),
        ),
        "convolution": lambda: nn.silu(net.conv1d(wide)),
        "norms of q and k": lambda: gated_delta.normalize_qk(heads, heads, inv_scale=0.1, eps=1e-6),
        "gated norm": lambda: net.norm(out, out),
        "a layer of attention": lambda: layers[-1](x, mask="causal"),
    }
    sheet = bench.result.sheet(f"{arch}, {tokens:,} tokens, ms", "part", "least (median)")
    for part, call in bench.each(arch, list(parts.items())):
        mx.eval(call())
        took = Spread.of(_timed(call) for _ in range(bench.rounds))
        sheet.add(part, f"{took.least:.3f} ({took.median:.3f})")
