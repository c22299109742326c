// Runs a CUDA C++ kernel on a CPU, a block at a time, a thread for a thread: slow, but every barrier is a real one.
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(...)
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct Place { int x; };
struct bf16 { unsigned short bits; };
alignas(16) float4 memory[14528];
static thread_local Place threadIdx, blockIdx, gridDim;
static std::barrier<> *block_barrier, *warp_barriers[32];
static float exchanged[1024];

inline float widened(unsigned bits) { bits <<= 16; float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned short rounded(float x) {
    unsigned bits; std::memcpy(&bits, &x, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float x, int distance) {
    auto &barrier = *warp_barriers[threadIdx.x / 32];
    exchanged[threadIdx.x] = x;
    barrier.arrive_and_wait();
    float y = exchanged[threadIdx.x ^ distance];
    barrier.arrive_and_wait();
    return y;
}
inline void __syncwarp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }
static std::atomic<int> awaited, phases;
inline void barrier_init(long long *) { awaited = 0, phases = 0; }
inline void arrived(int bytes) { if (awaited.fetch_sub(bytes) == bytes) phases++; }
inline void barrier_expect(long long *, int bytes) { awaited += bytes + 1; arrived(1); }
inline void barrier_wait(long long *, int phase) { while ((phases & 1) == phase) std::this_thread::yield(); }
inline void copy_in(void *to, const void *from, int bytes, long long *) {
    if (std::uintptr_t(to) % 16 || std::uintptr_t(from) % 16 || bytes % 16) std::abort();
    std::memcpy(to, from, bytes);
    arrived(bytes);
}
inline void copy_16(void *to, const void *from) {
    if (std::uintptr_t(to) % 16 || std::uintptr_t(from) % 16) std::abort();
    std::memcpy(to, from, 16);
}
inline void wait_for_copies() {}
inline int min(int x, int y) { return x < y ? x : y; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

template <class Kernel> void on_host(int blocks, int threads, Kernel kernel) {
    for (int block = 0; block < blocks; block++) {
        std::memset(memory, 0xff, sizeof(memory));  // NaN: nothing may be read that nobody wrote
        std::barrier<> all(threads);
        block_barrier = &all;
        for (int warp = 0; warp < threads / 32; warp++) warp_barriers[warp] = new std::barrier<>(32);
        std::vector<std::thread> running;
        for (int thread = 0; thread < threads; thread++)
            running.emplace_back([=] { threadIdx.x = thread; blockIdx.x = block; gridDim.x = blocks; kernel(); });
        for (auto &one : running) one.join();
        for (int warp = 0; warp < threads / 32; warp++) delete warp_barriers[warp];
    }
}
