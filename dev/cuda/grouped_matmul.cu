/*
grouped_matmul.cu: the experts of an MoE layer, forward and backward. Each expert is a small MLP with rows of its own,
so each of the layer's products is a group of products that differ in their number of rows, which only the GPU knows:
    gate_up (R,2F) = rows of inp  gate_up_proj[e]^T         d_act (R,F)        = rows of d_out  down_proj[e]
    expert_act     = swiglu(gate_up)                        d_gate_up          = swiglu_backward(d_act)
    expert_out (R,C) = expert_act  down_proj[e]^T           d_expert_in (R,C)  = d_gate_up  gate_up_proj[e]
                                                            d_down_proj[e]    += d_out^T expert_act
                                                            d_gate_up_proj[e] += d_gate_up^T inp
(grouped GEMM without capacity or dropped tokens: MegaBlocks, Gale et al. 2022; gather inside it: ScatterMoE, Tan et al.
2024; tile core after CUTLASS.)
R = N*K rows sorted by expert; inp, d_out (N,C) by token; gate_up_proj (E,2F,C), down_proj (E,C,F); the gradients of the
weights are fp32. References: cpu::matmul_forward and matmul_backward an expert, swiglu_forward, swiglu_backward,
permute_forward, combine_backward, and for the whole layer mlp_forward, mlp_backward.

nvcc -std=c++17 -O3 -arch=native -I. -o build/dev/grouped_matmul dev/cuda/grouped_matmul.cu -lcjson -lcublasLt -lcublas
dev/emu/emucc -I. -o build/dev/grouped_matmul dev/cuda/grouped_matmul.cu -lcjson

kernel 1: a thread an output; it looks for the expert of its row
kernel 2: a list of tiles, 128 rows of one expert each, so that a block has one weight matrix; tiles in shared memory
kernel 3: the same on tensor cores (tile_core.h)
kernel 4: the gather moves into the product: rows of inp are read by token, expert_in no longer exists
kernel 5: SwiGLU and its backward move into the epilogues, with the router weight and its gradient: nothing is left
           between the products, and only gate_up is kept for backward
kernel 6: no kernel of ours: a loop over experts on the host, cuBLASLt for each (--experts loop)
// winner: 5 (its plain products are those of 3 and 4)
*/
#include "common.h"
#ifndef EMU
#include <cublas_v2.h>
#endif
#include "matmul.h"
#include "routing.h"
#include "swiglu.h"
#include "tile_core.h"

// ----------------------------------------------------------------------------
// the neighbours, in their plainest form: permute.cu and combine.cu have those of the trainer

// a thread owns an element of expert_in, a block 256; bound by instructions
__global__ void plain_permute_forward_kernel1(bf16* expert_in, const bf16* inp, const int* row_token, size_t R,
                                             size_t C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < R * C) { expert_in[i] = inp[(size_t)row_token[i / C] * C + i % C]; }
}

void permute_forward(bf16* expert_in, const bf16* inp, const int* row_token, size_t R, size_t C, cudaStream_t stream) {
    // expert_in[row,:] = inp[token of row,:]
    plain_permute_forward_kernel1<<<(unsigned)ceil_div(R * C, 256), 256, 0, stream>>>(expert_in, inp, row_token, R, C);
    launchCheck("permute_forward");
}

// a block of one warp owns a row, a lane every 32nd column; bound by memory, 64 bytes a request
__global__ void plain_combine_backward_kernel1(bf16* d_expert_out, float* d_router_weight_rows, const bf16* d_out,
                                              const bf16* expert_out, const float* router_weights, const int* row_slot,
                                              int K, size_t C) {
    size_t row = blockIdx.x, slot = (size_t)row_slot[row];
    float dot = 0;
    for (size_t c = threadIdx.x; c < C; c += 32) {
        float d = __bfloat162float(d_out[slot / K * C + c]);
        dot += d * __bfloat162float(expert_out[row * C + c]);
        d_expert_out[row * C + c] = __float2bfloat16(router_weights[slot] * d);
    }
    dot = warp_sum(dot);
    if (threadIdx.x == 0) { d_router_weight_rows[row] = dot; }
}

void combine_backward(bf16* d_expert_out, float* d_router_weight_rows, const bf16* d_out, const bf16* expert_out,
                      const float* router_weights, const int* row_slot, size_t R, int K, size_t C,
                      cudaStream_t stream) {
    // d_expert_out[row,:] = router weight * d_out[token,:]; d_router_weight_rows[row] = d_out[token] . expert_out[row]
    plain_combine_backward_kernel1<<<(unsigned)R, 32, 0, stream>>>(d_expert_out, d_router_weight_rows, d_out,
                                                                  expert_out, router_weights, row_slot, K, C);
    launchCheck("combine_backward");
}

// ----------------------------------------------------------------------------
// kernel 1: a thread owns one output, whatever its expert. Every product reads its two numbers from the caches: bound
// by those, at a few percent of what the arithmetic units could do.

__device__ inline size_t expert_of_row(size_t row, const int* expert_offsets) {
    size_t e = 0;
    while (row >= (size_t)expert_offsets[e + 1]) { e++; }
    return e;
}

// a thread owns an element of out (R,OC), a block 256
__global__ void grouped_matmul_forward_kernel1(bf16* out, const bf16* inp, const bf16* weight,
                                               const int* expert_offsets, size_t R, size_t C, size_t OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / OC, o = i % OC;
    if (row >= R) { return; }
    const bf16 *x = inp + row * C, *w = weight + (expert_of_row(row, expert_offsets) * OC + o) * C;
    float sum = 0;
    for (size_t c = 0; c < C; c++) { sum += __bfloat162float(x[c]) * __bfloat162float(w[c]); }
    out[i] = __float2bfloat16(sum);
}

// a thread owns an element of d_inp (R,C), a block 256
__global__ void grouped_matmul_backward_inp_kernel1(bf16* d_inp, const bf16* d_out, const bf16* weight,
                                                    const int* expert_offsets, size_t R, size_t C, size_t OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / C, c = i % C;
    if (row >= R) { return; }
    const bf16 *d = d_out + row * OC, *w = weight + expert_of_row(row, expert_offsets) * OC * C + c;
    float sum = 0;
    for (size_t o = 0; o < OC; o++) { sum += __bfloat162float(d[o]) * __bfloat162float(w[o * C]); }
    d_inp[i] = __float2bfloat16(sum);
}

// a thread owns an element of d_weight (E,OC,C), a block 256
__global__ void grouped_matmul_backward_weight_kernel1(float* d_weight, const bf16* d_out, const bf16* inp,
                                                       const int* expert_offsets, size_t C, size_t OC, int E) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, e = i / (OC * C), o = i / C % OC, c = i % C;
    if (e >= (size_t)E) { return; }
    float sum = 0;
    for (size_t row = (size_t)expert_offsets[e]; row < (size_t)expert_offsets[e + 1]; row++) {
        sum += __bfloat162float(d_out[row * OC + o]) * __bfloat162float(inp[row * C + c]);
    }
    d_weight[i] += sum;
}

// ----------------------------------------------------------------------------
// kernel 2: a block of 256 threads owns 128 x 64 outputs of one expert, a thread 8 x 4 of them in registers. Operands
// pass through shared memory 16 steps of the sum at a time, so each number is read from global memory 64 or 128 times
// less often. Bound by the fp32 units and the reads of shared memory that feed them (12 for 32 multiply-adds).

constexpr int SIMPLE_COLS = 64, SIMPLE_STEP = 16, SIMPLE_THREADS = 256;

// left(row, k) and right(k, column) give an element, 0 beyond the edges
template <class Left, class Right>
__device__ inline void simple_tile(float (&acc)[8][4], int length, Left left, Right right) {
    __shared__ float left_tile[SIMPLE_STEP][TILE_ROWS + 1], right_tile[SIMPLE_STEP][SIMPLE_COLS + 1];
    int row = threadIdx.x / 16 * 8, column = threadIdx.x % 16 * 4;
    #pragma unroll
    for (int i = 0; i < 32; i++) { acc[i / 4][i % 4] = 0; }
    for (int k0 = 0; k0 < length; k0 += SIMPLE_STEP) {
        for (int i = threadIdx.x; i < TILE_ROWS * SIMPLE_STEP; i += SIMPLE_THREADS) {
            left_tile[i % SIMPLE_STEP][i / SIMPLE_STEP] = left(i / SIMPLE_STEP, k0 + i % SIMPLE_STEP);
        }
        for (int i = threadIdx.x; i < SIMPLE_COLS * SIMPLE_STEP; i += SIMPLE_THREADS) {
            right_tile[i % SIMPLE_STEP][i / SIMPLE_STEP] = right(k0 + i % SIMPLE_STEP, i / SIMPLE_STEP);
        }
        __syncthreads(); // both tiles are complete
        for (int k = 0; k < SIMPLE_STEP; k++) {
            #pragma unroll
            for (int i = 0; i < 32; i++) {
                acc[i / 4][i % 4] += left_tile[k][row + i / 4] * right_tile[k][column + i % 4];
            }
        }
        __syncthreads(); // all have read the tiles, they may be filled again
    }
}

// a block owns 128 rows of a tile x 64 columns of out (R,OC)
__global__ void __launch_bounds__(SIMPLE_THREADS)
grouped_matmul_forward_kernel2(bf16* out, const bf16* inp, const bf16* weight, const int4* tile_list, int C, int OC) {
    int4 tile = tile_list[blockIdx.y];
    if (tile.x < 0) { return; } // past the last tile
    int row0 = tile.y, end = tile.z, o0 = blockIdx.x * SIMPLE_COLS;
    const bf16* w = weight + (size_t)tile.x * OC * C;
    auto left = [&](int r, int k) {
        return row0 + r < end && k < C ? __bfloat162float(inp[(size_t)(row0 + r) * C + k]) : 0.0f;
    };
    auto right = [&](int k, int n) {
        return o0 + n < OC && k < C ? __bfloat162float(w[(size_t)(o0 + n) * C + k]) : 0.0f;
    };
    float acc[8][4];
    simple_tile(acc, C, left, right);
    for (int i = 0; i < 32; i++) {
        int r = row0 + (int)threadIdx.x / 16 * 8 + i / 4, o = o0 + (int)threadIdx.x % 16 * 4 + i % 4;
        if (r < end && o < OC) { out[(size_t)r * OC + o] = __float2bfloat16(acc[i / 4][i % 4]); }
    }
}

// a block owns 128 rows of a tile x 64 columns of d_inp (R,C)
__global__ void __launch_bounds__(SIMPLE_THREADS)
grouped_matmul_backward_inp_kernel2(bf16* d_inp, const bf16* d_out, const bf16* weight, const int4* tile_list, int C,
                                    int OC) {
    int4 tile = tile_list[blockIdx.y];
    if (tile.x < 0) { return; }
    int row0 = tile.y, end = tile.z, c0 = blockIdx.x * SIMPLE_COLS;
    const bf16* w = weight + (size_t)tile.x * OC * C;
    auto left = [&](int r, int k) {
        return row0 + r < end && k < OC ? __bfloat162float(d_out[(size_t)(row0 + r) * OC + k]) : 0.0f;
    };
    auto right = [&](int k, int n) {
        return c0 + n < C && k < OC ? __bfloat162float(w[(size_t)k * C + c0 + n]) : 0.0f;
    };
    float acc[8][4];
    simple_tile(acc, OC, left, right);
    for (int i = 0; i < 32; i++) {
        int r = row0 + (int)threadIdx.x / 16 * 8 + i / 4, c = c0 + (int)threadIdx.x % 16 * 4 + i % 4;
        if (r < end && c < C) { d_inp[(size_t)r * C + c] = __float2bfloat16(acc[i / 4][i % 4]); }
    }
}

// a block owns 128 x 64 of d_weight[e] (OC,C), e = blockIdx.z; the sum runs over the expert's rows
__global__ void __launch_bounds__(SIMPLE_THREADS)
grouped_matmul_backward_weight_kernel2(float* d_weight, const bf16* d_out, const bf16* inp, const int* expert_offsets,
                                       int C, int OC) {
    int e = blockIdx.z, row0 = expert_offsets[e], rows = expert_offsets[e + 1] - row0;
    int o0 = blockIdx.y * TILE_ROWS, c0 = blockIdx.x * SIMPLE_COLS;
    auto left = [&](int m, int k) {
        return o0 + m < OC && k < rows ? __bfloat162float(d_out[(size_t)(row0 + k) * OC + o0 + m]) : 0.0f;
    };
    auto right = [&](int k, int n) {
        return c0 + n < C && k < rows ? __bfloat162float(inp[(size_t)(row0 + k) * C + c0 + n]) : 0.0f;
    };
    float acc[8][4];
    simple_tile(acc, rows, left, right);
    for (int i = 0; i < 32; i++) {
        int o = o0 + (int)threadIdx.x / 16 * 8 + i / 4, c = c0 + (int)threadIdx.x % 16 * 4 + i % 4;
        if (o < OC && c < C) { d_weight[((size_t)e * OC + o) * C + c] += acc[i / 4][i % 4]; }
    }
}

// ----------------------------------------------------------------------------
// kernel 3: the tile core. x is the fastest coordinate of the grid: blocks that share a tile's rows run at the same
// time, and the rows come from memory once. Bound by the tensor cores, on Hopper by the issue slots of mma.sync.

// out (R,OC) = inp (R,C) weight[e]^T with weight[e] (OC,C), or, if not TRANSPOSED, inp weight[e] with weight[e] (C,OC):
// forward, and the gradient of inp from that of out. A block owns 128 rows x 128 columns, a thread 8 x 16 of them, and
// stores 8 neighbours at a time, 16 bytes. TRANSPOSED: tile columns are rows of weight, taken in the order that gives a
// thread its neighbours. Otherwise they are columns, whose order is given, and the lanes of a quad exchange.
template <bool TRANSPOSED>
__global__ void __launch_bounds__(TILE_THREADS)
grouped_matmul_kernel3(bf16* out, const bf16* inp, const bf16* weight, const int4* tile_list, int C, int OC) {
    int4 tile = tile_list[blockIdx.y];
    if (tile.x < 0) { return; } // past the last tile
    int row0 = tile.y, end = tile.z, o0 = blockIdx.x * 128;
    const bf16* w = weight + (size_t)tile.x * OC * C;
    AlongK<128> left(inp, C, [&](int r) { return row0 + r < end ? inp + (size_t)(row0 + r) * C : NULL; });
    float acc[4][8][4] = {};
    if constexpr (TRANSPOSED) {
        AlongK<128> right(w, C, [&](int n) {
            int o = o0 + n / 32 * 32 + tile_column_order(n % 32);
            return o < OC ? w + (size_t)o * C : NULL;
        });
        matmul_tile<128>(acc, left, right, C);
    } else {
        AcrossK<128, false> right(w, OC, o0, C, NULL);
        matmul_tile<128>(acc, left, right, C);
    }
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int r = row0 + tile_row(part);
        #pragma unroll
        for (int j = 0; j < 8; j += 4) {
            int o = o0 + tile_column<128>() + j * 8 + threadIdx.x % 4 * 8;
            float v[8];
            tile_take8(v, acc, part, j);
            if constexpr (!TRANSPOSED) { quad_transpose(v); }
            if (r < end && o < OC) { store8(out + (size_t)r * OC + o, v); }
        }
    }
}

// d_weight[e] (OC,C) += d_out^T inp over the rows of expert e. A block owns 128 x 128 of it and sums all rows.
__global__ void __launch_bounds__(TILE_THREADS)
grouped_matmul_backward_weight_kernel3(float* d_weight, const bf16* d_out, const bf16* inp, const int* expert_offsets,
                                       int C, int OC) {
    int e = blockIdx.z, row0 = expert_offsets[e], rows = expert_offsets[e + 1] - row0;
    int o0 = blockIdx.y * TILE_ROWS, c0 = blockIdx.x * 128;
    if (rows == 0) { return; } // nothing to add
    AcrossK<128, false> left(d_out + (size_t)row0 * OC, OC, o0, rows, NULL);
    AcrossK<128, false> right(inp + (size_t)row0 * C, C, c0, rows, NULL);
    float acc[4][8][4] = {};
    matmul_tile<128>(acc, left, right, rows);
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int o = o0 + tile_row(part);
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            int c = c0 + tile_column<128>() + j * 8 + threadIdx.x % 4 * 2;
            if (o >= OC || c >= C) { continue; }
            float2* p = (float2*)(d_weight + ((size_t)e * OC + o) * C + c);
            float2 sum = *p;
            *p = make_float2(sum.x + acc[part / 2][j][part % 2 * 2], sum.y + acc[part / 2][j][part % 2 * 2 + 1]);
        }
    }
}

// ----------------------------------------------------------------------------
// kernel 4: rows are found by token. The tile core copies a row at a time anyway, so the gather is free: a row is read
// in pieces of 64 bytes, two whole sectors, wherever it lies.

// out (R,OC) = rows row_token of inp (N,C) times weight[e]^T. A block owns 128 rows x 128 columns, as in kernel 3.
__global__ void __launch_bounds__(TILE_THREADS)
grouped_matmul_gathered_forward_kernel4(bf16* out, const bf16* inp, const bf16* weight, const int* row_token,
                               const int4* tile_list, int C, int OC) {
    int4 tile = tile_list[blockIdx.y];
    if (tile.x < 0) { return; } // past the last tile
    int row0 = tile.y, end = tile.z, o0 = blockIdx.x * 128;
    const bf16* w = weight + (size_t)tile.x * OC * C;
    AlongK<128> left(inp, C, [&](int r) { return row0 + r < end ? inp + (size_t)row_token[row0 + r] * C : NULL; });
    AlongK<128> right(w, C, [&](int n) {
        int o = o0 + n / 32 * 32 + tile_column_order(n % 32);
        return o < OC ? w + (size_t)o * C : NULL;
    });
    float acc[4][8][4] = {};
    matmul_tile<128>(acc, left, right, C);
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int r = row0 + tile_row(part);
        #pragma unroll
        for (int j = 0; j < 8; j += 4) {
            int o = o0 + tile_column<128>() + j * 8 + threadIdx.x % 4 * 8;
            float v[8];
            tile_take8(v, acc, part, j);
            if (r < end && o < OC) { store8(out + (size_t)r * OC + o, v); }
        }
    }
}

// d_weight[e] (OC,C) += d_out^T inp over the rows of expert e. With GATHER_OUT, GATHER_INP that operand has a row for
// each token and is read by row_token, else it has a row for each routed row. A block owns 128 x COLS (64 where 128
// would leave too few blocks to fill the card) and sums all rows of e in one order; no other block touches its part.
// Four lanes write 8 bytes each: a sector.
template <int COLS, bool GATHER_OUT, bool GATHER_INP>
__global__ void __launch_bounds__(TILE_THREADS)
grouped_matmul_backward_weight_kernel4(float* d_weight, const bf16* d_out, const bf16* inp, const int* row_token,
                                       const int* expert_offsets, int C, int OC) {
    int e = blockIdx.z, row0 = expert_offsets[e], rows = expert_offsets[e + 1] - row0;
    int o0 = blockIdx.y * TILE_ROWS, c0 = blockIdx.x * COLS;
    if (rows == 0) { return; } // nothing to add
    AcrossK<TILE_ROWS, GATHER_OUT> left(GATHER_OUT ? d_out : d_out + (size_t)row0 * OC, OC, o0, rows, row_token + row0);
    AcrossK<COLS, GATHER_INP> right(GATHER_INP ? inp : inp + (size_t)row0 * C, C, c0, rows, row_token + row0);
    float acc[4][COLS / 16][4] = {};
    matmul_tile<COLS>(acc, left, right, rows);
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int o = o0 + tile_row(part);
        #pragma unroll
        for (int j = 0; j < COLS / 16; j++) {
            int c = c0 + tile_column<COLS>() + j * 8 + threadIdx.x % 4 * 2;
            if (o >= OC || c >= C) { continue; }
            float2* p = (float2*)(d_weight + ((size_t)e * OC + o) * C + c);
            float2 sum = *p;
            *p = make_float2(sum.x + acc[part / 2][j][part % 2 * 2], sum.y + acc[part / 2][j][part % 2 * 2 + 1]);
        }
    }
}

// ----------------------------------------------------------------------------
// kernel 5: SwiGLU in the epilogues

// gate_up (R,2F) = rows row_token of inp (N,C) times gate_up_proj[e]^T; expert_act (R,F) = silu(gate) * up. A block
// owns 128 rows x 64 gate columns and the 64 up columns that belong to them: of the 64 tile columns of a warp the first
// 32 are rows of the gate matrix and the next 32 the same rows of the up matrix, so each thread holds both halves of
// its products.
__global__ void __launch_bounds__(TILE_THREADS)
experts_gate_up_forward_kernel5(bf16* gate_up, bf16* expert_act, const bf16* inp, const bf16* gate_up_proj,
                                const int* row_token, const int4* tile_list, int C, int F) {
    int4 tile = tile_list[blockIdx.y];
    if (tile.x < 0) { return; } // past the last tile
    int row0 = tile.y, end = tile.z, f0 = blockIdx.x * 64;
    const bf16* w = gate_up_proj + (size_t)tile.x * 2 * F * C;
    AlongK<128> left(inp, C, [&](int r) { return row0 + r < end ? inp + (size_t)row_token[row0 + r] * C : NULL; });
    AlongK<128> right(w, C, [&](int n) {
        int f = f0 + n / 64 * 32 + tile_column_order(n % 32), is_up = n / 32 % 2;
        return f < F ? w + (size_t)(is_up * F + f) * C : NULL;
    });
    float acc[4][8][4] = {};
    matmul_tile<128>(acc, left, right, C);
    int f = f0 + (int)threadIdx.x / 64 * 32 + (int)threadIdx.x % 4 * 8;
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int r = row0 + tile_row(part);
        float gate[8], up[8], act[8];
        tile_take8(gate, acc, part, 0);
        tile_take8(up, acc, part, 4);
        #pragma unroll
        for (int q = 0; q < 8; q++) { // act is made of what backward will find in memory
            gate[q] = round_bf16(gate[q]);
            up[q] = round_bf16(up[q]);
        }
        swiglu8(act, gate, up);
        if (r < end && f < F) {
            store8(gate_up + (size_t)r * 2 * F + f, gate);
            store8(gate_up + (size_t)r * 2 * F + F + f, up);
            store8(expert_act + (size_t)r * F + f, act);
        }
    }
}

// The backward of down_proj, SwiGLU and the router's weight in one. With d = rows row_token of d_out (N,C) times
// down_proj[e] and w the row's router weight, expert_out = expert_act down_proj^T gives
//     gradient of w      d_out . expert_out = d . expert_act, so expert_out need not be kept; router_partials[i] (R)
//                        has the part of columns 64 i .. 64 i + 63, for router_backward to add in order
//     gradient of act    w d, and through SwiGLU the gradients of gate and up, written over gate_up (R,2F)
//     expert_act (R,F)   = w act: what the gradient of down_proj multiplies with d_out's rows
// act is computed again, bit by bit, from gate and up. A block owns 128 rows x 128 columns of d. A thread reads 16
// bytes of gate_up and writes the same 16 bytes: nobody else needs them.
__global__ void __launch_bounds__(TILE_THREADS)
experts_down_backward_kernel5(bf16* gate_up, bf16* expert_act, float* router_partials, const bf16* d_out,
                              const bf16* down_proj, const float* router_weights, const int* row_slot,
                              const int* row_token, const int4* tile_list, size_t R, int C, int F) {
    int4 tile = tile_list[blockIdx.y];
    if (tile.x < 0) { return; } // past the last tile
    int row0 = tile.y, end = tile.z, f0 = blockIdx.x * 128;
    AlongK<128> left(d_out, C, [&](int r) { return row0 + r < end ? d_out + (size_t)row_token[row0 + r] * C : NULL; });
    AcrossK<128, false> right(down_proj + (size_t)tile.x * C * F, F, f0, C, NULL);
    float acc[4][8][4] = {};
    matmul_tile<128>(acc, left, right, C);
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int r = row0 + tile_row(part);
        float w = r < end ? router_weights[row_slot[r]] : 0, dot = 0;
        #pragma unroll
        for (int j = 0; j < 8; j += 4) {
            int f = f0 + tile_column<128>() + j * 8 + (int)threadIdx.x % 4 * 8;
            float d[8], gate[8], up[8], act[8];
            tile_take8(d, acc, part, j);
            quad_transpose(d);
            if (r < end && f < F) {
                bf16* gate_up_rf = gate_up + (size_t)r * 2 * F + f;
                load8(gate, gate_up_rf);
                load8(up, gate_up_rf + F);
                swiglu8(act, gate, up);
                #pragma unroll
                for (int q = 0; q < 8; q++) {
                    act[q] = round_bf16(act[q]);
                    dot += d[q] * act[q];
                    act[q] *= w;
                    d[q] *= w;
                }
                swiglu8_backward(gate, up, d, gate, up);
                store8(gate_up_rf, gate);
                store8(gate_up_rf + F, up);
                store8(expert_act + (size_t)r * F + f, act);
            }
        }
        dot = warp_sum(dot, 4); // over the four lanes that share the row
        if (threadIdx.x % 4 == 0 && r < end) {
            router_partials[(blockIdx.x * 2 + threadIdx.x / 64) * R + r] = dot;
        }
    }
}

// ----------------------------------------------------------------------------
// experts: each a SwiGLU MLP. The launchers of the trainer.

void mlp_forward(bf16* out, bf16* act, bf16* gate_up, const bf16* inp, const bf16* gate_up_proj, const bf16* down_proj,
                 size_t N, size_t C, size_t F, cudaStream_t stream) {
    // out (N,C) = swiglu(inp gate_up_proj^T) down_proj^T; gate_up (N,2F) and act (N,F) are kept
    matmul_forward(gate_up, inp, gate_up_proj, N, C, 2 * F, stream);
    swiglu_forward(act, gate_up, N, F, stream);
    matmul_forward(out, act, down_proj, N, F, C, stream);
}

void mlp_backward(bf16* d_inp, float* d_gate_up_proj, float* d_down_proj, bf16* d_gate_up, bf16* d_act,
                  const bf16* d_out, const bf16* inp, const bf16* act, const bf16* gate_up, const bf16* gate_up_proj,
                  const bf16* down_proj, size_t N, size_t C, size_t F, cudaStream_t stream) {
    // d_inp (N,C), d_gate_up (N,2F), d_act (N,F) =; d_gate_up_proj, d_down_proj +=. d_gate_up may be gate_up itself
    matmul_backward(d_act, d_down_proj, d_out, act, down_proj, N, F, C, stream);
    swiglu_backward(d_gate_up, d_act, gate_up, N, F, stream);
    matmul_backward(d_inp, d_gate_up_proj, d_gate_up, inp, gate_up_proj, N, C, 2 * F, stream);
}

dim3 experts_grid(size_t columns, int block_columns, size_t R, size_t C, size_t F, int E) {
    // Tiles of rows in y: R/128 + E are enough for any routing, since each expert adds at most one that is not full;
    // the blocks that are not needed find -1 in tile_list. So the host need not know how the tokens were routed.
    size_t tiles = R / TILE_ROWS + (size_t)E;
    if (C % 8 != 0) { fatal("experts: hidden_size must be padded to a multiple of 8, is %zu", C); }
    if (F % 8 != 0) { fatal("experts: moe_intermediate_size must be padded to a multiple of 8, is %zu", F); }
    if (C > INT_MAX / 4 || F > INT_MAX / 4 || R > INT_MAX) { fatal("experts: (%zu, %zu, %zu) is too large", R, C, F); }
    if (tiles > 65535) { fatal("experts: %zu rows for %d experts are %zu tiles, at most 65535 fit", R, E, tiles); }
    return dim3((unsigned)ceil_div(columns, block_columns), (unsigned)tiles);
}

template <bool TRANSPOSED>
void grouped_matmul(bf16* out, const bf16* inp, const bf16* weight, Routing r, size_t R, size_t C, size_t OC, int E,
                    cudaStream_t stream) {
    // out (R,OC) = inp (R,C) weight[e]^T, weight (E,OC,C); if not TRANSPOSED inp weight[e], weight (E,C,OC)
    grouped_matmul_kernel3<TRANSPOSED><<<experts_grid(OC, 128, R, C, OC, E), TILE_THREADS, tile_shared_bytes(128),
                                         stream>>>(out, inp, weight, r.tile_list, (int)C, (int)OC);
    launchCheck("grouped_matmul_kernel3");
}

template <int COLS, bool GATHER_OUT, bool GATHER_INP>
void grouped_matmul_backward_weight(float* d_weight, const bf16* d_out, const bf16* inp, Routing r, size_t C, size_t OC,
                                    int E, cudaStream_t stream) {
    // d_weight[e] (OC,C) += d_out^T inp over the rows of e. A block for each tile and expert
    if (E > 65535 || ceil_div(OC, TILE_ROWS) > 65535) { fatal("experts: %d experts of %zu rows are too many", E, OC); }
    dim3 grid((unsigned)ceil_div(C, COLS), (unsigned)ceil_div(OC, TILE_ROWS), (unsigned)E);
    grouped_matmul_backward_weight_kernel4<COLS, GATHER_OUT, GATHER_INP>
        <<<grid, TILE_THREADS, tile_shared_bytes(COLS), stream>>>(d_weight, d_out, inp, r.row_token, r.expert_offsets,
                                                                  (int)C, (int)OC);
    launchCheck("grouped_matmul_backward_weight");
}

void experts_gate_up(bf16* gate_up, bf16* expert_act, const bf16* inp, const bf16* gate_up_proj, Routing r, size_t R,
                     size_t C, size_t F, int E, cudaStream_t stream) {
    // gate_up (R,2F) = rows of inp (N,C) times gate_up_proj[e]^T, expert_act (R,F) = swiglu of it
    if (R == 0) { return; }
    experts_gate_up_forward_kernel5<<<experts_grid(F, 64, R, C, F, E), TILE_THREADS, tile_shared_bytes(128), stream>>>(
        gate_up, expert_act, inp, gate_up_proj, r.row_token, r.tile_list, (int)C, (int)F);
    launchCheck("experts_gate_up_forward");
}

void experts_forward(bf16* expert_out, bf16* gate_up, bf16* expert_act, const bf16* inp, const bf16* gate_up_proj,
                     const bf16* down_proj, Routing r, size_t R, size_t C, size_t F, int E, cudaStream_t stream) {
    // expert_out (R,C) = of each row its expert's MLP, not yet weighted. inp (N,C) is read by token: no expert_in.
    // Backward needs gate_up (R,2F) only
    if (R == 0) { return; }
    experts_gate_up(gate_up, expert_act, inp, gate_up_proj, r, R, C, F, E, stream);
    grouped_matmul<true>(expert_out, expert_act, down_proj, r, R, F, C, E, stream);
}

int experts_num_partials(size_t F) {
    // pieces of each router weight's gradient: one for 64 columns of expert_act, an even number
    return (int)(2 * ceil_div(F, 128));
}

void experts_backward(bf16* d_expert_in, float* d_gate_up_proj, float* d_down_proj, float* router_partials,
                      bf16* gate_up, bf16* expert_act, const bf16* d_out, const bf16* inp, const bf16* gate_up_proj,
                      const bf16* down_proj, const float* router_weights, Routing r, size_t R, size_t C, size_t F,
                      int E, cudaStream_t stream) {
    // d_expert_in (R,C) =, d_gate_up_proj, d_down_proj +=, router_partials (experts_num_partials(F), R) =. d_out (N,C)
    // is the gradient of the combined output. gate_up comes in as forward left it and goes out as its gradient;
    // expert_act is scratch
    if (R == 0) { return; }
    experts_down_backward_kernel5<<<experts_grid(F, 128, R, C, F, E), TILE_THREADS, tile_shared_bytes(128), stream>>>(
        gate_up, expert_act, router_partials, d_out, down_proj, router_weights, r.row_slot, r.row_token, r.tile_list, R,
        (int)C, (int)F);
    launchCheck("experts_down_backward_kernel5");
    const bf16 *d_gate_up = gate_up, *weighted_act = expert_act; // what these two hold from here on
    grouped_matmul_backward_weight<64, true, false>(d_down_proj, d_out, weighted_act, r, F, C, E, stream);
    grouped_matmul_backward_weight<128, false, true>(d_gate_up_proj, d_gate_up, inp, r, C, 2 * F, E, stream);
    grouped_matmul<false>(d_expert_in, d_gate_up, gate_up_proj, r, R, 2 * F, C, E, stream);
}

void experts_loop_forward(bf16* expert_out, bf16* gate_up, bf16* expert_act, bf16* expert_in, int* host_offsets,
                          const bf16* inp, const bf16* gate_up_proj, const bf16* down_proj, Routing r, size_t R,
                          size_t C, size_t F, int E, cudaStream_t stream) {
    // --experts loop: one expert after another, each a dense MLP. The host must know where each one's rows begin:
    // host_offsets (E+1), pinned, is copied from the device, and the device idles while it waits
    if (R == 0) { return; }
    cudaCheck(cudaMemcpyAsync(host_offsets, r.expert_offsets, (E + 1) * sizeof(int), cudaMemcpyDeviceToHost, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    permute_forward(expert_in, inp, r.row_token, R, C, stream);
    for (size_t e = 0; e < (size_t)E; e++) {
        size_t begin = (size_t)host_offsets[e], rows = (size_t)host_offsets[e + 1] - begin;
        mlp_forward(expert_out + begin * C, expert_act + begin * F, gate_up + begin * 2 * F, expert_in + begin * C,
                    gate_up_proj + e * 2 * F * C, down_proj + e * C * F, rows, C, F, stream);
    }
}

void experts_loop_backward(bf16* d_expert_in, float* d_gate_up_proj, float* d_down_proj, float* d_router_weight_rows,
                           bf16* d_expert_out, bf16* d_gate_up, bf16* d_act, const bf16* d_out, const bf16* expert_in,
                           const bf16* expert_out, const bf16* expert_act, const bf16* gate_up,
                           const bf16* gate_up_proj, const bf16* down_proj, const float* router_weights,
                           const int* host_offsets, Routing r, size_t R, int K, size_t C, size_t F, int E,
                           cudaStream_t stream) {
    // d_expert_in (R,C), d_router_weight_rows (R) and the scratch d_expert_out (R,C), d_gate_up (R,2F), d_act (R,F) =;
    // d_gate_up_proj, d_down_proj +=. host_offsets as forward left it
    if (R == 0) { return; }
    combine_backward(d_expert_out, d_router_weight_rows, d_out, expert_out, router_weights, r.row_slot, R, K, C,
                     stream);
    for (size_t e = 0; e < (size_t)E; e++) {
        size_t begin = (size_t)host_offsets[e], rows = (size_t)host_offsets[e + 1] - begin;
        mlp_backward(d_expert_in + begin * C, d_gate_up_proj + e * 2 * F * C, d_down_proj + e * C * F,
                     d_gate_up + begin * 2 * F, d_act + begin * F, d_expert_out + begin * C, expert_in + begin * C,
                     expert_act + begin * F, gate_up + begin * 2 * F, gate_up_proj + e * 2 * F * C,
                     down_proj + e * C * F, rows, C, F, stream);
    }
}

// ----------------------------------------------------------------------------
// a layer: random weights and tokens, and a routing made on the host

enum { NUM_KERNELS = 6 };
enum Skew { RANDOM, ALL_ON_ONE, ONE_ELSEWHERE }; // ONE_ELSEWHERE: a single token does not go to the first experts

// rows of `length` numbers with zeros behind, up to `padded`
std::vector<float> random_padded(size_t rows, size_t length, size_t padded, float scale, uint64_t seed) {
    std::vector<float> x = random_floats(rows * padded, scale, seed);
    #pragma omp parallel for
    for (size_t i = 0; i < x.size(); i++) {
        if (i % padded >= length) { x[i] = 0; }
    }
    return x;
}

// clears the rows past `length` of matrices of `padded` rows
void clear_rows(std::vector<float>* x, size_t row_length, size_t length, size_t padded) {
    #pragma omp parallel for
    for (size_t i = 0; i < x->size(); i++) {
        if (i / row_length % padded >= length) { (*x)[i] = 0; }
    }
}

struct Layer {
    size_t N, C, F, R; // C and F padded
    int E, K;
    std::vector<float> inp, d_out, gate_up_proj, down_proj, router_weights, d_gate_up_proj0, d_down_proj0;
    std::vector<int> indices, tokens_per_expert, expert_offsets, row_slot, slot_row, row_token;
    std::vector<int4> tile_list;
};

void route(Layer* l, enum Skew skew) {
    uint64_t state = 7;
    l->indices.resize(l->R);
    for (size_t n = 0; n < l->N; n++) {
        int first = skew == RANDOM ? (int)(rng_uniform(&state) * (float)l->E) % l->E : 0;
        int stride = skew == RANDOM ? 1 + (int)(n % 3) * (l->E % 3 != 0 && l->E % 2 != 0) : 1;
        if (skew == ONE_ELSEWHERE && n == l->N / 2) { first = l->E - 1; }
        for (int k = 0; k < l->K; k++) { l->indices[n * l->K + k] = (first + k * stride) % l->E; }
    }
    std::vector<int> order(l->E);
    l->tokens_per_expert.resize(l->E);
    l->expert_offsets.resize(l->E + 1);
    l->row_slot.resize(l->R);
    l->slot_row.resize(l->R);
    l->row_token.resize(l->R);
    cpu::route_rows(l->tokens_per_expert.data(), l->expert_offsets.data(), order.data(), l->row_slot.data(),
                    l->slot_row.data(), l->indices.data(), l->N, l->E, l->K);
    for (size_t row = 0; row < l->R; row++) { l->row_token[row] = l->row_slot[row] / l->K; }
    for (int e = 0; e < l->E; e++) {
        int end = l->expert_offsets[e + 1];
        for (int row = l->expert_offsets[e]; row < end; row += TILE_ROWS) {
            l->tile_list.push_back(make_int4(e, row, std::min(row + TILE_ROWS, end), 0));
        }
    }
    l->tile_list.resize(l->R / TILE_ROWS + l->E, make_int4(-1, 0, 0, 0));
}

Layer make_layer(size_t N, int E, int K, size_t C, size_t F, enum Skew skew) {
    Layer l;
    size_t C8 = ceil_div(C, 8) * 8, F8 = ceil_div(F, 8) * 8;
    l.N = N, l.C = C8, l.F = F8, l.R = N * K, l.E = E, l.K = K;
    l.inp = random_padded(N, C, C8, 2, 1);
    l.d_out = random_padded(N, C, C8, 1, 2);
    l.gate_up_proj = random_padded((size_t)E * 2 * F8, C, C8, 0.5, 3);
    l.d_gate_up_proj0 = random_padded((size_t)E * 2 * F8, C, C8, 1, 4);
    clear_rows(&l.gate_up_proj, C8, F, F8);
    clear_rows(&l.d_gate_up_proj0, C8, F, F8);
    l.down_proj = random_padded((size_t)E * C8, F, F8, 1, 5);
    l.d_down_proj0 = random_padded((size_t)E * C8, F, F8, 1, 6);
    clear_rows(&l.down_proj, F8, C, C8);
    clear_rows(&l.d_down_proj0, F8, C, C8);
    l.router_weights = random_floats(N * K, 1, 8);
    route(&l, skew);
    return l;
}

struct DeviceLayer {
    Device<bf16> inp, d_out, gate_up_proj, down_proj, gate_up, expert_act, expert_in, expert_out;
    Device<bf16> d_expert_in, d_expert_out, d_act, d_gate_up;
    Device<float> router_weights, d_gate_up_proj, d_down_proj, router_partials;
    Device<int> tokens_per_expert, expert_offsets, row_slot, slot_row, row_token;
    Device<int4> tile_list;
    int* host_offsets;
    Routing routing;
    explicit DeviceLayer(const Layer& l)
        : inp(to_bf16(l.inp)), d_out(to_bf16(l.d_out)), gate_up_proj(to_bf16(l.gate_up_proj)),
          down_proj(to_bf16(l.down_proj)), gate_up(l.R * 2 * l.F), expert_act(l.R * l.F), expert_in(l.R * l.C),
          expert_out(l.R * l.C), d_expert_in(l.R * l.C), d_expert_out(l.R * l.C), d_act(l.R * l.F),
          d_gate_up(l.R * 2 * l.F), router_weights(l.router_weights), d_gate_up_proj(l.d_gate_up_proj0),
          d_down_proj(l.d_down_proj0), router_partials(experts_num_partials(l.F) * l.R),
          tokens_per_expert(l.tokens_per_expert), expert_offsets(l.expert_offsets), row_slot(l.row_slot),
          slot_row(l.slot_row), row_token(l.row_token), tile_list(l.tile_list) {
        routing = Routing{tokens_per_expert, expert_offsets, row_slot, slot_row, row_token, tile_list};
        cudaCheck(cudaMallocHost((void**)&host_offsets, (l.E + 1) * sizeof(int)));
    }
    ~DeviceLayer() { cudaFreeHost(host_offsets); }
};

// ----------------------------------------------------------------------------
// the versions: products, and what becomes of the layer with them

void product_forward(int kernel, bf16* out, const bf16* inp, const bf16* weight, const Layer& l, const DeviceLayer& d,
                     size_t C, size_t OC) {
    dim3 tiles = experts_grid(OC, kernel == 2 ? SIMPLE_COLS : 128, l.R, C, OC, l.E);
    if (kernel == 1) {
        grouped_matmul_forward_kernel1<<<(unsigned)ceil_div(l.R * OC, 256), 256>>>(
            out, inp, weight, d.routing.expert_offsets, l.R, C, OC);
    } else if (kernel == 2) {
        grouped_matmul_forward_kernel2<<<tiles, SIMPLE_THREADS>>>(out, inp, weight, d.routing.tile_list, (int)C,
                                                                  (int)OC);
    } else {
        grouped_matmul<true>(out, inp, weight, d.routing, l.R, C, OC, l.E, 0);
    }
    launchCheck("grouped_matmul_forward");
}

void product_forward_gathered(bf16* out, const bf16* inp, const bf16* weight, const Layer& l, const DeviceLayer& d,
                              size_t C, size_t OC) {
    dim3 tiles = experts_grid(OC, 128, l.R, C, OC, l.E);
    grouped_matmul_gathered_forward_kernel4<<<tiles, TILE_THREADS, tile_shared_bytes(128)>>>(
        out, inp, weight, d.routing.row_token, d.routing.tile_list, (int)C, (int)OC);
    launchCheck("grouped_matmul_gathered_forward_kernel4");
}

void product_backward_inp(int kernel, bf16* d_inp, const bf16* d_out, const bf16* weight, const Layer& l,
                          const DeviceLayer& d, size_t C, size_t OC) {
    if (kernel == 1) {
        grouped_matmul_backward_inp_kernel1<<<(unsigned)ceil_div(l.R * C, 256), 256>>>(
            d_inp, d_out, weight, d.routing.expert_offsets, l.R, C, OC);
    } else if (kernel == 2) {
        grouped_matmul_backward_inp_kernel2<<<experts_grid(C, SIMPLE_COLS, l.R, C, OC, l.E), SIMPLE_THREADS>>>(
            d_inp, d_out, weight, d.routing.tile_list, (int)C, (int)OC);
    } else {
        grouped_matmul<false>(d_inp, d_out, weight, d.routing, l.R, OC, C, l.E, 0);
    }
    launchCheck("grouped_matmul_backward_inp");
}

void product_backward_weight(int kernel, float* d_weight, const bf16* d_out, const bf16* inp, const Layer& l,
                             const DeviceLayer& d, size_t C, size_t OC) {
    unsigned rows = (unsigned)ceil_div(OC, TILE_ROWS), E = (unsigned)l.E;
    if (kernel == 1) {
        grouped_matmul_backward_weight_kernel1<<<(unsigned)ceil_div(E * OC * C, 256), 256>>>(
            d_weight, d_out, inp, d.routing.expert_offsets, C, OC, l.E);
    } else if (kernel == 2) {
        grouped_matmul_backward_weight_kernel2<<<dim3((unsigned)ceil_div(C, SIMPLE_COLS), rows, E), SIMPLE_THREADS>>>(
            d_weight, d_out, inp, d.routing.expert_offsets, (int)C, (int)OC);
    } else {
        dim3 grid((unsigned)ceil_div(C, 128), rows, E);
        grouped_matmul_backward_weight_kernel3<<<grid, TILE_THREADS, tile_shared_bytes(128)>>>(
            d_weight, d_out, inp, d.routing.expert_offsets, (int)C, (int)OC);
    }
    launchCheck("grouped_matmul_backward_weight");
}

void layer_forward(int kernel, const Layer& l, DeviceLayer& d) {
    size_t R = l.R, C = l.C, F = l.F;
    if (kernel == 5) {
        return experts_forward(d.expert_out, d.gate_up, d.expert_act, d.inp, d.gate_up_proj, d.down_proj, d.routing, R,
                               C, F, l.E, 0);
    }
    if (kernel == 6) {
        return experts_loop_forward(d.expert_out, d.gate_up, d.expert_act, d.expert_in, d.host_offsets, d.inp,
                                    d.gate_up_proj, d.down_proj, d.routing, R, C, F, l.E, 0);
    }
    if (kernel == 4) {
        product_forward_gathered(d.gate_up, d.inp, d.gate_up_proj, l, d, C, 2 * F);
    } else {
        permute_forward(d.expert_in, d.inp, d.row_token, R, C, 0);
        product_forward(kernel, d.gate_up, d.expert_in, d.gate_up_proj, l, d, C, 2 * F);
    }
    swiglu_forward(d.expert_act, d.gate_up, R, F, 0);
    product_forward(kernel, d.expert_out, d.expert_act, d.down_proj, l, d, F, C);
}

// the gradient of gate_up takes its place
void layer_backward(int kernel, const Layer& l, DeviceLayer& d) {
    size_t R = l.R, C = l.C, F = l.F;
    if (kernel == 5) {
        return experts_backward(d.d_expert_in, d.d_gate_up_proj, d.d_down_proj, d.router_partials, d.gate_up,
                                d.expert_act, d.d_out, d.inp, d.gate_up_proj, d.down_proj, d.router_weights, d.routing,
                                R, C, F, l.E, 0);
    }
    if (kernel == 6) {
        return experts_loop_backward(d.d_expert_in, d.d_gate_up_proj, d.d_down_proj, d.router_partials, d.d_expert_out,
                                     d.gate_up, d.d_act, d.d_out, d.expert_in, d.expert_out, d.expert_act, d.gate_up,
                                     d.gate_up_proj, d.down_proj, d.router_weights, d.host_offsets, d.routing, R, l.K,
                                     C, F, l.E, 0);
    }
    combine_backward(d.d_expert_out, d.router_partials, d.d_out, d.expert_out, d.router_weights, d.row_slot, R, l.K, C,
                     0);
    product_backward_inp(kernel, d.d_act, d.d_expert_out, d.down_proj, l, d, F, C);
    product_backward_weight(kernel, d.d_down_proj, d.d_expert_out, d.expert_act, l, d, F, C);
    swiglu_backward(d.gate_up, d.d_act, d.gate_up, R, F, 0);
    if (kernel == 4) {
        grouped_matmul_backward_weight<128, false, true>(d.d_gate_up_proj, d.gate_up, d.inp, d.routing, C, 2 * F, l.E,
                                                         0);
    } else {
        product_backward_weight(kernel, d.d_gate_up_proj, d.gate_up, d.expert_in, l, d, C, 2 * F);
    }
    product_backward_inp(kernel, d.d_expert_in, d.gate_up, d.gate_up_proj, l, d, C, 2 * F);
}

// ----------------------------------------------------------------------------
// checks. Each stage is compared with what the CPU makes of this stage's own bf16 inputs, so that every tolerance is
// that of one rounding; check_whole_layer adds that the stages are the right ones.

static char where[128]; // the layer being checked

const char* named(const char* what) {
    static char name[256];
    snprintf(name, sizeof(name), "%s: %s", where, what);
    return name;
}

void check_padding(const char* what, const std::vector<float>& x, size_t length, size_t padded) {
    size_t wrong = 0;
    #pragma omp parallel for reduction(+ : wrong)
    for (size_t i = 0; i < x.size(); i++) { wrong += i % padded >= length && x[i] != 0; }
    check_result(wrong == 0, named(what), "the padding is not zero");
}

// want = for each expert the product of its rows with its weight
void reference_forward(std::vector<float>* want, const std::vector<float>& inp, const std::vector<float>& weight,
                       const Layer& l, size_t C, size_t OC) {
    for (int e = 0; e < l.E; e++) {
        size_t begin = (size_t)l.expert_offsets[e], rows = (size_t)l.expert_offsets[e + 1] - begin;
        cpu::matmul_forward(want->data() + begin * OC, inp.data() + begin * C, weight.data() + e * OC * C, rows, C, OC);
    }
}

void reference_backward(std::vector<float>* d_inp, std::vector<float>* d_weight, const std::vector<float>& d_out,
                        const std::vector<float>& inp, const std::vector<float>& weight, const Layer& l, size_t C,
                        size_t OC) {
    for (int e = 0; e < l.E; e++) {
        size_t begin = (size_t)l.expert_offsets[e], rows = (size_t)l.expert_offsets[e + 1] - begin;
        cpu::matmul_backward(d_inp->data() + begin * C, d_weight->data() + e * OC * C, d_out.data() + begin * OC,
                             inp.data() + begin * C, weight.data() + e * OC * C, rows, C, OC, 0, 1);
    }
}

// d_down_proj: the fused kernels put the router weight on act's side of the product, the others on d_out's
void check_d_down_proj(int kernel, const std::vector<float>& got, const std::vector<float>& act, const Layer& l,
                       const DeviceLayer& d) {
    std::vector<float> left = to_float(d.d_expert_out.get()), right = act, want = l.d_down_proj0, unused(l.R * l.F);
    if (kernel == 5) {
        std::vector<float> weighted(l.R * l.F);
        #pragma omp parallel for
        for (size_t i = 0; i < weighted.size(); i++) { weighted[i] = l.router_weights[l.row_slot[i / l.F]] * act[i]; }
        right = to_float(d.expert_act.get());
        check_bf16(named("router weight * act"), right, weighted, 0.51, 0);
        cpu::permute_forward(left.data(), l.d_out.data(), l.row_slot.data(), 0, l.R, l.K, l.C);
    }
    reference_backward(&unused, &want, left, right, l.down_proj, l, l.F, l.C);
    check_f32(named("d_down_proj"), got, want);
}

void check_forward(const Layer& l, const std::vector<float>& gate_up, const std::vector<float>& act,
                   const std::vector<float>& out) {
    std::vector<float> expert_in(l.R * l.C), want_gate_up(l.R * 2 * l.F), want_act(l.R * l.F), want_out(l.R * l.C);
    cpu::permute_forward(expert_in.data(), l.inp.data(), l.row_slot.data(), 0, l.R, l.K, l.C);
    reference_forward(&want_gate_up, expert_in, l.gate_up_proj, l, l.C, 2 * l.F);
    check_bf16(named("gate_up"), gate_up, want_gate_up);
    cpu::swiglu_forward(want_act.data(), gate_up.data(), l.R, l.F);
    check_bf16(named("expert_act"), act, want_act, 1, 0);
    reference_forward(&want_out, act, l.down_proj, l, l.F, l.C);
    check_bf16(named("expert_out"), out, want_out);
}

void check_backward(int kernel, const Layer& l, const DeviceLayer& d, const std::vector<float>& gate_up,
                    const std::vector<float>& act, const std::vector<float>& out) {
    size_t R = l.R, C = l.C, F = l.F;
    std::vector<float> expert_in(R * C), d_expert_out(R * C), d_act(R * F), want(R * 2 * F), unused(l.d_down_proj0);
    std::vector<float> want_rows(R), got_rows(R), partials = d.router_partials.get(), slots(R);
    cpu::permute_forward(expert_in.data(), l.inp.data(), l.row_slot.data(), 0, R, l.K, C);
    cpu::combine_backward(d_expert_out.data(), slots.data(), l.d_out.data(), out.data(), l.router_weights.data(),
                          l.row_slot.data(), 0, R, l.K, C);
    int num_partials = kernel == 5 ? experts_num_partials(F) : 1;
    for (size_t row = 0; row < R; row++) {
        want_rows[row] = slots[l.row_slot[row]];
        for (int i = 0; i < num_partials; i++) { got_rows[row] += partials[i * R + row]; }
    }
    check_f32(named("gradient of the router weights"), got_rows, want_rows, 1e-5);

    if (kernel != 5) {
        check_bf16(named("d_expert_out"), d.d_expert_out.get(), d_expert_out, 0.51, 0);
        d_expert_out = to_float(d.d_expert_out.get());
    }
    reference_backward(&d_act, &unused, d_expert_out, act, l.down_proj, l, F, C);
    if (kernel != 5) {
        check_bf16(named("d_act"), d.d_act.get(), d_act);
        d_act = to_float(d.d_act.get());
    }
    cpu::swiglu_backward(want.data(), d_act.data(), gate_up.data(), R, F);
    std::vector<float> d_gate_up = to_float(d.gate_up.get());
    check_bf16(named("d_gate_up"), d_gate_up, want, 1, 1.0 / 4096); // nearly the rounding alone: the sum is in fp32

    std::vector<float> want_d_in(R * C), want_d_gate_up_proj = l.d_gate_up_proj0;
    reference_backward(&want_d_in, &want_d_gate_up_proj, d_gate_up, expert_in, l.gate_up_proj, l, C, 2 * F);
    check_bf16(named("d_expert_in"), d.d_expert_in.get(), want_d_in);
    check_f32(named("d_gate_up_proj"), d.d_gate_up_proj.get(), want_d_gate_up_proj);
    check_d_down_proj(kernel, d.d_down_proj.get(), act, l, d);
}

void check_layer(int kernel, size_t N, int E, int K, size_t C, size_t F, enum Skew skew) {
    Layer l = make_layer(N, E, K, C, F, skew);
    DeviceLayer d(l);
    snprintf(where, sizeof(where), "kernel %d, N %zu, E %d, K %d, C %zu, F %zu, %s", kernel, N, E, K, C, F,
             skew == RANDOM ? "random" : skew == ALL_ON_ONE ? "all on one" : "one elsewhere");
    layer_forward(kernel, l, d);
    std::vector<float> gate_up = to_float(d.gate_up.get()), act = to_float(d.expert_act.get());
    std::vector<float> out = to_float(d.expert_out.get());
    check_forward(l, gate_up, act, out);
    if (kernel == 5) { // its gradient of the router weights is that of the sum before it is rounded to expert_out
        reference_forward(&out, act, l.down_proj, l, l.F, l.C);
    }
    layer_backward(kernel, l, d);
    check_backward(kernel, l, d, gate_up, act, out);
    check_padding("gate_up", gate_up, F, l.F);
    check_padding("expert_out", out, C, l.C);
    check_padding("d_gate_up", to_float(d.gate_up.get()), F, l.F);
    check_padding("d_expert_in", to_float(d.d_expert_in.get()), C, l.C);
    check_padding("d_gate_up_proj, columns", d.d_gate_up_proj.get(), C, l.C);
    check_padding("d_gate_up_proj, rows", d.d_gate_up_proj.get(), F * l.C, l.F * l.C);
    check_padding("d_down_proj, columns", d.d_down_proj.get(), F, l.F);
    check_padding("d_down_proj, rows", d.d_down_proj.get(), C * l.F, l.C * l.F);
}

void check_close(const char* what, const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
    double sum = 0;
    char detail[128];
    for (size_t i = 0; i < want.size(); i++) { sum += ((double)got[i] - want[i]) * ((double)got[i] - want[i]); }
    double error = sqrt(sum / std::max<size_t>(want.size(), 1)) / rms(want);
    snprintf(detail, sizeof(detail), "relative error %g (tolerance %g)", error, tolerance);
    check_result(error <= tolerance, named(what), detail);
}

// From the tokens to the last gradient by cpu::mlp_forward and cpu::mlp_backward in fp32, rounded nowhere. Each of up
// to five bf16 stores adds an error of 2^-9 / sqrt(3) of the rms: 0.0025 in all.
void check_whole_layer(int kernel) {
    Layer l = make_layer(200, 6, 2, 60, 20, RANDOM);
    DeviceLayer d(l);
    size_t R = l.R, C = l.C, F = l.F;
    snprintf(where, sizeof(where), "kernel %d, whole layer", kernel);
    std::vector<float> in(R * C), gate_up(R * 2 * F), act(R * F), out(R * C), d_out(R * C), d_gate_up(R * 2 * F),
        d_act(R * F);
    std::vector<float> d_in(R * C), slots(R), d_gate_up_proj = l.d_gate_up_proj0, d_down_proj = l.d_down_proj0;
    cpu::permute_forward(in.data(), l.inp.data(), l.row_slot.data(), 0, R, l.K, C);
    for (int e = 0; e < l.E; e++) {
        size_t begin = (size_t)l.expert_offsets[e], rows = (size_t)l.expert_offsets[e + 1] - begin;
        const float *w_gate_up = l.gate_up_proj.data() + e * 2 * F * C, *w_down = l.down_proj.data() + e * C * F;
        cpu::mlp_forward(out.data() + begin * C, act.data() + begin * F, gate_up.data() + begin * 2 * F,
                         in.data() + begin * C, w_gate_up, w_down, rows, C, F);
        cpu::combine_backward(d_out.data(), slots.data(), l.d_out.data(), out.data(), l.router_weights.data(),
                              l.row_slot.data(), begin, begin + rows, l.K, C);
        cpu::mlp_backward(d_in.data() + begin * C, d_gate_up_proj.data() + e * 2 * F * C,
                          d_down_proj.data() + e * C * F, d_gate_up.data() + begin * 2 * F, d_act.data() + begin * F,
                          d_out.data() + begin * C, in.data() + begin * C, act.data() + begin * F,
                          gate_up.data() + begin * 2 * F, w_gate_up, w_down, rows, C, F, 1);
    }
    layer_forward(kernel, l, d);
    layer_backward(kernel, l, d);
    check_close("expert_out", to_float(d.expert_out.get()), out, 0.005);
    check_close("d_expert_in", to_float(d.d_expert_in.get()), d_in, 0.005);
    check_close("d_gate_up_proj", d.d_gate_up_proj.get(), d_gate_up_proj, 0.005);
    check_close("d_down_proj", d.d_down_proj.get(), d_down_proj, 0.005);
}

void check_all(int kernel) {
    check_layer(kernel, 1, 1, 1, 48, 32, RANDOM);
    check_layer(kernel, 1, 6, 2, 60, 20, RANDOM);
    check_layer(kernel, 5, 3, 2, 8, 8, RANDOM);
    check_layer(kernel, 17, 6, 4, 64, 32, RANDOM);
    check_layer(kernel, 17, 16, 1, 48, 20, RANDOM); // some experts get nothing
    check_layer(kernel, 200, 1, 1, 60, 20, RANDOM);
    check_layer(kernel, 200, 16, 4, 48, 32, RANDOM);
    check_layer(kernel, 128, 6, 2, 64, 20, ALL_ON_ONE); // the K first experts have one full tile each
    check_layer(kernel, 200, 16, 2, 60, 32, ONE_ELSEWHERE);
    check_layer(kernel, 129, 6, 1, 136, 72, ONE_ELSEWHERE); // a block more in each direction
    check_layer(kernel, 65, 3, 2, 72, 136, RANDOM);
    check_whole_layer(kernel);
    if (kernel >= 5) { // nothing to do, nothing launched
        Layer empty = make_layer(0, 2, 1, 8, 8, RANDOM);
        DeviceLayer d(empty);
        layer_forward(kernel, empty, d);
        layer_backward(kernel, empty, d);
    }
    // a sequence; all 8 are 8 times as slow
    if (dev_is_large(kernel)) { check_layer(kernel, 4096, 16, 2, 896, 512, RANDOM); }
}

// ----------------------------------------------------------------------------
// benchmark: a layer of smol-500m at batch 8

#ifndef EMU
// The library's own grouped product (cuBLAS 12.5 and later), forward: out rows = inp rows weight[e]^T. It takes
// pointers on the device, but the number of rows of each expert on the host.
void bench_cublas_grouped(const char* name, bf16* out, const bf16* inp, const bf16* weight, const Layer& l, size_t C,
                          size_t OC, double flops) {
    cublasHandle_t handle;
    cublasCheck(cublasCreate(&handle));
    std::vector<int> m(l.E, (int)OC), n(l.E), k(l.E, (int)C), ld_out(l.E, (int)OC), size(l.E, 1);
    std::vector<cublasOperation_t> trans(l.E, CUBLAS_OP_T), plain(l.E, CUBLAS_OP_N);
    std::vector<float> one(l.E, 1), zero(l.E, 0);
    std::vector<const void*> weights(l.E), inps(l.E);
    std::vector<void*> outs(l.E);
    for (int e = 0; e < l.E; e++) { // column-major: out^T (OC, rows) = weight inp^T
        size_t begin = (size_t)l.expert_offsets[e];
        n[e] = l.tokens_per_expert[e];
        weights[e] = weight + e * OC * C, inps[e] = inp + begin * C, outs[e] = out + begin * OC;
    }
    Device<const void*> d_weights(weights), d_inps(inps);
    Device<void*> d_outs(outs);
    bench_library(name, 0, flops, [&] {
        cublasCheck(cublasGemmGroupedBatchedEx(handle, trans.data(), plain.data(), m.data(), n.data(), k.data(),
                                               one.data(), d_weights, CUDA_R_16BF, k.data(), d_inps, CUDA_R_16BF,
                                               k.data(), zero.data(), d_outs, CUDA_R_16BF, ld_out.data(), l.E,
                                               size.data(), CUBLAS_COMPUTE_32F));
    });
    cublasCheck(cublasDestroy(handle));
}
#else
void bench_cublas_grouped(const char*, bf16*, const bf16*, const bf16*, const Layer&, size_t, size_t, double) {}
#endif

// the six products of kernel 3, 4 or 5 one by one
void bench_products(int kernel, const Layer& l, DeviceLayer& d) {
    size_t R = l.R, C = l.C, F = l.F;
    double flops = 2.0 * R * C * F; // of the products with down_proj, half of those with gate_up_proj
    char name[96];
    auto title = [&](const char* what) {
        snprintf(name, sizeof(name), "grouped_matmul %d, %s", kernel, what);
        return name;
    };
    bench(title("gate_up"), 0, 2 * flops, [&] {
        if (kernel == 5) {
            experts_gate_up(d.gate_up, d.expert_act, d.inp, d.gate_up_proj, d.routing, R, C, F, l.E, 0);
        } else if (kernel == 4) {
            product_forward_gathered(d.gate_up, d.inp, d.gate_up_proj, l, d, C, 2 * F);
        } else {
            product_forward(kernel, d.gate_up, d.expert_in, d.gate_up_proj, l, d, C, 2 * F);
        }
    });
    bench(title("expert_out"), 0, flops,
          [&] { product_forward(kernel, d.expert_out, d.expert_act, d.down_proj, l, d, F, C); });
    bench(title("d_act"), 0, flops, [&] {
        if (kernel == 5) { // overwrites gate_up with its gradient, again and again: wrong numbers, right time
            experts_down_backward_kernel5<<<experts_grid(F, 128, R, C, F, l.E), TILE_THREADS, tile_shared_bytes(128)>>>(
                d.gate_up.data, d.expert_act.data, d.router_partials.data, d.d_out.data, d.down_proj.data,
                d.router_weights.data, d.routing.row_slot, d.routing.row_token, d.routing.tile_list, R, (int)C, (int)F);
            launchCheck("experts_down_backward_kernel5");
        } else {
            product_backward_inp(kernel, d.d_act, d.d_expert_out, d.down_proj, l, d, F, C);
        }
    });
    bench(title("d_expert_in"), 0, 2 * flops,
          [&] { product_backward_inp(kernel, d.d_expert_in, d.gate_up, d.gate_up_proj, l, d, C, 2 * F); });
    bench(title("d_down_proj"), 0, flops, [&] {
        if (kernel == 5) {
            grouped_matmul_backward_weight<64, true, false>(d.d_down_proj, d.d_out, d.expert_act, d.routing, F, C, l.E,
                                                            0);
        } else {
            product_backward_weight(kernel, d.d_down_proj, d.d_expert_out, d.expert_act, l, d, F, C);
        }
    });
    bench(title("d_gate_up_proj"), 0, 2 * flops, [&] {
        if (kernel >= 4) {
            grouped_matmul_backward_weight<128, false, true>(d.d_gate_up_proj, d.gate_up, d.inp, d.routing, C, 2 * F,
                                                             l.E, 0);
        } else {
            product_backward_weight(kernel, d.d_gate_up_proj, d.gate_up, d.expert_in, l, d, C, 2 * F);
        }
    });
}

// the same products by NVIDIA's libraries, beside those of kernel 5
void bench_libraries(const Layer& l, DeviceLayer& d) {
    size_t C = l.C, F = l.F;
    layer_forward(6, l, d); // fills expert_in, which kernel 5 does not need
    bench_library("cuBLASLt an expert, gate_up", 0, 4.0 * l.R * C * F, [&] {
        for (size_t e = 0; e < (size_t)l.E; e++) {
            size_t begin = (size_t)l.expert_offsets[e], rows = (size_t)l.tokens_per_expert[e];
            matmul_forward(d.gate_up + begin * 2 * F, d.expert_in + begin * C, d.gate_up_proj + e * 2 * F * C, rows, C,
                           2 * F, 0);
        }
    });
    bench_cublas_grouped("cublasGemmGroupedBatchedEx, gate_up", d.gate_up, d.expert_in, d.gate_up_proj, l, C, 2 * F,
                         4.0 * l.R * C * F);
    bench_cublas_grouped("cublasGemmGroupedBatchedEx, expert_out", d.expert_out, d.expert_act, d.down_proj, l, F, C,
                         2.0 * l.R * C * F);
}

void bench_all(int kernel) {
    Layer l = make_layer(8 * 4096, 16, 2, 896, 512, RANDOM);
    DeviceLayer d(l);
    double flops = 6.0 * l.R * l.C * l.F;
    char name[96];
    layer_forward(kernel, l, d); // everything holds numbers before single products are timed
    layer_backward(kernel, l, d);
    if (kernel <= 5) { bench_products(kernel, l, d); }
    snprintf(name, sizeof(name), "grouped_matmul %d, layer forward", kernel);
    bench(name, 0, flops, [&] { layer_forward(kernel, l, d); });
    snprintf(name, sizeof(name), "grouped_matmul %d, layer backward", kernel);
    bench(name, 0, 2 * flops, [&] { layer_backward(kernel, l, d); });
    if (kernel == 5) { bench_libraries(l, d); }
}

int main(int argc, char** argv) {
    dev_open(argc, argv, NUM_KERNELS);
    gemm_open();
    for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    gemm_close();
    return dev_close();
}
