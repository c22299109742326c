// Hopper's barriers, copies and matrix products as `hopper.cu` uses them, and the activations.
//
// Shared memory holds pieces: rows of 64 bf16 or 32 fp32 numbers, 128 bytes, whose 16-byte parts are exchanged by the
// row's number modulo 8.

typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
struct alignas(64) TensorMap { char bytes[128]; };

constexpr int STAGES = 4, PIECE = 64 * 128, LEFT = 2 * PIECE, STAGE = 6 * PIECE, STEP = 64;
constexpr bool LEFT_LIES = KIND == 4, RIGHT_LIES = KIND >= 2;  // contiguous along what is not summed
constexpr int COLUMNS = KIND == 0 ? 128 : 256, SLICE = KIND == 4 && WIDE ? 32 : 64, SLICES = COLUMNS / SLICE;
constexpr int ENDING = KIND == 2 ? SLICES : 0;  // turns of the ring that bring what a tile's end reads

DEVICE u32 shared_address(const void *at) { return u32(__cvta_generic_to_shared(at)); }
DEVICE u32 block_of_pair() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE void meet_pair() {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
DEVICE void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(block)
        : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
DEVICE void copy_in(u32 to, const TensorMap *map, int column, int row, int matrix, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
        : "memory");
}
DEVICE void copy_to_pair(u32 to, const TensorMap *map, int column, int row, int matrix, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier),
        "h"((unsigned short)3)
        : "memory");
}
DEVICE void copy_out(const TensorMap *map, u32 from, int column, int row, int matrix) {
#if KIND == 4 && ADDS
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                     map), "r"(from), "r"(column), "r"(row), "r"(matrix)
                 : "memory");
#else
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(column), "r"(row), "r"(matrix)
                 : "memory");
#endif
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int LEFT_OPEN> DEVICE void copies_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT_OPEN) : "memory");
}
DEVICE void copies_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void meet(int number) { asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory"); }
DEVICE void shared_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Groups of 8 rows are 1024 bytes apart; for operands that lie, the next 64 columns of the same rows are a piece apart.
DEVICE u64 describe(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64(PIECE >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int OPEN> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory"); }
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define NAMES \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
    "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, " \
    "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
    "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, " \
    "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
    "%123, %124, %125, %126, %127}"
// d[64, 256] (+)= left[64, 16] right[16, 256]
DEVICE void multiply(float (&d)[128], u64 left, u64 right, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " NAMES
        ", %128, %129, add, 1, 1, %131, %132;\n}\n"
        : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
        : "l"(left), "l"(right), "r"(add), "n"(int(LEFT_LIES)), "n"(int(RIGHT_LIES)));
}

DEVICE u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE float low(u32 both) { return __uint_as_float(both << 16); }
DEVICE float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
DEVICE float bend(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float sigmoid(float x) { return 0.5f + 0.5f * bend(0.5f * x); }
#ifdef GATE_CAP
DEVICE float bend_gate(float x) { return GATE_CAP * bend(x * (1.0f / GATE_CAP)); }
DEVICE float gate_slope(float bent) { return 1.0f - (bent * (1.0f / GATE_CAP)) * (bent * (1.0f / GATE_CAP)); }
#else
DEVICE float bend_gate(float x) { return x; }
DEVICE float gate_slope(float) { return 1.0f; }
#endif
#ifdef UP_CAP
DEVICE float bend_up(float x) { return UP_CAP * bend(x * (1.0f / UP_CAP)); }
DEVICE float up_slope(float bent) { return 1.0f - (bent * (1.0f / UP_CAP)) * (bent * (1.0f / UP_CAP)); }
#else
DEVICE float bend_up(float x) { return x; }
DEVICE float up_slope(float) { return 1.0f; }
#endif
DEVICE float glu(float gate, float up) { return bend_gate(gate) * sigmoid(gate) * bend_up(up); }
// Turns gate and up into their gradients for `upstream` on the value, which is returned.
DEVICE float glu_gradient(float upstream, float &gate, float &up) {
    float openness = sigmoid(gate), bent = bend_gate(gate), opened = bent * openness, passing = bend_up(up);
    float slope = openness * gate_slope(bent) + opened * (1.0f - openness);
    gate = upstream * slope * passing;
    up = upstream * opened * up_slope(passing);
    return opened * passing;
}
