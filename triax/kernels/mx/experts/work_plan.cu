// Sort pairs of token and expert by expert, and cut each expert's pairs into work items; one block does it all.
//
// Compiled with EXPERTS, MOST (pairs of an item) and THREADS. In which order an expert's pairs stand is left to chance:
// each is worked on by itself, whatever its place.

struct Item {
    int expert, first, count, unused;
};

constexpr int EACH = (EXPERTS + THREADS - 1) / THREADS;  // experts of a thread, side by side

extern "C" __global__ void __launch_bounds__(THREADS, 1)
plan(const long long *expert, int pairs, int *order, Item *items, int *num_items) {
    __shared__ int count[EXPERTS], place[THREADS], number[THREADS];
    const int thread = threadIdx.x;
    for (int e = thread; e < EXPERTS; e += THREADS) count[e] = 0;
    __syncthreads();
    for (int p = thread; p < pairs; p += THREADS) atomicAdd(&count[expert[p]], 1);
    __syncthreads();
    int own_pairs = 0, own_items = 0;
    for (int e = thread * EACH; e < min((thread + 1) * EACH, EXPERTS); e++) {
        own_pairs += count[e];
        own_items += (count[e] + MOST - 1) / MOST;
    }
    place[thread] = own_pairs;
    number[thread] = own_items;
    __syncthreads();
    for (int distance = 1; distance < THREADS; distance *= 2) {
        const int pairs_before = thread >= distance ? place[thread - distance] : 0;
        const int items_before = thread >= distance ? number[thread - distance] : 0;
        __syncthreads();
        place[thread] += pairs_before;
        number[thread] += items_before;
        __syncthreads();
    }
    int first = place[thread] - own_pairs, item = number[thread] - own_items;
    if (thread == THREADS - 1) *num_items = number[thread];
    for (int e = thread * EACH; e < min((thread + 1) * EACH, EXPERTS); e++) {
        const int some = count[e];
        for (int done = 0; done < some; done += MOST) items[item++] = {e, first + done, min(some - done, MOST), 0};
        count[e] = first;  // from here on where the next of its pairs goes
        first += some;
    }
    __syncthreads();
    for (int p = thread; p < pairs; p += THREADS) order[atomicAdd(&count[expert[p]], 1)] = p;
}

// Add what a token's experts returned, in the order of its choice: a block is a token, a thread takes four channels
// at a time. Compiled with CHANNELS.
extern "C" __global__ void add(const float *returned, int top_k, unsigned short *output) {
    const float4 *const from =
        reinterpret_cast<const float4 *>(returned) + (long long)blockIdx.x * top_k * (CHANNELS / 4);
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < CHANNELS / 4; i += gridDim.y * blockDim.x) {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int choice = 0; choice < top_k; choice++) {
            const float4 x = from[(long long)choice * (CHANNELS / 4) + i];
            sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
        }
        uint2 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both.x) : "f"(sum.y), "f"(sum.x));
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both.y) : "f"(sum.w), "f"(sum.z));
        reinterpret_cast<uint2 *>(output)[(long long)blockIdx.x * (CHANNELS / 4) + i] = both;
    }
}
