// Routed experts with MXFP4 weights for many tokens: an item's tokens come slice by slice while they are multiplied.
//
// Behind weights.cuh. `arrange` lays each item's tokens out as the products want them, and `multiply_slices` has the
// copy engine bring slices of RING chunks of them to a ring in shared memory. Blocks take every so-many-th (item, group
// of rows), so that at any time all work on few experts, whose weights the second cache then holds. Also compiled with
// STAGES (slices in the ring), and ROUNDED (tokens are rounded to MXFP8 first).

constexpr int SLICES = CHUNKS / RING, PIECE = RING * 2048;  // of an item; bytes of eight tokens in a slice

// A block lays out eight tokens of an item, zeros where there are fewer: [items, eighths, chunks, 4, 32 lanes].
extern "C" __global__ void __launch_bounds__(THREADS)
arrange(const u16 *x, int pairs_of_row, const int *order, const Item *items, const int *num_items, uint4 *arranged) {
    const int at = blockIdx.x / EIGHTS, eighth = blockIdx.x % EIGHTS, lane = threadIdx.x % 32;
    if (at >= *num_items) return;
    const Item item = items[at];
    if (eighth * 8 >= item.count) return;
    const int column = eighth * 8 + lane / 4;
    const bool is_used = column < item.count;
    const int own = is_used ? order[item.first + column] / pairs_of_row : 0;
    const uint4 *const row = reinterpret_cast<const uint4 *>(x + i64(own) * K) + lane % 4 * 4;
    for (int chunk = threadIdx.x / 32; chunk < CHUNKS; chunk += WARPS) {
        uint4 part[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            part[w] = {0, 0, 0, 0};
            if (is_used) part[w] = row[chunk * 16 + w];
        }
        if (ROUNDED) {
            u32 largest = 0;
#pragma unroll
            for (int w = 0; w < 4; w++) largest = max(largest, largest_bits(part[w]));
#pragma unroll
            for (int w = 0; w < 4; w++) round_to(part[w], largest);
        }
#pragma unroll
        for (int w = 0; w < 4; w++)
            arranged[((i64(blockIdx.x) * CHUNKS + chunk) * 4 + w) * 32 + lane] = paired(part[w]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
multiply_slices(const uint4 *arranged, const u8 *packed, const u8 *packed_too, const u8 *scales, const u8 *scales_too,
                const int *order, const Item *items, const int *num_items, const float *share, void *out, Caps caps) {
    extern __shared__ uint4 slices[];  // [stages, eighths, RING chunks, 4, 32 lanes], rings of weights, barriers
    constexpr int STAGE = EIGHTS * RING * 128;
    char *const rings = reinterpret_cast<char *>(slices + STAGES * STAGE);
    const Shared barriers = shared_address(rings + WARPS * RING * SLOT);
    const int warp = threadIdx.x / 32, total = *num_items * GROUPS;
    if (int(blockIdx.x) >= total) return;

    int coming = blockIdx.x, coming_slice = 0;  // what to fetch next
    const auto fetch = [&](int stage) {
        if (coming >= total) return;
        const int at = coming / GROUPS, eighths = (items[at].count + 7) / 8;
        barrier_expect(barriers + 8 * stage, eighths * PIECE);
        for (int n = 0; n < eighths; n++)
            copy_in(shared_address(slices + stage * STAGE + n * RING * 128),
                    arranged + ((i64(at) * EIGHTS + n) * CHUNKS + coming_slice * RING) * 128, PIECE,
                    barriers + 8 * stage);
        if (++coming_slice == SLICES) coming_slice = 0, coming += gridDim.x;
    };
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) barrier_init(barriers + 8 * stage);
        barriers_show();
        for (int stage = 0; stage < STAGES; stage++) fetch(stage);
    }
    __syncthreads();

    Weights weights = {rings + warp * RING * SLOT};
    const auto open = [&](int at) {
        weights.open(packed, packed_too, scales, scales_too, items[at / GROUPS].expert, at % GROUPS * WARPS + warp);
    };
    open(blockIdx.x);
#pragma unroll
    for (int slot = 0; slot < RING - 1; slot++) weights.ask(slot);

    int stage = 0, phase = 0;
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
        const Item item = items[at / GROUPS];
        const int eighths = (item.count + 7) / 8;
        float sum[2][EIGHTS][4] = {};
        for (int slice = 0; slice < SLICES; slice++) {
            barrier_wait(barriers + 8 * stage, phase);
#pragma unroll
            for (int slot = 0; slot < RING; slot++) {
                weights.ask((slot + RING - 1) % RING);
                if (slot == 0) {
                    weights.advance();
                    // behind the block's last group comes that group again: what is loaded then, nobody uses
                    if (slice + 1 == SLICES) open(at + int(gridDim.x) < total ? at + gridDim.x : at);
                }
                weights.multiply_chunk(sum, slot, slices + stage * STAGE + slot * 128, RING, eighths);
            }
            __syncthreads();
            if (threadIdx.x == 0) fetch(stage);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        write(sum, at % GROUPS * WARPS + warp, order + item.first, item.count, share, out, caps);
    }
    copies_wait<0>();
}
