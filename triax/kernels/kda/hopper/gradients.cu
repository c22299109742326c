// All gradients of a chunk and head but the state's: a block for either half of the channels, and of the values.
//
// Products are transposed: a thread's numbers are rows g and g + 8 of its warp's 16 channels, tokens 2l and 2l + 1 of
// every 8, so that sums over channels' tokens stay in a quarter of a warp. Anchors of the decays are those of `prepare`.
//
// A pair of tokens adds to the gates at and before one and takes from those at and before the other: in the sum up to a
// gate almost all of it cancels, so both sides take the very same rounded factors.
//
// With ANCHORED below 32 a warp multiplies alone, a tile of 16 tokens at a time, and keeps no factors: registers are room
// for what is anchored in three ways, or in four.
//
// RAW: as in `prepare`; the gradients are those of what came in, and the two blocks of a head exchange their dot products.

constexpr int STATE = 0, D_STATE = 2 * TILE, WRITTEN = 4 * TILE, ERRORS = 6 * TILE, D_READ = 8 * TILE;
constexpr int QUERY = 10 * TILE, KEY = 11 * TILE, PAIRS = 12 * TILE, SMALL = 14 * TILE;
// Once the products with the state are done: factors of pairs in the places of their operands, sums, results.
constexpr int COLUMNS = STATE, QUERY_ROWS = STATE + TILE, KEY_ROWS = D_READ, SECOND_ROWS = D_READ + TILE;
constexpr int SUMS = ERRORS, D_QUERY = ERRORS + TILE;
// Once all products are.
constexpr int GATES_IN = D_STATE, D_KEY = D_STATE + TILE, D_GATE = WRITTEN;

// Not kept by the compiler where it is used again: registers are dearer here.
DEVICE float power_anew(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Rows of 64 tokens, 64 numbers each, into a tile.
DEVICE void rows_in(u32 tile, const bf16* from, i64 apart, int rows) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int t = (threadIdx.x >> 3) + 16 * i, piece = threadIdx.x & 7;
        cell_in(tile + t * 128 + ((piece ^ (t & 7)) << 4), from + (t < rows ? t : 0) * apart + 8 * piece, t < rows);
    }
}
// What a log decay would leave over what the held one leaves: gradients are those of what was asked for.
DEVICE float asked(float gate) { return power(fminf(gate * 1.4426950408889634f - HELD, 0.f)); }
DEVICE u32 of_fragment(u32 tile) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = ((lane >> 4) << 3) + (lane & 7);
    return tile + t * 128 + (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
}
// Sixteen tokens of a tile as packed fragments, and back.
DEVICE void fragment(u32 (&x)[4], u32 tile, int j) { load_transposed(x, of_fragment(tile) + j * 2048); }
DEVICE void put_fragment(u32 tile, const u32 (&x)[4], int j) {
    store_transposed(of_fragment(tile) + j * 2048, x[0], x[1], x[2], x[3]);
}
// Sums over a warp's channels of numbers [16] of tokens 8 b + 2 l + e; kept by warp and token.
DEVICE void sum_channels(float* sums, float (&x)[16]) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int far = 4; far < 32; far *= 2) x[i] += __shfl_xor_sync(~0u, x[i], far);
    if (lane < 4)
#pragma unroll
        for (int b = 0; b < 8; b++)
            *(float2*)(sums + 64 * warp + 8 * b + 2 * lane) = make_float2(x[2 * b], x[2 * b + 1]);
}
DEVICE float of_warps(const float* sums, int t) { return sums[t] + sums[64 + t] + sums[128 + t] + sums[192 + t]; }

#if ANCHORED == 32
// Adds what a row gets from pairs to what it gets from the state, [16 channels, 16 tokens] at a time: `visit` gets both
// for two tokens each, and what they are worth to the gates.
template <typename F>
DEVICE void rows_done(const float (&x)[32], const float (&half_first)[2], const float (&half_second)[2],
                      const float (&state)[32], const float (&one)[32], const float (&two)[16], u32 factors, u32 second,
                      F&& visit) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 far[4], near[4];
        fragment(far, factors, j);
        if (j >= 2) fragment(near, second, j - 2);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = 4 * j + e, r = e & 1;
            float up0 = power_anew(x[2 * i]), up1 = power_anew(x[2 * i + 1]), p0 = 0.f, p1 = 0.f;
            float g0 = low(far[e]) * one[2 * i], g1 = high(far[e]) * one[2 * i + 1];
            if (j >= 2) {
                float t0 = two[2 * (i & 7)], t1 = two[2 * (i & 7) + 1];
                p0 = t0 * up0, p1 = t1 * up1;
                g0 += low(near[e]) * t0, g1 += high(near[e]) * t1;
                up0 = up0 * half_second[r] * half_first[r], up1 = up1 * half_second[r] * half_first[r];
            }
            p0 += one[2 * i] * up0, p1 += one[2 * i + 1] * up1;
            visit(i, state[2 * i] * (up0 * half_first[r]), state[2 * i + 1] * (up1 * half_first[r]), p0, p1, g0, g1);
        }
    }
}

#else
// The same where rows have columns in their own tile, in the one before in its half, and in the half before.
template <typename T, typename S, typename N, typename P, typename R, typename C, typename F>
DEVICE void rows_done(T&& tile_sum, S&& since, N&& past, const float (&state)[32], int of_key, u32 pairs, P&& powers,
                      R&& row_factors, C&& column_factors, F&& visit) {
    u32 unused[4], near_column[4], far_column[2][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float own[2][4] = {}, near[2][4] = {}, far[2][4] = {};
        u32 a[4], step[4], near_row[4], far_row[4], pair[4];
        if (j & 1) {
            corner(pair, pairs, 16 * j, 16 * j - 16);
            warp_product(near, near_column, pair);
        }
        float2 factor[4];
        powers(factor, j, -1.f);
        column_factors(factor, j, a, step, near_column, j < 2 ? far_column[j] : unused);
        corner(pair, pairs, 16 * j, 16 * j);
        warp_product(own[0], a, pair[0], pair[1]);
        warp_product(own[1], step, pair[2], pair[3]);
        if (j >= 2)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                corner(pair, pairs, 16 * j, 16 * i);
                warp_product(far, far_column[i], pair);
            }
        float2(&up)[4] = factor;
        powers(up, j, 1.f);
        row_factors(of_key, up, j, a, near_row, far_row);
        float start[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < j; i++) sum += tile_sum(r, i);
            start[r] = power(sum);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int r = e & 1, n = e >> 1;
            float o0 = own[n][2 * r], o1 = own[n][2 * r + 1];
            float p0 = o0 * up[e].x, p1 = o1 * up[e].y, g0 = low(a[e]) * o0, g1 = high(a[e]) * o1;
            float from = since(r, j, n), since0 = up[e].x * from, since1 = up[e].y * from;
            if (j & 1) {
                o0 = near[n][2 * r], o1 = near[n][2 * r + 1];
                p0 += o0 * since0, p1 += o1 * since1;
                g0 += low(near_row[e]) * o0, g1 += high(near_row[e]) * o1;
            }
            if (j >= 2) {
                o0 = far[n][2 * r], o1 = far[n][2 * r + 1];
                p0 += o0 * (j == 3 ? past(since0, r, 2) : since0), p1 += o1 * (j == 3 ? past(since1, r, 2) : since1);
                g0 += low(far_row[e]) * o0, g1 += high(far_row[e]) * o1;
            }
            int i = 4 * j + e;
            visit(i, state[2 * i] * (since0 * start[r]), state[2 * i + 1] * (since1 * start[r]), p0, p1, g0, g1);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(128, 2)
#if RAW
    __cluster_dims__(2, 1, 1)
#endif
        gradients(const bf16* q, const bf16* k, const bf16* v, const GATE* gates, const BETAS* betas, const float* rates,
                  const float* biases, float lowest, const float* scales, const bf16* d_read, const int* first,
                  const int* count, const unsigned char* states, const unsigned char* written,
                  const unsigned char* d_errors, const unsigned char* d_states, bf16* dq, bf16* dk, bf16* dv, GATE* dg,
                  float* d_beta, float* d_bias, float* d_rate, int tokens, int heads, int sharing, i64 q_token, i64 q_head,
                  i64 k_token, i64 k_head, i64 v_token, i64 v_head, i64 g_token, i64 g_head, i64 b_token, i64 b_head,
                  i64 d_token, i64 d_head) {
    extern __shared__ __align__(1024) unsigned char shared[];
    float *beta = (float*)(shared + SMALL), *own = beta + 64, *scale = own + 64;  // [64], [64], [query and key, 64]
    u32 at = shared_address(shared), loaded = at + PAIRS + 64;  // a corner of the pairs that nothing uses
    int half = blockIdx.x & 1, slot = blockIdx.x >> 1, n = slot / heads, h = slot % heads, rows = count[n];
    i64 start = first[n];
    int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, l = lane & 3;
    int channel = 64 * half + 16 * warp + g;
    if (thread == 0) {
        barrier_init(loaded, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        shared_to_async();
        barrier_expect(loaded, 8 * TILE);
        copy_in(at + STATE, states + ((i64)slot * 4 + 2 * half) * TILE, 2 * TILE, loaded);
        copy_in(at + D_STATE, d_states + ((i64)slot * 4 + 2 * half) * TILE, 2 * TILE, loaded);
        copy_in(at + WRITTEN, written + (i64)slot * 2 * TILE, 2 * TILE, loaded);
        copy_in(at + ERRORS, d_errors + (i64)slot * 2 * TILE, 2 * TILE, loaded);
    }
    rows_in(at + D_READ, d_read + start * d_token + h * d_head, d_token, rows);
    rows_in(at + D_READ + TILE, d_read + start * d_token + h * d_head + 64, d_token, rows);
    rows_in(at + QUERY, q + start * q_token + h / sharing * q_head + 64 * half, q_token, rows);
    rows_in(at + KEY, k + start * k_token + h / sharing * k_head + 64 * half, k_token, rows);
    constexpr int EIGHTS = ANCHORED / 8;
    float x[32], full[2][ROWS / ANCHORED];  // log decays since the tile's anchor; of either row's tiles
#if RAW
    rows_in(at + PAIRS + TILE, gates + start * g_token + h * g_head + 64 * half, g_token, rows);
#else
    {
        const GATE* from = gates + (start + 2 * l) * g_token + h * g_head + channel;
#pragma unroll
        for (int b = 0; b < 8; b++, from += 8 * g_token) {
            int t = 8 * b + 2 * l;
            x[4 * b] = t < rows ? number(from[0]) : 0.f, x[4 * b + 2] = t < rows ? number(from[8]) : 0.f;
            const GATE* next = from + g_token;
            x[4 * b + 1] = t + 1 < rows ? number(next[0]) : 0.f, x[4 * b + 3] = t + 1 < rows ? number(next[8]) : 0.f;
        }
    }
#endif
    if (thread < ROWS) {
        float b = thread < rows ? number(betas[(start + thread) * b_token + h * b_head]) : 0.f;
        beta[thread] = RAW && thread < rows ? sigmoid(b) : b;
        if (RAW) {
            float2 both = ((const float2*)scales)[(i64)slot * ROWS + thread];
            scale[thread] = both.x, scale[ROWS + thread] = both.y;
        }
    }
    cells_done();
    shared_to_async();
    __syncthreads();
#if RAW
    float rate = power(rates[h] * 1.4426950408889634f);
    float bias[2] = {biases[h * 128 + channel], biases[h * 128 + channel + 8]};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 four[4];
        fragment(four, at + PAIRS + TILE, j);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            int i = 8 * j + e, t = 8 * (i >> 2) + 2 * l + (i & 1);
            float slope, z = (e & 1 ? high(four[e >> 1]) : low(four[e >> 1])) + bias[(e >> 1) & 1];
            x[i] = t >= rows ? 0.f : UNBOUNDED ? -rate * softplus(z, slope) : lowest * sigmoid(rate * z);
        }
    }
    __syncthreads();  // pairs come where the gates were
#endif
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.f;
#pragma unroll
        for (int b = 0; b < 8; b++) {
            float &x0 = x[4 * b + 2 * r], &x1 = x[4 * b + 2 * r + 1];
            if (UNBOUNDED) x0 = fmaxf(x0, HELD / 1.4426950408889634f), x1 = fmaxf(x1, HELD / 1.4426950408889634f);
            float both = (x0 + x1) * 1.4426950408889634f, far;
#if !CAUSAL
            float upto = both;
            far = __shfl_up_sync(~0u, upto, 1, 4), upto += l >= 1 ? far : 0.f;
            far = __shfl_up_sync(~0u, upto, 2, 4), upto += l >= 2 ? far : 0.f;
            x0 = sum + upto - both + x0 * 1.4426950408889634f;
            x1 = sum + upto;
            sum += __shfl_sync(~0u, upto, 3, 4);
#else
            // Of the tokens before a pair alone: a difference of sums would round by the later one's gate.
            far = __shfl_up_sync(~0u, both, 1, 4);
            float before = l >= 1 ? far : 0.f;
            far = __shfl_up_sync(~0u, before, 1, 4), before += l >= 2 ? far : 0.f;
            far = __shfl_up_sync(~0u, before, 2, 4), before += l >= 2 ? far : 0.f;
            x0 = sum + before + x0 * 1.4426950408889634f;
            x1 = sum + before + both;
            sum += __shfl_sync(~0u, before + both, 3, 4);
#endif
            if (b % EIGHTS == EIGHTS - 1) full[r][b / EIGHTS] = sum, sum = 0.f;
        }
#pragma unroll
        for (int b = 0; b < 8; b++) {
            float anchor = CAUSAL ? -BALANCE : 0.5f * full[r][b / EIGHTS];
            x[4 * b + 2 * r] -= anchor, x[4 * b + 2 * r + 1] -= anchor;
        }
    }
#if ANCHORED == 32
    float half_first[2], half_second[2];  // e to half of either tile's decay; together they may be below all numbers
#pragma unroll
    for (int r = 0; r < 2; r++)
        half_first[r] = power(0.5f * full[r][0]), half_second[r] = power(0.5f * full[r][1]);
#else
    constexpr int TILES_OF_16 = 16 / ANCHORED;
    auto tile_sum = [&](int r, int j) {
        return ANCHORED == 16 ? full[r][j] : full[r][TILES_OF_16 * j] + full[r][TILES_OF_16 * (j + 1) - 1];
    };
#if !CAUSAL
    float own_half[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) own_half[i & 1][i >> 1] = power(0.5f * full[i & 1][i >> 1]);
    auto since = [&](int r, int j, int) { return own_half[r][j]; };
    auto until = since;
    auto past = [&](float x, int r, int j) { return x * own_half[r][j] * own_half[r][j]; };
#else
    // From the start of a tile of 16 to the anchor of its n-th eight, and from that anchor to the tile's end; balanced.
    // And past a whole tile.
    auto since = [&](int r, int j, int n) {
        return ANCHORED == 8 && n ? power_anew(full[r][TILES_OF_16 * j] - BALANCE) : UNBALANCED;
    };
    auto until = [&](int r, int j, int n) {
        return power_anew(BALANCE + (ANCHORED == 8 && n ? full[r][TILES_OF_16 * (j + 1) - 1] : tile_sum(r, j)));
    };
    auto past = [&](float x, int r, int j) { return x * power_anew(tile_sum(r, j)); };
#endif
#endif
    barrier_wait(loaded, 0);
#if RAW
    if (thread == 0) barrier_expect(loaded, 512);  // next it counts what the other half sends
#endif

    u32 query[16], key[16];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 four[4];
        fragment(four, at + QUERY, j);
#pragma unroll
        for (int i = 0; i < 4; i++) query[4 * j + i] = four[i];
        fragment(four, at + KEY, j);
#pragma unroll
        for (int i = 0; i < 4; i++) key[4 * j + i] = four[i];
    }
    auto scaled = [&](u32 both, const float* scales, int i) {
        float2 s = RAW ? *(const float2*)(scales + 8 * (i >> 1) + 2 * l) : make_float2(1.f, 1.f);
        return make_float2(low(both) * s.x, high(both) * s.y);
    };
    auto query_at = [&](int i) { return scaled(query[i], scale, i); };
    auto key_at = [&](int i) { return scaled(key[i], scale + ROWS, i); };
    auto beta_at = [&](int i) { return *(const float2*)(beta + 8 * (i >> 1) + 2 * l); };
    auto own_at = [&](int i) { return *(const float2*)(own + 8 * (i >> 1) + 2 * l); };
    {
        float reads[32], overlaps[32];
        products_begin();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int k16 = (i >> 2) * TILE + (i & 3) * 32;
            product<0, 0>(reads, describe(at + D_READ + k16), describe(at + WRITTEN + k16), i);
            product<0, 0>(overlaps, describe(at + ERRORS + k16), describe(at + WRITTEN + k16), i);
        }
        products_commit();
        products_wait<0>();
#pragma unroll
        for (int i = 0; i < 16; i++) {
            int t = 16 * warp + g + 8 * (i & 1), c = 8 * (i >> 1) + 2 * l;
            if (t == c) own[t] = reads[2 * i];
            if (t == c + 1) own[t] = reads[2 * i + 1];
            if (t < 32 && c >= 32) continue;
            int to = place(t, c);
            *(u32*)(shared + PAIRS + to) = pack(t > c ? reads[2 * i] : 0.f, t > c + 1 ? reads[2 * i + 1] : 0.f);
            *(u32*)(shared + PAIRS + TILE + to) =
                pack(t > c ? overlaps[2 * i] : 0.f, t > c + 1 ? overlaps[2 * i + 1] : 0.f);
        }
    }
    float of_query[32], of_row[32];
    products_begin();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int k16 = (i >> 2) * TILE + (i & 3) * 32;
        product<1, 0>(of_query, describe(at + STATE + 2048 * i), describe(at + D_READ + k16), i);
        product<1, 0>(of_row, describe(at + STATE + 2048 * i), describe(at + ERRORS + k16), i);
    }
    products_commit();

    // Meanwhile what needs no product: the values' gradient, beta's share of it, and sums of states with gradients.
    float of_beta = 0.f;
    {
        int t = thread >> 1;
        float b = beta[t];
        const bf16* value = v + (start + t) * v_token + h * v_head + 64 * half + 32 * (thread & 1);
        bf16* to = dv + ((start + t) * heads + h) * 128 + 64 * half + 32 * (thread & 1);
        if (t < rows)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint4 a = *(const uint4*)(value + 8 * i);
                uint4 e = *(const uint4*)(shared + ERRORS + half * TILE + place(t, 32 * (thread & 1) + 8 * i));
                of_beta += low(a.x) * low(e.x) + high(a.x) * high(e.x) + low(a.y) * low(e.y) + high(a.y) * high(e.y) +
                           low(a.z) * low(e.z) + high(a.z) * high(e.z) + low(a.w) * low(e.w) + high(a.w) * high(e.w);
                *(uint4*)(to + 8 * i) = make_uint4(
                    pack(b * low(e.x), b * high(e.x)), pack(b * low(e.y), b * high(e.y)),
                    pack(b * low(e.z), b * high(e.z)), pack(b * low(e.w), b * high(e.w)));
            }
        of_beta += __shfl_xor_sync(~0u, of_beta, 1);
    }
    float2 both = make_float2(0.f, 0.f);
#pragma unroll 8
    for (int i = 0; i < 32; i++) {
        int from = place(32 * warp + i, 2 * lane);
        u32 a = *(const u32*)(shared + STATE + from), b = *(const u32*)(shared + D_STATE + from);
        both.x += low(a) * low(b), both.y += high(a) * high(b);
    }
    products_wait<0>();
    __syncthreads();
#if RAW
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // the other half may write into the sums
#endif

    float* sums = (float*)(shared + SUMS);  // of states, beta, query and key: [4 warps, 64] each
    *(float2*)(sums + 64 * warp + 2 * lane) = both;
#if ANCHORED == 32
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 columns[4], of_q[4], of_k[4], second_q[4], second_k[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = 4 * j + e, r = e & 1;
            float2 a = query_at(i), b = key_at(i), w = beta_at(i);
            float up0 = power_anew(x[2 * i]), up1 = power_anew(x[2 * i + 1]);
            columns[e] = pack(b.x * power_anew(-x[2 * i]), b.y * power_anew(-x[2 * i + 1]));
            a.x *= up0, a.y *= up1, b.x *= -w.x * up0, b.y *= -w.y * up1;
            if (j >= 2) {
                second_q[e] = pack(a.x, a.y), second_k[e] = pack(b.x, b.y);
                a.x = a.x * half_second[r] * half_first[r], a.y = a.y * half_second[r] * half_first[r];
                b.x = b.x * half_second[r] * half_first[r], b.y = b.y * half_second[r] * half_first[r];
            }
            of_q[e] = pack(a.x, a.y), of_k[e] = pack(b.x, b.y);
        }
        put_fragment(at + COLUMNS, columns, j);
        put_fragment(at + QUERY_ROWS, of_q, j);
        put_fragment(at + KEY_ROWS, of_k, j);
        if (j >= 2) {
            put_fragment(at + SECOND_ROWS, second_q, j - 2);
            put_fragment(at + SECOND_ROWS + TILE / 2, second_k, j - 2);
        }
    }
    shared_to_async();
    __syncthreads();

    // What rows t get from columns i of the first tile, and rows of the second tile from columns of the second.
    auto pairs_of_rows = [&](float (&one)[32], float (&two)[16], u32 pairs) {
        products_begin();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            product<1, 0>(one, describe(at + COLUMNS + 2048 * i), describe(pairs + 32 * i), i);
            product<1, 0>(two, describe(at + COLUMNS + 4096 + 2048 * i), describe(pairs + 4096 + 64 + 32 * i), i);
        }
        products_commit();
        products_wait<0>();
    };
#else
    auto row_at = [&](int of_key, int i) {
        if (!of_key) return query_at(i);
        float2 b = key_at(i), w = beta_at(i);
        return make_float2(b.x * -w.x, b.y * -w.y);
    };
    // Rounded factors of tile j: since the own anchor or until there; of columns until the second anchor, where they lie
    // before it; since the tile's start or until its end; and since the border in the middle of the chunk or until there.
    auto row_factors = [&](int of_key, const float2 (&up)[4], int j, u32 (&own)[4], u32 (&near)[4], u32 (&far)[4]) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float2 a = row_at(of_key, 4 * j + e);
            float from = since(e & 1, j, e >> 1);
            a.x *= up[e].x, a.y *= up[e].y;
            own[e] = pack(a.x, a.y);
            near[e] = pack(a.x * from, a.y * from);
            a.x *= from, a.y *= from;
            far[e] = j == 3 ? pack(past(a.x, e & 1, 2), past(a.y, e & 1, 2)) : near[e];
        }
    };
    auto column_factors = [&](const float2 (&down)[4], int j, u32 (&own)[4], u32 (&step)[4], u32 (&near)[4],
                              u32 (&far)[4]) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float2 b = key_at(4 * j + e);
            float to = until(e & 1, j, e >> 1);
            b.x *= down[e].x, b.y *= down[e].y;
            own[e] = step[e] = pack(b.x, b.y);
            if (ANCHORED == 8 && e < 2) {
                float by = power_anew(full[e & 1][TILES_OF_16 * j]);
                step[e] = pack(b.x * by, b.y * by);
            }
            near[e] = pack(b.x * to, b.y * to);
            b.x *= to, b.y *= to;
            far[e] = j == 0 ? pack(past(b.x, e & 1, 1), past(b.y, e & 1, 1)) : near[e];
        }
    };
    auto powers = [&](float2 (&of)[4], int j, float sign) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = 4 * j + e;
            of[e] = make_float2(power_anew(sign * x[2 * i]), power_anew(sign * x[2 * i + 1]));
        }
    };
#endif
    float dot[16];
    {
        u32 result[16];
#if ANCHORED == 32
        float one[32], two[16];
        pairs_of_rows(one, two, at + PAIRS);
#endif
#pragma unroll
        for (int i = 0; i < 16; i++) dot[i] = 0.f;
        auto visit = [&](int i, float s0, float s1, float p0, float p1, float g0, float g1) {
            float2 a = query_at(i), b = key_at(i), d = own_at(i);
            of_query[2 * i] = a.x * s0 + g0, of_query[2 * i + 1] = a.y * s1 + g1;
            p0 += s0 + d.x * b.x, p1 += s1 + d.y * b.y;
            dot[i & ~1] += a.x * p0, dot[i | 1] += a.y * p1;
            result[i] = pack(p0, p1);
            if ((i & 3) == 3) {
                u32 four[4] = {result[i - 3], result[i - 2], result[i - 1], result[i]};
                put_fragment(at + D_QUERY, four, i >> 2);
            }
        };
#if ANCHORED == 32
        rows_done(x, half_first, half_second, of_query, one, two, at + QUERY_ROWS, at + SECOND_ROWS, visit);
#else
        rows_done(tile_sum, since, past, of_query, 0, at + PAIRS, powers, row_factors, column_factors, visit);
#endif
#if RAW
        sum_channels(sums + 512, dot);
#endif
    }
    float(&d_decay)[32] = of_query;
    {
#if ANCHORED == 32
        float one[32], two[16];
        pairs_of_rows(one, two, at + PAIRS + TILE);
#endif
#pragma unroll
        for (int i = 0; i < 16; i++) dot[i] = 0.f;
        auto visit = [&](int i, float s0, float s1, float p0, float p1, float g0, float g1) {
            float2 b = key_at(i), w = beta_at(i);
            d_decay[2 * i] += g0 - w.x * b.x * s0, d_decay[2 * i + 1] += g1 - w.y * b.y * s1;
            p0 += s0, p1 += s1;
            dot[i & ~1] += b.x * p0, dot[i | 1] += b.y * p1;
            of_row[2 * i] = -w.x * p0, of_row[2 * i + 1] = -w.y * p1;
        };
#if ANCHORED == 32
        rows_done(x, half_first, half_second, of_row, one, two, at + KEY_ROWS, at + SECOND_ROWS + TILE / 2, visit);
#else
        rows_done(tile_sum, since, past, of_row, 1, at + PAIRS + TILE, powers, row_factors, column_factors, visit);
#endif
        sum_channels(sums + 256, dot);
    }
    float last[2] = {0.f, 0.f};  // what every gate of the chunk gets
    {
        float hat[32];
#if ANCHORED == 32
        float one[16], two[16];
#endif
        products_begin();
#pragma unroll
        for (int i = 0; i < 8; i++)
            product<1, 0>(hat, describe(at + D_STATE + 2048 * i),
                          describe(at + WRITTEN + (i >> 2) * TILE + (i & 3) * 32), i);
#if ANCHORED == 32
#pragma unroll
        for (int i = 0; i < 4; i++) {
            product<1, 1>(one, describe(at + QUERY_ROWS + 2048 * i), describe(at + PAIRS + 2048 * i), i);
            product<1, 1>(one, describe(at + KEY_ROWS + 2048 * i), describe(at + PAIRS + TILE + 2048 * i), 1);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            product<1, 1>(two, describe(at + SECOND_ROWS + 2048 * i), describe(at + PAIRS + 4096 + 64 + 2048 * i), i);
            product<1, 1>(two, describe(at + SECOND_ROWS + TILE / 2 + 2048 * i),
                          describe(at + PAIRS + TILE + 4096 + 64 + 2048 * i), 1);
        }
#endif
        products_commit();
        products_wait<0>();
        __syncthreads();
#if RAW
        rows_in(at + GATES_IN, gates + start * g_token + h * g_head + 64 * half, g_token, rows);
#pragma unroll
        for (int i = 0; i < 16; i++) dot[i] = 0.f;
#endif
#if ANCHORED != 32
        float own[4][2][4] = {}, stepped[4][4] = {}, near[4][2][4] = {}, far[4][2][4] = {};
#endif
#pragma unroll
        for (int step = 0; step < 4; step++) {
            int j = step ^ (ANCHORED == 32 ? 0 : 2);  // the later half first: its rows meet the earlier one's columns
            u32 factors[4], result[4];
#if ANCHORED == 32
            fragment(factors, at + COLUMNS, j);
#else
            if ((j & 1) == 0)
#pragma unroll
                for (int t = j + 1; t >= j; t--) {
                    float2 up[4];
                    powers(up, t, 1.f);
#pragma unroll
                    for (int which = 0; which < 2; which++) {
                        u32 pair[4], row[4], near_row[4], far_row[4], pairs = at + PAIRS + which * TILE;
                        row_factors(which, up, t, row, near_row, far_row);
                        corner_transposed(pair, pairs, 16 * t, 16 * t);
#if ANCHORED == 16
                        warp_product(own[t], row, pair);
#else
                        warp_product(own[t][0], row[0], row[1], pair[0]);
                        warp_product(stepped[t], row[2], row[3], pair[1]);
                        warp_product(own[t][1], row[2], row[3], pair[3]);
#endif
                        if (t > j) {
                            corner_transposed(pair, pairs, 16 * t, 16 * j);
                            warp_product(near[j], near_row, pair);
                        }
                        if (j == 2)
#pragma unroll
                            for (int i = 0; i < 2; i++) {
                                corner_transposed(pair, pairs, 16 * t, 16 * i);
                                warp_product(far[i], far_row, pair);
                            }
                    }
                }
            u32 step_factors[4], near_factors[4], far_factors[4];
            float2 down[4];
            powers(down, j, -1.f);
            column_factors(down, j, factors, step_factors, near_factors, far_factors);
            float end[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float sum = 0.f;
#pragma unroll
                for (int i = j + 1; i < 4; i++) sum += tile_sum(r, i);
                end[r] = power(sum);
            }
#endif
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int i = 4 * j + e, r = e & 1;
                float2 a = query_at(i), b = key_at(i), d = own_at(i);
#if ANCHORED == 32
                float down0 = power_anew(-x[2 * i]), down1 = power_anew(-x[2 * i + 1]);
                float far = j >= 2 ? half_second[r] : half_first[r] * half_second[r] * half_second[r];
                float h0 = hat[2 * i] * (down0 * far), h1 = hat[2 * i + 1] * (down1 * far);
                float c0 = j >= 2 ? two[2 * (i & 7)] : one[2 * (i & 7)];
                float c1 = j >= 2 ? two[2 * (i & 7) + 1] : one[2 * (i & 7) + 1];
                float g0 = low(factors[e]) * c0, g1 = high(factors[e]) * c1;
                c0 *= down0, c1 *= down1;
#else
                int n = e >> 1;
                float down0 = down[e].x, down1 = down[e].y, o0 = own[j][n][2 * r], o1 = own[j][n][2 * r + 1];
                float c0 = o0 * down0, c1 = o1 * down1, g0 = low(factors[e]) * o0, g1 = high(factors[e]) * o1;
                if (ANCHORED == 8 && n == 0) {
                    float by = power_anew(full[r][TILES_OF_16 * j]);
                    o0 = stepped[j][2 * r], o1 = stepped[j][2 * r + 1];
                    c0 += o0 * (down0 * by), c1 += o1 * (down1 * by);
                    g0 += low(step_factors[e]) * o0, g1 += high(step_factors[e]) * o1;
                }
                float to = until(r, j, n);
                down0 *= to, down1 *= to;
                if ((j & 1) == 0) {
                    o0 = near[j][n][2 * r], o1 = near[j][n][2 * r + 1];
                    c0 += o0 * down0, c1 += o1 * down1;
                    g0 += low(near_factors[e]) * o0, g1 += high(near_factors[e]) * o1;
                }
                if (j < 2) {
                    o0 = far[j][n][2 * r], o1 = far[j][n][2 * r + 1];
                    c0 += o0 * (j == 0 ? past(down0, r, 1) : down0), c1 += o1 * (j == 0 ? past(down1, r, 1) : down1);
                    g0 += low(far_factors[e]) * o0, g1 += high(far_factors[e]) * o1;
                }
                float h0 = hat[2 * i] * (down0 * end[r]), h1 = hat[2 * i + 1] * (down1 * end[r]);
#endif
                last[r] += b.x * h0 + b.y * h1;
                d_decay[2 * i] -= b.x * h0 + g0;
                d_decay[2 * i + 1] -= b.y * h1 + g1;
                float p0 = of_row[2 * i] + h0 + c0 + d.x * a.x;
                float p1 = of_row[2 * i + 1] + h1 + c1 + d.y * a.y;
                if (RAW) dot[i & ~1] += b.x * p0, dot[i | 1] += b.y * p1;
                result[e] = pack(p0, p1);
            }
            put_fragment(at + D_KEY, result, j);
        }
#if RAW
        sum_channels(sums + 768, dot);
#endif
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        last[r] += __shfl_xor_sync(~0u, last[r], 1);
        last[r] += __shfl_xor_sync(~0u, last[r], 2);
        float whole = 0.f;
#pragma unroll
        for (int i = 0; i < ROWS / ANCHORED; i++) whole += full[r][i];
        float sum = last[r] + power(whole) * of_warps(sums, 16 * warp + g + 8 * r);
#pragma unroll
        for (int b = 7; b >= 0; b--) {
            float &x0 = d_decay[4 * b + 2 * r], &x1 = d_decay[4 * b + 2 * r + 1];
            float pair = x0 + x1, from = pair, far;
            far = __shfl_down_sync(~0u, from, 1, 4), from += l < 3 ? far : 0.f;
            far = __shfl_down_sync(~0u, from, 2, 4), from += l < 2 ? far : 0.f;
            x1 = sum + from - pair + x1;
            x0 = sum + from;
            sum += __shfl_sync(~0u, from, 0, 4);
        }
    }
#if RAW
    cells_done();
    __syncthreads();
    float of_bias[2] = {0.f, 0.f}, of_rate = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 four[4], result[4];
        fragment(four, at + GATES_IN, j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = 4 * j + e, t = 8 * (i >> 1) + 2 * l, r = e & 1;
            float z0 = low(four[e]) + bias[r], z1 = high(four[e]) + bias[r];
#if !UNBOUNDED
            float p0 = sigmoid(rate * z0), p1 = sigmoid(rate * z1);
            float d0 = t < rows ? d_decay[2 * i] * (lowest * rate) * p0 * (1.f - p0) : 0.f;
            float d1 = t + 1 < rows ? d_decay[2 * i + 1] * (lowest * rate) * p1 * (1.f - p1) : 0.f;
            of_bias[r] += d0 + d1, of_rate += d0 * z0 + d1 * z1;
#else
            float p0, p1, a0 = -rate * softplus(z0, p0), a1 = -rate * softplus(z1, p1);
            float d0 = t < rows ? d_decay[2 * i] * asked(a0) : 0.f;
            float d1 = t + 1 < rows ? d_decay[2 * i + 1] * asked(a1) : 0.f;
            of_rate += d0 * a0 + d1 * a1;
            d0 *= -rate * p0, d1 *= -rate * p1;
            of_bias[r] += d0 + d1;
#endif
            result[e] = pack(d0, d1);
        }
        put_fragment(at + D_GATE, result, j);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        of_bias[r] += __shfl_xor_sync(~0u, of_bias[r], 1);
        of_bias[r] += __shfl_xor_sync(~0u, of_bias[r], 2);
        if (l == 0) d_bias[(i64)slot * 128 + channel + 8 * r] = of_bias[r];
    }
#pragma unroll
    for (int far = 1; far < 32; far *= 2) of_rate += __shfl_xor_sync(~0u, of_rate, far);
    if (lane == 0) d_rate[(i64)slot * 8 + 4 * half + warp] = of_rate;
    // The other half's dot products of query and key with their gradients.
    float* peer = sums + 1024;
    __syncthreads();
    {
        float mine = of_warps(sums + (thread < 64 ? 512 : 768), thread & 63);
        u32 to, there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(peer + thread)), "r"(half ^ 1));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(loaded), "r"(half ^ 1));
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(mine),
                     "r"(there)
                     : "memory");
        barrier_wait(loaded, 1);
    }
#else
    {
        GATE* to = dg + ((start + 2 * l) * heads + h) * 128 + channel;
        i64 apart = (i64)heads * 128;
#pragma unroll
        for (int b = 0; b < 8; b++, to += 8 * apart) {
            int t = 8 * b + 2 * l;
#if UNBOUNDED
            const GATE* from = gates + (start + t) * g_token + h * g_head + channel;
            if (t < rows) d_decay[4 * b] *= asked(number(from[0])), d_decay[4 * b + 2] *= asked(number(from[8]));
            from += g_token;
            if (t + 1 < rows)
                d_decay[4 * b + 1] *= asked(number(from[0])), d_decay[4 * b + 3] *= asked(number(from[8]));
#endif
            if (t < rows) to[0] = (GATE)d_decay[4 * b], to[8] = (GATE)d_decay[4 * b + 2];
            if (t + 1 < rows) to[apart] = (GATE)d_decay[4 * b + 1], to[apart + 8] = (GATE)d_decay[4 * b + 3];
        }
    }
    __syncthreads();
#endif
    if ((thread & 1) == 0 && (thread >> 1) < rows)
        d_beta[((i64)half * tokens + start + (thread >> 1)) * heads + h] = of_beta - of_warps(sums + 256, thread >> 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int t = (thread >> 3) + 16 * i, piece = 8 * (thread & 7);
        if (t >= rows) continue;
        i64 to = ((start + t) * heads + h) * 128 + 64 * half + piece;
#pragma unroll
        for (int which = 0; which < 2; which++) {
            uint4 d = *(const uint4*)(shared + (which ? D_KEY : D_QUERY) + place(t, piece));
#if RAW
            uint4 a = *(const uint4*)(shared + (which ? KEY : QUERY) + place(t, piece));
            const float* mine = sums + (which ? 768 : 512);
            float s = scale[ROWS * which + t];
            float along = (of_warps(mine, t) + (sums + 1024)[64 * which + t]) * s * (which ? 1.f : 128.f);
            d.x = pack(s * (low(d.x) - along * low(a.x)), s * (high(d.x) - along * high(a.x)));
            d.y = pack(s * (low(d.y) - along * low(a.y)), s * (high(d.y) - along * high(a.y)));
            d.z = pack(s * (low(d.z) - along * low(a.z)), s * (high(d.z) - along * high(a.z)));
            d.w = pack(s * (low(d.w) - along * low(a.w)), s * (high(d.w) - along * high(a.w)));
#endif
            *(uint4*)((which ? dk : dq) + to) = d;
        }
#if RAW
        *(uint4*)(dg + to) = *(const uint4*)(shared + D_GATE + place(t, piece));
#endif
    }
}
