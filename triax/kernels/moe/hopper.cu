// Products of rows with their expert's matrices on Hopper's matrix units, each with what follows it.
//
// Two blocks that stand side by side take two tiles of 128 rows of one expert and the same 256 columns: each fetches its
// own rows and half of the other operand, which goes to both. Of a block's three groups of four warps one fetches, and
// two multiply 64 rows each; the operands of the next tile are on their way while a tile is finished. Blocks stay and
// take one pair of tiles after another.
//
// KIND decides what is multiplied and what becomes of it; names are those of `products.py`:
//   0 gate_up_proj  x gate^T and x up^T of 128 columns; shares times their activation, KEEPS: the two themselves
//   1 down_proj  x matrix^T
//   2 down_proj_backward  x matrix, then the activation's gradient, whose arguments follow the operands through the same ring
//   3 gate_up_proj_backward  x[0] gate + x[1] up
//   4 weight_gradient  left^T right over each expert's rows, in WIDE fp32 or in bf16, ADDS to what is there
// Also compiled with GATE_CAP and UP_CAP where there are caps.
// This text stands behind that of `hopper.cuh`.

struct Work {
    const int *expert, *used, *first, *count;  // as in `Rows`; tiles of rows are twice 128 high
    const float *share;                        // of each row
    float *share_parts;                        // [tiles of columns, rows]
    long long rows;
    int depth;      // what is summed, where it does not depend on the expert
    int wide, tall;  // tiles of columns; of 256 rows of an outer product
    int experts;
};
struct Tile {
    int expert, row, column, steps, first;  // row of this block, in `weight_gradient` of the result
};

DEVICE Tile tile_of(const Work &work, int number, int rank) {
    Tile tile;
    tile.column = number % work.wide * COLUMNS;
    int rest = number / work.wide;
    if (KIND == 4) {
        tile.expert = rest / work.tall;
        tile.row = rest % work.tall * 256 + rank * 128;
        tile.first = work.first[tile.expert];
        tile.steps = (work.count[tile.expert] + STEP - 1) / STEP;
    } else {
        tile.expert = work.expert[rest];
        tile.row = rest * 256 + rank * 128;
        tile.first = 0;
        tile.steps = (work.depth + STEP - 1) / STEP * (KIND == 3 ? 2 : 1);
    }
    return tile;
}
// Forwards and backwards in turn, so that no pair gets the longest tile of every round.
DEVICE int number_in(int round, int pair, int pairs) { return round * pairs + (round % 2 ? pairs - 1 - pair : pair); }
DEVICE int number_of_tiles(const Work &work) {
    return (KIND == 4 ? work.experts * work.tall : *work.used) * work.wide;
}

// 16 rows of 16 columns of a piece, as the matrix units leave them, in bf16; `line` counts from the piece's first row
DEVICE u32 place(u32 piece, int line, int part) {
    int lane = threadIdx.x % 32, own = line + threadIdx.x % 128 / 32 * 16 + lane % 16;
    return piece + own * 128 + (((part + lane / 16) ^ (own & 7)) << 4);
}
DEVICE void load_piece(u32 (&x)[4], u32 piece, int group, int part) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(place(piece, group * 64, part))
                 : "memory");
}
DEVICE void store_piece(const u32 *x, u32 piece, int group, int part) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(place(piece, group * 64, part)),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
// Gives a stage back to both blocks once the copies from it are read.
DEVICE void return_stage(u32 barrier) {
    copies_read<0>();
    barrier_arrive(barrier, 0);
    barrier_arrive(barrier, 1);
}

// One group's 16 KB through which results leave, a piece of 64 rows at a time, two in turn.
struct Outbox {
    u32 address;
    int group, turn;
    DEVICE u32 take() {
        if (threadIdx.x % 128 == 0) copies_read<1>();
        meet(1 + group);
        return address + (turn++ & 1) * PIECE;
    }
    DEVICE void send(u32 from, const TensorMap *map, int column, int row, int matrix) {
        shared_to_async();
        meet(1 + group);
        if (threadIdx.x % 128 == 0) copy_out(map, from, column, row, matrix);
    }
    // 64 rows of 64 columns
    DEVICE void put(const u32 (&x)[16], const TensorMap *map, int column, int row, int matrix) {
        u32 piece = take();
#pragma unroll
        for (int part = 0; part < 8; part += 2) store_piece(x + 2 * part, piece, 0, part);
        send(piece, map, column, row, matrix);
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
experts_product(const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap right,
                const __grid_constant__ TensorMap other, const __grid_constant__ TensorMap kept,
                const __grid_constant__ TensorMap result, const __grid_constant__ TensorMap both,
                const int *expert, const int *used, const int *first, const int *count, const float *share,
                float *share_parts, long long rows, int depth, int wide, int tall, int experts) {
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 full[STAGES], free[STAGES];
    const Work work{expert, used, first, count, share, share_parts, rows, depth, wide, tall, experts};
    u32 ring = (shared_address(memory) + 1023) & ~1023u;
    u32 filled = shared_address(full), freed = shared_address(free);
    int rank = block_of_pair(), group = threadIdx.x / 128, pairs = gridDim.x / 2, pair = blockIdx.x / 2;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(filled + 8 * stage, 1);
            barrier_init(freed + 8 * stage, 4);  // two groups of two blocks
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_pair();
    int tiles = number_of_tiles(work);
    u32 turn = 0;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x == 256) {
            for (int round = 0, number; (number = number_in(round, pair, pairs)) < tiles; round++) {
                Tile tile = tile_of(work, number, rank);
                for (int step = 0; step < tile.steps + ENDING; step++, turn++) {
                    u32 stage = turn % STAGES, to = ring + stage * STAGE, barrier = filled + 8 * stage;
                    barrier_wait(freed + 8 * stage, turn / STAGES % 2 ^ 1);
                    if (KIND == 2 && step >= tile.steps) {
                        int column = tile.column + (step - tile.steps) * SLICE;
                        barrier_expect(barrier, 2 * LEFT);
                        copy_in(to, &kept, column, tile.row, 0, barrier);
                        copy_in(to + LEFT, &kept, column, tile.row, 1, barrier);
                        continue;
                    }
                    barrier_expect(barrier, STAGE);
                    int k = step * STEP;
                    u32 half = to + LEFT + rank * 2 * PIECE;
                    if (KIND == 0) {
                        copy_in(to, &left, k, tile.row, 0, barrier);
                        copy_to_pair(half, rank ? &other : &right, k, tile.column, tile.expert, barrier);
                    } else if (KIND == 1) {
                        copy_in(to, &left, k, tile.row, 0, barrier);
                        copy_to_pair(half, &right, k, tile.column + rank * 128, tile.expert, barrier);
                    } else if (KIND == 4) {
                        int row = tile.first + k;
                        copy_in(to, &left, tile.row, row, 0, barrier);
                        copy_in(to + PIECE, &left, tile.row + 64, row, 0, barrier);
                        copy_to_pair(half, &right, tile.column + rank * 128, row, 0, barrier);
                        copy_to_pair(half + PIECE, &right, tile.column + rank * 128 + 64, row, 0, barrier);
                    } else {
                        int part = KIND == 3 && step >= tile.steps / 2;
                        if (part) k -= tile.steps / 2 * STEP;
                        const TensorMap *matrix = part ? &other : &right;
                        copy_in(to, &left, k, tile.row, part, barrier);
                        copy_to_pair(half, matrix, tile.column + rank * 128, k, tile.expert, barrier);
                        copy_to_pair(half + PIECE, matrix, tile.column + rank * 128 + 64, k, tile.expert, barrier);
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        [[maybe_unused]] Outbox outbox{ring + STAGES * STAGE + group * 2 * PIECE, group, 0};
        bool leads = threadIdx.x % 128 == 0, tells = threadIdx.x % 128 < 2;
        for (int round = 0, number; (number = number_in(round, pair, pairs)) < tiles; round++) {
            Tile tile = tile_of(work, number, rank);
            float d[128];
            if (KIND == 4 && tile.steps == 0) {
#pragma unroll
                for (int i = 0; i < 128; i++) d[i] = 0.0f;
            }
            for (int step = 0; step < tile.steps; step++, turn++) {
                u32 stage = turn % STAGES, at = ring + stage * STAGE;
                barrier_wait(filled + 8 * stage, turn / STAGES % 2);
                u64 rows_at = describe(at + group * PIECE), columns_at = describe(at + LEFT);
                products_begin();
#pragma unroll
                for (int k = 0; k < 4; k++)
                    multiply(d, rows_at + k * (LEFT_LIES ? 2048 : 32) / 16, columns_at + k * (RIGHT_LIES ? 2048 : 32) / 16,
                             step > 0 || k > 0);
                products_commit();
                products_wait<1>();
                if (step > 0 && tells) barrier_arrive(freed + 8 * ((turn - 1) % STAGES), threadIdx.x % 128);
            }
            products_wait<0>();
            if (tile.steps > 0 && tells) barrier_arrive(freed + 8 * ((turn - 1) % STAGES), threadIdx.x % 128);

            int row = tile.row + group * 64;
            [[maybe_unused]] int line = row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#if KIND == 4 && WIDE
#pragma unroll
            for (int slice = 0; slice < SLICES; slice++) {
                u32 piece = outbox.take();
#pragma unroll
                for (int i = 0; i < 8; i++) {  // blocks of 8 columns, each twice for rows 8 apart
                    int lane = threadIdx.x % 32, own = threadIdx.x % 128 / 32 * 16 + lane / 4 + i % 2 * 8;
                    int part = i / 2 * 2 + lane % 4 / 2;
                    u32 at = piece + own * 128 + ((part ^ (own & 7)) << 4) + lane % 2 * 8;
                    const float *x = &d[slice * 16 + i * 2];
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x[0]), "f"(x[1]) : "memory");
                }
                outbox.send(piece, &result, tile.column + slice * SLICE, row, tile.expert);
            }
#elif KIND == 0
            float upper = work.share[line], lower = work.share[line + 8];
#pragma unroll
            for (int slice = 0; slice < SLICES; slice++) {
                int column = tile.column + slice * SLICE;
                u32 gate[16], up[16];
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    gate[i] = pack(d[slice * 32 + 2 * i], d[slice * 32 + 2 * i + 1]);
                    up[i] = pack(d[64 + slice * 32 + 2 * i], d[64 + slice * 32 + 2 * i + 1]);
                }
                if (KEEPS) {
                    outbox.put(gate, &both, column, row, 0);
                    outbox.put(up, &both, column, row, 1);
                }
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    float weight = i % 2 ? lower : upper;
                    gate[i] = pack(weight * glu(low(gate[i]), low(up[i])), weight * glu(high(gate[i]), high(up[i])));
                }
                outbox.put(gate, &result, column, row, 0);
            }
#elif KIND == 2
            float weights[2] = {work.share[line], work.share[line + 8]}, parts[2] = {0.0f, 0.0f};
#pragma unroll
            for (int slice = 0; slice < SLICES; slice++, turn++) {
                int column = tile.column + slice * SLICE;
                u32 stage = turn % STAGES, at = ring + stage * STAGE;
                barrier_wait(filled + 8 * stage, turn / STAGES % 2);
#pragma unroll
                for (int part = 0; part < 8; part += 2) {
                    u32 gate[4], up[4], value[4];
                    load_piece(gate, at, group, part);
                    load_piece(up, at + LEFT, group, part);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float *back = &d[slice * 32 + 4 * part + 2 * i];
                        float g[2] = {low(gate[i]), high(gate[i])}, u[2] = {low(up[i]), high(up[i])}, v[2];
                        float weight = weights[i % 2];
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            v[j] = glu_gradient(back[j] * weight, g[j], u[j]);
                            parts[i % 2] += back[j] * v[j];
                        }
                        gate[i] = pack(g[0], g[1]), up[i] = pack(u[0], u[1]);
                        value[i] = pack(v[0] * weight, v[1] * weight);
                    }
                    store_piece(gate, at, group, part);
                    store_piece(up, at + LEFT, group, part);
                    store_piece(value, at + 2 * LEFT, group, part);
                }
                // results leave from where the arguments came to
                if (slice > 0 && leads) return_stage(freed + 8 * ((turn - 1) % STAGES));
                shared_to_async();
                meet(1 + group);
                if (leads) {
                    copy_out(&both, at + group * PIECE, column, row, 0);
                    copy_out(&both, at + LEFT + group * PIECE, column, row, 1);
                    copy_out(&result, at + 2 * LEFT + group * PIECE, column, row, 0);
                }
            }
            if (leads) return_stage(freed + 8 * ((turn - 1) % STAGES));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                parts[i] += __shfl_xor_sync(~0u, parts[i], 1);
                parts[i] += __shfl_xor_sync(~0u, parts[i], 2);
                if (threadIdx.x % 4 == 0) work.share_parts[tile.column / COLUMNS * work.rows + line + 8 * i] = parts[i];
            }
#else
#pragma unroll
            for (int slice = 0; slice < SLICES; slice++) {
                u32 x[16];
#pragma unroll
                for (int i = 0; i < 16; i++) x[i] = pack(d[slice * 32 + 2 * i], d[slice * 32 + 2 * i + 1]);
                outbox.put(x, &result, tile.column + slice * SLICE, row, KIND == 4 ? tile.expert : 0);
            }
#endif
        }
        if (leads) copies_done();
    }
    meet_pair();  // neither leaves while the other still tells it something
}
