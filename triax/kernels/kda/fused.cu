// Decode and verify: a block works on one row and head after another, the state in registers, 4 columns a thread, while
// the copy engine brings the next one's state and inputs to shared memory. A warp has 32 columns and, with the few
// others that share them, all rows; in the walk over tokens only these wait for each other.
//
// Compiled behind `numbers.cuh`.

struct Inputs {
    const X *mixed, *decay, *gate;
    i64 xn, xt, dn, dt, dh, gn, gt, gh;
    const E *state;
    const W *window;
    i64 state_slot, window_slot;
    int H;
};

// Where channel c of head h, counted query first, then key, then value, lies among those of all heads.
__device__ inline int channel_of(int c, int h, int H) {
    return c < 2 * K ? (c / K * H + h) * K + c % K : 2 * H * K + h * V + c - 2 * K;
}

// Start the copies of what row n and head h needs; all warps share them out, since one after the other starts its own.
__device__ inline void fetch(const Inputs &in, i64 n, i64 h, i64 place, E *state, X *raw, W *window, i64 *barrier) {
    constexpr int PARTS = MIXES ? 5 : 4, STREAMS = TOKENS * PARTS, COPIES = 1 + STREAMS + (MIXES ? PAST * 3 : 0);
    if (threadIdx.x == 0) barrier_expect(barrier, place == 0 ? 0 : STATE_BYTES + RAW_BYTES + WINDOW_BYTES);
    if (place == 0) return;
    for (int i = threadIdx.x / 32 + threadIdx.x % 32 * WARPS; i < COPIES; i += THREADS) {
        const int stream = i - 1;
        void *to = state;
        const void *from = in.state + place * in.state_slot + h * K * V;
        int bytes = STATE_BYTES;
        if (stream >= STREAMS) {
            const int j = (stream - STREAMS) / 3, part = (stream - STREAMS) % 3;
            to = window + j * MIXED + part * K;
            from = in.window + place * in.window_slot + i64(j) * in.H * MIXED +
                   (part < 2 ? (part * in.H + h) * K : 2 * in.H * K + h * V);
            bytes = (part < 2 ? K : V) * sizeof(W);
        } else if (stream >= 0) {
            const int t = stream / PARTS, part = stream % PARTS;
            to = raw + t * RAW + (part < 3 ? part * K : part == 3 ? MIXED : MIXED + K);
            from = part < 2    ? in.mixed + n * in.xn + t * in.xt + (part * in.H + h) * K
                   : part == 2 ? in.mixed + n * in.xn + t * in.xt + 2 * in.H * K + h * V
                   : part == 3 ? in.decay + n * in.dn + t * in.dt + h * in.dh
                               : in.gate + n * in.gn + t * in.gt + h * in.gh;
            bytes = (part == 2 || part == 4 ? V : K) * sizeof(X);
        }
        copy_in(to, from, bytes, barrier);
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
    float *const partial = sg + (MIXES ? TOKENS * V : 0), *const gain = partial + 2 * THREADS * 2;
    float *const dots = gain + V, *const shares = dots + (MOST + 3) / 4 * 4;
    i64 *const barrier = reinterpret_cast<i64 *>(shares + (MOST + 3) / 4 * 4);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int strand = warp / SHARERS, group = warp % SHARERS * (32 / LANES) + lane / LANES;
    const int column = strand * SPAN + lane % LANES * 4, channels = H * MIXED;
    const int decays = thread - (THREADS - K);  // the channel whose decay is a thread's: the last convolve less
    const int above = group * STRIP;  // a thread's first row; the next ones follow, then those a round of groups below
    const Inputs in = {mixed, decay, gate, xn, xt, dn, dt, dh, gn, gt, gh, state, window, state_slot, window_slot, H};

    int item = blockIdx.x, phase = 0;
    i64 place = slot[item / H], next_place = 0;
    if (thread == 0) barrier_init(barrier);
    if (MIXES && TOKENS > 0)
        for (int c = thread; c < V; c += THREADS) gain[c] = norm[c];
    __syncthreads();
    fetch(in, item / H, item % H, place, next_state, raw, next_window, barrier);

    for (; item < items; item += gridDim.x) {
        const i64 n = item / H, h = item % H;
        const int next = item + gridDim.x;
        if (next < items) next_place = slot[next / H];
        int count = 0;
        if (PENDING > 0) count = accepted[n];

        // What does not come by the copy engine is asked for before waiting for it.
        float taps[OWN][TAPS], head_rate = 0.0f, channel_bias = 0.0f, openness = 0.0f;
        if (TOKENS > 0) {
            head_rate = rate[h];
            if (decays >= 0) channel_bias = bias[h * K + decays];
            if (thread < TOKENS) openness = read_number(beta + n * bn + thread * bt + h * bh);
            if (MIXES) {
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    const int c = thread + i * THREADS;
                    const int channel = channel_of(c, int(h), H);
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
        E *const cell = state + place * state_slot + h * K * V + above * V + column;
        if (PENDING > 0 && place > 0) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) S[r] = read_vector(next_state + (above + below(r)) * V + column);
        }
        if (PENDING > 0 && place > 0) {
            __syncthreads();
            for (int t = 0; t < count; t++) {
                const Vector u = read_vector(so + t * V + column);
#pragma unroll
                for (int r = 0; r < ROWS; r += STRIP) {
                    const Strip a = strip(sa + t * K + above + below(r)), k = strip(sk + t * K + above + below(r));
#pragma unroll
                    for (int i = 0; i < STRIP; i++)
                        S[r + i] = stored(plus_times(times(S[r + i], a.x[i]), u, k.x[i]), state);
                }
            }
            if (count > 0) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) write_vector(cell + below(r) * V, S[r]);
            }
            __syncthreads();
        }

        if (place > 0) {
            if (MIXES) {
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    const int c = thread + i * THREADS;
                    if (c >= MIXED) break;
                    const int channel = channel_of(c, int(h), H);
                    float x[PAST + AT_ONCE];  // the last inputs before, then those of some tokens
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
                    const int size = c < 2 * K ? K : V;
                    float *const to = c < K ? sq + c : c < 2 * K ? sk + c - K : so + c - 2 * K;
#pragma unroll 1
                    for (int from = 0; from < TOKENS; from += AT_ONCE) {
#pragma unroll
                        for (int t = 0; t < AT_ONCE; t++)
                            if (TOKENS % AT_ONCE == 0 || from + t < TOKENS)
                                x[PAST + t] = read_number(raw + (from + t) * RAW + c);
                        float sum[AT_ONCE];
#pragma unroll
                        for (int t = 0; t < AT_ONCE; t++) {
                            sum[t] = 0.0f;
#pragma unroll
                            for (int j = 0; j < TAPS; j++) sum[t] = __fmaf_rn(x[t + j], taps[i][j], sum[t]);
                            sum[t] = __fmul_rn(sum[t], sigmoid(sum[t]));
                        }
#pragma unroll
                        for (int t = 0; t < AT_ONCE; t++)
                            if (TOKENS % AT_ONCE == 0 || from + t < TOKENS) to[(from + t) * size] = sum[t];
#pragma unroll
                        for (int j = 0; j < PAST; j++) x[j] = x[AT_ONCE + j];
                    }
                    if (WRITES) {
#pragma unroll
                        for (int j = 0; j < PAST; j++) write_number(old + i64(j) * channels, x[j]);
                    }
                }
#pragma unroll 1
                for (int from = 0; from < GATES; from += GATES_AT_ONCE) {
                    float z[GATES_AT_ONCE];
#pragma unroll
                    for (int j = 0; j < GATES_AT_ONCE; j++) {
                        const int i = thread + (from + j) * THREADS;
                        if (i < TOKENS * V) z[j] = read_number(raw + i / V * RAW + MIXED + K + i % V);
                    }
#pragma unroll
                    for (int j = 0; j < GATES_AT_ONCE; j++) z[j] = sigmoid(z[j]);
#pragma unroll
                    for (int j = 0; j < GATES_AT_ONCE; j++) {
                        const int i = thread + (from + j) * THREADS;
                        if (i < TOKENS * V) sg[i] = z[j];
                    }
                }
            } else {
                for (int i = thread; i < TOKENS * MIXED; i += THREADS) {
                    const int t = i / MIXED, c = i % MIXED;
                    (c < K ? sq + t * K + c : c < 2 * K ? sk + t * K + c - K : so + t * V + c - 2 * K)[0] =
                        read_number(raw + t * RAW + c);
                }
            }
            if (decays >= 0) {
                const float by = __expf(head_rate);
#pragma unroll 1
                for (int from = 0; from < TOKENS; from += AT_ONCE) {
                    float z[AT_ONCE];
#pragma unroll
                    for (int t = 0; t < AT_ONCE; t++)
                        if (TOKENS % AT_ONCE == 0 || from + t < TOKENS)
                            z[t] = read_number(raw + (from + t) * RAW + MIXED + decays);
#pragma unroll
                    for (int t = 0; t < AT_ONCE; t++) {
                        z[t] = __fadd_rn(z[t], channel_bias);
                        z[t] = __expf(BOUNDED ? lowest * sigmoid(by * z[t]) : -by * softplus(z[t]));
                    }
#pragma unroll
                    for (int t = 0; t < AT_ONCE; t++) {
                        if (TOKENS % AT_ONCE && from + t >= TOKENS) break;
                        sa[(from + t) * K + decays] = z[t];
                        if (!WRITES) kept[((n * TOKENS + from + t) * H + h) * K + decays] = z[t];
                    }
                }
            }
            if (thread < TOKENS) shares[thread] = sigmoid(openness);
        }
        if (PENDING == 0 && place > 0) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) S[r] = read_vector(next_state + (above + below(r)) * V + column);
        }
        __syncthreads();
        // All of the stage is read: the next item may come.
        if (next < items) fetch(in, next / H, next % H, next_place, next_state, raw, next_window, barrier);

        if (place > 0 && TOKENS > 0) {
            // Half a warp a token.
            for (int first = warp * 2; first < TOKENS; first += WARPS * 2) {
                const bool on = first + lane / 16 < TOKENS;
                const int t = on ? first + lane / 16 : first;
                float q[K / 16], k[K / 16], of_query = 0.0f, of_key = 0.0f, dot = 0.0f;
#pragma unroll
                for (int i = 0; i < K / 16; i++) {
                    q[i] = sq[t * K + lane % 16 + 16 * i];
                    k[i] = sk[t * K + lane % 16 + 16 * i];
                }
#pragma unroll
                for (int i = 0; i < K / 16; i++) {
                    of_query = __fmaf_rn(q[i], q[i], of_query);
                    of_key = __fmaf_rn(k[i], k[i], of_key);
                    dot = __fmaf_rn(q[i], k[i], dot);
                }
                const float unit = __fmul_rn(rsqrtf(sum_of_half_warp(of_query) + 1e-6f), rsqrtf(float(K)));
                const float key_unit = rsqrtf(sum_of_half_warp(of_key) + 1e-6f);
                dot = __fmul_rn(__fmul_rn(sum_of_half_warp(dot), unit), key_unit);
                if (on) {
#pragma unroll
                    for (int i = 0; i < K / 16; i++) {
                        const int c = lane % 16 + 16 * i;
                        sq[t * K + c] = __fmul_rn(q[i], unit);
                        sk[t * K + c] = __fmul_rn(k[i], key_unit);
                        if (!WRITES) key[((n * TOKENS + t) * H + h) * K + c] = __fmul_rn(k[i], key_unit);
                    }
                    if (lane % 16 == 0) dots[t] = dot;
                }
            }
            __syncthreads();
            const bool finds = lane < 16, writes_down = warp % SHARERS == 0;
            const int own = column + (lane & 8 ? 2 : 0);  // of the two columns whose sums a lane ends with
            float *record = WRITES ? nullptr : update + (n * TOKENS * H + h) * V + own;
#pragma unroll 1
            for (int t = 0; t < TOKENS; t++) {
                Vector found = {0, 0, 0, 0}, out = {0, 0, 0, 0};
                const int first = t * K + above;
                const float share = shares[t], dot = dots[t];
                Pair *const values = reinterpret_cast<Pair *>(so + t * V + own);
                const Pair value = *values;
#pragma unroll
                for (int r = 0; r < ROWS; r += STRIP) {
                    const Strip a = strip(sa + first + below(r)), k = strip(sk + first + below(r));
                    const Strip q = strip(sq + first + below(r));
#pragma unroll
                    for (int i = 0; i < STRIP; i++) {
                        S[r + i] = times(S[r + i], a.x[i]);
                        found = plus_times(found, S[r + i], k.x[i]);
                        out = plus_times(out, S[r + i], q.x[i]);
                    }
                }
                Pair sum = sums_of_lanes(found, out, lane);
                if (SHARERS > 1) {
                    Pair *const all = reinterpret_cast<Pair *>(partial) + (t & 1) * THREADS;
                    all[thread] = sum;
                    meet(1 + strand, 32 * SHARERS);
                    sum = {0.0f, 0.0f};
#pragma unroll
                    for (int i = 0; i < SHARERS; i++) {
                        const Pair one = all[(strand * SHARERS + i) * 32 + lane];
                        sum = {__fadd_rn(sum.x, one.x), __fadd_rn(sum.y, one.y)};
                    }
                }
                // Of lanes that have `found`.
                const Pair u = {__fmul_rn(share, __fadd_rn(value.x, -sum.x)),
                                __fmul_rn(share, __fadd_rn(value.y, -sum.y))};
                // What is read after the write, from sums over the state before it: one pass over it, not two.
                const float x = __shfl_xor_sync(0xffffffffu, u.x, 16), y = __shfl_xor_sync(0xffffffffu, u.y, 16);
                if (writes_down && !finds) *values = {__fmaf_rn(dot, x, sum.x), __fmaf_rn(dot, y, sum.y)};
                if (!WRITES) {
                    if (writes_down && finds) *reinterpret_cast<Pair *>(record) = u;
                    record += H * V;
                }
                Vector all;
                all.x = __shfl_sync(0xffffffffu, u.x, lane % LANES);
                all.y = __shfl_sync(0xffffffffu, u.y, lane % LANES);
                all.z = __shfl_sync(0xffffffffu, u.x, lane % LANES + 8);
                all.w = __shfl_sync(0xffffffffu, u.y, lane % LANES + 8);
#pragma unroll
                for (int r = 0; r < ROWS; r += STRIP) {
                    const Strip k = strip(sk + first + below(r));
#pragma unroll
                    for (int i = 0; i < STRIP; i++) {
                        S[r + i] = plus_times(S[r + i], all, k.x[i]);
                        if (!WRITES) S[r + i] = stored(S[r + i], state);
                    }
                }
            }
            if (WRITES) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) write_vector(cell + below(r) * V, S[r]);
            }
            __syncthreads();
            for (int first = warp * 2; first < TOKENS; first += WARPS * 2) {
                const bool on = first + lane / 16 < TOKENS;
                const int t = on ? first + lane / 16 : first;
                float x[V / 16], scale = 1.0f;
#pragma unroll
                for (int i = 0; i < V / 16; i++) x[i] = so[t * V + lane % 16 + 16 * i];
                if (MIXES) {
                    float squares = 0.0f;
#pragma unroll
                    for (int i = 0; i < V / 16; i++) squares = __fmaf_rn(x[i], x[i], squares);
                    scale = rsqrtf(__fmaf_rn(sum_of_half_warp(squares), 1.0f / V, eps));
                }
                if (on) {
#pragma unroll
                    for (int i = 0; i < V / 16; i++) {
                        const int c = lane % 16 + 16 * i;
                        if (MIXES) x[i] = __fmul_rn(__fmul_rn(__fmul_rn(x[i], scale), gain[c]), sg[t * V + c]);
                        write_number(read + ((n * TOKENS + t) * H + h) * V + c, x[i]);
                    }
                }
            }
        } else {
            for (int i = thread; i < TOKENS * V; i += THREADS)
                write_number(read + ((n * TOKENS + i / V) * H + h) * V + i % V, 0.0f);
        }
        place = next_place;
    }
}
