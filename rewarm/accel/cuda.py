"""The gated delta rule token by token in one CUDA kernel (docs/accel.md).

The rows of a head's state do not meet: a block has a few of them in registers, eight lanes to a
row, and goes through all tokens. Between a token and the next stands one sum over a key, so the
matrix products of the chunked form have nothing to win, and where a prompt was cut changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from .launch import FLOATS, Launch, agree, is_cuda, kernel

Rule = Callable[..., tuple[mx.array, mx.array]]

LANES = 8  # that share a row of the state
ROWS = 16  # of one head in a block
CHECKED = 37  # tokens of the check before first use: more than one tile, the last one not full

HEADER = """
namespace rewarm {
template <typename N>
struct alignas(4 * sizeof(N)) Four {
    N at[4];
};

template <typename N>
__device__ Four<N> four(const N* from, bool aligned) {
    if (aligned) return *(const Four<N>*)from;
    return {from[0], from[1], from[2], from[3]};
}

template <typename N>
__device__ float4 floats(const Four<N>& x) {
    return make_float4(static_cast<float>(x.at[0]), static_cast<float>(x.at[1]),
                       static_cast<float>(x.at[2]), static_cast<float>(x.at[3]));
}

__device__ inline bool is_aligned(const void* at, int bytes) {
    return (unsigned long long)at % bytes == 0;
}

}  // namespace rewarm
"""

SOURCE = """
    using rewarm::Four, rewarm::floats, rewarm::four, rewarm::is_aligned;
    constexpr int THREADS = LANES * ROWS;
    constexpr int PARTS = Dk / 4;          // of a key, four numbers each
    constexpr int MINE = PARTS / LANES;    // of them a lane has every LANES-th: no bank conflicts
    constexpr int FIT = (BY_KEY ? 1024 : 2048) / Dk;
    constexpr int TILE = FIT < 32 ? FIT : 32;  // tokens staged at a time, in less than 48 KB
    constexpr int LOADS = (TILE * PARTS + THREADS - 1) / THREADS;
    constexpr int VALUES = (TILE * ROWS + THREADS - 1) / THREADS;
    constexpr int GATES = BY_KEY ? LOADS : 1;
    __shared__ float4 keys[2][TILE][PARTS];
    __shared__ float4 queries[2][TILE][PARTS];
    __shared__ float4 gates[2][TILE][BY_KEY ? PARTS : 1];
    __shared__ float4 facts[2][TILE];      // a token's gate, beta, and k q
    __shared__ float values[2][TILE][ROWS];

    const int length = k_shape[1], Hk = k_shape[2];
    const int Hv = v_shape[2], Dv = v_shape[3];
    const int me = threadIdx.x;
    const int lane = me % LANES;
    const int row = me / LANES;
    const int head = blockIdx.x / (Dv / ROWS);  // counted over all sequences
    const int first_row = (blockIdx.x % (Dv / ROWS)) * ROWS;
    const int value_head = head % Hv;
    const int key_head = value_head / (Hv / Hk);
    const long long first_token = (long long)(head / Hv) * length;

    const bool aligned = is_aligned(q, sizeof(Four<T>)) && is_aligned(k, sizeof(Four<T>)) &&
                         is_aligned(state_in, 16) && (!BY_KEY || is_aligned(g, sizeof(Four<G>)));

    float4 state[MINE];
    const long long at = ((long long)head * Dv + first_row + row) * Dk + lane * 4;
    #pragma unroll
    for (int i = 0; i < MINE; ++i) state[i] = floats(four(state_in + at + i * LANES * 4, aligned));

    // What is loaded for the next tile waits here as it came: to convert it is to wait for it.
    Four<T> next_keys[LOADS], next_queries[LOADS];
    Four<G> next_gates[GATES];
    V next_values[VALUES];
    G next_gate = {};
    W next_write = {};
    bool next_counts = true;

    auto load = [&](int begin) {
        const int count = length - begin < TILE ? length - begin : TILE;
        #pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int token = (i * THREADS + me) / PARTS, part = (i * THREADS + me) % PARTS;
            if (token < count) {
                const long long t = first_token + begin + token;
                next_keys[i] = four(k + (t * Hk + key_head) * Dk + part * 4, aligned);
                next_queries[i] = four(q + (t * Hk + key_head) * Dk + part * 4, aligned);
                if (BY_KEY)
                    next_gates[BY_KEY ? i : 0] =
                        four(g + (t * Hv + value_head) * Dk + part * 4, aligned);
            }
        }
        #pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int token = (i * THREADS + me) / ROWS, of = (i * THREADS + me) % ROWS;
            if (token < count)
                next_values[i] =
                    v[((first_token + begin + token) * Hv + value_head) * Dv + first_row + of];
        }
        if (me < count) {
            const long long t = first_token + begin + me;
            next_write = beta[t * Hv + value_head];
            if (!BY_KEY) next_gate = g[t * Hv + value_head];
            next_counts = COUNTS;
        }
    };

    auto stage = [&](int to, int count) {
        #pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int token = (i * THREADS + me) / PARTS, part = (i * THREADS + me) % PARTS;
            if (token < count) {
                keys[to][token][part] = floats(next_keys[i]);
                queries[to][token][part] = floats(next_queries[i]);
                if (BY_KEY)
                    gates[to][token][BY_KEY ? part : 0] = floats(next_gates[BY_KEY ? i : 0]);
            }
        }
        #pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int token = (i * THREADS + me) / ROWS, of = (i * THREADS + me) % ROWS;
            if (token < count) values[to][token][of] = static_cast<float>(next_values[i]);
        }
        if (me < count) {  // a masked token neither decays nor writes
            facts[to][me].x = BY_KEY || !next_counts ? 1.0f : static_cast<float>(next_gate);
            facts[to][me].y = next_counts ? static_cast<float>(next_write) : 0.0f;
            facts[to][me].w = next_counts ? 1.0f : 0.0f;
        }
    };

    load(0);
    for (int begin = 0, now = 0; begin < length; begin += TILE, now ^= 1) {
        const int count = length - begin < TILE ? length - begin : TILE;
        stage(now, count);
        __syncthreads();  // and nobody reads the other half any more: the next stage may write it
        if (begin + TILE < length) load(begin + TILE);

        for (int first = 0; first < count; first += ROWS) {
            const int token = first + row;
            float sum = 0.0f;
            if (token < count) {
                #pragma unroll
                for (int i = 0; i < MINE; ++i) {
                    const float4 key = keys[now][token][i * LANES + lane];
                    const float4 query = queries[now][token][i * LANES + lane];
                    sum += key.x * query.x + key.y * query.y + key.z * query.z + key.w * query.w;
                }
            }
            #pragma unroll
            for (int away = 1; away < LANES; away *= 2)
                sum += __shfl_xor_sync(0xffffffff, sum, away);
            if (lane == 0 && token < count) facts[now][token].z = sum;
        }
        __syncthreads();

        T* out = y + ((first_token + begin) * Hv + value_head) * Dv + first_row + row;
        #pragma unroll 4
        for (int t = 0; t < count; ++t) {
            const float4 fact = facts[now][t];
            float4 held = make_float4(0.0f, 0.0f, 0.0f, 0.0f), read = held;
            float4 key[MINE];
            #pragma unroll
            for (int i = 0; i < MINE; ++i) {
                key[i] = keys[now][t][i * LANES + lane];
                const float4 query = queries[now][t][i * LANES + lane];
                float4 decay = make_float4(fact.x, fact.x, fact.x, fact.x);
                if (BY_KEY && (!MASKED || fact.w != 0.0f))
                    decay = gates[now][t][BY_KEY ? i * LANES + lane : 0];
                state[i].x *= decay.x; state[i].y *= decay.y;
                state[i].z *= decay.z; state[i].w *= decay.w;
                held.x += state[i].x * key[i].x; read.x += state[i].x * query.x;
                held.y += state[i].y * key[i].y; read.y += state[i].y * query.y;
                held.z += state[i].z * key[i].z; read.z += state[i].z * query.z;
                held.w += state[i].w * key[i].w; read.w += state[i].w * query.w;
            }
            // y = S q after the write is what q reads before it, and the write's part: both sums
            // go through the lanes at once, and the next token waits for one of them only.
            float was = (held.x + held.y) + (held.z + held.w);
            float sum = (read.x + read.y) + (read.z + read.w);
            #pragma unroll
            for (int away = 1; away < LANES; away *= 2) {
                was += __shfl_xor_sync(0xffffffff, was, away);
                sum += __shfl_xor_sync(0xffffffff, sum, away);
            }
            const float delta = (values[now][t][row] - was) * fact.y;
            #pragma unroll
            for (int i = 0; i < MINE; ++i) {
                state[i].x += key[i].x * delta; state[i].y += key[i].y * delta;
                state[i].z += key[i].z * delta; state[i].w += key[i].w * delta;
            }
            if (lane == 0) *out = static_cast<T>(sum + delta * fact.z);
            out += Hv * Dv;
        }
    }
    #pragma unroll
    for (int i = 0; i < MINE; ++i) *(float4*)(state_out + at + i * LANES * 4) = state[i];
"""


class Kind(NamedTuple):
    """What one compiled kernel is for."""

    queries: mx.Dtype
    values: mx.Dtype
    gates: mx.Dtype
    writes: mx.Dtype
    key_dim: int
    by_key: bool
    masked: bool


def kind_of(q: mx.array, v: mx.array, g: mx.array, beta: mx.array, mask: mx.array | None) -> Kind:
    sizes = (q.shape[-1], g.ndim == 4, mask is not None)
    return Kind(q.dtype, v.dtype, g.dtype, beta.dtype, *sizes)


def fits(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> bool:
    """Whether the kernel knows such shapes, and there is a device for it."""
    return is_cuda() and _knows(q, k, v, g, beta)


def _knows(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> bool:
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    return (
        key_dim % (4 * LANES) == 0
        and key_dim <= 256  # the state is in registers
        and value_dim % ROWS == 0
        and q.dtype == k.dtype
        and all(x.dtype in FLOATS for x in (q, v, g, beta))
    )


@functools.cache
def agrees(chunked: Rule, kind: Kind) -> bool:
    """Whether the kernel gives what the chunked form does for a few tokens."""
    given = _sample(kind)
    return agree(
        "gated delta layers run in chunks", lambda: by_token(*given), lambda: chunked(*given)
    )


def _sample(kind: Kind) -> tuple[Any, ...]:
    """Two sequences, two heads to a key."""
    shape, heads = (2, CHECKED, 2, kind.key_dim), (2, CHECKED, 4)
    keys = [mx.random.key(i) for i in range(6)]
    q, k = (mx.random.normal(shape, key=key) * kind.key_dim**-0.5 for key in keys[:2])
    v = mx.random.normal((*heads, 2 * ROWS), key=keys[2])
    g = mx.random.uniform(0.5, 1, (*heads, *[kind.key_dim] * kind.by_key), key=keys[3])
    beta = mx.random.uniform(0, 1, heads, key=keys[4])
    state = mx.random.normal((2, 4, 2 * ROWS, kind.key_dim), key=keys[5])
    mask = None
    if kind.masked:  # the outputs of masked tokens mean nothing, but a query of 0 reads 0
        mask = mx.arange(CHECKED)[None] >= mx.array([[0], [9]])
        q = mx.where(mask[..., None, None], q, 0)
    dtypes = (kind.queries, kind.queries, kind.values, kind.gates, kind.writes)
    arrays = (x.astype(dtype) for x, dtype in zip((q, k, v, g, beta), dtypes, strict=True))
    return *arrays, state, mask


def by_token(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As `delta.chunked`, for shapes that fit."""
    batch, length, heads, value_dim = v.shape
    if state is None:
        state = mx.zeros((batch, heads, value_dim, q.shape[-1]))
    given = [q, k, v, g, beta, state.astype(mx.float32)]
    if mask is not None:
        given.append(mx.broadcast_to(mask, (batch, length)))
    y, state = cast("Sequence[mx.array]", _launched(*given))
    return y, state


@mx.custom_function
def _launched(*given: mx.array) -> Sequence[mx.array]:
    q, _, v, g, beta, state = given[:6]
    # MLX knows a compiled kernel by its name and these: what the source depends on must be here.
    template = [
        *zip("TVGW", (q.dtype, v.dtype, g.dtype, beta.dtype), strict=True),
        ("Dk", q.shape[-1]),
        ("BY_KEY", g.ndim == 4),
        ("LANES", LANES),
        ("ROWS", ROWS),
    ]
    found: Sequence[mx.array] = _kernel(masked=len(given) > 6)(
        inputs=list(given),
        template=template,
        grid=(v.shape[0] * v.shape[2] * v.shape[3] * LANES, 1, 1),
        threadgroup=(ROWS * LANES, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, mx.float32],
    )
    return found


@_launched.vjp
def _gradients(
    primals: Sequence[mx.array], cotangents: Sequence[mx.array], _: Sequence[mx.array]
) -> list[mx.array]:
    """Those of the chunked form: mlx-lm trains through this function."""
    from .delta import chunked

    masks = list(primals[6:])

    def rule(*given: mx.array) -> list[mx.array]:
        return list(chunked(*given, *masks))

    _, found = mx.vjp(rule, list(primals[:6]), list(cotangents))
    return [*found, *map(mx.zeros_like, masks)]


@functools.cache
def _kernel(masked: bool) -> Launch:
    counts = "mask[t]" if masked else "true"
    source = f"constexpr bool MASKED = {str(masked).lower()};" + SOURCE.replace("COUNTS", counts)
    inputs = ["q", "k", "v", "g", "beta", "state_in", *["mask"] * masked]
    return kernel("gated_delta", inputs, ["y", "state_out"], source, HEADER)
