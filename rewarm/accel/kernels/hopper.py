"""The CUDA source of Hopper's matrix products (wgmma), by four warps, of shared memory.

A matrix lies there in blocks of 64 columns. In a block, eight rows take 1,024 bytes one after the
other, and the 16 bytes at place p of row r lie at p ^ (r % 8).
"""

from __future__ import annotations

BLOCK = """
// What lies there, for the unit that multiplies: the first number's address and the way to the next
// 64 columns and to the next eight rows, in 16 bytes each.
__device__ inline unsigned long long described(const void* at, int columns, int rows) {
    const unsigned long long from = (unsigned)__cvta_generic_to_shared(at);
    return (from & 0x3ffff) >> 4 | (unsigned long long)columns << 16 |
           (unsigned long long)rows << 32 | 1ull << 62;
}

// 16 columns of rows, of a matrix of so many rows.
__device__ inline unsigned long long rows_of(const uint4* at, int rows, int first, int step) {
    return described(at + (step / 4 * rows + first) * 8 + step % 4 * 2, 1, 64);
}

// All columns of 16 rows.
__device__ inline unsigned long long columns_of(const uint4* at, int rows, int step) {
    return described(at + step * 16 * 8, rows * 8, 64);
}

// What threads wrote, or copied, into shared memory is seen by that unit.
__device__ inline void written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Kernels for other GPUs name it, with tiles of other sizes, and never call it.
template <int N, typename T>
__device__ void score(float (&)[N][4], unsigned long long, unsigned long long, int, T) {}

// Who writes these registers does so before, and who reads them after: the compiler does not know
// that the unit has them meanwhile.
template <int N>
__device__ void hold(float (&x)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(x[i][j]) :: "memory");
}

template <int N>
__device__ void hold(unsigned (&x)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(x[i][j]) :: "memory");
}

__device__ inline void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
"""


def _sums(columns: int) -> tuple[str, str]:
    """64 rows' sums in the registers of four warps: their places in the text, and what they are."""
    count = columns // 2
    places = ", ".join(f"%{i}" for i in range(count))
    return places, ", ".join(f'"+f"(sum[{i // 4}][{i % 4}])' for i in range(count))


def _score(kind: str, name: str, keys: int) -> str:
    places, sums = _sums(keys)
    n = keys // 2
    return f"""
__device__ inline void score(float (&sum)[{keys // 8}][4], unsigned long long queries,
                             unsigned long long keys, int more, {kind}) {{
    asm volatile("{{ .reg .pred more; setp.ne.b32 more, %{n + 2}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{name}.{name} "
                 "{{{places}}}, %{n}, %{n + 1}, more, 1, 1, 0, 0; }}"
                 : {sums} : "l"(queries), "l"(keys), "r"(more));
}}
"""


def _weigh(kind: str, name: str, dim: int) -> str:
    places, sums = _sums(dim)
    n = dim // 2
    return f"""
__device__ inline void weigh(float (&sum)[{dim // 8}][4], const unsigned (&weights)[4],
                             unsigned long long values, {kind}) {{
    asm volatile("{{ .reg .pred more; setp.ne.b32 more, 1, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{dim}k16.f32.{name}.{name} {{{places}}}, "
                 "{{%{n}, %{n + 1}, %{n + 2}, %{n + 3}}}, %{n + 4}, more, 1, 1, 1; }}"
                 : {sums} : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]),
                   "l"(values));
}}
"""


def header(keys: int, dims: tuple[int, ...]) -> str:
    """Make the functions `score`, queries times so many keys, and `weigh`, which adds weights times
    values of heads of these sizes."""
    kinds = (("__nv_bfloat16", "bf16"), ("__half", "f16"))
    made = [_score(*kind, keys) for kind in kinds]
    made += [_weigh(*kind, dim) for kind in kinds for dim in dims]
    return "namespace rewarm::hopper {" + BLOCK + "".join(made) + "}  // namespace rewarm::hopper\n"
