// tile_core.h: the matrix product inside the expert kernels of train_moe.cu. routing.h first.
#ifndef DEV_CUDA_TILE_CORE_H
#define DEV_CUDA_TILE_CORE_H

// ----------------------------------------------------------------------------
// The tile core. A block of 4 warps computes a tile of 128 x COLS (COLS is 128 or 64) of a product of two bf16
// matrices, in fp32 on the tensor cores. The sum is walked in steps of 32; for each step shared memory takes 128 x 32
// of the left operand and 32 x COLS of the right one. There is room for three steps, one in use and two on their way:
//
//     bytes         left operand       right operand      (COLS = 128; 48 KiB in all, two blocks fit an SM)
//     stage 0       0     .. 8191      8192  .. 16383
//     stage 1       16384 ..           24576 ..
//     stage 2       32768 ..           40960 .. 49151
//
// The warps stand 2 x 2, each owns 64 x COLS/2. With tiles that large a step needs 16 loads of fragments for 64 mma;
// with eight warps of 64 x 32 it is half as many again, and shared memory becomes the limit.
//
// Where an operand comes from differs from product to product, and that is all that differs before the epilogue:
//     AlongK   the sum runs along rows of memory: inp and weight in inp weight^T, d_out in d_out weight
//     AcrossK  the sum runs across them:          weight in d_out weight, both in d_out^T inp
// What lies beyond an edge is copied as zeros (cpa16 reads nothing then), in both operands: 0 times whatever was there
// could be NaN.

const int TILE_STEP = 32, TILE_STAGES = 3, TILE_THREADS = 128;

// Tile row r of the operand is a row of memory, from wherever the kernel says: a gather costs nothing here.
//
// In shared memory a row is 64 bytes, four chunks of 16. ldmatrix reads one chunk of 8 rows at a time, and these must
// lie in different banks (128 bytes, two rows): chunk c of row r is kept at place c ^ (r / 2 % 4).
//     place      0 1 2 3
//     row 0, 1   0 1 2 3
//     row 2, 3   1 0 3 2
//     row 4, 5   2 3 0 1
//     row 6, 7   3 2 1 0
template <int ROWS> struct AlongK {
    static constexpr int COPIES = ROWS * 4 / TILE_THREADS; // chunks that a thread copies a step
    const bf16* row[COPIES]; // beginnings of its tile rows t / 4 + 32 i
    unsigned inside;         // bit i: row[i] exists
    int length;              // of the sum

    // row_of(r): where tile row r begins, NULL if there is none. matrix: any valid address
    template <class RowOf> __device__ AlongK(const bf16* matrix, int length, RowOf row_of) : inside(0), length(length) {
        #pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const bf16* p = row_of((int)threadIdx.x / 4 + 32 * i);
            row[i] = p != NULL ? p : matrix;
            inside |= (unsigned)(p != NULL) << i;
        }
    }

    static __device__ bf16* place(bf16* tile, int r, int chunk) {
        return tile + r * TILE_STEP + (chunk ^ (r >> 1 & 3)) * 8;
    }

    __device__ void load(bf16* tile, int k0) {
        int chunk = threadIdx.x % 4, k = k0 + chunk * 8;
        #pragma unroll
        for (int i = 0; i < COPIES; i++) {
            cpa16(place(tile, (int)threadIdx.x / 4 + 32 * i, chunk), row[i] + k, (inside >> i & 1) && k < length);
        }
    }

    // as left operand: rows m .. m+15, k .. k+15;  as right operand: columns n .. n+15, two n8 tiles
    static __device__ void left(uint32_t (&a)[4], bf16* tile, int m, int k) {
        int lane = threadIdx.x % 32;
        ldsm4(a, place(tile, m + lane % 16, k / 8 + lane / 16));
    }
    static __device__ void right(uint32_t (&b)[4], bf16* tile, int n, int k) {
        int lane = threadIdx.x % 32;
        ldsm4(b, place(tile, n + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2));
    }
};

// Row k of the sum is row k of memory, or with GATHER row row_token[k]; the tile takes COLS neighbouring columns of it.
//
// In shared memory it stays that way round, 32 rows of COLS; ldmatrix transposes on the way to the registers. Chunk c
// of row k is kept at place c ^ (k % 8).
template <int COLS, bool GATHER> struct AcrossK {
    static constexpr int CHUNKS = COLS / 8;            // of a row
    static constexpr int ROWS = TILE_THREADS / CHUNKS; // that the block copies at a time
    static constexpr int COPIES = TILE_STEP / ROWS;    // chunks that a thread copies a step: rows t / CHUNKS + ROWS i
    const bf16* column; // this thread's first
    bool inside;        // it exists
    size_t stride;      // from a row to the next
    int length;         // of the sum
    const int* row_token;
    int token[COPIES]; // of the rows to copy next: looked up a step ahead, or each step would wait for memory twice

    // matrix with `columns` columns; the tile begins at column `first`
    __device__ AcrossK(const bf16* matrix, int columns, int first, int length, const int* row_token)
        : stride(columns), length(length), row_token(row_token) {
        int c = first + (int)threadIdx.x % CHUNKS * 8;
        inside = c < columns;
        column = matrix + (inside ? c : 0);
        if (GATHER) { look_up(0); }
    }

    __device__ void look_up(int k0) {
        #pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int k = k0 + (int)threadIdx.x / CHUNKS + ROWS * i;
            token[i] = k < length ? row_token[k] : 0;
        }
    }

    static __device__ bf16* place(bf16* tile, int k, int chunk) { return tile + k * COLS + (chunk ^ (k & 7)) * 8; }

    __device__ void load(bf16* tile, int k0) {
        int r = (int)threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        #pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int k = k0 + r + ROWS * i;
            const bf16* from = column + (size_t)(GATHER ? token[i] : k) * stride;
            cpa16(place(tile, r + ROWS * i, chunk), from, inside && k < length);
        }
        if (GATHER) { look_up(k0 + TILE_STEP); }
    }

    static __device__ void left(uint32_t (&a)[4], bf16* tile, int m, int k) {
        int lane = threadIdx.x % 32;
        ldsm4t(a, place(tile, k + lane % 8 + lane / 16 * 8, m / 8 + lane / 8 % 2));
    }
    static __device__ void right(uint32_t (&b)[4], bf16* tile, int n, int k) {
        int lane = threadIdx.x % 32;
        ldsm4t(b, place(tile, k + lane % 16, n / 8 + lane / 16));
    }
};

size_t tile_shared_bytes(int cols) { return sizeof(bf16) * TILE_STAGES * TILE_STEP * (TILE_ROWS + cols); }

// This thread's place in the tile: acc[i][j][2 h + q] of matmul_tile is element
//     row tile_row(2 i + h), column tile_column<COLS>() + 8 j + 2 (threadIdx.x % 4) + q
__device__ inline int tile_row(int part) {
    return threadIdx.x / 32 % 2 * 64 + part * 8 + threadIdx.x % 32 / 4;
}
template <int COLS> __device__ inline int tile_column() { return threadIdx.x / 64 * (COLS / 2); }

// acc += left operand times right operand, sum of `length` products each. One barrier a step.
template <int COLS, class Left, class Right>
__device__ inline void matmul_tile(float (&acc)[4][COLS / 16][4], Left& left, Right& right, int length) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    constexpr int LEFT_SIZE = TILE_ROWS * TILE_STEP, STAGE_SIZE = LEFT_SIZE + COLS * TILE_STEP;
    int warp_row = threadIdx.x / 32 % 2 * 64, warp_column = tile_column<COLS>();
    int steps = (length + TILE_STEP - 1) / TILE_STEP;
    auto stage_of = [&](int step) { return (bf16*)shared_bytes + step % TILE_STAGES * STAGE_SIZE; };
    auto load_step = [&](int step) {
        if (step < steps) {
            left.load(stage_of(step), step * TILE_STEP);
            right.load(stage_of(step) + LEFT_SIZE, step * TILE_STEP);
        }
        cpa_commit(); // an empty group too: cpa_wait counts them
    };
    for (int step = 0; step < TILE_STAGES - 1; step++) { load_step(step); }
    for (int step = 0; step < steps; step++) {
        cpa_wait<TILE_STAGES - 2>();
        __syncthreads(); // this step has landed for all threads; all are done with the one before: its stage is free
        load_step(step + TILE_STAGES - 1);
        bf16 *left_tile = stage_of(step), *right_tile = left_tile + LEFT_SIZE;
        #pragma unroll
        for (int k = 0; k < TILE_STEP; k += 16) {
            uint32_t a[4][4];
            #pragma unroll
            for (int i = 0; i < 4; i++) { Left::left(a[i], left_tile, warp_row + i * 16, k); }
            #pragma unroll
            for (int j = 0; j < COLS / 16; j += 2) {
                uint32_t b[4];
                Right::right(b, right_tile, warp_column + j * 8, k);
                uint32_t b_first[2] = {b[0], b[1]}, b_second[2] = {b[2], b[3]};
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    mma16816(acc[i][j], a[i], b_first);
                    mma16816(acc[i][j + 1], a[i], b_second);
                }
            }
        }
    }
}

// 8 of a thread's accumulators: of the n8 tiles j .. j+3 the two of each that lie in row tile_row(part)
template <int TILES>
__device__ inline void tile_take8(float (&v)[8], const float (&acc)[4][TILES][4], int part, int j) {
    #pragma unroll
    for (int q = 0; q < 8; q++) { v[q] = acc[part / 2][j + q / 2][part % 2 * 2 + q % 2]; }
}

// The epilogues want to store 16 bytes, 8 neighbouring columns, but mma leaves a thread two columns of each n8 tile:
//     column of the 32     0 1   2 3   4 5   6 7 | 8 9  10 11 12 13 14 15 | ...
//     lane of the quad      0     1     2     3  |  0     1     2     3   | ...
// Two ways out. Where tile columns are rows of memory (AlongK), which row goes where is ours to choose: tile column n
// takes column tile_column_order(n) of its 32, and lane t ends up with columns 8 t .. 8 t + 7 in its four n8 tiles.
__device__ inline int tile_column_order(int n) { return n % 8 / 2 * 8 + n / 8 % 4 * 2 + n % 2; }

// Where they are columns of memory (AcrossK), the four lanes of a quad exchange: v holds four pairs, pair j of lane t
// becomes pair t of lane j. Two rounds, with the neighbour lane and with the one after it.
__device__ inline void quad_transpose(float (&v)[8]) {
    #pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        bool upper = (threadIdx.x & bit) != 0;
        #pragma unroll
        for (int low = 0; low < 8; low++) { // element low / 2 is a pair without the bit, high the one with it
            int high = low + 2 * bit;
            if ((low / 2 & bit) != 0) { continue; }
            float got = __shfl_xor_sync(0xffffffff, upper ? v[low] : v[high], bit);
            if (upper) {
                v[low] = got;
            } else {
                v[high] = got;
            }
        }
    }
}

#endif
