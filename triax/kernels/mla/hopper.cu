// Absorbed attention over paged latents on Hopper's matrix units, all heads of a query at once.
//
// Transposed: logits^T [64 tokens, heads] = latents [64, 576] query^T, and means^T [512, heads] += latents^T shares^T, so
// that the matrix units' fixed 64 rows are tokens and channels, and the heads, of which there may be 96, are columns: no
// product is wasted on padding. One block is one query and one part of its sequence's pages. One group of four warps
// makes the logits of a page and turns them into shares; all three groups average, the first the fewest channels, and
// the other two are at it while the first is at the next page. Latents come in pieces of 64 tokens by 64 channels through a ring; each piece serves
// twice, and whoever used it last asks the copy engine for the next one in its place.
//
// Compiled with HEADS (columns, a multiple of 16 up to 96) and SLOTS (pieces in the ring, 9 to 18), behind the products
// that the launching module writes for this number of heads: `of_logits` and `of_means`.

constexpr int PIECES = 9, VALUES = 8, PIECE = 64 * 128;  // pieces of a page; those that are averaged too; bytes
constexpr int STRIPES = HEADS / 8, HALF = HEADS / 2;
constexpr float NOTHING = -1e30f, SLACK = 8.0f;  // a stale maximum is kept while no share exceeds 2^SLACK

__device__ __forceinline__ u32 shared_address(const void *at) { return u32(__cvta_generic_to_shared(at)); }
__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            barrier),
        "r"(phase)
        : "memory");
}
__device__ __forceinline__ void copy_in(u32 to, const TensorMap *map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void meet(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ bool meet_and_ask(int number, int threads, bool mine) {
    u32 any;
    asm volatile(
        "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %1, 0;\nbarrier.cta.red.or.pred any, %2, %3, mine;\n"
        "selp.u32 %0, 1, 0, any;\n}"
        : "=r"(any)
        : "r"(u32(mine)), "r"(number), "r"(threads)
        : "memory");
    return any;
}
// A piece has rows of 128 bytes, 16-byte parts exchanged by the row's number modulo 8, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ u64 describe(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

struct Shared {
    u64 full[SLOTS], queries, shared[2], used[2];
    float largest[HEADS], faded[2][HEADS], inverse[HEADS];
    float found[4][HEADS], mass[4][HEADS];
    int grown[2];
};

struct Source {
    const TensorMap *latents;
    u32 ring, full;
    int total;  // pieces of this block's part
};

// Ask for the piece behind piece `q` in its slot; its page is one of the next two pages' numbers.
__device__ __forceinline__ void refill(const Source &from, int q, int slot, int p, int page, int page_after) {
    if (q + SLOTS >= from.total) return;
    const int behind = (p + SLOTS) % PIECES, barrier = from.full + 8 * slot;
    barrier_expect(barrier, PIECE);
    // The shared key first: it is not averaged, so its place is the first to be free again.
    copy_in(from.ring + slot * PIECE, from.latents, behind ? 64 * (behind - 1) : 64 * VALUES,
            ((p + SLOTS) / PIECES == 1 ? page : page_after) * 64, barrier);
}

// Average the values of a page: this group's pieces are every third one, COUNT of them.
template <int COUNT>
__device__ __forceinline__ void average(float (&means)[COUNT][HEADS / 2], Shared &own, u32 share, const Source &from,
                                        int side, int group, int slot) {
    if (own.grown[side]) {
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            const float2 fade = *reinterpret_cast<const float2 *>(&own.faded[side][8 * j + 2 * (threadIdx.x % 4)]);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                means[i][4 * j] *= fade.x;
                means[i][4 * j + 1] *= fade.y;
                means[i][4 * j + 2] *= fade.x;
                means[i][4 * j + 3] *= fade.y;
            }
        }
    }
    products_begin();
    const u64 right = describe(share);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int p = 1 + 3 * i + group, at = slot + p < SLOTS ? slot + p : slot + p - SLOTS;
        const u64 left = describe(from.ring + at * PIECE);
#pragma unroll
        for (int step = 0; step < 4; step++) of_means(means[i], left + 128 * step, right + 2 * step, 1);
        products_commit();
    }
}

// Write this group's channels of the averages of all heads.
template <int COUNT>
__device__ __forceinline__ void write(const float (&means)[COUNT][HEADS / 2], const Shared &own, float *part,
                                      long long place, int head, int H, int group) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < STRIPES; j++) {
        const int h = 8 * j + 2 * (lane % 4);
        const float2 inverse = *reinterpret_cast<const float2 *>(&own.inverse[h]);
        float *const to = part + (place + h) * (64 * VALUES) + warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int channel = (3 * i + group) * 64;
            if (head + h < H) {
                to[channel] = means[i][4 * j] * inverse.x;
                to[channel + 8] = means[i][4 * j + 2] * inverse.x;
            }
            if (head + h + 1 < H) {
                to[64 * VALUES + channel] = means[i][4 * j + 1] * inverse.y;
                to[64 * VALUES + channel + 8] = means[i][4 * j + 3] * inverse.y;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
attend(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap latents, const int *table,
       const int *seen, float *part, float *summary, int table_row, int seen_row, int seen_query, int W, int H, int S,
       float scale) {
    extern __shared__ char room[];
    const u32 ring = (shared_address(room) + 1023) & ~1023u, query = ring + SLOTS * PIECE;
    const u32 shares = query + PIECES * HEADS * 128;
    Shared &own = *reinterpret_cast<Shared *>(room + (shares + 2 * HEADS * 128 - shared_address(room)));
    const int split = blockIdx.x, row = blockIdx.y / ((H + HEADS - 1) / HEADS);
    const int head = blockIdx.y % ((H + HEADS - 1) / HEADS) * HEADS, n = row / W;
    const int count = seen[n * (long long)seen_row + row % W * seen_query], tiles = (count + 63) / 64;
    const int each = (tiles + S - 1) / S, first = min(split * each, tiles), last = min(first + each, tiles);
    const int *const pages = table + n * (long long)table_row;
    const int thread = threadIdx.x, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const bool speaks = thread % 128 == 0;
    const u32 full = shared_address(own.full), asked = shared_address(&own.queries);
    const u32 shared = shared_address(own.shared), used = shared_address(own.used);
    const Source from = {&latents, ring, full, (last - first) * PIECES};

    if (thread == 0) {
        for (int i = 0; i < SLOTS; i++) barrier_init(full + 8 * i, 1);
        barrier_init(asked, 1);
        for (int i = 0; i < 2; i++) {
            barrier_init(shared + 8 * i, 128);
            barrier_init(used + 8 * i, 3);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int i = thread; i < HEADS; i += 384) own.largest[i] = NOTHING;
    for (int i = thread; i < 4 * HEADS; i += 384) (&own.mass[0][0])[i] = 0.0f;
    __syncthreads();

    // Pages of the next tiles, known in time to be asked for.
    int page = first + 1 < last ? pages[first + 1] : 0, page_after = first + 2 < last ? pages[first + 2] : 0;
    int slot = 0, phase = 0, q = 0;  // of the tile's first piece
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 152;");
        float means[2][HEADS / 2];
#pragma unroll
        for (int i = 0; i < HEADS; i++) means[i / (HEADS / 2)][i % (HEADS / 2)] = 0.0f;
        if (speaks) {
            barrier_expect(asked, PIECES * HEADS * 128);
            for (int p = 0; p < PIECES; p++) copy_in(query + p * HEADS * 128, &queries, 64 * p, row * H + head, asked);
            const int begin = first < last ? pages[first] : 0;
            for (int i = 0; i < min(SLOTS, from.total); i++) {
                const int p = i % PIECES;
                barrier_expect(full + 8 * i, PIECE);
                copy_in(ring + i * PIECE, &latents, p ? 64 * (p - 1) : 64 * VALUES, (i < PIECES ? begin : page) * 64,
                        full + 8 * i);
            }
        }
        barrier_wait(asked, 0);
        for (int tile = first; tile < last; tile++, q += PIECES) {
            const int side = (tile - first) & 1, turn_of_side = (tile - first) >> 1 & 1;
            const int page_then = tile + 3 < last ? pages[tile + 3] : 0;
            if (tile * 64 + 64 > count) {
                // Rows behind the last token may hold anything, even no numbers: zeros instead.
                for (int p = 0; p < PIECES; p++) {
                    const int at = slot + p < SLOTS ? slot + p : slot + p - SLOTS;
                    barrier_wait(full + 8 * at, slot + p < SLOTS ? phase : phase ^ 1);
                    for (int i = (count - tile * 64) * 32 + thread % 128; i < 64 * 32; i += 128)
                        asm volatile("st.shared.u32 [%0], %1;" ::"r"(ring + at * PIECE + 4 * i), "r"(0) : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                meet(1, 128);
            }
            bool any_grown = false;
            const u32 share = shares + side * HEADS * 128;
#pragma unroll 1
            for (int begin = 0; begin < HEADS; begin += HALF) {
                // Half of the heads at a time: the registers of the other groups are worth more.
                float logit[HALF / 2];
                products_begin();
                {
                    int at = slot, turn = phase;
#pragma unroll 1
                    for (int p = 0; p < PIECES; p++) {
                        barrier_wait(full + 8 * at, turn);
                        const u64 left = describe(ring + at * PIECE);
                        const u64 right = describe(query + ((p ? p - 1 : VALUES) * HEADS + begin) * 128);
#pragma unroll
                        for (int step = 0; step < 4; step++)
                            of_logits(logit, left + 2 * step, right + 2 * step, p || step);
                        if (++at == SLOTS) at = 0, turn ^= 1;
                    }
                }
                products_commit();
                products_wait<0>();
                if (begin && speaks) refill(from, q, slot, 0, page, page_after);

                if (tile * 64 + 64 > count) {
                    const int token = tile * 64 + warp * 16 + lane / 4;
#pragma unroll
                    for (int i = 0; i < HALF / 2; i++)
                        if (token + (i & 2) * 4 >= count) logit[i] = -INFINITY;
                }
#pragma unroll
                for (int j = 0; j < HALF / 8; j++) {
                    float even = fmaxf(logit[4 * j], logit[4 * j + 2]), odd = fmaxf(logit[4 * j + 1], logit[4 * j + 3]);
#pragma unroll
                    for (int distance = 4; distance < 32; distance *= 2) {
                        even = fmaxf(even, __shfl_xor_sync(0xffffffffu, even, distance));
                        odd = fmaxf(odd, __shfl_xor_sync(0xffffffffu, odd, distance));
                    }
                    if (lane < 4)
                        *reinterpret_cast<float2 *>(&own.found[warp][begin + 8 * j + 2 * lane]) = {even, odd};
                }
                // The shares of two tiles ago, and how they faded, are no longer needed.
                if (begin == 0) barrier_wait(used + 8 * side, turn_of_side ^ 1);
                meet(1, 128);
                bool grown = false;
                if (thread % 128 < HALF) {
                    const int h = begin + thread % 128;
                    const float (*const found)[HEADS] = own.found;
                    const float top = scale * fmaxf(fmaxf(found[0][h], found[1][h]), fmaxf(found[2][h], found[3][h]));
                    const float before = own.largest[h];
                    grown = top > before + SLACK;
                    own.largest[h] = grown ? top : before;
                    own.faded[side][h] = grown ? power(before - top) : 1.0f;
                }
                any_grown |= meet_and_ask(2, 128, grown);
#pragma unroll
                for (int j = 0; j < HALF / 8; j++) {
                    const int h = begin + 8 * j + 2 * (lane % 4);
                    const float2 top = *reinterpret_cast<const float2 *>(&own.largest[h]);
                    const float a = power(logit[4 * j] * scale - top.x), b = power(logit[4 * j + 1] * scale - top.y);
                    const float c = power(logit[4 * j + 2] * scale - top.x);
                    const float d = power(logit[4 * j + 3] * scale - top.y);
                    // Two 8 by 8 matrices of tokens by heads, turned over: a row is a head.
                    const int to = begin + 8 * j + lane % 8, eight = warp * 2 + lane / 8 % 2;
                    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                                     share + to * 128 + ((eight ^ (to & 7)) << 4)),
                                 "r"(packed(a, b)), "r"(packed(c, d))
                                 : "memory");
                    logit[4 * j] = a + c;
                    logit[4 * j + 1] = b + d;
                }
                if (begin) {
                    if (speaks) own.grown[side] = any_grown;
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    barrier_arrive(shared + 8 * side);
                }
#pragma unroll
                for (int j = 0; j < HALF / 8; j++) {
                    float even = logit[4 * j], odd = logit[4 * j + 1];
#pragma unroll
                    for (int distance = 4; distance < 32; distance *= 2) {
                        even += __shfl_xor_sync(0xffffffffu, even, distance);
                        odd += __shfl_xor_sync(0xffffffffu, odd, distance);
                    }
                    if (lane < 4) {
                        const int h = begin + 8 * j + 2 * lane;
                        float2 *const mass = reinterpret_cast<float2 *>(&own.mass[warp][h]);
                        const float2 fade = *reinterpret_cast<const float2 *>(&own.faded[side][h]);
                        *mass = {mass->x * fade.x + even, mass->y * fade.y + odd};
                    }
                }
            }
            barrier_wait(shared + 8 * side, turn_of_side);
            average<2>(means, own, share, from, side, group, slot);
            products_wait<0>();
            if (speaks) {
                barrier_arrive(used + 8 * side);
                refill(from, q + 3, slot + 3 < SLOTS ? slot + 3 : slot + 3 - SLOTS, 3, page, page_after);
                refill(from, q + 6, slot + 6 < SLOTS ? slot + 6 : slot + 6 - SLOTS, 6, page, page_after);
            }
            slot += PIECES;
            if (slot >= SLOTS) slot -= SLOTS, phase ^= 1;
            page = page_after;
            page_after = page_then;
        }
        meet(1, 128);
        const long long place = ((long long)row * S + split) * H + head;
        if (thread % 128 < HEADS) {
            const int h = thread % 128;
            const float total = own.mass[0][h] + own.mass[1][h] + own.mass[2][h] + own.mass[3][h];
            own.inverse[h] = total > 0.0f ? 1.0f / total : 0.0f;
            if (head + h < H) {
                summary[(place + h) * 2] = own.largest[h];
                summary[(place + h) * 2 + 1] = total;
            }
        }
        meet(3, 384);
        write<2>(means, own, part, place, head, H, group);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
    float means[3][HEADS / 2];
#pragma unroll
    for (int i = 0; i < 3; i++)
#pragma unroll
        for (int j = 0; j < HEADS / 2; j++) means[i][j] = 0.0f;
#pragma unroll 1
    for (int tile = first; tile < last; tile++, q += PIECES) {
        const int side = (tile - first) & 1, turn_of_side = (tile - first) >> 1 & 1;
        const int page_then = tile + 3 < last ? pages[tile + 3] : 0;
        barrier_wait(shared + 8 * side, turn_of_side);
        average<3>(means, own, shares + side * HEADS * 128, from, side, group, slot);
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int p = 1 + 3 * i + group, at = slot + p < SLOTS ? slot + p : slot + p - SLOTS;
            if (i == 0) products_wait<2>();
            if (i == 1) products_wait<1>();
            if (i == 2) products_wait<0>();
            if (speaks) refill(from, q + p, at, p, page, page_after);
        }
        if (speaks) barrier_arrive(used + 8 * side);
        slot += PIECES;
        if (slot >= SLOTS) slot -= SLOTS;
        page = page_after;
        page_after = page_then;
    }
    meet(3, 384);
    write<3>(means, own, part, ((long long)row * S + split) * H + head, head, H, group);
}
