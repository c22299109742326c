// Decode and verify: a block works on one row and head after another, the state in registers, 4 columns a thread, while
// the copy engine brings the next one's state and inputs to shared memory.
//
// Compiled with K and V (sizes of a head), TAPS, THREADS (of a block, at least K), TOKENS (walked over), PENDING (at most
// written before), MIXES (convolve before, normalise after), BOUNDED (kind of decay gate), WRITES (the walk's end is the
// new state), and the number formats X (streams), E (state), W (window). Every sum has one order and every rounding is
// spelled out, so that tokens tried and written later leave the bits of tokens written at once.

typedef long long i64;

#ifdef __CUDACC_RTC__  // tests also compile this file for a CPU, and then bring their own
struct bf16 {
    unsigned short bits;
};
__device__ inline float widened(unsigned bits) { return __uint_as_float(bits << 16); }
__device__ inline unsigned short rounded(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ inline unsigned shared_address(const void *at) { return unsigned(__cvta_generic_to_shared(at)); }
__device__ inline void barrier_init(i64 *barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_expect(i64 *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ inline void barrier_wait(i64 *barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            shared_address(barrier)),
        "r"(phase)
        : "memory");
}
__device__ inline void copy_in(void *to, const void *from, int bytes, i64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
#endif

constexpr int WARPS = THREADS / 32, LANES = V / 4, GROUPS = THREADS / LANES, ROWS = K / GROUPS;
constexpr int PAST = TAPS - 1, MIXED = 2 * K + V, RAW = MIXED + K + (MIXES ? V : 0);
constexpr int OWN = (MIXED + THREADS - 1) / THREADS;  // channels of the convolution that a thread owns
constexpr int STRIP = ROWS % 4 == 0 ? 4 : ROWS % 2 == 0 ? 2 : 1;
constexpr int MOST = TOKENS > PENDING ? TOKENS : PENDING;
constexpr int STATE_BYTES = K * V * sizeof(E), RAW_BYTES = TOKENS * RAW * sizeof(X);
constexpr int WINDOW_BYTES = MIXES ? PAST * MIXED * sizeof(W) : 0;
static_assert(ROWS * GROUPS == K && LANES * 4 == V, "sizes must split evenly");

struct Vector {
    float x, y, z, w;
};

__device__ inline float read_number(const float *at) { return *at; }
__device__ inline float read_number(const bf16 *at) { return widened(at->bits); }
__device__ inline void write_number(float *at, float x) { *at = x; }
__device__ inline void write_number(bf16 *at, float x) { at->bits = rounded(x); }
__device__ inline float as_stored(float x, const float *) { return x; }
__device__ inline float as_stored(float x, const bf16 *) { return widened(rounded(x)); }

__device__ inline Vector read_vector(const float *at) {
    float4 x = *reinterpret_cast<const float4 *>(at);
    return {x.x, x.y, x.z, x.w};
}
__device__ inline Vector read_vector(const bf16 *at) {
    uint2 x = *reinterpret_cast<const uint2 *>(at);
    return {widened(x.x & 0xffff), widened(x.x >> 16), widened(x.y & 0xffff), widened(x.y >> 16)};
}
__device__ inline void write_vector(float *at, Vector x) { *reinterpret_cast<float4 *>(at) = {x.x, x.y, x.z, x.w}; }
__device__ inline void write_vector(bf16 *at, Vector x) {
    *reinterpret_cast<uint2 *>(at) = {rounded(x.x) | unsigned(rounded(x.y)) << 16,
                                      rounded(x.z) | unsigned(rounded(x.w)) << 16};
}

// Neighbours in shared memory, read at once.
struct alignas(4 * STRIP) Strip {
    float x[STRIP];
};
__device__ inline Strip strip(const float *at) { return *reinterpret_cast<const Strip *>(at); }

__device__ inline Vector times(Vector x, float a) {
    return {__fmul_rn(x.x, a), __fmul_rn(x.y, a), __fmul_rn(x.z, a), __fmul_rn(x.w, a)};
}
__device__ inline Vector plus_times(Vector sum, Vector x, float a) {
    return {__fmaf_rn(x.x, a, sum.x), __fmaf_rn(x.y, a, sum.y), __fmaf_rn(x.z, a, sum.z), __fmaf_rn(x.w, a, sum.w)};
}
__device__ inline Vector stored(Vector x, const E *kind) {
    return {as_stored(x.x, kind), as_stored(x.y, kind), as_stored(x.z, kind), as_stored(x.w, kind)};
}

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ inline float sum_of_warp(float x) {
    for (int distance = 16; distance; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

struct Inputs {
    const X *mixed, *decay, *gate;
    i64 xn, xt, dn, dt, dh, gn, gt, gh;
    const E *state;
    const W *window;
    i64 state_slot, window_slot;
    int H;
};

// Start the copies of what row n and head h needs; the lanes of one warp share them out.
__device__ inline void fetch(const Inputs &in, i64 n, i64 h, i64 place, E *state, X *raw, W *window, i64 *barrier) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) barrier_expect(barrier, place == 0 ? 0 : STATE_BYTES + RAW_BYTES + WINDOW_BYTES);
    __syncwarp();
    if (place == 0) return;
    if (lane == 0) copy_in(state, in.state + place * in.state_slot + h * K * V, STATE_BYTES, barrier);
    for (int i = lane; i < TOKENS * 5; i += 32) {
        const int t = i / 5, part = i % 5;
        X *const to = raw + t * RAW;
        const X *const mixed = in.mixed + n * in.xn + t * in.xt;
        if (part == 0) copy_in(to, mixed + h * K, K * sizeof(X), barrier);
        if (part == 1) copy_in(to + K, mixed + (in.H + h) * K, K * sizeof(X), barrier);
        if (part == 2) copy_in(to + 2 * K, mixed + 2 * in.H * K + h * V, V * sizeof(X), barrier);
        if (part == 3) copy_in(to + MIXED, in.decay + n * in.dn + t * in.dt + h * in.dh, K * sizeof(X), barrier);
        if (part == 4 && MIXES)
            copy_in(to + MIXED + K, in.gate + n * in.gn + t * in.gt + h * in.gh, V * sizeof(X), barrier);
    }
    if (MIXES) {
        for (int i = lane; i < PAST * 3; i += 32) {
            const int j = i / 3, part = i % 3;
            W *const to = window + j * MIXED + part * K;
            const W *const from = in.window + place * in.window_slot + i64(j) * in.H * MIXED;
            if (part == 0) copy_in(to, from + h * K, K * sizeof(W), barrier);
            if (part == 1) copy_in(to, from + (in.H + h) * K, K * sizeof(W), barrier);
            if (part == 2) copy_in(to, from + 2 * in.H * K + h * V, V * sizeof(W), barrier);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
walk(const X *mixed, const X *decay, const X *beta, const X *gate, const float *conv, const float *rate,
     const float *bias, const float *norm, E *state, W *window, const int *slot, X *read, float *key, float *update,
     float *kept, const X *old_mixed, const float *old_key, const float *old_update, const float *old_kept,
     const int *accepted, i64 xn, i64 xt, i64 dn, i64 dt, i64 dh, i64 bn, i64 bt, i64 bh, i64 gn, i64 gt, i64 gh,
     i64 yn, i64 yt, i64 state_slot, i64 window_slot, int H, int items, float eps, float lowest) {
    extern __shared__ float4 memory[];
    E *const next_state = reinterpret_cast<E *>(memory);
    X *const raw = reinterpret_cast<X *>(next_state + K * V);
    W *const next_window = reinterpret_cast<W *>(raw + TOKENS * RAW);
    float *const sq = reinterpret_cast<float *>(next_window + (MIXES ? PAST * MIXED : 0)), *const sk = sq + MOST * K;
    float *const sa = sk + MOST * K, *const so = sa + MOST * K, *const sg = so + MOST * V;
    float *const su = sg + (MIXES ? TOKENS * V : 0), *const partial = su + V, *const gain = partial + 2 * GROUPS * V;
    float *const dots = gain + V, *const shares = dots + (MOST + 3) / 4 * 4;
    i64 *const barrier = reinterpret_cast<i64 *>(shares + (MOST + 3) / 4 * 4);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int group = thread / LANES, column = thread % LANES * 4, channels = H * MIXED;
    const Inputs in = {mixed, decay, gate, xn, xt, dn, dt, dh, gn, gt, gh, state, window, state_slot, window_slot, H};

    int item = blockIdx.x, phase = 0;
    i64 place = slot[item / H], next_place = 0;
    if (thread == 0) barrier_init(barrier);
    if (MIXES && TOKENS > 0)
        for (int c = thread; c < V; c += THREADS) gain[c] = norm[c];
    __syncthreads();
    if (warp == 0) fetch(in, item / H, item % H, place, next_state, raw, next_window, barrier);

    for (; item < items; item += gridDim.x) {
        const i64 n = item / H, h = item % H;
        const int next = item + gridDim.x;
        if (next < items) next_place = slot[next / H];
        int count = 0;
        if (PENDING > 0) count = accepted[n];

        // What does not come by the copy engine is asked for before waiting for it.
        float taps[OWN][TAPS], head_rate = 0.0f, channel_bias = 0.0f;
        if (TOKENS > 0) {
            head_rate = __expf(rate[h]);
            if (thread < K) channel_bias = bias[h * K + thread];
            if (MIXES) {
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    const int c = thread + i * THREADS;
                    const int channel = c < 2 * K ? (c / K * H + int(h)) * K + c % K : 2 * H * K + int(h) * V + c - 2 * K;
#pragma unroll
                    for (int j = 0; j < TAPS; j++) taps[i][j] = c < MIXED ? conv[i64(channel) * TAPS + j] : 0.0f;
                }
            }
        }
        __syncthreads();  // the item before is finished with shared memory
        if (PENDING > 0 && place > 0) {
            for (int i = thread; i < count * K; i += THREADS) {
                const i64 at = ((n * PENDING + i / K) * H + h) * K + i % K;
                sk[i] = old_key[at];
                sa[i] = old_kept[at];
            }
            for (int i = thread; i < count * V; i += THREADS)
                so[i] = old_update[((n * PENDING + i / V) * H + h) * V + i % V];
        }
        barrier_wait(barrier, phase);
        phase ^= 1;

        Vector S[ROWS];
        E *const cell = state + place * state_slot + h * K * V + i64(group) * ROWS * V + column;
        if (place > 0) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) S[r] = read_vector(next_state + (group * ROWS + r) * V + column);
        }
        if (PENDING > 0 && place > 0) {
            __syncthreads();
            for (int t = 0; t < count; t++) {
                const Vector u = read_vector(so + t * V + column);
#pragma unroll
                for (int r = 0; r < ROWS; r += STRIP) {
                    const Strip a = strip(sa + t * K + group * ROWS + r), k = strip(sk + t * K + group * ROWS + r);
#pragma unroll
                    for (int i = 0; i < STRIP; i++)
                        S[r + i] = stored(plus_times(times(S[r + i], a.x[i]), u, k.x[i]), state);
                }
            }
            if (count > 0) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) write_vector(cell + r * V, S[r]);
            }
            __syncthreads();
        }

        if (place > 0) {
            if (MIXES) {
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    const int c = thread + i * THREADS;
                    if (c >= MIXED) break;
                    const int channel = c < 2 * K ? (c / K * H + int(h)) * K + c % K : 2 * H * K + int(h) * V + c - 2 * K;
                    float x[TAPS];  // the last is the current token's
#pragma unroll
                    for (int j = 0; j < PAST; j++) {
                        const int p = count + j;
                        x[j] = p < PAST ? read_number(next_window + p * MIXED + c)
                                        : read_number(old_mixed + n * yn + (p - PAST) * yt + channel);
                    }
                    W *const old = window + place * window_slot + channel;
                    if (PENDING > 0 && count > 0) {
#pragma unroll
                        for (int j = 0; j < PAST; j++) write_number(old + i64(j) * channels, x[j]);
                    }
                    float *const to = c < K ? sq + c : c < 2 * K ? sk + c - K : so + c - 2 * K;
                    for (int t = 0; t < TOKENS; t++) {
                        x[PAST] = read_number(raw + t * RAW + c);
                        float sum = 0.0f;
#pragma unroll
                        for (int j = 0; j < TAPS; j++) sum = __fmaf_rn(x[j], taps[i][j], sum);
                        to[t * (c < 2 * K ? K : V)] = __fmul_rn(sum, sigmoid(sum));
#pragma unroll
                        for (int j = 0; j < PAST; j++) x[j] = x[j + 1];
                    }
                    if (WRITES) {
#pragma unroll
                        for (int j = 0; j < PAST; j++) write_number(old + i64(j) * channels, x[j]);
                    }
                }
                for (int i = thread; i < TOKENS * V; i += THREADS)
                    sg[i] = sigmoid(read_number(raw + i / V * RAW + MIXED + K + i % V));
            } else {
                for (int i = thread; i < TOKENS * MIXED; i += THREADS) {
                    const int t = i / MIXED, c = i % MIXED;
                    (c < K ? sq + t * K + c : c < 2 * K ? sk + t * K + c - K : so + t * V + c - 2 * K)[0] =
                        read_number(raw + t * RAW + c);
                }
            }
            if (thread < K) {
                for (int t = 0; t < TOKENS; t++) {
                    const float z = __fadd_rn(read_number(raw + t * RAW + MIXED + thread), channel_bias);
                    const float a = __expf(BOUNDED ? lowest * sigmoid(head_rate * z) : -head_rate * softplus(z));
                    sa[t * K + thread] = a;
                    if (!WRITES) kept[((n * TOKENS + t) * H + h) * K + thread] = a;
                }
            }
        }
        __syncthreads();
        // All of the stage is read: the next item may come.
        if (warp == 0 && next < items) fetch(in, next / H, next % H, next_place, next_state, raw, next_window, barrier);

        if (place > 0 && TOKENS > 0) {
            for (int t = warp; t < TOKENS; t += WARPS) {
                const float share = sigmoid(read_number(beta + n * bn + t * bt + h * bh));
                float of_query = 0.0f, of_key = 0.0f, dot = 0.0f;
                for (int c = lane; c < K; c += 32) {
                    const float q = sq[t * K + c], k = sk[t * K + c];
                    of_query = __fmaf_rn(q, q, of_query);
                    of_key = __fmaf_rn(k, k, of_key);
                    dot = __fmaf_rn(q, k, dot);
                }
                const float unit = __fmul_rn(rsqrtf(sum_of_warp(of_query) + 1e-6f), rsqrtf(float(K)));
                const float key_unit = rsqrtf(sum_of_warp(of_key) + 1e-6f);
                dot = __fmul_rn(__fmul_rn(sum_of_warp(dot), unit), key_unit);
                for (int c = lane; c < K; c += 32) {
                    sq[t * K + c] = __fmul_rn(sq[t * K + c], unit);
                    const float k = __fmul_rn(sk[t * K + c], key_unit);
                    sk[t * K + c] = k;
                    if (!WRITES) key[((n * TOKENS + t) * H + h) * K + c] = k;
                }
                if (lane == 0) {
                    dots[t] = dot;
                    shares[t] = share;
                }
            }
            __syncthreads();
            for (int t = 0; t < TOKENS; t++) {
                Vector found = {0, 0, 0, 0}, out = {0, 0, 0, 0};
                const int first = t * K + group * ROWS;
#pragma unroll
                for (int r = 0; r < ROWS; r += STRIP) {
                    const Strip a = strip(sa + first + r), k = strip(sk + first + r), q = strip(sq + first + r);
#pragma unroll
                    for (int i = 0; i < STRIP; i++) {
                        S[r + i] = times(S[r + i], a.x[i]);
                        found = plus_times(found, S[r + i], k.x[i]);
                        out = plus_times(out, S[r + i], q.x[i]);
                    }
                }
                write_vector(partial + group * V + column, found);
                write_vector(partial + (GROUPS + group) * V + column, out);
                __syncthreads();
                // A thread a column and kind of sum; then the columns' updates go to all.
                float sums[(2 * V + THREADS - 1) / THREADS];
#pragma unroll
                for (int i = 0; i < (2 * V + THREADS - 1) / THREADS; i++) {
                    const int place = thread + i * THREADS, kind = place / V, c = place % V;
                    float sum = 0.0f;
                    if (place < 2 * V) {
#pragma unroll
                        for (int g = 0; g < GROUPS; g++) sum = __fadd_rn(sum, partial[(kind * GROUPS + g) * V + c]);
                    }
                    if (kind == 0) {
                        const float u = __fmul_rn(shares[t], __fadd_rn(so[t * V + c], -sum));
                        su[c] = u;
                        if (!WRITES) update[((n * TOKENS + t) * H + h) * V + c] = u;
                    }
                    sums[i] = sum;
                }
                __syncthreads();
                // What is read after the write, from sums over the state before it: one pass over the state, not two.
#pragma unroll
                for (int i = 0; i < (2 * V + THREADS - 1) / THREADS; i++) {
                    const int place = thread + i * THREADS, c = place % V;
                    if (place / V == 1) so[t * V + c] = __fmaf_rn(dots[t], su[c], sums[i]);
                }
                const Vector u = read_vector(su + column);
#pragma unroll
                for (int r = 0; r < ROWS; r += STRIP) {
                    const Strip k = strip(sk + first + r);
#pragma unroll
                    for (int i = 0; i < STRIP; i++) {
                        S[r + i] = plus_times(S[r + i], u, k.x[i]);
                        if (!WRITES) S[r + i] = stored(S[r + i], state);
                    }
                }
            }
            if (WRITES) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) write_vector(cell + r * V, S[r]);
            }
            __syncthreads();
            for (int t = warp; t < TOKENS; t += WARPS) {
                float scale = 1.0f;
                if (MIXES) {
                    float squares = 0.0f;
                    for (int c = lane; c < V; c += 32) squares = __fmaf_rn(so[t * V + c], so[t * V + c], squares);
                    scale = rsqrtf(__fmaf_rn(sum_of_warp(squares), 1.0f / V, eps));
                }
                for (int c = lane; c < V; c += 32) {
                    float x = so[t * V + c];
                    if (MIXES) x = __fmul_rn(__fmul_rn(__fmul_rn(x, scale), gain[c]), sg[t * V + c]);
                    write_number(read + ((n * TOKENS + t) * H + h) * V + c, x);
                }
            }
        } else {
            for (int i = thread; i < TOKENS * V; i += THREADS)
                write_number(read + ((n * TOKENS + i / V) * H + h) * V + i % V, 0.0f);
        }
        place = next_place;
    }
}
