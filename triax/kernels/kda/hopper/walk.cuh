// What both walks over a sequence share: fragments, and the warp that fetches chunks ahead of those that multiply.
//
// A group of four warps owns 64 value columns and keeps the transposed state [64 values, 128 channels] in registers. A
// thread's numbers of a product's result are rows g and g + 8 of its warp's 16, columns 2l and 2l + 1 of every 8.

constexpr int VALUE_ROW = TILES * 128 + 16;  // bytes between tokens of the values, free of bank conflicts
constexpr int VALUES = 2 * STAGE, STORE = VALUES + 2 * ROWS * VALUE_ROW;
constexpr int STATES = STORE + TILES * TILE, BARRIERS = STATES + (KEEP ? 2 * TILES * TILE : 0);

// One chunk's record and 64 rows of the values or of their gradients, into stage `s`; by four warps. The record comes by
// one bulk copy; rows lie apart, and as many small bulk copies would be several times slower than these. Rows from
// `rows` on become zeros.
DEVICE void fetch(unsigned char* shared, int s, u32 full, const unsigned char* record, const bf16* values, i64 apart,
                  int rows) {
    int thread = threadIdx.x & 127;
    if (thread == 0) {
        barrier_expect(full, RECORD);
        copy_in(shared_address(shared + s * STAGE), record, RECORD, full);
    }
    if (values) {
        u32 to = shared_address(shared + VALUES + s * ROWS * VALUE_ROW);
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) {
            int p = thread + 128 * i, r = p / (8 * TILES), piece = p % (8 * TILES);
            cell_in(to + r * VALUE_ROW + 16 * piece, values + (r < rows ? r : 0) * apart + 8 * piece, r < rows);
        }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
}
constexpr int FETCHERS = 129;  // arrivals that fill a stage: each fetching thread's rows, and the record

// The left operand [64 values, 64 tokens] from rows of values.
DEVICE void values_of(u32 (&x)[16], u32 at) {
    int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    u32 from = at + (((lane >> 4) << 3) + (lane & 7)) * VALUE_ROW + 32 * warp + (lane & 8) * 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 four[4];
        load_transposed(four, from + 16 * j * VALUE_ROW);
#pragma unroll
        for (int i = 0; i < 4; i++) x[4 * j + i] = four[i];
    }
}
template <int N>
DEVICE void pack_all(u32 (&to)[N / 2], const float (&from)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
}
// Packed [64 values, 64 tokens] into a tile of rows of tokens.
DEVICE void store_tokens(u32 tile, const u32 (&x)[16]) {
    int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    int t = ((lane >> 4) << 3) + (lane & 7), piece = (2 * warp + ((lane >> 3) & 1)) ^ (lane & 7);
    u32 at = tile + t * 128 + piece * 16;
#pragma unroll
    for (int j = 0; j < 4; j++) store_transposed(at + 16 * j * 128, x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
}
// Packed [64 values, 128 channels] into two tiles of rows of values.
DEVICE void store_state(u32 tiles, const u32 (&x)[32]) {
    int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    int v = 16 * warp + (lane & 15), swap = lane & 7;
#pragma unroll
    for (int s = 0; s < 8; s++) {
        int piece = (2 * (s & 3) + (lane >> 4)) ^ swap;
        store_straight(tiles + (s >> 2) * TILE + v * 128 + piece * 16, x[4 * s], x[4 * s + 1], x[4 * s + 2],
                       x[4 * s + 3]);
    }
}
// A group's two tiles into the image [2, 128 values, 128 bytes] of a whole state; by one thread.
DEVICE void keep_state(unsigned char* image, u32 tiles, int column) {
    copy_out(image + column * 128, tiles, TILE);
    copy_out(image + 2 * TILE + column * 128, tiles + TILE, TILE);
}
template <typename F>
DEVICE void each_cell(F&& f) {
    int lane = threadIdx.x & 31, v = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2), c = 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 64; i++) f(i, v + 4 * (i & 2), c + 8 * (i >> 2) + (i & 1));
}
DEVICE void decay_state(float (&state)[64], const float* decay) {
    const float2* of = (const float2*)decay + (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < 16; j++) {
        float2 keep = of[4 * j];
        state[4 * j] *= keep.x, state[4 * j + 1] *= keep.y, state[4 * j + 2] *= keep.x, state[4 * j + 3] *= keep.y;
    }
}
// With two groups of four warps that multiply, the fetching one gives them its registers.
DEVICE void registers_down() {
    if (TILES == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}
DEVICE void registers_up() {
    if (TILES == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
}
