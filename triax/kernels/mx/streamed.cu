// Routed experts with MXFP4 weights for few tokens: every weight that is needed comes once from memory.
//
// Transposed: returned^T [rows of a matrix, tokens] = weights [rows, K] x^T [K, tokens], so that the matrix units' fixed
// 16 rows are the weights' own and tokens, of which an expert has few, are columns, 8 at a time. A lane loads 16 bytes of
// a row at once, which are the 32 weights of one scale; which of the inner places of a product they take is free, as
// long as tokens agree, so that nothing is moved between lanes. Codes become bf16 numbers by moving bits: sign and three
// bits of a code are at 15 and 8..6 a number 2^126 times too small, and multiplying by the scale puts that right.
//
// Compiled with K (inner width), ROWS (rows of a matrix), COLUMNS (tokens of a work item, a multiple of 8), RING (chunks
// on their way, divides K / 128), OPENS (two matrices and the activation between, or one matrix and the share), HAS_GATE_CAP,
// HAS_UP_CAP, ROUNDED (tokens are rounded to MXFP8 first), WARPS of a block, and BLOCKS of a processor.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = 32 * WARPS, CHUNKS = K / 128, EIGHTS = COLUMNS / 8;
constexpr int HEIGHT = OPENS ? 16 : 32;  // rows of a matrix that a warp takes at once; two times 16 in any case
constexpr int SLABS = ROWS / HEIGHT, GROUPS = (SLABS + WARPS - 1) / WARPS;
constexpr int ROW_BYTES = K / 2, ROW_SCALES = K / 32;
constexpr int SHIFT = 16;  // weights are made 2^16 times too small, so that scales up to 2^17 have room
constexpr float UNSHIFT = 65536.0f;
static_assert(K % 128 == 0 && ROWS % HEIGHT == 0 && CHUNKS % RING == 0, "sizes must split evenly");

struct Item {
    int expert, first, count, unused;  // its tokens are `count` places of the order from `first` on
};

__device__ __forceinline__ uint4 load_once(const u8 *at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}
__device__ __forceinline__ u32 times(u32 x, u32 y) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    return product;
}
// d [16, 8] += a [16, 16] b [16, 8]
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Eight codes to eight numbers, code i beside code i + 4.
__device__ __forceinline__ void widen(u32 (&out)[4], u32 codes, u32 scale) {
    constexpr u32 SPREAD = (1 << 6) + (1 << 12), KEPT = 0x81c081c0;
    const u32 upper = codes >> 8;
    out[0] = times((codes & 0x000f000f) * SPREAD & KEPT, scale);
    out[1] = times((codes & 0x00f000f0) * (SPREAD >> 4) & KEPT, scale);
    out[2] = times((upper & 0x000f000f) * SPREAD & KEPT, scale);
    out[3] = times((upper & 0x00f000f0) * (SPREAD >> 4) & KEPT, scale);
}
// The scale as two bf16 numbers; what the codes lack is in it, and the shift. Scales that leave no room become infinite.
__device__ __forceinline__ u32 scale_of(u32 four, int which) {
    return (min(__byte_perm(four, 0, 0x4440 | which), 129u + SHIFT) + (126 - SHIFT)) * (0x10001u << 7);
}
__device__ __forceinline__ u16 rounded(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
// cap tanh(x / cap) without cancellation near zero
__device__ __forceinline__ float bent(float x, float cap, float inverse) {
    const float z = x * inverse, e = __expf(-2.0f * fabsf(z)), square = z * z;
    const float near = z * (1.0f - square * (1.0f / 3 - square * (2.0f / 15 - square * (17.0f / 315))));
    return cap * (square < 0.0625f ? near : copysignf(__fdividef(1.0f - e, 1.0f + e), z));
}

// Round 32 numbers, which four neighbouring lanes hold in eighths, to MXFP8 and back.
__device__ __forceinline__ void round_block(uint4 &x) {
    u32 *const word = &x.x;
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) largest = max(largest, max(word[i] << 16 & 0x7fff0000, word[i] & 0x7fff0000));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int code = max(int(largest >> 23) - 8, 0);
    const float scale = __uint_as_float(code ? code << 23 : 1 << 22), inverse = __uint_as_float((254 - code) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float low = __uint_as_float(word[i] << 16) * inverse, high = __uint_as_float(word[i] & 0xffff0000) * inverse;
        u16 eights;
        u32 halves;
        float a, b;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(eights) : "f"(high), "f"(low));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(eights));
        asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
            : "=f"(a), "=f"(b)
            : "r"(halves));
        word[i] = rounded(a * scale) | u32(rounded(b * scale)) << 16;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
stream(const u16 *x, int pairs_of_row, const u8 *packed, const u8 *packed_too, const u8 *scales, const u8 *scales_too,
       const int *order, const Item *items, const int *num_items, const float *share, void *out, float gate_cap,
       float up_cap, float gate_inverse, float up_inverse) {
    extern __shared__ uint4 tokens[];  // [eights, chunks, 4, 32 lanes], as the products want them
    int *const pair = reinterpret_cast<int *>(tokens + EIGHTS * CHUNKS * 128);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const i64 total = i64(*num_items) * GROUPS;
    const int begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;

    uint4 ring[RING][4];
    u32 ring_scale[RING];
    const u8 *next[2], *next_scale;
    int chunk_ahead = 0, ahead = begin;
    // Where the warp's rows of a group begin: rows g and g + 8 of both halves, and one of these four's scales.
    const auto open = [&](int at) {
        const Item item = items[at / GROUPS];
        const int row = min(at % GROUPS * WARPS + warp, SLABS - 1) * HEIGHT;
        const i64 first = i64(item.expert) * ROWS + row + g;
        next[0] = packed + first * ROW_BYTES + t * 16;
        next[1] = OPENS ? packed_too + first * ROW_BYTES + t * 16 : next[0] + 16 * ROW_BYTES;
        const i64 own = first + t % 2 * 8;
        next_scale = (OPENS && t >= 2 ? scales_too : scales + (OPENS || t < 2 ? 0 : 16 * ROW_SCALES)) + own * ROW_SCALES;
    };
    const auto ask = [&](int slot) {
        if (ahead < end) {
#pragma unroll
            for (int i = 0; i < 4; i++) ring[slot][i] = load_once(next[i / 2] + i % 2 * 8 * ROW_BYTES);
            ring_scale[slot] = __ldg(reinterpret_cast<const u32 *>(next_scale));
            next[0] += 64;
            next[1] += 64;
            next_scale += 4;
            if (++chunk_ahead == CHUNKS) {
                chunk_ahead = 0;
                if (++ahead < end) open(ahead);
            }
        }
    };
    if (begin < end) open(begin);
#pragma unroll
    for (int slot = 0; slot < RING - 1; slot++) ask(slot);

    for (int at = begin, held = -1; at < end; at++) {
        if (at / GROUPS != held) {
            held = at / GROUPS;
            const Item item = items[held];
            __syncthreads();
            const int some = item.count * (K / 8);
            for (int i = threadIdx.x; i - lane < some; i += THREADS) {
                const int n = i / (K / 8), u = i % (K / 8);
                uint4 part = {0, 0, 0, 0};
                if (i < some) {
                    const int own = order[item.first + n];
                    part = *reinterpret_cast<const uint4 *>(x + i64(own / pairs_of_row) * K + u * 8);
                    if (u == 0) pair[n] = own;
                }
                if (ROUNDED) round_block(part);
                if (i < some)
                    tokens[((n / 8 * CHUNKS + u / 16) * 4 + u % 4) * 32 + n % 8 * 4 + u % 16 / 4] = {
                        __byte_perm(part.x, part.z, 0x5410), __byte_perm(part.x, part.z, 0x7632),
                        __byte_perm(part.y, part.w, 0x5410), __byte_perm(part.y, part.w, 0x7632)};
            }
            __syncthreads();
        }
        float sum[2][EIGHTS][4] = {};
        for (int first = 0; first < CHUNKS; first += RING) {
#pragma unroll
            for (int slot = 0; slot < RING; slot++) {
                ask((slot + RING - 1) % RING);
                u32 scale[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    scale[i] = scale_of(__shfl_sync(0xffffffffu, ring_scale[slot], g * 4 + i), t);
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    uint4 of_tokens[EIGHTS];
#pragma unroll
                    for (int n = 0; n < EIGHTS; n++)
                        of_tokens[n] = tokens[((n * CHUNKS + first + slot) * 4 + w) * 32 + lane];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 upper[4], lower[4];
                        widen(upper, (&ring[slot][2 * half].x)[w], scale[2 * half]);
                        widen(lower, (&ring[slot][2 * half + 1].x)[w], scale[2 * half + 1]);
#pragma unroll
                        for (int n = 0; n < EIGHTS; n++) {
                            const uint4 b = of_tokens[n];
                            multiply(sum[half][n], upper[0], lower[0], upper[1], lower[1], b.x, b.y);
                            multiply(sum[half][n], upper[2], lower[2], upper[3], lower[3], b.z, b.w);
                        }
                    }
                }
            }
        }
        const int slab = at % GROUPS * WARPS + warp, count = items[held].count;
        if (slab >= SLABS) continue;
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = n * 8 + t * 2 + i % 2, row = slab * HEIGHT + g + i / 2 * 8;
                if (column >= count) continue;
                const int own = pair[column];
                if (OPENS) {
                    float gate = sum[0][n][i] * UNSHIFT, up = sum[1][n][i] * UNSHIFT;
                    const float openness = __fdividef(1.0f, 1.0f + __expf(-gate));
                    if (HAS_GATE_CAP) gate = bent(gate, gate_cap, gate_inverse);
                    if (HAS_UP_CAP) up = bent(up, up_cap, up_inverse);
                    static_cast<u16 *>(out)[i64(own) * ROWS + row] = rounded(gate * openness * up);
                } else {
                    const float weight = share[own] * UNSHIFT;
                    float *const to = static_cast<float *>(out) + i64(own) * ROWS + row;
                    to[0] = sum[0][n][i] * weight;
                    to[16] = sum[1][n][i] * weight;
                }
            }
    }
}
