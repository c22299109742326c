// What the kernel needs of Hopper in its own words: barriers, the copy engine, neighbours, and the matrix units.

__device__ __forceinline__ u32 shared_address(const void *at) { return u32(__cvta_generic_to_shared(at)); }
__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::
            "r"(barrier), "r"(phase)
        : "memory");
}
__device__ __forceinline__ void copy_in(u32 to, const TensorMap *map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
// The neighbour's place of what lies here at `address`.
__device__ __forceinline__ u32 over_there(u32 address, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}
__device__ __forceinline__ void give(u32 to, float a, float b, float c, float d, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void give(u32 to, u32 from, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "r"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void barrier_arrive_there(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void neighbours_meet() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void meet(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ bool meet_and_ask(int number, int threads, bool mine) {
    u32 any;
    asm volatile(
        "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %1, 0;\nbarrier.cta.red.or.pred any, %2, %3, mine;\n"
        "selp.u32 %0, 1, 0, any;\n}"
        : "=r"(any)
        : "r"(u32(mine)), "r"(number), "r"(threads)
        : "memory");
    return any;
}
// A piece has rows of 128 bytes, 16-byte parts exchanged by the row's number modulo 8, 8 rows 1024 bytes apart.
__device__ __forceinline__ u64 describe(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
// The same with rows of 64 bytes, exchanged by their number's half modulo 4.
__device__ __forceinline__ u64 describe_narrow(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(512 >> 4) << 32 | u64(2) << 62;
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
