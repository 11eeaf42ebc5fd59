"""The CUDA source of the gated delta rule (docs/accel.md); `cuda` launches it.

The rows of a head's state do not depend on one another. A block holds some of them in the registers
of one half of its threads, which go through all tokens, four at a time. The four read the state
before them, and what earlier ones of the four wrote. So the sums over keys are taken for all four
at once. The other half of the threads loads the tokens, and computes how each four of them act on
one another.
"""

HEADER = """
namespace rewarm {
// Four numbers as they came, in whole words: to take them apart is to wait for them.
template <typename N>
struct alignas(4 * sizeof(N)) Four {
    unsigned words[sizeof(N)];
};

template <typename N>
__device__ Four<N> four(const N* from, bool aligned) {
    if (aligned) return *(const Four<N>*)from;
    Four<N> found;
    #pragma unroll
    for (int i = 0; i < sizeof(N); ++i) {
        if (sizeof(N) == 4) {
            found.words[i] = ((const unsigned*)from)[i];
        } else {
            const unsigned low = ((const unsigned short*)from)[i * 2];
            const unsigned high = ((const unsigned short*)from)[i * 2 + 1];
            found.words[i] = low | high << 16;
        }
    }
    return found;
}

template <typename N>
__device__ float number(const Four<N>& from, int i) {
    if (sizeof(N) == 4) return __uint_as_float(from.words[i]);
    const unsigned short half = from.words[i / 2] >> i % 2 * 16;
    return static_cast<float>(*(const N*)&half);
}

template <typename N>
__device__ float4 floats(const Four<N>& x) {
    return make_float4(number(x, 0), number(x, 1), number(x, 2), number(x, 3));
}

__device__ inline bool is_aligned(const void* at, int bytes) {
    return (unsigned long long)at % bytes == 0;
}

__device__ inline float4 operator*(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

__device__ inline float dot(float4 a, float4 b, float sum) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
}

__device__ inline void add(float4& to, float4 x, float times) {
    to.x = fmaf(x.x, times, to.x);
    to.y = fmaf(x.y, times, to.y);
    to.z = fmaf(x.z, times, to.z);
    to.w = fmaf(x.w, times, to.w);
}

__device__ inline float at(float4 x, int i) {
    return i < 2 ? (i == 0 ? x.x : x.y) : i == 2 ? x.z : x.w;
}

// Sums over the 2 * AWAY lanes that differ in their last bits. A lane is left with N / (2 * AWAY)
// of them, at least one: those whose index begins with the lane's bits.
template <int N, int AWAY>
__device__ void sum_apart(float (&x)[N]) {
    int left = N;
    #pragma unroll
    for (int away = AWAY; away > 0; away /= 2) {
        if (left > 1) {
            left /= 2;
            const bool upper = threadIdx.x & away;
            #pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                if (i < left) {
                    const float mine = upper ? x[i + left] : x[i];
                    const float other = upper ? x[i] : x[i + left];
                    x[i] = mine + __shfl_xor_sync(0xffffffff, other, away);
                }
            }
        } else {
            x[0] += __shfl_xor_sync(0xffffffff, x[0], away);
        }
    }
}

// Of one half of the block's threads.
__device__ inline void wait_for_the_half(int threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// What four tokens are to one another. A token's write, from the state S before the four, is
// writes * v - reads * S k, and less for each that wrote before it: keys * its write.
struct Met {
    float4 writes;      // beta
    float4 reads;       // beta, and the gates up to the token
    float4 left;        // the gates after it
    float decay[4];     // those up to it
    float4 keys[4];     // beta k[t] k[s] for s < t, and the gates between
    float4 queries[4];  // q[t] k[s] for s <= t, and the gates between; else 0
};
}  // namespace rewarm
"""

# Where each key has its gate, keys and queries are staged with the gates from the start of the four
# multiplied in, and once more keys with those to the end; Met then knows of no gates.
SOURCE = """
    using rewarm::Four, rewarm::four, rewarm::floats, rewarm::is_aligned, rewarm::operator*;
    using rewarm::dot, rewarm::add, rewarm::at, rewarm::sum_apart, rewarm::Met;
    constexpr int PARTS = Dk / 4;                // of a key, four numbers each
    constexpr int MINE = PARTS / LANES;          // of them a lane has every LANES-th
    constexpr int APART = LANES / ROWS;          // lanes for each row where sums are put together
    constexpr int BLOCK = HALF / LANES * ROWS;   // rows of the state
    constexpr int FIT = (BY_KEY ? 1024 : 2048) / Dk / 4 * 4;
    constexpr int TILE = FIT < 32 ? FIT : 32;    // tokens staged at a time, in less than 48 KB
    constexpr int STEPS = TILE / 4;
    constexpr int LOADS = (TILE * PARTS + HALF - 1) / HALF;
    constexpr int VALUES = (STEPS * BLOCK + HALF - 1) / HALF;
    constexpr int GATES = BY_KEY ? LOADS : 1;
    constexpr unsigned ALL = 0xffffffff;
    __shared__ float4 keys[2][TILE][PARTS];
    __shared__ float4 queries[2][TILE][PARTS];
    __shared__ float4 gates[2][BY_KEY ? TILE : 1][PARTS];    // then keys for the end of the four
    __shared__ float4 wholes[2][BY_KEY ? STEPS : 1][PARTS];  // all gates of the four
    __shared__ float4 values[2][STEPS][BLOCK];
    __shared__ float4 decays[2][STEPS], writes[2][STEPS];
    __shared__ Met met[2][STEPS];

    const int length = k_shape[1], Hk = k_shape[2];
    const int Hv = v_shape[2], Dv = v_shape[3];
    const int head = blockIdx.x / (Dv / BLOCK);  // counted over all sequences
    const int first_row = (blockIdx.x % (Dv / BLOCK)) * BLOCK;
    const int value_head = head % Hv;
    const int key_head = value_head / (Hv / Hk);
    const long long first_token = (long long)(head / Hv) * length;
    const int tiles = (length + TILE - 1) / TILE;
    const bool aligned = is_aligned(q, sizeof(Four<T>)) && is_aligned(k, sizeof(Four<T>)) &&
                         is_aligned(state_in, 16) && (!BY_KEY || is_aligned(g, sizeof(Four<G>)));

    if (threadIdx.x >= HALF) {
        const int me = threadIdx.x - HALF;
        // What is loaded for the next tile waits here, as it came. Of tokens that are not there, or
        // masked, all is 0 and the gate is 1: they change nothing.
        Four<T> next_keys[LOADS], next_queries[LOADS];
        Four<G> next_gates[GATES];
        bool next_decays[GATES];
        V next_values[VALUES][4];
        G next_gate = {};
        W next_write = {};
        bool next_counts = false;

        auto load = [&](int tile) {
            const long long begin = first_token + (long long)tile * TILE;
            const int left = length - tile * TILE, count = left < TILE ? left : TILE;
            const T* keys_from = k + (begin * Hk + key_head) * Dk;
            const T* queries_from = q + (begin * Hk + key_head) * Dk;
            const V* values_from = v + (begin * Hv + value_head) * Dv + first_row;
            #pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int token = (i * HALF + me) / PARTS, part = (i * HALF + me) % PARTS;
                const long long t = begin + token;
                next_keys[i] = next_queries[i] = Four<T>{};
                if (BY_KEY) next_decays[BY_KEY ? i : 0] = false;
                if (token < count && COUNTS) {
                    next_keys[i] = four(keys_from + token * Hk * Dk + part * 4, aligned);
                    next_queries[i] = four(queries_from + token * Hk * Dk + part * 4, aligned);
                    if (BY_KEY) {
                        next_decays[BY_KEY ? i : 0] = true;
                        next_gates[BY_KEY ? i : 0] =
                            four(g + (t * Hv + value_head) * Dk + part * 4, aligned);
                    }
                }
            }
            #pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                const int step = (i * HALF + me) / BLOCK, row = (i * HALF + me) % BLOCK;
                #pragma unroll
                for (int token = 0; token < 4; ++token) {
                    const long long t = begin + step * 4 + token;
                    next_values[i][token] = static_cast<V>(0.0f);
                    if (step * 4 + token < count && COUNTS)
                        next_values[i][token] = values_from[(step * 4 + token) * Hv * Dv + row];
                }
            }
            const long long t = begin + me;
            next_counts = me < count && COUNTS;
            if (next_counts) {
                next_write = beta[t * Hv + value_head];
                if (!BY_KEY) next_gate = g[t * Hv + value_head];
            }
        };

        auto stage = [&](int to) {
            #pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int token = (i * HALF + me) / PARTS, part = (i * HALF + me) % PARTS;
                if (token < TILE) {
                    keys[to][token][part] = floats(next_keys[i]);
                    queries[to][token][part] = floats(next_queries[i]);
                    if (BY_KEY)
                        gates[to][BY_KEY ? token : 0][part] =
                            next_decays[BY_KEY ? i : 0] ? floats(next_gates[BY_KEY ? i : 0])
                                                        : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
                }
            }
            #pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                const int step = (i * HALF + me) / BLOCK, row = (i * HALF + me) % BLOCK;
                auto value = [&](int token) { return static_cast<float>(next_values[i][token]); };
                if (step < STEPS)
                    values[to][step][row] = make_float4(value(0), value(1), value(2), value(3));
            }
            if (me < TILE) {
                ((float*)decays[to])[me] =
                    BY_KEY || !next_counts ? 1.0f : static_cast<float>(next_gate);
                ((float*)writes[to])[me] = next_counts ? static_cast<float>(next_write) : 0.0f;
            }
        };

        // A warp's: once for all rows of the block.
        auto meet = [&](int now, int step) {
            const int lane = me % 32;
            float sums[16] = {};  // q[t] k[s] at t * 4 + s, and k[t] k[s] at s * 4 + t
            for (int part = lane; part < PARTS; part += 32) {
                float4 key[4], query[4], decay[4];
                #pragma unroll
                for (int t = 0; t < 4; ++t) {
                    key[t] = keys[now][step * 4 + t][part];
                    query[t] = queries[now][step * 4 + t][part];
                    if (BY_KEY) decay[t] = gates[now][BY_KEY ? step * 4 + t : 0][part];
                }
                #pragma unroll
                for (int s = 0; s < 4; ++s) {
                    float4 decayed = key[s];
                    sums[s * 4 + s] = dot(query[s], decayed, sums[s * 4 + s]);
                    #pragma unroll
                    for (int t = s + 1; t < 4; ++t) {
                        if (BY_KEY) decayed = decayed * decay[t];
                        sums[t * 4 + s] = dot(query[t], decayed, sums[t * 4 + s]);
                        sums[s * 4 + t] = dot(key[t], decayed, sums[s * 4 + t]);
                    }
                    if (BY_KEY) gates[now][BY_KEY ? step * 4 + s : 0][part] = decayed;
                }
                if (BY_KEY) {
                    float4 up_to = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
                    #pragma unroll
                    for (int t = 0; t < 4; ++t) {
                        up_to = up_to * decay[t];
                        keys[now][step * 4 + t][part] = key[t] * up_to;
                        queries[now][step * 4 + t][part] = query[t] * up_to;
                    }
                    wholes[now][BY_KEY ? step : 0][part] = up_to;
                }
            }
            sum_apart<16, 16>(sums);

            Met& found = met[now][step];
            const float4 decay = decays[now][step], write = writes[now][step];
            auto between = [&](int s, int t) {  // the gates after s up to t
                float all = s < 0 ? decay.x : 1.0f;
                if (s < 1 && t > 0) all *= decay.y;
                if (s < 2 && t > 1) all *= decay.z;
                return s < 3 && t > 2 ? all * decay.w : all;
            };
            const int a = lane / 8, b = lane / 2 % 4;  // of the sum that the lane is left with
            if (lane % 2 == 0) {
                ((float*)&found.queries[a])[b] = b <= a ? between(b, a) * sums[0] : 0.0f;
                if (b > a)
                    ((float*)&found.keys[b])[a] = at(write, b) * between(a, b) * sums[0];
            }
            if (lane < 4) {
                found.decay[lane] = between(-1, lane);
                ((float*)&found.writes)[lane] = at(write, lane);
                ((float*)&found.reads)[lane] = at(write, lane) * between(-1, lane);
                ((float*)&found.left)[lane] = between(lane, 3);
            }
        };

        load(0);
        for (int tile = 0; tile < tiles; ++tile) {
            stage(tile % 2);
            if (tile + 1 < tiles) load(tile + 1);
            rewarm::wait_for_the_half(HALF);
            for (int step = me / 32; step < STEPS; step += HALF / 32) meet(tile % 2, step);
            __syncthreads();  // the other half goes through this tile while the next one is brought
        }
        return;
    }

    const int lane = threadIdx.x % LANES;
    const int own = lane / APART;  // a lane has the rows of its group, its own first: row ^ own
    const int first = threadIdx.x / LANES * ROWS;
    const int mine = lane % 4;  // the token of four whose sums a lane is left with
    float4 state[ROWS][MINE];
    auto place = [&](int row, int i) {
        const long long of = (long long)head * Dv + first_row + first + (row ^ own);
        return of * Dk + (i * LANES + lane) * 4;
    };
    #pragma unroll
    for (int row = 0; row < ROWS; ++row)
        #pragma unroll
        for (int i = 0; i < MINE; ++i)
            state[row][i] = floats(four(state_in + place(row, i), aligned));
    T* out = y + ((first_token + mine) * Hv + value_head) * Dv + first_row + first + own;

    auto go = [&](int now, int step, bool is_there) {
        float4 key[4][MINE];
        float sums[ROWS][8] = {};  // S k and S q of each token
        #pragma unroll
        for (int t = 0; t < 4; ++t)
            #pragma unroll
            for (int i = 0; i < MINE; ++i) {
                key[t][i] = keys[now][step * 4 + t][i * LANES + lane];
                const float4 query = queries[now][step * 4 + t][i * LANES + lane];
                #pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    sums[row][t * 2] = dot(state[row][i], key[t][i], sums[row][t * 2]);
                    sums[row][t * 2 + 1] = dot(state[row][i], query, sums[row][t * 2 + 1]);
                }
            }
        // Rows apart, then tokens. Of rows no lane has to choose which to keep: each has its own
        // where the other has the one to give.
        #pragma unroll
        for (int half = ROWS / 2; half > 0; half /= 2)
            #pragma unroll
            for (int row = 0; row < half; ++row)
                #pragma unroll
                for (int i = 0; i < 8; ++i)
                    sums[row][i] += __shfl_xor_sync(ALL, sums[row + half][i], half * APART);
        sum_apart<8, 2>(sums[0]);
        float held = sums[0][0], read = sums[0][1];
        #pragma unroll
        for (int away = 4; away < APART; away *= 2) {
            held += __shfl_xor_sync(ALL, held, away);
            read += __shfl_xor_sync(ALL, read, away);
        }

        const Met& four = met[now][step];
        const float4 given = four.writes * values[now][step][first + own];
        float write[ROWS][4];
        #pragma unroll
        for (int t = 0; t < 4; ++t) {
            float wrote = at(given, t) - at(four.reads, t) * __shfl_sync(ALL, held, t, 4);
            #pragma unroll
            for (int s = 0; s < t; ++s) wrote -= at(four.keys[t], s) * write[0][s];
            write[0][t] = wrote;
        }
        read *= four.decay[mine];
        const float4 reads = four.queries[mine];
        #pragma unroll
        for (int s = 0; s < 4; ++s) read = fmaf(at(reads, s), write[0][s], read);
        if (lane % APART < 4 && is_there) *out = static_cast<T>(read);
        out += 4 * Hv * Dv;

        #pragma unroll
        for (int t = 0; t < 4; ++t) {
            if (!BY_KEY) write[0][t] *= at(four.left, t);
            #pragma unroll
            for (int row = 1; row < ROWS; ++row)
                write[row][t] = __shfl_xor_sync(ALL, write[0][t], row * APART);
        }
        const float whole = four.decay[3];
        #pragma unroll
        for (int i = 0; i < MINE; ++i) {
            float4 decay = make_float4(whole, whole, whole, whole);
            if (BY_KEY) decay = wholes[now][BY_KEY ? step : 0][i * LANES + lane];
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) state[row][i] = state[row][i] * decay;
            #pragma unroll
            for (int t = 0; t < 4; ++t) {
                if (BY_KEY) key[t][i] = gates[now][BY_KEY ? step * 4 + t : 0][i * LANES + lane];
                #pragma unroll
                for (int row = 0; row < ROWS; ++row) add(state[row][i], key[t][i], write[row][t]);
            }
        }
    };

    for (int tile = 0; tile < tiles; ++tile) {
        __syncthreads();  // it is brought, and nobody reads the one before it any more
        const int left = length - tile * TILE;
        for (int step = 0; step < STEPS && step * 4 < left; ++step)
            go(tile % 2, step, step * 4 + mine < left);
    }
    #pragma unroll
    for (int row = 0; row < ROWS; ++row)
        #pragma unroll
        for (int i = 0; i < MINE; ++i) *(float4*)(state_out + place(row, i)) = state[row][i];
"""
