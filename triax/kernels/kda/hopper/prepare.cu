// Everything of a chunk and head that does not depend on the state: one block each.
//
// With x the log decay (base 2) summed inside a tile of 32 rows and counted from the tile's middle, e^x and e^-x stay in
// bf16's range while no step is below -5.4. Columns are anchored in the middle of their own tile; rows of the second
// tile have two anchors, one for the columns of either tile. With ANCHORED = 16 there are four tiles, whose products with
// each other are anchored at the border in the middle of the chunk, or of its half. With ANCHORED = 8 each of these is
// two, and columns of the first have a second anchor, at the border, for the rows of the second.
//
// `sharing` value heads in a row share a query and a key.
//
// RAW: query and key get their norms here, beta is a sigmoid, the log decay lowest * sigmoid(e^rate (gate + bias)), or
// -e^rate softplus(gate + bias) where it has no bound.

DEVICE void load4(float (&x)[4], const float* from) {
    float4 four = *(const float4*)from;
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
DEVICE void load4(float (&x)[4], const bf16* from) {
    uint2 four = *(const uint2*)from;
    x[0] = low(four.x), x[1] = high(four.x), x[2] = low(four.y), x[3] = high(four.y);
}
DEVICE void store4(void* to, float a, float b, float c, float d) { *(uint2*)to = make_uint2(pack(a, b), pack(c, d)); }
DEVICE u32 tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
constexpr int WIDTH = 72;  // numbers between rows of fp32 squares, free of bank conflicts

// c[16, 8] += a[16, K] b[K, 8], both fp32 with rounded factors.
template <int K>
DEVICE void small_product(float (&c)[4], const float* a, int a_width, const float* b, int b_width) {
    int g = (threadIdx.x & 31) >> 2, l = threadIdx.x & 3;
#pragma unroll
    for (int s = 0; s < K; s += 8) {
        u32 a0 = tf32(a[g * a_width + s + l]), a1 = tf32(a[(g + 8) * a_width + s + l]);
        u32 a2 = tf32(a[g * a_width + s + l + 4]), a3 = tf32(a[(g + 8) * a_width + s + l + 4]);
        u32 b0 = tf32(b[(s + l) * b_width + g]), b1 = tf32(b[(s + l + 4) * b_width + g]);
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}
DEVICE void put(float* to, int width, const float (&c)[4], float sign) {
    int g = (threadIdx.x & 31) >> 2, l = threadIdx.x & 3;
    *(float2*)(to + g * width + 2 * l) = make_float2(sign * c[0], sign * c[1]);
    *(float2*)(to + (g + 8) * width + 2 * l) = make_float2(sign * c[2], sign * c[3]);
}

// A warp's eight rows of 128 numbers, one after another.
template <typename NUMBER>
DEVICE void wide_rows_in(u32 to, const NUMBER* from, i64 apart, int rows) {
    constexpr int AT_ONCE = sizeof(NUMBER) == 2 ? 2 : 1, PIECES = 32 / AT_ONCE;
    int lane = threadIdx.x & 31, r = 8 * (threadIdx.x >> 5) + lane / PIECES, piece = lane % PIECES;
    const NUMBER* row = from + r * apart + piece * (16 / (int)sizeof(NUMBER));
    to += (r * PIECES + piece) * 16;
#pragma unroll
    for (int i = 0; i < 8; i += AT_ONCE, row += AT_ONCE * apart)
        cell_in(to + i * PIECES * 16, r + i < rows ? row : from, r + i < rows);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    prepare(const bf16* q, const bf16* k, const GATE* gates, const BETAS* betas, const float* rates, const float* biases,
            float lowest, const int* first, const int* count, unsigned char* records, float* scales, int heads, int sharing,
            i64 q_token, i64 q_head,
            i64 k_token, i64 k_head, i64 g_token, i64 g_head, i64 b_token, i64 b_head) {
    extern __shared__ __align__(1024) unsigned char shared[];
#if ANCHORED == 32
    unsigned char *query_rows = shared, *second_rows = shared + 4 * TILE, *key_columns = shared + 6 * TILE;
#else
    // Rows of the odd tiles, of the later two, and columns of the even tiles and of the first two; queries before keys.
    unsigned char *own_rows = shared, *own_columns = shared + 4 * TILE, *near_rows = shared + 6 * TILE;
    unsigned char *far_rows = shared + 8 * TILE, *far_columns = shared + 10 * TILE;
    unsigned char* step_columns = shared + 12 * TILE;  // of first eights for the second ones: two halves, 32 rows each
#endif
    float* sums = (float*)(shared + (ANCHORED == 32 ? 8 : ANCHORED == 16 ? 12 : 13) * TILE);  // [8 warps, 128]
    float *decays = sums + 8 * 128, *beta = decays + 128;  // [128], [64]: as at the end of a record
    int n = blockIdx.x / heads, h = blockIdx.x % heads, rows = count[n];
    i64 start = first[n];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, c = 4 * lane;
    unsigned char* record = records + (i64)blockIdx.x * RECORD;
    if (threadIdx.x < ROWS) {
        float b = threadIdx.x < rows ? number(betas[(start + threadIdx.x) * b_token + h * b_head]) : 0.f;
        beta[threadIdx.x] = RAW && threadIdx.x < rows ? sigmoid(b) : b;
    }
    // Each warp its own eight rows, into the room of the factors.
    u32 at = shared_address(shared);
    wide_rows_in(at, q + start * q_token + h / sharing * q_head, q_token, rows);
    wide_rows_in(at + 2 * TILE, k + start * k_token + h / sharing * k_head, k_token, rows);
    wide_rows_in(at + 4 * TILE, gates + start * g_token + h * g_head, g_token, rows);
    cells_done();
    __syncwarp();
    float gate[8][4];
    uint2 query[8], key[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int r = 8 * warp + i;
        load4(gate[i], (const GATE*)(shared + 4 * TILE) + r * 128 + c);
        query[i] = *(const uint2*)(shared + r * 256 + 8 * lane);
        key[i] = *(const uint2*)(shared + 2 * TILE + r * 256 + 8 * lane);
    }
    float query_scale[8], key_scale[8];
#if RAW
    float rate = power(rates[h] * 1.4426950408889634f), bias[4];
    load4(bias, biases + h * 128 + c);
    float squares[16];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        squares[i] = low(query[i].x) * low(query[i].x) + high(query[i].x) * high(query[i].x) +
                     low(query[i].y) * low(query[i].y) + high(query[i].y) * high(query[i].y);
        squares[8 + i] = low(key[i].x) * low(key[i].x) + high(key[i].x) * high(key[i].x) + low(key[i].y) * low(key[i].y) +
                         high(key[i].y) * high(key[i].y);
    }
    // Sixteen sums over 32 lanes in 16 exchanges: at each step a lane keeps half of them; in the end two lanes have one.
#pragma unroll
    for (int far = 16, half = 8; half; far >>= 1, half >>= 1)
#pragma unroll
        for (int i = 0; i < half; i++) {
            float a = squares[i], b = squares[i + half];
            bool upper = lane & far;
            squares[i] = (upper ? b : a) + __shfl_xor_sync(~0u, upper ? a : b, far);
        }
    squares[0] += __shfl_xor_sync(~0u, squares[0], 1);
    float root = rsqrtf(squares[0] + 1e-6f) * (lane & 16 ? 1.f : 0.08838834764831845f);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        query_scale[i] = __shfl_sync(~0u, root, 2 * i), key_scale[i] = __shfl_sync(~0u, root, 16 + 2 * i);
        if (scales && lane == 0)
            ((float2*)scales)[(i64)blockIdx.x * ROWS + 8 * warp + i] = make_float2(query_scale[i], key_scale[i]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float slope, z = gate[i][e] + bias[e];
            gate[i][e] = 8 * warp + i >= rows ? 0.f
                         : UNBOUNDED          ? -rate * softplus(z, slope)
                                              : lowest * sigmoid(rate * z);
        }
    }
#endif
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            gate[i][e] = held(gate[i][e] * 1.4426950408889634f) + (i ? gate[i - 1][e] : 0.f);
    *(float4*)(sums + warp * 128 + c) = make_float4(gate[7][0], gate[7][1], gate[7][2], gate[7][3]);
    __syncthreads();
#if ANCHORED == 32
    bool in_second = warp >= 4;
    float before[4], first_half[4], second_half[4];
    {
        float all[2][4] = {};
#pragma unroll
        for (int e = 0; e < 4; e++) before[e] = 0.f;
#pragma unroll
        for (int w = 0; w < 8; w++) {
            float part[4];
            load4(part, sums + w * 128 + c);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (w < warp && (w >= 4) == in_second) before[e] += part[e];
                all[w >> 2][e] += part[e];
            }
        }
        float decay[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float first_all = all[0][e], second_all = all[1][e];
            before[e] -= 0.5f * (in_second ? second_all : first_all);
            first_half[e] = power(0.5f * all[0][e]);
            second_half[e] = power(0.5f * all[1][e]);
            decay[e] = power(all[0][e] + all[1][e]);
        }
        if (warp == 0) *(float4*)(decays + c) = make_float4(decay[0], decay[1], decay[2], decay[3]);
    }
#else
    int tile = warp >> 1;
    bool is_second = warp & 1;  // eight rows of a tile
    // From the warp's anchor to the end of its tile of 16; and, with ANCHORED = 8, between that tile's anchors.
    float before[4], own_end[4], step[4], next[4], from_start[4], until_end[4];
    {
        float all[4][4] = {};
#pragma unroll
        for (int e = 0; e < 4; e++) before[e] = 0.f;
#pragma unroll
        for (int w = 0; w < 8; w++) {
            float part[4];
            load4(part, sums + w * 128 + c);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (w < warp && w >> 1 == tile) before[e] += part[e];
                all[w >> 1][e] += part[e];
            }
        }
        float decay[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float all_own = 0.f, from = 0.f, end = 0.f;
#pragma unroll
            for (int other = 0; other < 4; other++) {
                all_own += other == tile ? all[other][e] : 0.f;
                from += other < tile ? all[other][e] : 0.f;
                end += other > tile ? all[other][e] : 0.f;
            }
            step[e] = power(is_second ? before[e] - BALANCE : gate[7][e]);
            if (CAUSAL) {
                own_end[e] = power(all_own - (ANCHORED == 8 ? before[e] : 0.f) + BALANCE);
                before[e] = ANCHORED == 8 ? BALANCE : before[e] + BALANCE;
            } else {
                before[e] -= 0.5f * all_own;
                own_end[e] = power(0.5f * all_own);
            }
            next[e] = power(tile == 0 ? all[1][e] : tile == 3 ? all[2][e] : 0.f);
            from_start[e] = power(from), until_end[e] = power(end);
            decay[e] = power(from + all_own + end);
        }
        if (warp == 0) *(float4*)(decays + c) = make_float4(decay[0], decay[1], decay[2], decay[3]);
    }
#endif
    int half = (lane >> 4) * TILE;
    uint2 kept[8][3];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int r = 8 * warp + i, to = half + place(r, c & 63);
        float b = beta[r];
        float x[4], y[4], z[4], q0[4], k0[4];
        q0[0] = low(query[i].x), q0[1] = high(query[i].x), q0[2] = low(query[i].y), q0[3] = high(query[i].y);
        k0[0] = low(key[i].x), k0[1] = high(key[i].x), k0[2] = low(key[i].y), k0[3] = high(key[i].y);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float sum = gate[i][e] + before[e], up = power(sum), down = power(-sum);
            if (RAW) q0[e] *= query_scale[i], k0[e] *= key_scale[i];
            x[e] = q0[e] * up;
            y[e] = k0[e] * up;
            z[e] = k0[e] * down;
        }
#if ANCHORED == 32
        store4(key_columns + to, z[0], z[1], z[2], z[3]);
        if (in_second) {
            int own = half + place(r - 32, c & 63);
            store4(second_rows + own, x[0], x[1], x[2], x[3]);
            store4(second_rows + own + 32 * 128, y[0], y[1], y[2], y[3]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[e] = x[e] * second_half[e] * first_half[e];
                y[e] = y[e] * second_half[e] * first_half[e];
                z[e] *= second_half[e];
            }
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) z[e] = z[e] * first_half[e] * second_half[e] * second_half[e];
        }
        store4(query_rows + to, x[0], x[1], x[2], x[3]);
        store4(query_rows + 2 * TILE + to, y[0], y[1], y[2], y[3]);
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] *= first_half[e], y[e] *= b * first_half[e];
#else
        store4(own_rows + to, x[0], x[1], x[2], x[3]);
        store4(own_rows + 2 * TILE + to, y[0], y[1], y[2], y[3]);
        store4(own_columns + to, z[0], z[1], z[2], z[3]);
#if ANCHORED == 8
        if (!is_second)
            store4(step_columns + (half >> 1) + place(8 * tile + i, c & 63), z[0] * step[0], z[1] * step[1],
                   z[2] * step[2], z[3] * step[3]);
#endif
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float since = !CAUSAL ? own_end[e] : ANCHORED == 8 && is_second ? step[e] : UNBALANCED;
            x[e] *= since, y[e] *= since, z[e] *= own_end[e];
        }
        int odd = (tile & 1) * 16 + (r & 15), later = (tile >> 1) * 16 + (r & 15);
        if (tile & 1) {
            store4(near_rows + half + place(later, c & 63), x[0], x[1], x[2], x[3]);
            store4(near_rows + half + place(32 + later, c & 63), y[0], y[1], y[2], y[3]);
        } else {
            store4(far_columns + half + place(later, c & 63), z[0], z[1], z[2], z[3]);
        }
        if (tile >= 2) {
            store4(far_rows + half + place(odd, c & 63), x[0] * next[0], x[1] * next[1], x[2] * next[2],
                   x[3] * next[3]);
            store4(far_rows + half + place(32 + odd, c & 63), y[0] * next[0], y[1] * next[1], y[2] * next[2],
                   y[3] * next[3]);
        } else {
            store4(far_columns + half + place(32 + odd, c & 63), z[0] * next[0], z[1] * next[1],
                   z[2] * next[2], z[3] * next[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[e] *= from_start[e], y[e] *= b * from_start[e], z[e] *= until_end[e];
#endif
        kept[i][0] = make_uint2(pack(y[0], y[1]), pack(y[2], y[3]));
        kept[i][1] = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
        kept[i][2] = make_uint2(pack(z[0], z[1]), pack(z[2], z[3]));
    }
    shared_to_async();
    __syncthreads();

    int group = warp >> 2, column = 2 * (lane & 3);
#if ANCHORED == 32
    // The first four warps multiply queries, the others keys, both with the first tile's columns; each half of the second
    // tile's columns with the second tile's rows of both.
    int row = 16 * (warp & 3) + (lane >> 2);
    float wide[16], narrow[8];
    u32 rows_at = shared_address(query_rows) + group * 2 * TILE, columns_at = shared_address(key_columns);
    u32 second_at = shared_address(second_rows), second_columns_at = columns_at + (32 + 16 * group) * 128;
    products_begin();
#pragma unroll
    for (int s = 0; s < 8; s++) {
        int at = (s >> 2) * TILE + (s & 3) * 32;
        product<0, 0>(wide, describe(rows_at + at), describe(columns_at + at), s);
        product<0, 0>(narrow, describe(second_at + at), describe(second_columns_at + at), s);
    }
    products_commit();
#else
    // Four warps multiply columns of the first of either two tiles, four those of the second, with the rows of both kinds
    // that come later; each warp its own sixteen rows of queries or keys with their own columns.
    float far[8], near[8], own[2][4] = {}, stepped[4] = {};
    u32 columns_at = shared_address(far_columns) + 16 * group * 128;
    products_begin();
#pragma unroll
    for (int s = 0; s < 8; s++) {
        int at = (s >> 2) * TILE + (s & 3) * 32;
        product<0, 0>(far, describe(shared_address(far_rows) + at), describe(columns_at + 32 * 128 + at), s);
        product<0, 0>(near, describe(shared_address(near_rows) + at), describe(columns_at + at), s);
    }
    products_commit();
    {
        u32 rows_at = shared_address(own_rows) + group * 2 * TILE, own_at = shared_address(own_columns);
        u32 steps[4];
#pragma unroll
        for (int s = 0; s < 8; s++) {
            u32 a[4], swapped[4], b[4];
            corner(swapped, rows_at + (s >> 2) * TILE, 16 * (warp & 3), 16 * (s & 3));
            corner(b, own_at + (s >> 2) * TILE, 16 * (warp & 3), 16 * (s & 3));
            a[0] = swapped[0], a[1] = swapped[2], a[2] = swapped[1], a[3] = swapped[3];
            warp_product(own, a, b);
#if ANCHORED == 8
            if ((s & 1) == 0)
                load_straight(steps, shared_address(step_columns) + (s >> 2) * (TILE / 2) +
                                           place(8 * (warp & 3) + (lane & 7), 16 * (s & 3) + ((lane >> 3) << 3)));
            warp_product(stepped, a, steps[2 * (s & 1)], steps[2 * (s & 1) + 1]);
#endif
        }
        if (ANCHORED == 8) own[0][2] = stepped[2], own[0][3] = stepped[3];
    }
#endif
    // Only now: the fence above would have waited for these stores.
#pragma unroll
    for (int i = 0; i < 8; i++) {
        unsigned char* to = record + half + place(8 * warp + i, c & 63);
        *(uint2*)(to + KEYS) = kept[i][0];
        *(uint2*)(to + QUERIES) = kept[i][1];
        *(uint2*)(to + WRITES) = kept[i][2];
    }
    if (threadIdx.x < 48) ((float4*)(record + DECAY))[threadIdx.x] = ((const float4*)decays)[threadIdx.x];
    products_wait<0>();
    __syncthreads();

    float* lower = (float*)shared;           // A, [64, WIDTH]
    float* inverse = lower + 64 * WIDTH;     // (I + A)^-1
    float* between = inverse + 64 * WIDTH;   // [32, 40]
    unsigned char* reads = shared + 6 * TILE;
    auto put_pair = [&](bool of_query, int t, int i, float a, float b) {
        if (of_query)
            *(u32*)(reads + place(t, i)) = pack(t >= i ? a : 0.f, t >= i + 1 ? b : 0.f);
        else
            *(float2*)(lower + t * WIDTH + i) = make_float2(t > i ? beta[t] * a : 0.f, t > i + 1 ? beta[t] * b : 0.f);
    };
#if ANCHORED == 32
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            int t = row + 4 * e, i = 8 * j + column;
            float a = wide[4 * j + e], b = wide[4 * j + e + 1];
            put_pair(group == 0, t, i, a, b);
        }
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            int t = 32 + (row & 31) + 4 * e, i = 32 + 16 * group + 8 * j + column;
            float a = narrow[4 * j + e], b = narrow[4 * j + e + 1];
            put_pair(row < 32, t, i, a, b);
        }
#else
    int part = warp & 3, first_row = lane >> 2;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            int t = first_row + 4 * e, i = 8 * j + column;
            put_pair(part < 2, 32 + 16 * (part & 1) + t, 16 * group + i, far[4 * j + e], far[4 * j + e + 1]);
            if ((part & 1) == group)
                put_pair(part < 2, 32 * group + 16 + t, 32 * group + i, near[4 * j + e], near[4 * j + e + 1]);
            put_pair(group == 0, 16 * part + t, 16 * part + i, own[j][e], own[j][e + 1]);
        }
    if (threadIdx.x >= 192) {
        int p = threadIdx.x & 31, at = threadIdx.x & 32;
        *(uint4*)(reads + place(at + (p >> 1), at + 16 + 8 * (p & 1))) = make_uint4(0, 0, 0, 0);
    }
#endif
    if (threadIdx.x < 128) *(uint4*)(reads + place(threadIdx.x >> 2, 32 + 8 * (threadIdx.x & 3))) = make_uint4(0, 0, 0, 0);
    __syncthreads();

    if (threadIdx.x < ROWS) {
        // Blocks of 16 by substitution in fp32: for near-equal keys, powers of A would grow and cancel.
        int block = threadIdx.x >> 4, j = threadIdx.x & 15;
        const float* a = lower + 16 * block * (WIDTH + 1);
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            x[i] = i == j ? 1.f : 0.f;
#pragma unroll
            for (int m = 0; m < 16; m++)
                if (m < i) x[i] -= a[i * WIDTH + m] * x[m];
        }
#pragma unroll
        for (int i = 0; i < 16; i++) inverse[16 * block * (WIDTH + 1) + i * WIDTH + j] = x[i];
    } else {
        for (int p = threadIdx.x - ROWS; p < 512; p += 192) {
            *(uint4*)(record + READS + 16 * p) = *(const uint4*)(reads + 16 * p);
            int pair = p >> 8, i = (p >> 4) & 15, j = p & 15;
            inverse[(32 * pair + i) * WIDTH + 32 * pair + 16 + j] = 0.f;
        }
    }
    __syncthreads();
    if (warp < 4) {
        // Two blocks of 16 to one of 32: X21 = -X22 (A21 X11), half of the columns a warp.
        int corner = 32 * (warp >> 1) * (WIDTH + 1), j = 8 * (warp & 1);
        float x[4] = {}, y[4] = {};
        small_product<16>(x, lower + corner + 16 * WIDTH, WIDTH, inverse + corner + j, WIDTH);
        put(between + warp * 16 * 8, 8, x, 1.f);
        __syncwarp();
        small_product<16>(y, inverse + corner + 16 * (WIDTH + 1), WIDTH, between + warp * 16 * 8, 8);
        put(inverse + corner + 16 * WIDTH + j, WIDTH, y, -1.f);
    }
    __syncthreads();
    {
        int i = 16 * (warp >> 2), j = 8 * (warp & 3);
        float x[4] = {}, y[4] = {};
        small_product<32>(x, lower + (32 + i) * WIDTH, WIDTH, inverse + j, WIDTH);
        put(between + i * 40 + j, 40, x, 1.f);
        __syncthreads();
        small_product<32>(y, inverse + (32 + i) * WIDTH + 32, WIDTH, between + j, 40);
        put(inverse + (32 + i) * WIDTH + j, WIDTH, y, -1.f);
    }
    __syncthreads();
#pragma unroll
    for (int p = threadIdx.x; p < 512; p += 256) {
        int t = p >> 3, i = 8 * (p & 7);
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = inverse[t * WIDTH + i + e];
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = i + e <= t ? x[e] : 0.f;
        *(uint4*)(record + INVERSE + place(t, i)) =
            make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    }
}
