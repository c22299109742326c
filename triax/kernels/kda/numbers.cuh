// Sizes, numbers, vectors and sums of the decode kernel, and its words for the copy engine.
//
// Compiled with K and V (sizes of a head), TAPS, THREADS (of a block, at least K), TOKENS (walked over), PENDING (at
// most written before), MIXES (convolve before, normalise after), BOUNDED (kind of decay gate), WRITES (the walk's end
// is the new state), and the number formats X (streams), E (state), W (window). Every sum has one order and every
// rounding is spelled out, so that tokens tried and written later leave the bits of tokens written at once.

typedef long long i64;

#ifdef __CUDACC_RTC__  // tests also compile this file for a CPU, and then bring their own
struct bf16 {
    unsigned short bits;
};
__device__ inline float widened(unsigned bits) { return __uint_as_float(bits << 16); }
__device__ inline unsigned short rounded(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ inline unsigned shared_address(const void *at) { return unsigned(__cvta_generic_to_shared(at)); }
__device__ inline void barrier_init(i64 *barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_expect(i64 *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ inline void barrier_wait(i64 *barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            shared_address(barrier)),
        "r"(phase)
        : "memory");
}
__device__ inline void meet(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void copy_in(void *to, const void *from, int bytes, i64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
#endif

constexpr int WARPS = THREADS / 32, LANES = 8, SPAN = 4 * LANES, SHARERS = WARPS * SPAN / V;
constexpr int GROUPS = 32 / LANES * SHARERS, ROWS = K / GROUPS;  // of rows; of a thread
constexpr int PAST = TAPS - 1, MIXED = 2 * K + V, RAW = MIXED + K + (MIXES ? V : 0);
constexpr int OWN = (MIXED + THREADS - 1) / THREADS;  // channels of the convolution that a thread owns
constexpr int STRIP = ROWS % 4 == 0 ? 4 : ROWS % 2 == 0 ? 2 : 1;
constexpr int MOST = TOKENS > PENDING ? TOKENS : PENDING;
constexpr int AT_ONCE = TOKENS < 1 ? 1 : TOKENS < 10 ? TOKENS : 8;  // tokens that a thread reads before it works
constexpr int GATES = (TOKENS * V + THREADS - 1) / THREADS;         // of a thread
constexpr int GATES_AT_ONCE = GATES < 1 ? 1 : GATES < 6 ? GATES : 5;
constexpr int STATE_BYTES = K * V * sizeof(E), RAW_BYTES = TOKENS * RAW * sizeof(X);
constexpr int WINDOW_BYTES = MIXES ? PAST * MIXED * sizeof(W) : 0;
static_assert(ROWS * GROUPS == K && SHARERS * V == WARPS * SPAN, "sizes must split evenly");

struct Vector {
    float x, y, z, w;
};

__device__ inline float read_number(const float *at) { return *at; }
__device__ inline float read_number(const bf16 *at) { return widened(at->bits); }
__device__ inline void write_number(float *at, float x) { *at = x; }
__device__ inline void write_number(bf16 *at, float x) { at->bits = rounded(x); }
__device__ inline float as_stored(float x, const float *) { return x; }
__device__ inline float as_stored(float x, const bf16 *) { return widened(rounded(x)); }

__device__ inline Vector read_vector(const float *at) {
    float4 x = *reinterpret_cast<const float4 *>(at);
    return {x.x, x.y, x.z, x.w};
}
__device__ inline Vector read_vector(const bf16 *at) {
    uint2 x = *reinterpret_cast<const uint2 *>(at);
    return {widened(x.x & 0xffff), widened(x.x >> 16), widened(x.y & 0xffff), widened(x.y >> 16)};
}
__device__ inline void write_vector(float *at, Vector x) { *reinterpret_cast<float4 *>(at) = {x.x, x.y, x.z, x.w}; }
__device__ inline void write_vector(bf16 *at, Vector x) {
    *reinterpret_cast<uint2 *>(at) = {rounded(x.x) | unsigned(rounded(x.y)) << 16,
                                      rounded(x.z) | unsigned(rounded(x.w)) << 16};
}

// Neighbours in shared memory, read at once.
struct alignas(4 * STRIP) Strip {
    float x[STRIP];
};
__device__ inline Strip strip(const float *at) { return *reinterpret_cast<const Strip *>(at); }

// How far row r of a thread lies below its first.
__device__ constexpr int below(int r) { return r / STRIP * STRIP * GROUPS + r % STRIP; }

__device__ inline Vector times(Vector x, float a) {
    return {__fmul_rn(x.x, a), __fmul_rn(x.y, a), __fmul_rn(x.z, a), __fmul_rn(x.w, a)};
}
__device__ inline Vector plus_times(Vector sum, Vector x, float a) {
    return {__fmaf_rn(x.x, a, sum.x), __fmaf_rn(x.y, a, sum.y), __fmaf_rn(x.z, a, sum.z), __fmaf_rn(x.w, a, sum.w)};
}
__device__ inline Vector stored(Vector x, const E *kind) {
    return {as_stored(x.x, kind), as_stored(x.y, kind), as_stored(x.z, kind), as_stored(x.w, kind)};
}

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ inline float sum_of_half_warp(float x) {
    for (int distance = 8; distance; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// Two kinds of sums over a warp's lanes with the same columns: each lane ends with two of the eight. Lanes below 16
// have `found`, the others `out`; bit 3 tells which two columns.
struct Pair {
    float x, y;
};
__device__ inline float kept_and_theirs(float low, float high, bool upper, int distance) {
    const float theirs = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
    return __fadd_rn(upper ? high : low, theirs);
}
__device__ inline Pair sums_of_lanes(Vector found, Vector out, int lane) {
    const bool first = lane & 16, second = lane & 8;
    const float x = kept_and_theirs(found.x, out.x, first, 16), y = kept_and_theirs(found.y, out.y, first, 16);
    const float z = kept_and_theirs(found.z, out.z, first, 16), w = kept_and_theirs(found.w, out.w, first, 16);
    return {kept_and_theirs(x, z, second, 8), kept_and_theirs(y, w, second, 8)};
}
