// Walk one sequence of one head, chunk by chunk, with the state in registers.
//
// TILES: groups of four warps, 64 value columns each, in a block; the blocks of a head stand next to each other.
// KEEP: also keep what the backward pass needs: the state before each chunk, and what each token wrote.
// MAPS: read nothing; columns past the values start from the identity and write no values: a segment's own map.

extern "C" __global__ void __launch_bounds__(TILES * 128 + 128, 1)
    scan(const bf16* v, const float* state, const int* runs, const int* run_first, const int* run_tokens,
         const int* run_chunk, const int* run_slot, const unsigned char* records, bf16* out, unsigned char* states,
         unsigned char* writes, float* ends, int heads, i64 v_token, i64 v_head) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int BLOCKS = (MAPS ? 4 : 2) / TILES;
    int owner = blockIdx.x / BLOCKS, part = blockIdx.x % BLOCKS, s = owner / heads, h = owner % heads;
    int group = threadIdx.x >> 7, lane = threadIdx.x & 31;
    int column = 64 * (TILES * part + group);  // first of the group's value columns
    bool identity = MAPS && TILES * part >= 2;
    int begin = runs[s], end = runs[s + 1];
    u32 full = shared_address(shared + BARRIERS), empty = full + 16;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(full + 8 * i, FETCHERS);
            barrier_init(empty + 8 * i, 4 * TILES);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        shared_to_async();
    }
    __syncthreads();

    if (group == TILES) {
        registers_down();
        int chunk = 0;
        for (int run = begin; run < end; run++) {
            i64 start = run_first[run];
            int tokens = run_tokens[run], first = run_chunk[run];
            for (int j = 0; 64 * j < tokens; j++, chunk++) {
                int stage = chunk & 1;
                barrier_wait(empty + 8 * stage, ~(chunk >> 1) & 1);
                const bf16* values = v + (start + 64 * j) * v_token + h * v_head + 64 * TILES * part;
                fetch(shared, stage, full + 8 * stage, records + ((i64)(first + j) * heads + h) * RECORD,
                      identity ? nullptr : values, v_token, min(64, tokens - 64 * j));
            }
        }
        return;
    }

    registers_up();
    constexpr int CELLS = 128 * 128;
    u32 store = shared_address(shared + STORE) + group * TILE;
    u32 kept = shared_address(shared + STATES) + group * 2 * TILE;
    int wide = MAPS ? 256 : 128;
    float S[64], E[32], O[32] = {};
    u32 packed[32], half[16];
    if (state)
        each_cell([&](int i, int row, int c) { S[i] = state[(i64)owner * CELLS + c * 128 + column + row]; });
    else
        each_cell([&](int i, int row, int c) { S[i] = identity && column + row - 128 == c ? 1.f : 0.f; });
    if (begin == end) each_cell([&](int i, int row, int c) { ends[(i64)owner * 128 * wide + c * wide + column + row] = S[i]; });

    int chunk = 0, pending = 0;  // rows of the chunk before that are read but not stored
    bf16* to = nullptr;
    bool first_thread = (threadIdx.x & 127) == 0;
    auto store_reads = [&](unsigned char* image) {
        u32 x[16];
        pack_all(x, O);
        if (KEEP) {
            if (first_thread) copies_read();
            group_barrier(1 + group);
        }
        store_tokens(store, x);
        if (KEEP && image) {
            store_state(kept, packed);
            shared_to_async();
        }
        group_barrier(1 + group);
        if (KEEP && image && first_thread) {
            keep_state(image, kept, column);
            copies_commit();
        }
        int t = (threadIdx.x & 127) >> 3, piece = threadIdx.x & 7;
#pragma unroll
        for (int i = 0; i < 4; i++, t += 16)
            if (t < pending) {
                uint4 x = *(uint4*)(shared + STORE + group * TILE + t * 128 + ((piece ^ (t & 7)) << 4));
                *(uint4*)(to + (i64)t * heads * 128 + 8 * piece) = x;
            }
        pending = 0;
    };
    for (int run = begin; run < end; run++) {
        i64 start = run_first[run];
        int tokens = run_tokens[run], first = run_chunk[run];
        for (int j = 0; 64 * j < tokens; j++, chunk++) {
            int stage = chunk & 1, rows = min(64, tokens - 64 * j);
            i64 n = (i64)(first + j) * heads + h;
            const unsigned char* record = shared + stage * STAGE;
            u32 at = shared_address(record);
            barrier_wait(full + 8 * stage, (chunk >> 1) & 1);
            pack_all(packed, S);
            products_begin();
#pragma unroll
            for (int i = 0; i < 8; i++)
                product<0>(E, packed + 4 * i, describe(at + KEYS + (i >> 2) * TILE + (i & 3) * 32), i);
            products_commit();
            products_wait<1>();  // waits for nothing: the assembler then knows which products are over
            if (!MAPS) {
                store_reads(states + n * 4 * TILE);
                products_begin();
#pragma unroll
                for (int i = 0; i < 8; i++)
                    product<0>(O, packed + 4 * i, describe(at + QUERIES + (i >> 2) * TILE + (i & 3) * 32), i);
                products_commit();
            }
            decay_state(S, (const float*)(record + DECAY));
            if (!identity)
                values_of(half, shared_address(shared + VALUES + stage * ROWS * VALUE_ROW) + group * 128);
            const float2* betas = (const float2*)(record + BETA) + (lane & 3);
            products_wait<MAPS ? 0 : 1>();
#pragma unroll
            for (int i = 0; i < 16; i++) {
                // Pieces of eight tokens, rows g and g + 8 of each.
                float2 beta = betas[4 * (i >> 1)];
                if (identity)
                    half[i] = pack(-E[2 * i], -E[2 * i + 1]);
                else
                    half[i] = pack(beta.x * low(half[i]) - E[2 * i], beta.y * high(half[i]) - E[2 * i + 1]);
            }
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; i++) product<0>(E, half + 4 * i, describe(at + INVERSE + 32 * i), i);
            products_commit();
            products_wait<0>();
            pack_all(half, E);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; i++) product<1>(S, half + 4 * i, describe(at + WRITES + 2048 * i, TILE), 1);
            if (!MAPS)
#pragma unroll
                for (int i = 0; i < 4; i++) product<0>(O, half + 4 * i, describe(at + READS + 32 * i), 1);
            products_commit();
            if (!MAPS) group_barrier(1 + group);  // the reads before have left the room that both share
            if (KEEP) {
                store_tokens(store, half);
                shared_to_async();
                group_barrier(1 + group);
                if (first_thread) {
                    copy_out(writes + (2 * n + (column >> 6)) * TILE, store, TILE);
                    copies_commit();
                }
            }
            products_wait<0>();
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            pending = rows;
            to = out + ((start + 64 * j) * heads + h) * 128 + column;
        }
        i64 slot = (i64)run_slot[run] * heads + h;
        each_cell([&](int i, int row, int c) { ends[slot * 128 * wide + c * wide + column + row] = S[i]; });
    }
    if (!MAPS && pending) store_reads(nullptr);
    if (KEEP && first_thread) copies_done();
}
