// Hopper's matrix products, barriers and copies, as the kernels beside this file use them. Every kernel's source is this
// text followed by its own: no header is included, so that the run-time compiler needs no files of the toolkit.
//
// Tiles in shared memory and in the workspace are rows of 64 bf16 numbers, 128 bytes, in which 16-byte pieces are
// exchanged by the row's number modulo 8: the order in which the matrix units read without bank conflicts.

typedef unsigned short bf16;  // its bits
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE __device__ __forceinline__

constexpr int ROWS = 64;           // tokens of a chunk
constexpr int TILE = ROWS * 128;   // bytes of 64 rows of 64 numbers
// What `prepare` leaves of a chunk and head: keys, queries, writes [64, 128], inverse, reads [64, 64], decay, beta.
constexpr int KEYS = 0, QUERIES = 2 * TILE, WRITES = 4 * TILE, INVERSE = 6 * TILE, READS = 7 * TILE;
constexpr int DECAY = 8 * TILE, BETA = DECAY + 512, RECORD = BETA + 256;
constexpr int STAGE = 65 * 1024;   // a record's room

DEVICE u32 shared_address(const void* p) {
    u64 at;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(at) : "l"(p));
    return (u32)at;
}
DEVICE int place(int row, int column) { return row * 128 + (((column >> 3) ^ (row & 7)) << 4) + ((column & 7) << 1); }

DEVICE u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE float low(u32 both) { return __uint_as_float(both << 16); }
DEVICE float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
DEVICE float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float sigmoid(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.f + power(-1.4426950408889634f * x)));
    return y;
}

// ---------------------------------------------------------------- barriers and copies
DEVICE void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(u32 barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(barrier), "r"(parity)
        : "memory");
}
DEVICE void copy_in(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
DEVICE void copy_out(void* to, u32 from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void copies_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void copies_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What ordinary stores wrote to shared memory is seen by matrix units and bulk copies after this and a barrier.
DEVICE void shared_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void group_barrier(int number) { asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory"); }

// 16 bytes, or zeros, by an ordinary asynchronous copy: loads into registers would wait for room in the little cache that
// is left beside so much shared memory.
DEVICE void cell_in(u32 to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}
DEVICE void cells_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE void load_transposed(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
DEVICE void store_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
DEVICE void store_straight(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// ---------------------------------------------------------------- matrix products of four warps
// A tile is described by its address; `apart` is how far apart 64-number columns of the same rows lie, for operands
// whose contiguous direction is not the one summed over.
DEVICE u64 describe(u32 address, int apart = 16) {
    return (u64)((address & 0x3ffff) >> 4) | ((u64)(apart >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define IN4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define IN16(d, i) IN4(d, i), IN4(d, i + 4), IN4(d, i + 8), IN4(d, i + 12)
#define D8 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define D16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define D32                                                                                                   \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31}"
#define D64                                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"  \
    "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
    "%56,%57,%58,%59,%60,%61,%62,%63}"

// d[64, N] (+)= sign * a[64, 16] b[16, N]; a from registers. LYING: b's numbers are contiguous along N.
template <int LYING, int SIGN = 1>
DEVICE void product(float (&d)[32], const u32* a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32 ", {%32,%33,%34,%35}, %36, add, %39, 1, %38;\n}\n"
        : IN16(d, 0), IN16(d, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(LYING), "n"(SIGN));
}
template <int LYING, int SIGN = 1>
DEVICE void product(float (&d)[64], const u32* a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " D64 ", {%64,%65,%66,%67}, %68, add, %71, 1, %70;\n}\n"
        : IN16(d, 0), IN16(d, 16), IN16(d, 32), IN16(d, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(LYING), "n"(SIGN));
}
// The same with a in shared memory; A_LYING: a's numbers are contiguous along its 64 rows.
template <int A_LYING, int LYING>
DEVICE void product(float (&d)[8], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " D8 ", %8, %9, add, 1, 1, %11, %12;\n}\n"
        : IN4(d, 0), IN4(d, 4)
        : "l"(a), "l"(b), "r"(add), "n"(A_LYING), "n"(LYING));
}
template <int A_LYING, int LYING>
DEVICE void product(float (&d)[16], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " D16 ", %16, %17, add, 1, 1, %19, %20;\n}\n"
        : IN16(d, 0)
        : "l"(a), "l"(b), "r"(add), "n"(A_LYING), "n"(LYING));
}
template <int A_LYING, int LYING>
DEVICE void product(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32 ", %32, %33, add, 1, 1, %35, %36;\n}\n"
        : IN16(d, 0), IN16(d, 16)
        : "l"(a), "l"(b), "r"(add), "n"(A_LYING), "n"(LYING));
}
