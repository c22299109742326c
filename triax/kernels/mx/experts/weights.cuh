// What both kernels of routed experts with MXFP4 weights share: how weights come, become numbers and are multiplied,
// and what is written.
//
// Transposed: returned^T [rows of a matrix, tokens] = weights [rows, K] x^T [K, tokens], so that the matrix units'
// fixed 16 rows are the weights' own and tokens, of which an expert may have few, are columns, 8 at a time. A lane
// fetches 16 bytes of a row at once, which are the 32 weights of one scale; which of the inner places of a product they
// take is free, as long as tokens agree, so that no code moves between lanes. Codes become bf16 numbers by moving bits:
// with its sign at bit 15 and the rest at 8 to 6 a code is a number 2^126 times too small, which the scale puts right.
//
// Compiled with K (inner width), ROWS (rows of a matrix), COLUMNS (tokens of a work item, a multiple of 8), RING
// (chunks on their way, divides K / 128), OPENS (two matrices and the activation between, or one matrix and the share),
// HAS_GATE_CAP, HAS_UP_CAP, and WARPS of a block.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = 32 * WARPS, CHUNKS = K / 128, EIGHTS = COLUMNS / 8;
constexpr int STEP = 2;  // eighths of tokens that are multiplied or left out together
constexpr int HEIGHT = OPENS ? 16 : 32;  // rows of a matrix that a warp takes at once; two times 16 in any case
constexpr int SLABS = ROWS / HEIGHT, GROUPS = (SLABS + WARPS - 1) / WARPS;
constexpr int ROW_BYTES = K / 2, ROW_SCALES = K / 32;
constexpr int SHIFT = 16;  // weights are made 2^16 times too small, so that scales up to 2^17 have room
constexpr float UNSHIFT = 65536.0f;
static_assert(K % 128 == 0 && ROWS % HEIGHT == 0 && CHUNKS % RING == 0, "sizes must split evenly");

struct Item {
    int expert, first, count, unused;  // its tokens are `count` places of the order from `first` on
};

#ifdef __CUDACC_RTC__  // tests also compile this file for a CPU, and then bring their own
typedef u32 Shared;  // an address in shared memory
__device__ __forceinline__ Shared shared_address(const void *at) { return u32(__cvta_generic_to_shared(at)); }
// Start copies of 16 bytes, which leave no trace in the first cache, or of 4.
__device__ __forceinline__ void copy_16(Shared to, const u8 *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_4(Shared to, const u8 *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
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
__device__ __forceinline__ u16 rounded(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
// Two numbers to E4M3 and back.
__device__ __forceinline__ float2 through_e4m3(float low, float high) {
    u16 eights;
    u32 halves;
    float2 x;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(eights) : "f"(high), "f"(low));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(eights));
    asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(halves));
    return x;
}
__device__ __forceinline__ void barrier_init(Shared barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barriers_show() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(Shared barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(Shared barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        ::"r"(barrier), "r"(phase)
        : "memory");
}
__device__ __forceinline__ void copy_in(Shared to, const void *from, int bytes, Shared barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
#endif

// Eight codes to eight numbers, code i beside code i + 4.
__device__ __forceinline__ void widen(u32 (&out)[4], u32 codes, u32 scale) {
    constexpr u32 SPREAD = (1 << 6) + (1 << 12), KEPT = 0x81c081c0;
    const u32 upper = codes >> 8;
    out[0] = times((codes & 0x000f000f) * SPREAD & KEPT, scale);
    out[1] = times((codes & 0x00f000f0) * (SPREAD >> 4) & KEPT, scale);
    out[2] = times((upper & 0x000f000f) * SPREAD & KEPT, scale);
    out[3] = times((upper & 0x00f000f0) * (SPREAD >> 4) & KEPT, scale);
}
// Eight numbers of a token in the order in which `widen` leaves those of the weights.
__device__ __forceinline__ uint4 paired(uint4 x) {
    return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
            __byte_perm(x.y, x.w, 0x7632)};
}
// The scale as two bf16 numbers; what the codes lack is in it, and the shift. Scales without room become infinite.
__device__ __forceinline__ u32 scale_of(u32 four, int which) {
    return (min(__byte_perm(four, 0, 0x4440 | which), 129u + SHIFT) + (126 - SHIFT)) * (0x10001u << 7);
}
// The bits of the largest size of eight numbers.
__device__ __forceinline__ u32 largest_bits(uint4 x) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 two = (&x.x)[i];
        largest = max(largest, max(two << 16 & 0x7fff0000, two & 0x7fff0000));
    }
    return largest;
}
// Round eight numbers of a block to MXFP8 and back; the block's largest has these bits.
__device__ __forceinline__ void round_to(uint4 &x, u32 largest) {
    const int code = max(int(largest >> 23) - 8, 0);
    const float scale = __uint_as_float(code ? code << 23 : 1 << 22), inverse = __uint_as_float((254 - code) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 &two = (&x.x)[i];
        const float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000);
        const float2 x = through_e4m3(low * inverse, high * inverse);
        two = rounded(x.x * scale) | u32(rounded(x.y * scale)) << 16;
    }
}
// cap tanh(x / cap) without cancellation near zero
__device__ __forceinline__ float bent(float x, float cap, float inverse) {
    const float z = x * inverse, e = __expf(-2.0f * fabsf(z)), square = z * z;
    const float near = z * (1.0f - square * (1.0f / 3 - square * (2.0f / 15 - square * (17.0f / 315))));
    return cap * (square < 0.0625f ? near : copysignf(__fdividef(1.0f - e, 1.0f + e), z));
}

constexpr int SLOT = 2048 + 128;  // bytes of a chunk of a warp's rows: codes, and scales

// Chunks of 128 inner places of a warp's rows: g and g + 8 of the first 16, g and g + 8 of the second 16. They come to
// a ring in shared memory, every lane's part to where that lane alone reads it.
struct Weights {
    char *ring;
    const u8 *next, *next_too, *next_scale;  // what to ask for, RING chunks side by side

    __device__ __forceinline__ void open(const u8 *packed, const u8 *packed_too, const u8 *scales, const u8 *scales_too,
                                         int expert, int slab) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const i64 first = i64(expert) * ROWS + min(slab, SLABS - 1) * HEIGHT + g, own = first + t % 2 * 8;
        next = packed + first * ROW_BYTES + t * 16;
        next_too = OPENS ? packed_too + first * ROW_BYTES + t * 16 : next + 16 * ROW_BYTES;
        next_scale = OPENS && t >= 2 ? scales_too : scales;
        next_scale += (own + (OPENS || t < 2 ? 0 : 16)) * ROW_SCALES;
    }
    __device__ __forceinline__ void ask(int slot) {
        const int lane = threadIdx.x % 32;
        const Shared to = shared_address(ring) + slot * SLOT;
        copy_16(to + lane * 16, next + slot * 64);
        copy_16(to + lane * 16 + 512, next + slot * 64 + 8 * ROW_BYTES);
        copy_16(to + lane * 16 + 1024, next_too + slot * 64);
        copy_16(to + lane * 16 + 1536, next_too + slot * 64 + 8 * ROW_BYTES);
        copy_4(to + lane * 4 + 2048, next_scale + slot * 4);
        copies_commit();
    }
    __device__ __forceinline__ void advance() {
        next += RING * 64;
        next_too += RING * 64;
        next_scale += RING * 4;
    }
    // sum [2 x 16 rows, COLUMNS] += the chunk in a slot times tokens [eighths, `apart` chunks, 4, 32 lanes]
    __device__ __forceinline__ void multiply_chunk(float (&sum)[2][EIGHTS][4], int slot, const uint4 *tokens, int apart,
                                                   int eighths) {
        const int lane = threadIdx.x % 32;
        copies_wait<RING - 1>();
        const u32 scale = reinterpret_cast<const u32 *>(ring + slot * SLOT + 2048)[lane];
        uint4 code[4];
        u32 factor[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            code[i] = reinterpret_cast<const uint4 *>(ring + slot * SLOT)[i * 32 + lane];
            factor[i] = scale_of(__shfl_sync(0xffffffffu, scale, lane / 4 * 4 + i), lane % 4);
        }
#pragma unroll
        for (int w = 0; w < 4; w++) {
            u32 a[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) widen(a[i], (&code[i].x)[w], factor[i]);
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
                if (n && n % STEP == 0 && n >= eighths) break;
                const uint4 b = tokens[(n * apart * 4 + w) * 32 + lane];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 (&upper)[4] = a[2 * half], (&lower)[4] = a[2 * half + 1];
                    multiply(sum[half][n], upper[0], lower[0], upper[1], lower[1], b.x, b.y);
                    multiply(sum[half][n], upper[2], lower[2], upper[3], lower[3], b.z, b.w);
                }
            }
        }
    }
};

struct Caps {
    float gate, up, gate_inverse, up_inverse;
};

// Write what a warp's slab makes of the first `count` columns: activated in bf16, or times the share in fp32.
__device__ __forceinline__ void write(const float (&sum)[2][EIGHTS][4], int slab, const int *pair, int count,
                                      const float *share, void *out, Caps caps) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (slab >= SLABS) return;
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
                if (HAS_GATE_CAP) gate = bent(gate, caps.gate, caps.gate_inverse);
                if (HAS_UP_CAP) up = bent(up, caps.up, caps.up_inverse);
                static_cast<u16 *>(out)[i64(own) * ROWS + row] = rounded(gate * openness * up);
            } else {
                const float weight = share[own] * UNSHIFT;
                float *const to = static_cast<float *>(out) + i64(own) * ROWS + row;
                to[0] = sum[0][n][i] * weight;
                to[16] = sum[1][n][i] * weight;
            }
        }
}
