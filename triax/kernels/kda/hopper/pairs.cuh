// What the kernels that multiply pairs of tokens share: gates, and products of one warp.

DEVICE float number(float x) { return x; }
DEVICE float number(bf16 x) { return __uint_as_float((u32)x << 16); }

// log(1 + e^x), also where e^x is lost beside 1, and its slope.
DEVICE float softplus(float x, float& slope) {
    float e = power(1.4426950408889634f * x), part, log;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.f + e));
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(1.f + e));
    bool high = x > 15.f, low = e < 0.03f;
    slope = high ? 1.f : e * part;
    return high ? x : low ? e * (1.f - e * (0.5f - e * (0.33333333f - 0.25f * e))) : log * 0.6931471805599453f;
}

// ANCHORED tokens have a common anchor. With bounded gates 32 have it in their middle or, CAUSAL, 16 where they start, so
// that no later gate moves a bit of what comes before it; a power of two then centres their factors on 1. With others it
// is 16, or 8. The latter's log decays (base 2) are held at HELD: of a channel that forgets more, 4.5e-5 remains.
#define UNBOUNDED (ANCHORED == (CAUSAL ? 8 : 16))
constexpr float HELD = -14.4375f, BALANCE = 58.f, UNBALANCED = 3.469446951953614e-18f;  // 2^-58
DEVICE float held(float x) { return UNBOUNDED ? fmaxf(x, HELD) : x; }

DEVICE void load_straight(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
// d[16, 8] += a[16, 16] b[16, 8], from registers.
DEVICE void warp_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d[2][16, 8] += a[16, 16] b[16, 16]
DEVICE void warp_product(float (&d)[2][4], const u32 (&a)[4], const u32 (&b)[4]) {
    warp_product(d[0], a, b[0], b[1]);
    warp_product(d[1], a, b[2], b[3]);
}
// d[16, 8] += a[16, 8] b[8, 8]
DEVICE void warp_product(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(b));
}
// Sixteen rows and sixteen numbers of a tile: as they lie, or rows for columns.
DEVICE void corner(u32 (&x)[4], u32 tile, int row, int column) {
    int lane = threadIdx.x & 31;
    load_straight(x, tile + place(row + ((lane >> 4) << 3) + (lane & 7), column + (lane & 8)));
}
DEVICE void corner_transposed(u32 (&x)[4], u32 tile, int row, int column) {
    int lane = threadIdx.x & 31;
    load_transposed(x, tile + place(row + (lane & 15), column + ((lane >> 4) << 3)));
}
