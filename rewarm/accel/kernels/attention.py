"""The CUDA source of attention, which `cuda_attention` launches (docs/accel.md)."""

from __future__ import annotations

from . import hopper

HEAD_DIMS = (64, 128, 256)

HEADER = """
namespace rewarm {

__device__ inline unsigned in_shared(const void* at) {
    return (unsigned)__cvta_generic_to_shared(at);
}

// 16 bytes, or as many zeros.
__device__ inline void copy_later(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(in_shared(to)), "l"(from), "r"(there ? 16 : 0));
}

__device__ inline void end_of_copies() { asm volatile("cp.async.commit_group;"); }

__device__ inline void all_but_last_copies() { asm volatile("cp.async.wait_group 1;"); }

__device__ inline void four_tiles(unsigned (&to)[4], const void* from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(in_shared(from)));
}

__device__ inline void four_turned_tiles(unsigned (&to)[4], const void* from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(in_shared(from)));
}

// A product of 16 x 16 and 16 x 8 numbers is added to 16 x 8 floats.
__device__ inline void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline unsigned pair(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *(const unsigned*)&both;
}

__device__ inline unsigned pair(float low, float high, __half) {
    const __half2 both = __floats2half2_rn(low, high);
    return *(const unsigned*)&both;
}

}  // namespace rewarm
""" + hopper.header(keys=64, dims=HEAD_DIMS)

ATTENTION = """
    using rewarm::all_but_last_copies, rewarm::copy_later, rewarm::end_of_copies;
    using rewarm::four_tiles, rewarm::four_turned_tiles, rewarm::multiply, rewarm::pair;
    namespace hopper = rewarm::hopper;
    const float nothing_yet = __int_as_float(0xff800000);  // minus infinity
    constexpr bool SMALL = D > 128 && !HOPPER;
    constexpr int WARPS = SMALL ? 4 : 8;
    constexpr int ROWS = 16 * WARPS;      // queries of a block, of all heads that share a key
    constexpr int KEYS = SMALL ? 32 : 64;  // in shared memory at a time, twice
    constexpr int PARTS = D / 8;          // of a row, 16 bytes each
    constexpr int THREADS = 32 * WARPS;
    extern __shared__ unsigned char shared[];
    uint4* const queries = (uint4*)(((unsigned long long)shared + 1023) / 1024 * 1024);
    uint4* const keys = queries + ROWS * PARTS;
    uint4* const values = keys + 2 * KEYS * PARTS;

    const int Hq = q_shape[1], L = q_shape[2], Hk = k_shape[1], length = k_shape[2];
    const int group = Hq / Hk, rows = group * L;
    const int me = threadIdx.x, warp = me / 32, lane = me % 32;
    const int batch = blockIdx.y / Hk, key_head = blockIdx.y % Hk;
    const int first_row = blockIdx.x * ROWS;

    // Its keys: a share of all, and of these no more than its last query may see.
    const int tiles = (length + KEYS - 1) / KEYS;
    const int begin = (int)((long long)tiles * blockIdx.z / gridDim.z) * KEYS;
    const int its_end = (int)((long long)tiles * (blockIdx.z + 1) / gridDim.z) * KEYS;
    const int last_row = min(first_row + ROWS, rows) - 1;
    const int end = min(its_end, CAUSAL ? length - L + last_row / group + 1 : length);

    // Part p of row r lies at place p ^ (r & 7): eight rows of a column are in eight banks.
    // Hopper's products want eight parts of all rows after one another.
    auto place = [](int rows, int row, int part) {
        if (HOPPER) return (part / 8 * rows + row) * 8 + (part % 8 ^ row % 8);
        return row * PARTS + (part ^ (row & 7));
    };

    auto fetched = [](const T* from, long long step) {
        uint4 found;
        #pragma unroll
        for (int i = 0; i < 8; ++i) ((T*)&found)[i] = from[i * step];
        return found;
    };
    for (int i = me; i < ROWS * PARTS; i += THREADS) {
        const int row = first_row + i / PARTS, part = i % PARTS;
        uint4 found = make_uint4(0, 0, 0, 0);
        if (row < rows)
            found = fetched(q + batch * q_strides[0] + row / group * q_strides[2] +
                                (key_head * group + row % group) * q_strides[1] +
                                part * 8 * q_strides[3], q_strides[3]);
        queries[place(ROWS, i / PARTS, part)] = found;
    }

    const T* const k_at = k + batch * k_strides[0] + key_head * k_strides[1];
    const T* const v_at = v + batch * v_strides[0] + key_head * v_strides[1];
    const bool plain = k_strides[3] == 1 && v_strides[3] == 1 && k_strides[2] % 8 == 0 &&
                       v_strides[2] % 8 == 0 && (unsigned long long)k_at % 16 == 0 &&
                       (unsigned long long)v_at % 16 == 0;
    auto load = [&](int from, int stage) {
        uint4* const to_k = keys + stage * KEYS * PARTS;
        uint4* const to_v = values + stage * KEYS * PARTS;
        for (int i = me; i < KEYS * PARTS; i += THREADS) {
            const int row = i / PARTS, part = i % PARTS;
            const bool there = from + row < length;
            const long long at = there ? from + row : 0;
            const T* const its_k = k_at + at * k_strides[2] + part * 8 * k_strides[3];
            const T* const its_v = v_at + at * v_strides[2] + part * 8 * v_strides[3];
            if (plain) {
                copy_later(to_k + place(KEYS, row, part), its_k, there);
                copy_later(to_v + place(KEYS, row, part), its_v, there);
            } else {
                const uint4 nothing = make_uint4(0, 0, 0, 0);
                to_k[place(KEYS, row, part)] = there ? fetched(its_k, k_strides[3]) : nothing;
                to_v[place(KEYS, row, part)] = there ? fetched(its_v, v_strides[3]) : nothing;
            }
        }
    };

    // A thread has two rows of its warp's 16, eight apart, and every fourth pair of columns.
    const int top = first_row + warp * 16 + lane / 4;
    const bool works = first_row + (HOPPER ? warp / 4 * 64 : warp * 16) < rows;
    int seen[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = min(top + 8 * i, rows - 1);
        seen[i] = CAUSAL ? length - L + row / group : length - 1;
    }
    const int its_first = min(first_row + warp * 16, rows - 1);
    const int all_see = CAUSAL ? length - L + its_first / group : length - 1;
    const float turned = facts[0] * 1.44269504f;  // powers of 2 from here on
    float most[2] = {nothing_yet, nothing_yet}, total[2] = {0, 0};
    float sums[D / 8][4];
    #pragma unroll
    for (int i = 0; i < D / 8; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = 0;

    if (begin < end) load(begin, 0);
    end_of_copies();
    for (int from = begin, stage = 0; from < end; from += KEYS, stage ^= 1) {
        if (from + KEYS < end) load(from + KEYS, stage ^ 1);
        end_of_copies();
        all_but_last_copies();
        if (HOPPER) hopper::written();
        __syncthreads();
        if (works) {
            const uint4* const its_keys = keys + stage * KEYS * PARTS;
            const uint4* const its_values = values + stage * KEYS * PARTS;
            float scores[KEYS / 8][4];
            if (HOPPER) {
                hopper::begin();
                #pragma unroll
                for (int step = 0; step < D / 16; ++step)
                    hopper::score(scores, hopper::rows_of(queries, ROWS, warp / 4 * 64, step),
                                  hopper::rows_of(its_keys, KEYS, 0, step), step > 0, T());
                hopper::end();
                hopper::hold(scores);
            } else {
                #pragma unroll
                for (int i = 0; i < KEYS / 8; ++i)
                    #pragma unroll
                    for (int j = 0; j < 4; ++j) scores[i][j] = 0;
                #pragma unroll
                for (int step = 0; step < D / 16; ++step) {
                    unsigned a[4];
                    four_tiles(a, queries + place(ROWS, warp * 16 + lane % 16,
                                                  step * 2 + lane / 16));
                    #pragma unroll
                    for (int i = 0; i < KEYS / 16; ++i) {
                        unsigned b[4];
                        four_tiles(b, its_keys + place(KEYS, i * 16 + lane / 16 * 8 + lane % 8,
                                                       step * 2 + lane / 8 % 2));
                        multiply(scores[2 * i], a, b[0], b[1], T());
                        multiply(scores[2 * i + 1], a, b[2], b[3], T());
                    }
                }
            }
            if (from + KEYS - 1 > all_see) {
                #pragma unroll
                for (int i = 0; i < KEYS / 8; ++i)
                    #pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (from + i * 8 + lane % 4 * 2 + j % 2 > seen[j / 2])
                            scores[i][j] = nothing_yet;
            }
            float shrunk[2];
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                float now = most[r];
                #pragma unroll
                for (int i = 0; i < KEYS / 8; ++i)
                    now = fmaxf(now, fmaxf(scores[i][2 * r], scores[i][2 * r + 1]));
                now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, 1));
                now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, 2));
                const float base = now > nothing_yet ? now * turned : 0;
                shrunk[r] = exp2f(most[r] * turned - base);
                most[r] = now;
                float sum = 0;
                #pragma unroll
                for (int i = 0; i < KEYS / 8; ++i)
                    #pragma unroll
                    for (int j = 2 * r; j < 2 * r + 2; ++j) {
                        scores[i][j] = exp2f(scores[i][j] * turned - base);
                        sum += scores[i][j];
                    }
                total[r] = total[r] * shrunk[r] + sum;
            }
            #pragma unroll
            for (int i = 0; i < D / 8; ++i)
                #pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] *= shrunk[j / 2];
            unsigned weights[KEYS / 16][4];
            #pragma unroll
            for (int step = 0; step < KEYS / 16; ++step)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* const two = scores[2 * step + i / 2] + i % 2 * 2;
                    weights[step][i] = pair(two[0], two[1], T());
                }
            if (HOPPER) {
                hopper::hold(sums);
                hopper::hold(weights);
                hopper::begin();
                #pragma unroll
                for (int step = 0; step < KEYS / 16; ++step)
                    hopper::weigh(sums, weights[step], hopper::columns_of(its_values, KEYS, step),
                                  T());
                hopper::end();
                hopper::hold(sums);
            } else {
                #pragma unroll
                for (int step = 0; step < KEYS / 16; ++step)
                    #pragma unroll
                    for (int i = 0; i < D / 16; ++i) {
                        unsigned b[4];
                        four_turned_tiles(b, its_values + place(KEYS, step * 16 + lane % 16,
                                                                i * 2 + lane / 16));
                        multiply(sums[2 * i], weights[step], b[0], b[1], T());
                        multiply(sums[2 * i + 1], weights[step], b[2], b[3], T());
                    }
            }
        }
        __syncthreads();
    }
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        total[r] += __shfl_xor_sync(0xffffffff, total[r], 1);
        total[r] += __shfl_xor_sync(0xffffffff, total[r], 2);
        const int row = top + 8 * r;
        if (row >= rows) continue;
        const long long at = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * rows + row;
        if (lane % 4 == 0) {
            stats[2 * at] = most[r] * turned;
            stats[2 * at + 1] = total[r];
        }
        #pragma unroll
        for (int i = 0; i < D / 8; ++i)
            *(float2*)(partial + at * D + i * 8 + lane % 4 * 2) =
                make_float2(sums[i][2 * r], sums[i][2 * r + 1]);
    }
"""
"""Scores, weights and sums stay in registers. A block writes the weighted sum of its share of the
values, the largest score and the sum of the weights."""

TOGETHER = """
    const int splits = stats_shape[0], Hk = stats_shape[2], rows = stats_shape[3];
    const int heads = stats_shape[1] * Hk, group = (int)facts[1];
    const int part = threadIdx.x % (D / 4);
    const int row = blockIdx.x * (256 / (D / 4)) + threadIdx.x / (D / 4);
    if (row >= rows) return;
    float most = __int_as_float(0xff800000);  // minus infinity
    for (int s = 0; s < splits; ++s)
        most = fmaxf(most, stats[2 * (((long long)s * heads + blockIdx.y) * rows + row)]);
    float total = 0;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int s = 0; s < splits; ++s) {
        const long long at = ((long long)s * heads + blockIdx.y) * rows + row;
        const float weight = exp2f(stats[2 * at] - most);
        const float4 its = *(const float4*)(partial + at * D + part * 4);
        total += weight * stats[2 * at + 1];
        sum.x += weight * its.x; sum.y += weight * its.y;
        sum.z += weight * its.z; sum.w += weight * its.w;
    }
    const int L = rows / group;
    const long long token = (long long)(blockIdx.y / Hk) * L + row / group;
    const int head = blockIdx.y % Hk * group + row % group;
    T* const to = y + (token * Hk * group + head) * D + part * 4;
    to[0] = static_cast<T>(sum.x / total); to[1] = static_cast<T>(sum.y / total);
    to[2] = static_cast<T>(sum.z / total); to[3] = static_cast<T>(sum.w / total);
"""
