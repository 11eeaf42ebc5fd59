"""Compute other recurrences faster: off Metal, mlx-lm goes token by token (docs/accel.md).

RWKV-7 has the delta rule with a gate for each key. It reads the state with a vector a of its own
before the gates: u = S a, S = S w + u b' + v k', y = S r. Over a chunk, with D as in `delta`:

    (I - A) u = G' a S' + C v,   A[t, s] = D[t - 1, s] a[t] b[s],  C[t, s] = D[t - 1, s] a[t] k[s]
    y = G r S' + P u + Q v,      P[t, s] = D[t, s] r[t] b[s],      Q[t, s] = D[t, s] r[t] k[s]

Lightning attention has no corrections at all. The other recurrences are linear in each number of
their state: h = a h + x.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from . import cpu, is_off
from .cuda import Rule
from .delta import (
    chunk_size,
    decay_by_head,
    each_chunk,
    in_chunks,
    inverse,
    out_of_chunks,
    products_by_key,
    stretches,
)
from .replacement import Replacement, nn, put

PAYS = 8
"""Tokens from which these are faster than a loop."""
STRIDE = 16
"""Tokens of a stride. A scan takes these one by one, but all strides of a prompt at once."""
WIDE = 2**12
"""With more numbers in a state, a step takes longer than its launch, and the loop is fastest."""
BLOCK = 64
"""Tokens of a state-space layer whose states are held at once. Each has thousands of numbers."""

_stock: dict[str, Rule] = {}


def install() -> bool:
    """Make the models that are loaded use these functions; return true where one does."""
    if is_off() or mx.metal.is_available():
        return False
    used = [put(new, _stock, f"{new.module}'s layers run token by token") for new in REPLACED]
    return any(used)


def scan(a: mx.array, x: mx.array, h: mx.array) -> tuple[mx.array, mx.array]:
    """Give all h = a h + x over the second axis of a and x in float32, and the last one again."""
    batch, length = x.shape[:2]
    a, x, h = (each.astype(mx.float32) for each in (a, x, h))
    if h.size // batch > WIDE or length < 2 * STRIDE:
        states = []
        for t in range(length):
            h = _step(a[:, t], h, x[:, t])
            states.append(h)
        return mx.stack(states, axis=1), h
    count = -(-length // STRIDE)
    missing = count * STRIDE - length
    if missing:
        padding = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
        a, x = mx.pad(a, padding, constant_values=1), mx.pad(x, padding)
    a, x = (each.reshape(batch, count, STRIDE, *each.shape[2:]) for each in (a, x))
    alone, decay = [x[:, :, 0]], [a[:, :, 0]]
    for i in range(1, STRIDE):
        alone.append(_step(a[:, :, i], alone[-1], x[:, :, i]))
        decay.append(a[:, :, i] * decay[-1])
    before = []
    for n in range(count):
        before.append(h)
        h = _step(decay[-1][:, n], h, alone[-1][:, n])
    entering = mx.stack(before, axis=1)
    steps = [_step(d, entering, s) for d, s in zip(decay, alone, strict=True)]
    y = mx.stack(steps, axis=2).reshape(batch, count * STRIDE, *x.shape[3:])
    return y[:, :length], h


@functools.partial(mx.compile, shapeless=True)
def _step(a: mx.array, h: mx.array, x: mx.array) -> mx.array:
    return a * h + x


def _rnn_scan(x: mx.array, a: mx.array, h0: mx.array | None) -> tuple[mx.array, mx.array]:
    """Stand in for `recurrent_gemma.rnn_scan`."""
    if x.shape[1] < PAYS:
        return _stock["rnn_scan"](x, a, h0)
    y, h = scan(mx.broadcast_to(a, x.shape), x, mx.zeros_like(x[:, 0]) if h0 is None else h0)
    return y.astype(x.dtype), h.astype(x.dtype)


def state_space(
    x: mx.array,
    times: mx.array,
    rates: mx.array,
    writes: mx.array,
    reads: mx.array,
    h: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Compute Mamba's recurrence: y [B, T, D] and h [B, D, N].

    x and times are [B, T, D], rates are [D, N], writes and reads are [B, T, N]."""
    if h is None:
        h = mx.zeros((x.shape[0], *rates.shape), x.dtype)
    exp = cpu.exp if cpu.is_slow() else mx.exp
    parts, inputs = [], times * x
    for start in range(0, x.shape[1], BLOCK):
        part = slice(start, start + BLOCK)
        decay = exp((times[:, part, :, None] * rates).astype(mx.float32))
        written = inputs[:, part, :, None] * writes[:, part, None]
        states, h = scan(decay, written, h)
        parts.append((states @ reads[:, part, :, None].astype(mx.float32)).squeeze(-1))
    return mx.concatenate(parts, axis=1).astype(x.dtype), h.astype(x.dtype)


def _jamba_step(
    self: Any, x: mx.array, rates: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Stand in for `jamba.JambaMambaMixer.ssm_step`."""
    if x.shape[1] < PAYS:
        return _stock["ssm_step"](self, x, rates, state)
    rank, size = self.time_step_rank, self.ssm_state_size
    times, writes, reads = mx.split(self.x_proj(x), [rank, rank + size], axis=-1)
    times = nn.softplus(self.dt_proj(self.dt_layernorm(times)))
    y, h = state_space(x, times, rates, self.b_layernorm(writes), self.c_layernorm(reads), state)
    return y + self.D * x, h


def _mamba_sequence(
    self: Any, x: mx.array, conv_cache: mx.array | None, state_cache: mx.array | None
) -> Any:
    """Stand in for `mamba.MambaBlock._process_sequence`, which projects each token by itself."""
    if x.shape[1] < PAYS:
        return _stock["_process_sequence"](self, x, conv_cache, state_cache)
    taps, rank, size = self.conv_kernel_size, self.time_step_rank, self.ssm_state_size
    x, gate = mx.split(self.in_proj(x), 2, axis=-1)
    if conv_cache is None:
        conv_cache = mx.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype)
    seen = mx.concatenate([conv_cache, x], axis=1)
    x = nn.silu(self.conv1d(seen))
    parts = list(mx.split(self.x_proj(x), [rank, rank + size], axis=-1))
    if self.use_bcdt_rms:
        parts = [mx.fast.rms_norm(p, weight=None, eps=self.args.mixer_rms_eps) for p in parts]
    times, writes, reads = parts
    times = nn.softplus(self.dt_proj(times))
    y, h = state_space(x, times, -mx.exp(self.A_log), writes, reads, state_cache)
    y = self.out_proj(nn.silu(gate) * (y + self.D * x))
    return y, (seen[:, 1 - taps :], h)


def _gla(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, scale: float, h: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Stand in for `bailing_moe_linear.recurrent_gla`.

    q, k and v are [B, H, T, D], h is [B, H, Dk, Dv], and g is the logarithm of each head's gate."""
    batch, heads, length, key_dim = q.shape
    if length < PAYS:
        return _stock["recurrent_gla"](q, k, v, g, scale, h)
    size = chunk_size(length, key_dim, v.shape[-1], by_key=False)
    cut = functools.partial(in_chunks, size=size, key_heads=heads)
    gates = mx.broadcast_to(mx.exp(g.astype(mx.float32)), (batch, length, heads))
    q, k, values = (cut(x.swapaxes(1, 2)) for x in (q * scale, k, v))
    decayed = decay_by_head(q, k, cut(gates, padding=1))
    state = mx.zeros((batch, heads, key_dim, v.shape[-1])) if h is None else h.astype(mx.float32)
    state = state[None, :, :, None]
    y_alone = decayed.query_products @ values
    chunks = (values, y_alone, decayed.queries, decayed.whole, decayed.keys_left)
    outputs = []
    for values, y_alone, y_reads, whole, left in each_chunk(*chunks):
        outputs.append(mx.addmm(y_alone, y_reads, state))
        state = mx.addmm(state * whole, left.swapaxes(-1, -2), values)
    y = out_of_chunks(mx.concatenate(outputs), length).swapaxes(1, 2)
    return y.astype(v.dtype), state.reshape(batch, heads, key_dim, -1).astype(v.dtype)


def _wkv7(self: Any, r: mx.array, *others: Any) -> tuple[mx.array, mx.array]:
    """Stand in for `rwkv7.Rwkv7TimeMixing._wkv7`."""
    if r.shape[1] < PAYS:
        return _stock["_wkv7"](self, r, *others)
    return wkv7(r, *others)


def wkv7(
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Compute RWKV-7's recurrence: outputs [B, T, H, D] and the state [B, H, Dv, Dk].

    The other arrays are [B, T, H, D]. Gates are only multiplied, as in `delta`."""
    batch, length, heads, dim = r.shape
    h = mx.zeros((batch, heads, dim, dim), r.dtype) if state is None else state
    dtype = h.dtype
    h = h.astype(mx.float32).swapaxes(-1, -2)[None, :, :, None]
    outputs = []
    for part in stretches(length, heads * dim):
        y, h = _wkv7_stretch(
            r[:, part], w[:, part], k[:, part], v[:, part], a[:, part], b[:, part], h
        )
        outputs.append(y)
    h = mx.contiguous(h.swapaxes(-1, -2)).reshape(batch, heads, dim, dim)
    return mx.concatenate(outputs, axis=1), h.astype(dtype)


def _wkv7_stretch(
    r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, h: mx.array
) -> tuple[mx.array, mx.array]:
    length, heads, dim = r.shape[1:]
    dtype = r.dtype
    size = chunk_size(length, dim, dim, by_key=True)
    cut = functools.partial(in_chunks, size=size, key_heads=heads)
    r, k, v, a, b = (cut(x) for x in (r, k, v, a, b))
    w = cut(w, padding=1)
    products = products_by_key(
        mx.stack([a, r * w], axis=-3), mx.stack([b, k], axis=-3), w[..., None, :, :]
    )
    diagonal = mx.eye(size)
    from_u = (r * b).sum(axis=-1, keepdims=True) * diagonal
    from_v = (r * k).sum(axis=-1, keepdims=True) * diagonal
    reads_v = mx.zeros((size, size))
    for part in products:
        reads_v = reads_v + part[..., 0, :, 1, :]
        from_u = from_u + part[..., 1, :, 0, :]
        from_v = from_v + part[..., 1, :, 1, :]
    start = mx.cumprod(w, axis=-2)
    left = mx.cumprod(w, axis=-2, reverse=True, inclusive=False)
    solved = inverse([-part[..., 0, :, 0, :] for part in products])
    u_alone = solved @ (reads_v @ v)
    u_reads = solved @ (a * mx.cumprod(w, axis=-2, inclusive=False))
    y_alone = mx.addmm(from_v @ v, from_u, u_alone)
    y_reads = mx.addmm(r * start, from_u, u_reads)
    whole = start[..., -1, :, None]
    chunks = (u_alone, u_reads, y_alone, y_reads, whole, b * left, k * left, v)
    outputs = []
    for u_alone, u_reads, y_alone, y_reads, whole, b_left, k_left, v in each_chunk(*chunks):
        outputs.append(mx.addmm(y_alone, y_reads, h))
        u = mx.addmm(u_alone, u_reads, h)
        h = mx.addmm(h * whole, k_left.swapaxes(-1, -2), v)
        h = mx.addmm(h, b_left.swapaxes(-1, -2), u)
    return out_of_chunks(mx.concatenate(outputs), length).astype(dtype), h


REPLACED = (
    Replacement("recurrent_gemma", "rnn_scan", ("x", "a", "h0"), _rnn_scan),
    Replacement(
        "mamba",
        "MambaBlock._process_sequence",
        ("self", "x", "conv_cache", "state_cache"),
        _mamba_sequence,
    ),
    Replacement("jamba", "JambaMambaMixer.ssm_step", ("self", "x", "A", "state"), _jamba_step),
    Replacement("bailing_moe_linear", "recurrent_gla", ("q", "k", "v", "g", "scale", "h"), _gla),
    Replacement(
        "rwkv7",
        "Rwkv7TimeMixing._wkv7",
        ("self", "r", "w", "k", "v", "a", "b", "state"),
        _wkv7,
    ),
)
