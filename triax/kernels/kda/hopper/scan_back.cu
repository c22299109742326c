// Walk one sequence of one head backwards with the gradient of the state in registers.
//
// Keeps the gradient of the state after each chunk, and that of what each token wrote, before the substitution.

extern "C" __global__ void __launch_bounds__(TILES * 128 + 128, 1)
    scan_back(const bf16* d_read, const float* d_ends, const int* runs, const int* run_first, const int* run_tokens,
              const int* run_chunk, const int* run_slot, const unsigned char* records, unsigned char* d_states,
              unsigned char* d_errors, float* d_state, int heads, i64 d_token, i64 d_head) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int BLOCKS = 2 / TILES, CELLS = 128 * 128;
    int owner = blockIdx.x / BLOCKS, part = blockIdx.x % BLOCKS, s = owner / heads, h = owner % heads;
    int group = threadIdx.x >> 7, lane = threadIdx.x & 31;
    int column = 64 * (TILES * part + group);  // first of the group's value columns
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
        for (int run = end - 1; run >= begin; run--) {
            i64 start = run_first[run];
            int tokens = run_tokens[run], first = run_chunk[run];
            for (int j = (tokens - 1) >> 6; j >= 0; j--, chunk++) {
                int stage = chunk & 1;
                barrier_wait(empty + 8 * stage, ~(chunk >> 1) & 1);
                fetch(shared, stage, full + 8 * stage, records + ((i64)(first + j) * heads + h) * RECORD,
                      d_read + (start + 64 * j) * d_token + h * d_head + 64 * TILES * part, d_token,
                      min(64, tokens - 64 * j));
            }
        }
        return;
    }

    registers_up();
    bool first_thread = (threadIdx.x & 127) == 0;
    u32 store = shared_address(shared + STORE) + group * TILE;
    u32 kept = shared_address(shared + STATES) + group * 2 * TILE;
    float G[64], E[32];
    u32 packed[32], reads[16], errors[16];
#pragma unroll
    for (int i = 0; i < 64; i++) G[i] = 0.f;
    if (begin == end)
        each_cell([&](int i, int row, int c) { G[i] = d_ends[(i64)owner * CELLS + c * 128 + column + row]; });

    int chunk = 0;
    for (int run = end - 1; run >= begin; run--) {
        i64 slot = (i64)run_slot[run] * heads + h;
        each_cell([&](int i, int row, int c) { G[i] += d_ends[slot * CELLS + c * 128 + column + row]; });
        int tokens = run_tokens[run], first = run_chunk[run];
        for (int j = (tokens - 1) >> 6; j >= 0; j--, chunk++) {
            int stage = chunk & 1;
            i64 n = (i64)(first + j) * heads + h;
            const unsigned char* record = shared + stage * STAGE;
            u32 at = shared_address(record);
            barrier_wait(full + 8 * stage, (chunk >> 1) & 1);
            values_of(reads, shared_address(shared + VALUES + stage * ROWS * VALUE_ROW) + group * 128);
            pack_all(packed, G);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; i++) product<1>(E, reads + 4 * i, describe(at + READS + 2048 * i), i);
#pragma unroll
            for (int i = 0; i < 8; i++)
                product<0>(E, packed + 4 * i, describe(at + WRITES + (i >> 2) * TILE + (i & 3) * 32), 1);
            products_commit();
            products_wait<1>();  // waits for nothing: the assembler then knows which products are over
            decay_state(G, (const float*)(record + DECAY));
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; i++) product<1>(G, reads + 4 * i, describe(at + QUERIES + 2048 * i, TILE), 1);
            products_commit();
            if (first_thread) copies_read();
            group_barrier(1 + group);
            store_state(kept, packed);
            shared_to_async();
            group_barrier(1 + group);
            if (first_thread) {
                keep_state(d_states + n * 4 * TILE, kept, column);
                copies_commit();
            }
            products_wait<1>();
            pack_all(errors, E);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; i++) product<1>(E, errors + 4 * i, describe(at + INVERSE + 2048 * i), i);
            products_commit();
            products_wait<0>();
            pack_all(errors, E);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; i++) product<1, -1>(G, errors + 4 * i, describe(at + KEYS + 2048 * i, TILE), 1);
            products_commit();
            store_tokens(store, errors);
            shared_to_async();
            group_barrier(1 + group);
            if (first_thread) {
                copy_out(d_errors + (2 * n + (column >> 6)) * TILE, store, TILE);
                copies_commit();
            }
            products_wait<0>();
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        }
    }
    each_cell([&](int i, int row, int c) { d_state[(i64)owner * CELLS + c * 128 + column + row] = G[i]; });
    if (first_thread) copies_done();
}
