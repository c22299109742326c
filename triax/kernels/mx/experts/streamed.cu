// Routed experts with MXFP4 weights for few tokens: every weight that is needed comes once from memory.
//
// Behind weights.cuh. A block works on a stretch of all (item, group of rows); an item's tokens lie whole in shared
// memory as long as the block stays with it. Also compiled with ROUNDED (tokens are rounded to MXFP8 first) and BLOCKS
// (of a processor).

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
stream(const u16 *x, int pairs_of_row, const u8 *packed, const u8 *packed_too, const u8 *scales, const u8 *scales_too,
       const int *order, const Item *items, const int *num_items, const float *share, void *out, Caps caps) {
    extern __shared__ uint4 tokens[];  // [eighths, chunks, 4, 32 lanes], as the products want them
    char *const rings = reinterpret_cast<char *>(tokens + EIGHTS * CHUNKS * 128);
    int *const pair = reinterpret_cast<int *>(rings + WARPS * RING * SLOT);
    const int warp = threadIdx.x / 32;
    const i64 total = i64(*num_items) * GROUPS;
    const int begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
    if (begin == end) return;

    Weights weights = {rings + warp * RING * SLOT};
    const auto open = [&](int at) {
        weights.open(packed, packed_too, scales, scales_too, items[at / GROUPS].expert, at % GROUPS * WARPS + warp);
    };
    open(begin);
#pragma unroll
    for (int slot = 0; slot < RING - 1; slot++) weights.ask(slot);

    int count = 0;
    for (int at = begin, held = -1; at < end; at++) {
        if (at / GROUPS != held) {
            held = at / GROUPS;
            const Item item = items[held];
            count = item.count;
            __syncthreads();
            // columns of nobody become zeros: multiplying by zeros takes less power, which is what limits the clock
            for (int i = threadIdx.x; i < COLUMNS * (K / 8); i += THREADS) {
                const int n = i / (K / 8), u = i % (K / 8);
                uint4 part = {0, 0, 0, 0};
                if (n < count) {
                    const int own = order[item.first + n];
                    part = *reinterpret_cast<const uint4 *>(x + i64(own / pairs_of_row) * K + u * 8);
                    if (u == 0) pair[n] = own;
                }
                if (ROUNDED) {
                    u32 largest = largest_bits(part);
                    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                    round_to(part, max(largest, __shfl_xor_sync(0xffffffffu, largest, 2)));
                }
                tokens[((n / 8 * CHUNKS + u / 16) * 4 + u % 4) * 32 + n % 8 * 4 + u % 16 / 4] = paired(part);
            }
            __syncthreads();
        }
        float sum[2][EIGHTS][4] = {};
        for (int first = 0; first < CHUNKS; first += RING) {
#pragma unroll
            for (int slot = 0; slot < RING; slot++) {
                weights.ask((slot + RING - 1) % RING);
                if (slot == 0) {
                    weights.advance();
                    // behind the block's last group comes that group again: what is loaded then, nobody uses
                    if (first + RING == CHUNKS) open(min(at + 1, end - 1));
                }
                weights.multiply_chunk(sum, slot, tokens + (first + slot) * 128, CHUNKS, EIGHTS);
            }
        }
        write(sum, at % GROUPS * WARPS + warp, pair, count, share, out, caps);
    }
    copies_wait<0>();
}
