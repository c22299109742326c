// Decode and verify: one block holds the state of one row and head in registers, 4 columns a thread.
//
// Compiled with K and V (sizes of a head), TAPS, TOKENS (walked over), PENDING (at most written before), MIXES (convolve
// before, normalise after), BOUNDED (kind of decay gate), WRITES (the walk's end is the new state), and the number
// formats X (streams), E (state), W (window). Every sum has one order and every rounding is spelled out, so that tokens
// tried and written later leave the bits of tokens written at once.

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
#endif

constexpr int THREADS = 256, LANES = V / 4, GROUPS = THREADS / LANES, ROWS = K / GROUPS, PAST = TAPS - 1;
constexpr int STRIP = ROWS % 4 == 0 ? 4 : ROWS % 2 == 0 ? 2 : 1;
constexpr int MOST = TOKENS > PENDING ? TOKENS : PENDING;
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
__device__ inline Vector plus(Vector x, Vector y) {
    return {__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y), __fadd_rn(x.z, y.z), __fadd_rn(x.w, y.w)};
}
__device__ inline Vector plus_times(Vector sum, Vector x, float a) {
    return {__fmaf_rn(x.x, a, sum.x), __fmaf_rn(x.y, a, sum.y), __fmaf_rn(x.z, a, sum.z), __fmaf_rn(x.w, a, sum.w)};
}
__device__ inline Vector stored(Vector x, const E *kind) {
    return {as_stored(x.x, kind), as_stored(x.y, kind), as_stored(x.z, kind), as_stored(x.w, kind)};
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ inline float sum_of_warp(float x) {
    for (int distance = 16; distance; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// Input of the convolution `j` tokens after the window's first: from the window, then from the tokens behind it.
__device__ inline float seen(const W *window, const X *tokens, i64 stride, int channels, int channel, int j) {
    return j < PAST ? read_number(window + i64(j) * channels + channel)
                    : read_number(tokens + (j - PAST) * stride + channel);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
walk(const X *mixed, const X *decay, const X *beta, const X *gate, const float *conv, const float *rate,
     const float *bias, const float *norm, E *state, W *window, const int *slot, X *read, float *key, float *update,
     float *kept, const X *old_mixed, const float *old_key, const float *old_update, const float *old_kept,
     const int *accepted, i64 xn, i64 xt, i64 dn, i64 dt, i64 dh, i64 bn, i64 bt, i64 bh, i64 gn, i64 gt, i64 gh,
     i64 yn, i64 yt, i64 state_slot, i64 window_slot, int H, float eps, float lowest) {
    extern __shared__ float4 memory[];
    float *const sq = reinterpret_cast<float *>(memory), *const sk = sq + MOST * K, *const sa = sk + MOST * K;
    float *const sv = sa + MOST * K, *const so = sv + MOST * V, *const dots = so + MOST * V;
    float *const shares = dots + (MOST + 3) / 4 * 4, *const partial = shares + (MOST + 3) / 4 * 4;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int group = thread / LANES, column = thread % LANES * 4;
    const i64 n = blockIdx.x / H, h = blockIdx.x % H, place = slot[n];
    const int channels = H * (2 * K + V);

    if (place == 0) {
        for (int i = thread; i < TOKENS * V; i += THREADS)
            write_number(read + ((n * TOKENS + i / V) * H + h) * V + i % V, 0.0f);
        return;
    }
    E *const cell = state + place * state_slot + h * K * V + i64(group) * ROWS * V + column;
    Vector S[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) S[r] = read_vector(cell + r * V);

    if (MIXES) window += place * window_slot;
    int count = 0;
    if (PENDING > 0) {
        count = accepted[n];
        old_mixed += n * yn;
        for (int i = thread; i < count * K; i += THREADS) {
            const i64 at = ((n * PENDING + i / K) * H + h) * K + i % K;
            sk[i] = old_key[at];
            sa[i] = old_kept[at];
        }
        for (int i = thread; i < count * V; i += THREADS)
            so[i] = old_update[((n * PENDING + i / V) * H + h) * V + i % V];
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

    if (TOKENS > 0) {
        mixed += n * xn;
        decay += n * dn + h * dh;
        beta += n * bn + h * bh;
        const float head_rate = expf(rate[h]);
        for (int i = thread; i < TOKENS * (2 * K + V); i += THREADS) {
            const int t = i / (2 * K + V), c = i % (2 * K + V);
            const int channel = c < 2 * K ? c / K * H * K + int(h) * K + c % K : 2 * H * K + int(h) * V + c - 2 * K;
            float x;
            if (MIXES) {
                x = 0.0f;
#pragma unroll
                for (int j = 0; j < TAPS; j++) {
                    // Tokens of `mixed` come after those of `old_mixed` that count.
                    const int p = t + j;
                    const float input = p < PAST ? seen(window, old_mixed, yt, channels, channel, count + p)
                                                 : read_number(mixed + (p - PAST) * xt + channel);
                    x = __fmaf_rn(input, conv[i64(channel) * TAPS + j], x);
                }
                x = __fmul_rn(x, sigmoid(x));
            } else {
                x = read_number(mixed + t * xt + channel);
            }
            (c < K ? sq + t * K + c : c < 2 * K ? sk + t * K + c - K : sv + t * V + c - 2 * K)[0] = x;
        }
        for (int i = thread; i < TOKENS * K; i += THREADS) {
            const float z = __fadd_rn(read_number(decay + i / K * dt + i % K), bias[h * K + i % K]);
            const float a = expf(BOUNDED ? lowest * sigmoid(head_rate * z) : -head_rate * softplus(z));
            sa[i] = a;
            if (!WRITES) kept[((n * TOKENS + i / K) * H + h) * K + i % K] = a;
        }
        __syncthreads();
        for (int t = warp; t < TOKENS; t += THREADS / 32) {
            float of_query = 0.0f, of_key = 0.0f, dot = 0.0f;
            for (int c = lane; c < K; c += 32) {
                const float q = sq[t * K + c], k = sk[t * K + c];
                of_query = __fmaf_rn(q, q, of_query);
                of_key = __fmaf_rn(k, k, of_key);
                dot = __fmaf_rn(q, k, dot);
            }
            const float unit = __fmul_rn(rsqrtf(sum_of_warp(of_query) + 1e-6f), rsqrtf(float(K)));
            const float key_unit = rsqrtf(sum_of_warp(of_key) + 1e-6f);
            for (int c = lane; c < K; c += 32) {
                sq[t * K + c] = __fmul_rn(sq[t * K + c], unit);
                const float k = __fmul_rn(sk[t * K + c], key_unit);
                sk[t * K + c] = k;
                if (!WRITES) key[((n * TOKENS + t) * H + h) * K + c] = k;
            }
            dot = __fmul_rn(__fmul_rn(sum_of_warp(dot), unit), key_unit);
            if (lane == 0) {
                dots[t] = dot;
                shares[t] = sigmoid(read_number(beta + t * bt));
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
            float *const sums = partial + t % 2 * 2 * GROUPS * V + column;
            write_vector(sums + group * V, found);
            write_vector(sums + (GROUPS + group) * V, out);
            __syncthreads();
            found = read_vector(sums);
#pragma unroll
            for (int g = 1; g < GROUPS; g++) found = plus(found, read_vector(sums + g * V));
            const Vector v = read_vector(sv + t * V + column);
            const Vector u = times(plus_times(v, found, -1.0f), shares[t]);
            if (group == t % GROUPS) {
                // What is read after the write, from sums over the state before it: one pass over the state, not two.
                out = read_vector(sums + GROUPS * V);
#pragma unroll
                for (int g = 1; g < GROUPS; g++) out = plus(out, read_vector(sums + (GROUPS + g) * V));
                write_vector(so + t * V + column, plus_times(out, u, dots[t]));
                if (!WRITES) write_vector(update + ((n * TOKENS + t) * H + h) * V + column, u);
            }
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
        if (MIXES) gate += n * gn + h * gh;
        for (int t = warp; t < TOKENS; t += THREADS / 32) {
            float scale = 1.0f;
            if (MIXES) {
                float squares = 0.0f;
                for (int c = lane; c < V; c += 32) squares = __fmaf_rn(so[t * V + c], so[t * V + c], squares);
                scale = rsqrtf(__fmaf_rn(sum_of_warp(squares), 1.0f / V, eps));
            }
            for (int c = lane; c < V; c += 32) {
                float x = so[t * V + c];
                if (MIXES) x = __fmul_rn(__fmul_rn(x, scale), norm[c]) * sigmoid(read_number(gate + t * gt + c));
                write_number(read + ((n * TOKENS + t) * H + h) * V + c, x);
            }
        }
    }

    const int steps = WRITES ? TOKENS : count;
    if (MIXES && steps > 0) {
        const X *const tokens = WRITES ? mixed : old_mixed;
        const i64 stride = WRITES ? xt : yt;
        for (int c = thread; c < 2 * K + V; c += THREADS) {
            const int channel = c < 2 * K ? c / K * H * K + int(h) * K + c % K : 2 * H * K + int(h) * V + c - 2 * K;
            float shifted[PAST];
#pragma unroll
            for (int j = 0; j < PAST; j++) shifted[j] = seen(window, tokens, stride, channels, channel, steps + j);
#pragma unroll
            for (int j = 0; j < PAST; j++) write_number(window + i64(j) * channels + channel, shifted[j]);
        }
    }
}
