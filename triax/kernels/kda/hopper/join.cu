// The states before each segment of a sequence, from the segments' maps: state = keep state + add, one after the other.
//
// A block has eight value columns of a head; while it multiplies, the next segment's `keep` is on its way.

constexpr int COLUMNS = 8, ROW = 132, SQUARE = 128 * ROW;  // numbers between rows of `keep` in shared memory

DEVICE void keep_in(u32 to, const float* map) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int p = threadIdx.x + 256 * i, r = p >> 5, piece = p & 31;
        cell_in(to + (r * ROW + 4 * piece) * 4, map + r * 256 + 128 + 4 * piece, true);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(256, 1)
    join(const float* maps, const float* state, const int* segments, float* starts, int heads) {
    extern __shared__ __align__(1024) unsigned char shared[];
    float *keep = (float*)shared, *now = keep + 2 * SQUARE;  // [2, 128, ROW], [128, COLUMNS]
    int owner = blockIdx.x >> 4, first = 8 * (blockIdx.x & 15), s = owner / heads, h = owner % heads;
    int r = threadIdx.x >> 1, c = 4 * (threadIdx.x & 1), begin = segments[s], end = segments[s + 1];
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (state) x = *(const float4*)(state + ((i64)owner * 128 + r) * 128 + first + c);
    if (begin < end - 1) keep_in(shared_address(keep), maps + ((i64)begin * heads + h) * 128 * 256);
    for (int segment = begin; segment < end; segment++) {
        i64 at = (i64)segment * heads + h;
        *(float4*)(starts + (at * 128 + r) * 128 + first + c) = x;
        if (segment == end - 1) break;
        int turn = (segment - begin) & 1;
        *(float4*)(now + r * COLUMNS + c) = x;
        x = *(const float4*)(maps + (at * 128 + r) * 256 + first + c);
        if (segment + 1 < end - 1) {
            keep_in(shared_address(keep + (turn ^ 1) * SQUARE), maps + (at + heads) * 128 * 256);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else
            cells_done();
        __syncthreads();
        const float* row = keep + turn * SQUARE + r * ROW;
#pragma unroll 8
        for (int k = 0; k < 128; k += 4) {
            float4 a = *(const float4*)(row + k);
            float4 b0 = *(const float4*)(now + k * COLUMNS + c), b1 = *(const float4*)(now + (k + 1) * COLUMNS + c);
            float4 b2 = *(const float4*)(now + (k + 2) * COLUMNS + c), b3 = *(const float4*)(now + (k + 3) * COLUMNS + c);
            x.x += a.x * b0.x + a.y * b1.x + a.z * b2.x + a.w * b3.x;
            x.y += a.x * b0.y + a.y * b1.y + a.z * b2.y + a.w * b3.y;
            x.z += a.x * b0.z + a.y * b1.z + a.z * b2.z + a.w * b3.z;
            x.w += a.x * b0.w + a.y * b1.w + a.z * b2.w + a.w * b3.w;
        }
        __syncthreads();
    }
}
