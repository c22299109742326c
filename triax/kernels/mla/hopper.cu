// Absorbed attention over paged latents on Hopper's matrix units, all heads of a query at once.
//
// Transposed: logits^T [64 tokens, heads] = latents [64, 576] query^T, and means^T [512, heads] += latents^T shares^T,
// so that the matrix units' fixed 64 rows are tokens and channels, and the heads, of which there may be 96, are
// columns: no product is wasted on padding. Two neighbouring blocks take one query and one part of its sequence's
// pages, each half of the channels, so that queries and several pages find room in shared memory. Each makes logits of
// its channels for all heads, gives those of the neighbour's heads away, completes and shares out its own, and gives
// the shares away too. Two groups of four warps make logits, page about; two more average, each half of the block's
// channels, and ask the copy engine for the next page in the place of one that they are done with.
//
// Compiled with HEADS (columns, a multiple of 16 up to 96; a block's own half comes first) and RING (pages in shared
// memory), behind the products that the launching module writes for this number of heads, `of_logits` and `of_means`,
// and behind `engine.cuh`.

constexpr int PIECE = 64 * 128, PIECES = 4, NARROW = 64 * 64;  // 64 tokens by 64 channels in bytes; a block's; by 32
constexpr int PAGE = PIECES * PIECE + NARROW;
constexpr int HALF = HEADS / 2, STRIPES = HALF / 8, THREADS = 512;
constexpr int SHARES = HEADS * 128;  // bytes of a page's shares, and of its logits that come from the neighbour
constexpr float NOTHING = -1e30f, SLACK = 40.0f;  // a stale maximum is kept while no share exceeds 2^SLACK

struct alignas(16) Note {
    float faded[HALF];
    int grown;
};
struct Shared {
    u64 full[RING], queries, got[2], shared[2], used[2];
    Note note[2][2];  // a page's side; own heads' and the neighbour's
    float largest[HALF], faded[2][HALF], found[4][HALF], mass[8][HALF], inverse[HEADS];
    int grown[2];
};

__device__ __forceinline__ void fade(float (&mass)[2 * STRIPES], const float *faded, int lane) {
#pragma unroll
    for (int j = 0; j < STRIPES; j++) {
        const float2 by = *reinterpret_cast<const float2 *>(&faded[8 * j + 2 * (lane % 4)]);
        mass[2 * j] *= by.x;
        mass[2 * j + 1] *= by.y;
    }
}

// Logits of every second page, their shares, and at the end the sums.
__device__ __forceinline__ void share_out(Shared &own, u32 ring, u32 query, u32 shares, int side, u32 peer, int first,
                                          int last, int count, float scale, float *summary, int heads) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const bool speaks = thread == 0;
    const u32 share = shares + side * SHARES, inbox = shares + (2 + side) * SHARES + thread * 16;
    const u32 got = shared_address(&own.got[side]), shared = shared_address(&own.shared[side]);
    const u32 used = shared_address(&own.used[side]), note = shared_address(&own.note[side][0]);
    const u32 outbox = over_there(inbox, peer), got_there = over_there(got, peer);
    float mass[2 * STRIPES];
#pragma unroll
    for (int i = 0; i < 2 * STRIPES; i++) mass[i] = 0.0f;
    int slot = side % RING, phase = side / RING & 1;
    barrier_wait(shared_address(&own.queries), 0);
#pragma unroll 1
    for (int tile = first + side; tile < last; tile += 2) {
        const int turn = (tile - first) >> 1 & 1;
        const u32 here = ring + slot * PAGE;
        if (speaks) barrier_expect(got, SHARES);
        barrier_wait(shared_address(own.full) + 8 * slot, phase);
        if (tile * 64 + 64 > count) {
            // Rows behind the last token may hold anything, even no numbers: zeros instead.
            const int rest = count - tile * 64;
            for (int p = 0; p < PIECES; p++)
                for (int i = rest * 32 + thread; i < 64 * 32; i += 128)
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(here + p * PIECE + 4 * i), "r"(0) : "memory");
            for (int i = rest * 16 + thread; i < 64 * 16; i += 128)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(here + PIECES * PIECE + 4 * i), "r"(0) : "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            meet(2 + side, 128);
        }
        float logit[HALF];
        products_begin();
        {
            const u64 left = describe(here), right = describe(query);
            const u64 last_left = describe_narrow(here + PIECES * PIECE);
            const u64 last_right = describe_narrow(query + PIECES * HEADS * 128);
#pragma unroll
            for (int p = 0; p < PIECES; p++)
#pragma unroll
                for (int step = 0; step < 4; step++)
                    of_logits(logit, left + (p * PIECE >> 4) + 2 * step, right + (p * HEADS * 128 >> 4) + 2 * step,
                              p || step);
#pragma unroll
            for (int step = 0; step < 2; step++) of_logits(logit, last_left + 2 * step, last_right + 2 * step, 1);
        }
        products_commit();
        products_wait<0>();
        slot += 2;
        if (slot >= RING) slot -= RING, phase ^= 1;
        // Whoever sent shares of the page before had read its logits: there is room for more.
        barrier_wait(shared, turn ^ 1);
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            const float *const theirs = logit + HALF / 2 + 4 * j;
            give(outbox + j * 2048, theirs[0], theirs[1], theirs[2], theirs[3], got_there);
        }
        barrier_wait(got, turn);
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            float a, b, c, d;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
                         : "r"(inbox + j * 2048)
                         : "memory");
            logit[4 * j] += a;
            logit[4 * j + 1] += b;
            logit[4 * j + 2] += c;
            logit[4 * j + 3] += d;
        }
        if (tile * 64 + 64 > count) {
            const int token = tile * 64 + warp * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < HALF / 2; i++)
                if (token + (i & 2) * 4 >= count) logit[i] = -INFINITY;
        }

        // The page before, which the other group has, decides first.
        if (tile > first) {
            meet(4 + side, 256);
            if (own.grown[side ^ 1]) fade(mass, own.faded[side ^ 1], lane);
        }
        float2 top[STRIPES];
        bool over = false;
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            top[j] = *reinterpret_cast<const float2 *>(&own.largest[8 * j + 2 * (lane % 4)]);
            over |= fmaxf(logit[4 * j], logit[4 * j + 2]) * scale > top[j].x + SLACK;
            over |= fmaxf(logit[4 * j + 1], logit[4 * j + 3]) * scale > top[j].y + SLACK;
        }
        over = meet_and_ask(2 + side, 128, over);
        if (over) {
#pragma unroll
            for (int j = 0; j < STRIPES; j++) {
                float even = fmaxf(logit[4 * j], logit[4 * j + 2]), odd = fmaxf(logit[4 * j + 1], logit[4 * j + 3]);
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2) {
                    even = fmaxf(even, __shfl_xor_sync(0xffffffffu, even, distance));
                    odd = fmaxf(odd, __shfl_xor_sync(0xffffffffu, odd, distance));
                }
                if (lane < 4) *reinterpret_cast<float2 *>(&own.found[warp][8 * j + 2 * lane]) = {even, odd};
            }
            meet(2 + side, 128);
            if (thread < HALF) {
                const float (*const found)[HALF] = own.found;
                const float low = fmaxf(found[0][thread], found[1][thread]);
                const float most = scale * fmaxf(low, fmaxf(found[2][thread], found[3][thread]));
                const float before = own.largest[thread];
                const bool grown = most > before + SLACK;
                own.largest[thread] = grown ? most : before;
                own.faded[side][thread] = grown ? power(before - most) : 1.0f;
            }
            meet(2 + side, 128);
            fade(mass, own.faded[side], lane);
#pragma unroll
            for (int j = 0; j < STRIPES; j++)
                top[j] = *reinterpret_cast<const float2 *>(&own.largest[8 * j + 2 * (lane % 4)]);
        }
        if (speaks) own.grown[side] = over;
        if (tile + 1 < last) arrive(4 + (side ^ 1), 256);

        u32 low[STRIPES], high[STRIPES];  // tokens of the first eight and the next, of two heads
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            const float a = power(logit[4 * j] * scale - top[j].x), b = power(logit[4 * j + 1] * scale - top[j].y);
            const float c = power(logit[4 * j + 2] * scale - top[j].x), d = power(logit[4 * j + 3] * scale - top[j].y);
            mass[2 * j] += a + c;
            mass[2 * j + 1] += b + d;
            low[j] = packed(a, b);
            high[j] = packed(c, d);
        }
        // Nobody, here or there, reads the shares of two pages ago any more.
        barrier_wait(used, turn ^ 1);
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            // Two 8 by 8 matrices of tokens by heads, turned over: a row is a head.
            const int to = 8 * j + lane % 8, eight = warp * 2 + lane / 8 % 2;
            asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                             share + to * 128 + ((eight ^ (to & 7)) << 4)),
                         "r"(low[j]), "r"(high[j])
                         : "memory");
        }
        if (over && thread < HALF) own.note[side][0].faded[thread] = own.faded[side][thread];
        if (speaks) own.note[side][0].grown = over;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet(2 + side, 128);
        if (speaks) {
            const u32 there = over_there(shared, peer);
            give(over_there(share + HALF * 128, peer), share, HALF * 128, there);
            give(over_there(note + sizeof(Note), peer), note, sizeof(Note), there);
            barrier_expect(shared, HALF * 128 + sizeof(Note));
        }
    }
    meet(8, 256);
    const int final = (last - first - 1) & 1;
    if (first < last && final != side && own.grown[final]) fade(mass, own.faded[final], lane);
#pragma unroll
    for (int j = 0; j < STRIPES; j++) {
        float even = mass[2 * j], odd = mass[2 * j + 1];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            even += __shfl_xor_sync(0xffffffffu, even, distance);
            odd += __shfl_xor_sync(0xffffffffu, odd, distance);
        }
        if (lane < 4) *reinterpret_cast<float2 *>(&own.mass[side * 4 + warp][8 * j + 2 * lane]) = {even, odd};
    }
    meet(8, 256);
    if (side == 0 && thread < HALF) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) total += own.mass[i][thread];
        const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        own.inverse[thread] = inverse;
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(
                         over_there(shared_address(&own.inverse[HALF + thread]), peer)),
                     "f"(inverse)
                     : "memory");
        if (thread < heads) {
            summary[thread * 2] = own.largest[thread];
            summary[thread * 2 + 1] = total;
        }
    }
}

// Brings a group's pieces of a page, and the first group's the shared keys too.
struct Fetch {
    const TensorMap *latents, *narrow;
    u32 ring, full;
    int half, part_of;
    __device__ __forceinline__ void piece(int page, int slot, int i) const {
        const u32 to = ring + slot * PAGE, barrier = full + 8 * slot;
        if (i == 0) {
            barrier_expect(barrier, 2 * PIECE + (part_of ? 0 : NARROW));
            if (part_of == 0) copy_in(to + PIECES * PIECE, narrow, 512 + half * 32, page * 64, barrier);
        }
        copy_in(to + (part_of * 2 + i) * PIECE, latents, column(i), page * 64, barrier);
    }
    __device__ __forceinline__ int column(int i) const { return (half * PIECES + part_of * 2 + i) * 64; }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
attend(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap narrow_queries,
       const __grid_constant__ TensorMap latents, const __grid_constant__ TensorMap narrow_latents, const int *table,
       const int *seen, float *part, float *summary, int table_row, int seen_row, int seen_query, int W, int H,
       float scale) {
    extern __shared__ __align__(1024) char room[];
    const u32 ring = shared_address(room), query = ring + RING * PAGE;
    const u32 shares = query + HEADS * (PIECES * 128 + 64);
    Shared &own = *reinterpret_cast<Shared *>(room + (shares + 4 * SHARES - shared_address(room)));
    const int half = blockIdx.x % 2, columns = (H + HEADS - 1) / HEADS, row = blockIdx.x / 2 / columns;
    const int head = blockIdx.x / 2 % columns * HEADS, split = blockIdx.y, S = gridDim.y, n = row / W;
    const int count = seen[n * (long long)seen_row + row % W * seen_query], tiles = (count + 63) / 64;
    const int each = (tiles + S - 1) / S, first = min(split * each, tiles), last = min(first + each, tiles);
    const int thread = threadIdx.x, group = __shfl_sync(0xffffffffu, thread / 128, 0);
    const u32 peer = half ^ 1, full = shared_address(own.full);
    const long long place = ((long long)row * S + split) * H;
    const int mine = head + half * HALF, theirs = head + (half ^ 1) * HALF;  // first heads

    if (thread == 0) {
        for (int i = 0; i < RING; i++) barrier_init(full + 8 * i, 2);
        barrier_init(shared_address(&own.queries), 1);
        for (int i = 0; i < 2; i++) {
            barrier_init(shared_address(&own.got[i]), 1);
            barrier_init(shared_address(&own.shared[i]), 1);
            barrier_init(shared_address(&own.used[i]), 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int i = thread; i < HALF; i += THREADS) own.largest[i] = NOTHING;
    __syncthreads();
    neighbours_meet();

    if (group < 2) {
        share_out(own, ring, query, shares, group, peer, first, last, count, scale,
                  summary + (place + mine) * 2, H - mine);
        neighbours_meet();
    } else {
        const int part_of = group - 2, warp = thread / 32 % 4, lane = thread % 32;
        const bool speaks = thread % 128 == 0;
        const int *const pages = table + n * (long long)table_row;
        const Fetch fetch = {&latents, &narrow_latents, ring, full, half, part_of};
        if (speaks) {
            for (int i = 0; i < 2 * min(RING, last - first); i++) fetch.piece(pages[first + i / 2], i / 2, i % 2);
            if (part_of == 0) {
                const u32 asked = shared_address(&own.queries);
                barrier_expect(asked, HEADS * (PIECES * 128 + 64));
                for (int i = 0; i < 2; i++) {
                    const int from = row * H + (i ? theirs : mine);
                    for (int p = 0; p < PIECES; p++)
                        copy_in(query + (p * HEADS + i * HALF) * 128, &queries, (half * PIECES + p) * 64, from, asked);
                    const u32 narrow = query + PIECES * HEADS * 128 + i * HALF * 64;
                    copy_in(narrow, &narrow_queries, 512 + half * 32, from, asked);
                }
            }
        }
        float means[2][HALF];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < HALF; j++) means[i][j] = 0.0f;
        int slot = 0;
#pragma unroll 1
        for (int tile = first; tile < last; tile++) {
            const int side = (tile - first) & 1, turn = (tile - first) >> 1 & 1;
            const int page = tile + RING < last ? pages[tile + RING] : 0;
            barrier_wait(shared_address(&own.shared[side]), turn);
            const Note *const notes = own.note[side];
            if (notes[0].grown | notes[1].grown) {
#pragma unroll
                for (int j = 0; j < 2 * STRIPES; j++) {
                    const Note &note = notes[j / STRIPES];
                    if (!note.grown) continue;
                    const float *const faded = &note.faded[8 * (j % STRIPES) + 2 * (lane % 4)];
                    const float2 by = *reinterpret_cast<const float2 *>(faded);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        means[i][4 * j] *= by.x;
                        means[i][4 * j + 1] *= by.y;
                        means[i][4 * j + 2] *= by.x;
                        means[i][4 * j + 3] *= by.y;
                    }
                }
                meet(6 + part_of, 128);  // all have read before one gives the note back
            }
            products_begin();
            const u64 left = describe(ring + slot * PAGE + part_of * 2 * PIECE);
            const u64 right = describe(shares + side * SHARES);
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int step = 0; step < 4; step++)
                    of_means(means[i], left + (i * PIECE >> 4) + 128 * step, right + 2 * step, 1);
                products_commit();
            }
            const bool more = speaks && tile + RING < last;
            products_wait<1>();
            if (more) fetch.piece(page, slot, 0);
            products_wait<0>();
            if (speaks) {
                if (more) fetch.piece(page, slot, 1);
                const u32 used = shared_address(&own.used[side]);
                barrier_arrive(used);
                barrier_arrive_there(over_there(used, peer));
            }
            if (++slot == RING) slot = 0;
        }
        neighbours_meet();
#pragma unroll
        for (int j = 0; j < 2 * STRIPES; j++) {
            const int c = 8 * j + 2 * (lane % 4), h = (j < STRIPES ? mine : theirs - HALF) + c;
            const float2 inverse = *reinterpret_cast<const float2 *>(&own.inverse[c]);
            float *const to = part + (place + h) * 512 + half * 256 + part_of * 128 + warp * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (h < H) {
                    to[64 * i] = means[i][4 * j] * inverse.x;
                    to[64 * i + 8] = means[i][4 * j + 2] * inverse.x;
                }
                if (h + 1 < H) {
                    to[512 + 64 * i] = means[i][4 * j + 1] * inverse.y;
                    to[512 + 64 * i + 8] = means[i][4 * j + 3] * inverse.y;
                }
            }
        }
    }
}
