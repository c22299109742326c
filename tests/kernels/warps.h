// Runs CUDA C++ that multiplies by warps on a CPU, a block at a time, a thread for a thread.
#include <atomic>
#include <barrier>
#include <math.h>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct Place { int x; };
static thread_local Place threadIdx, blockIdx, gridDim;
alignas(128) uint4 tokens[227 * 64], slices[227 * 64];  // dynamic shared memory of one kernel or the other
static std::unique_ptr<std::barrier<>> block_barrier, warp_barriers[32];
static unsigned exchanged[1024][6];
typedef std::uintptr_t Shared;

inline void in_warp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
template <class T> inline T min(T x, T y) { return x < y ? x : y; }
template <class T> inline T max(T x, T y) { return x < y ? y : x; }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned bits_of(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
    const std::uint64_t all = std::uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(all >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
template <class T> inline T __shfl_sync(unsigned, T x, int lane) {
    exchanged[threadIdx.x][0] = x;
    in_warp();
    const T y = exchanged[threadIdx.x / 32 * 32 + lane][0];
    in_warp();
    return y;
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int other) {
    return __shfl_sync(mask, x, threadIdx.x % 32 ^ other);
}
template <class T> inline T __ldg(const T *at) { return *at; }

inline unsigned short rounded(float x) {
    const unsigned bits = bits_of(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned times(unsigned x, unsigned y) {
    const auto one = [](unsigned a, unsigned b) {
        return rounded(__uint_as_float(a << 16) * __uint_as_float(b << 16));
    };
    return one(x, y) | unsigned(one(x >> 16, y >> 16)) << 16;
}
inline float2 through_e4m3(float low, float high) {
    const auto one = [](float x) {
        const float unit = std::ldexp(1.0f, std::max(std::ilogb(x), -6) - 3);
        return x == 0 ? x : std::copysign(std::min(std::nearbyint(std::fabs(x) / unit) * unit, 448.0f), x);
    };
    return {one(low), one(high)};
}
inline void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(exchanged[threadIdx.x], own, sizeof own);
    in_warp();
    const unsigned (*const warp)[6] = exchanged + threadIdx.x / 32 * 32;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) {
            const int from = k % 8 / 2, shift = k % 2 ? 0 : 16, upper = i / 2, late = k / 8, column = t * 2 + i % 2;
            const auto half = [&](unsigned x) { return __uint_as_float(shift ? x << 16 : x & 0xffff0000); };
            d[i] += half(warp[g * 4 + from][upper + 2 * late]) * half(warp[column * 4 + from][4 + late]);
        }
    in_warp();
}

inline Shared shared_address(const void *at) { return Shared(at); }
inline void moved(Shared to, const void *from, int bytes, int whole) {
    if (to % whole || std::uintptr_t(from) % whole || bytes % whole) std::abort();
    std::memcpy(reinterpret_cast<void *>(to), from, bytes);
}
// Copies arrive as late as they may: when somebody waits for them.
struct Copy { Shared to; const void *from; int bytes; };
static thread_local std::vector<std::vector<Copy>> groups;
static thread_local std::vector<Copy> opened;
inline void copy_16(Shared to, const void *from) { opened.push_back({to, from, 16}); }
inline void copy_4(Shared to, const void *from) { opened.push_back({to, from, 4}); }
inline void copies_commit() { groups.push_back(opened), opened.clear(); }
template <int LEFT> inline void copies_wait() {
    while (int(groups.size()) > LEFT) {
        for (const Copy &copy : groups.front()) moved(copy.to, copy.from, copy.bytes, copy.bytes);
        groups.erase(groups.begin());
    }
}
struct Barrier { std::atomic<int> awaited, phases; };
inline Barrier &barrier_at(Shared at) { return *reinterpret_cast<Barrier *>(at); }
inline void barrier_init(Shared at) { barrier_at(at).awaited = 0, barrier_at(at).phases = 0; }
inline void barriers_show() {}
inline void arrived(Shared at, int bytes) {
    if (barrier_at(at).awaited.fetch_sub(bytes) == bytes) barrier_at(at).phases++;
}
inline void barrier_expect(Shared at, int bytes) { barrier_at(at).awaited += bytes + 1, arrived(at, 1); }
inline void barrier_wait(Shared at, int phase) {
    while ((barrier_at(at).phases & 1) == phase) std::this_thread::yield();
}
inline void copy_in(Shared to, const void *from, int bytes, Shared barrier) {
    moved(to, from, bytes, 16);
    arrived(barrier, bytes);
}

template <class Kernel> void on_host(int blocks, int threads, Kernel kernel) {
    for (int block = 0; block < blocks; block++) {
        std::memset(tokens, 0xff, sizeof tokens);  // NaN: nothing may be read that nobody wrote
        std::memset(slices, 0xff, sizeof slices);
        block_barrier = std::make_unique<std::barrier<>>(threads);
        for (int warp = 0; warp < threads / 32; warp++) warp_barriers[warp] = std::make_unique<std::barrier<>>(32);
        std::vector<std::thread> running;
        for (int thread = 0; thread < threads; thread++)
            running.emplace_back([=] {
                threadIdx.x = thread, blockIdx.x = block, gridDim.x = blocks;
                kernel();
                block_barrier->arrive_and_drop();
                warp_barriers[thread / 32]->arrive_and_drop();
            });
        for (auto &one : running) one.join();
    }
}
