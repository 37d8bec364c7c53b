// permute: the slots sorted by expert, and the tokens' rows there and back.
//
//   nvcc -std=c++17 -O3 -arch=native -I. -o build/dev/permute dev/cuda/permute.cu -lcjson -lcublasLt
//   dev/emu/emucc -I. -o build/dev/permute dev/cuda/permute.cu -lcjson              (no GPU: the emulator)
//
// route_rows: a stable counting sort of the R = N*K slots by router_indices (N,K). Six slots, E = 3:
//     router_indices 2 0 2 1 0 2 -> tokens_per_expert 2 1 3, expert_offsets 0 2 3 6, row_slot 1 4 3 0 2 5 and its
//     inverse slot_row 3 0 4 2 1 5; and the tiles (at most 128 rows of one expert) for the grouped matmuls
// permute_forward:  expert_in (R,C)[row,:] = inp (N,C)[row_token[row],:]
// permute_backward: d_inp (N,C)[n,:] = sum over k of d_expert_in (R,C)[slot_row[n,k],:] and, so that d_inp is written
//     once, the router's part beside it: sum over e of d_router_logits (N,E)[n,e] router (E,C)[e,:]
//
// route_rows  1  one thread, the CPU's loops
//             2  one block: each of 8 warps counts its eighth of the slots, then gives out rows, 32 slots at a time
//             3  count, scan, place: many blocks, each with a chunk of the slots; between them one that sums the counts
// permute     1  a thread an element
//             2  16 bytes a lane; a warp a row (forward) or four tokens (backward)
// winner: 3 (route_rows), 2 (permute)
//
// Reference: cpu::route_rows, permute_forward, permute_backward, and d_inp of cpu::matmul_backward.
#include "routing.h"

#if !defined(EMU) && __has_include(<cub/device/device_radix_sort.cuh>)
#include <cub/device/device_radix_sort.cuh>
#define HAVE_CUB
#endif

const int NUM_KERNELS = 3;

// ----------------------------------------------------------------------------
// first rungs

// One thread owns everything: some 100 ns a slot.
__global__ void route_rows_kernel1(Routing r, const int* router_indices, int slots, int E, int K, int tile_rows,
                                   int tiles) {
    for (int e = 0; e < E; e++) { r.tokens_per_expert[e] = 0; }
    for (int slot = 0; slot < slots; slot++) { r.tokens_per_expert[router_indices[slot]]++; }
    r.expert_offsets[0] = 0;
    int tile = 0;
    for (int e = 0; e < E; e++) {
        int first = r.expert_offsets[e], end = first + r.tokens_per_expert[e];
        r.expert_offsets[e + 1] = end;
        for (int row = first; row < end; row += tile_rows) {
            r.tile_list[tile++] = make_int4(e, row, min(row + tile_rows, end), 0);
        }
        r.tokens_per_expert[e] = first; // for the moment: the next free row
    }
    while (tile < tiles) { r.tile_list[tile++] = make_int4(-1, 0, 0, 0); }
    for (int slot = 0; slot < slots; slot++) {
        int row = r.tokens_per_expert[router_indices[slot]]++;
        r.row_slot[row] = slot;
        r.slot_row[slot] = row;
        r.row_token[row] = slot / K;
    }
    for (int e = 0; e < E; e++) { r.tokens_per_expert[e] -= r.expert_offsets[e]; }
}

// A thread owns an element, a block 256. Bound by instructions: a division of 64 bits for each 2 bytes moved.
__global__ void permute_forward_kernel1(bf16* expert_in, const bf16* inp, const int* row_token, size_t R, size_t C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= R * C) { return; }
    expert_in[i] = inp[row_token[i / C] * C + i % C];
}

// A thread owns an element of d_inp, a block 256. Bound by loads: K of d_expert_in and 2 for each expert of the router.
__global__ void permute_backward_kernel1(bf16* d_inp, const bf16* d_expert_in, const int* slot_row,
                                         const float* d_router_logits, const bf16* router, size_t N, int K, size_t C,
                                         int E) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * C) { return; }
    size_t n = i / C, c = i % C;
    float sum = 0;
    for (int k = 0; k < K; k++) { sum += __bfloat162float(d_expert_in[slot_row[n * K + k] * C + c]); }
    for (int e = 0; e < E; e++) { sum += d_router_logits[n * E + e] * __bfloat162float(router[e * C + c]); }
    d_inp[i] = __float2bfloat16(sum);
}

// ---- train_moe.cu has from here
const int ROUTE_MAX_EXPERTS = 1024;
const int ROUTE_WARPS = 8, ROUTE_CHUNK_SLOTS = 2048; // of a block; each warp has an eighth of the chunk's slots

// x[0..count) = its exclusive prefix sum, by one warp, 32 at a time; every lane gets the total
__device__ inline int route_scan_in_place(int* x, int count) {
    int lane = threadIdx.x % 32, total = 0;
    for (int first = 0; first < count; first += 32) {
        int i = first + lane, value = i < count ? x[i] : 0, sum = value;
        for (int distance = 1; distance < 32; distance *= 2) {
            int before = __shfl_up_sync(0xffffffff, sum, distance);
            if (lane >= distance) { sum += before; }
        }
        if (i < count) { x[i] = total + sum - value; }
        total += __shfl_sync(0xffffffff, sum, 31);
    }
    return total;
}

// Rows for the slots begin..end, by one warp: next (E) is the row of its next slot of each expert. Of the lanes with
// the same expert the first moves the row on for all.
__device__ inline void route_place_warp(Routing r, int* next, const int* router_indices, int begin, int end, int K) {
    int lane = threadIdx.x % 32;
    for (int first = begin; first < end; first += 32) {
        int slot = first + lane, e = slot < end ? router_indices[slot] : -1;
        unsigned peers = __match_any_sync(0xffffffff, e);
        int row = e >= 0 ? next[e] + __popc(peers & ((1u << lane) - 1)) : 0;
        __syncwarp(); // all have read before the first of them moves the row on
        if (e >= 0 && lane == __ffs(peers) - 1) { next[e] += __popc(peers); }
        if (e >= 0) {
            r.row_slot[row] = slot;
            r.slot_row[slot] = row;
            r.row_token[row] = slot / K;
        }
        __syncwarp(); // and it has done so before they read again
    }
}

// A block owns a chunk of the slots and counts them; integer additions give one result in any order.
// chunk_counts (E, chunks) =. Bound by latency: 4 bytes a slot.
__global__ void __launch_bounds__(32 * ROUTE_WARPS)
route_count_kernel3(int* chunk_counts, const int* router_indices, int slots, int E) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int* counts = (int*)shared_bytes; // (E)
    for (int e = threadIdx.x; e < E; e += blockDim.x) { counts[e] = 0; }
    __syncthreads(); // the counters are zero
    int begin = blockIdx.x * ROUTE_CHUNK_SLOTS, end = min(begin + ROUTE_CHUNK_SLOTS, slots);
    for (int slot = begin + threadIdx.x; slot < end; slot += blockDim.x) {
        atomicAdd(&counts[router_indices[slot]], 1);
    }
    __syncthreads(); // all slots are counted
    for (int e = threadIdx.x; e < E; e += blockDim.x) { chunk_counts[(size_t)e * gridDim.x + blockIdx.x] = counts[e]; }
}

// One block owns everything, a warp each 32nd expert: chunk_counts (E, chunks) becomes the number of the expert's slots
// in the chunks before; their totals give tokens_per_expert, expert_offsets and the tile list. Bound by latency: E/32
// scans.
__global__ void __launch_bounds__(1024) route_scan_kernel3(Routing r, int* chunk_counts, int chunks, int tiles, int E) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int *first_row = (int*)shared_bytes, *first_tile = first_row + E + 1; // (E+1) each: counts, then their sums
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int e = warp; e < E; e += 32) {
        int total = route_scan_in_place(chunk_counts + (size_t)e * chunks, chunks);
        if (lane == 0) {
            r.tokens_per_expert[e] = total;
            first_row[e] = total;
            first_tile[e] = (int)ceil_div(total, TILE_ROWS);
        }
    }
    __syncthreads(); // the counts of all experts are there
    if (warp < 2) {  // the first warp sums the rows, the second the tiles
        int* counts = warp == 0 ? first_row : first_tile;
        int total = route_scan_in_place(counts, E);
        if (lane == 0) { counts[E] = total; }
    }
    __syncthreads(); // all sums are there
    for (int e = threadIdx.x; e <= E; e += blockDim.x) { r.expert_offsets[e] = first_row[e]; }
    for (int e = warp; e < E; e += 32) {
        for (int tile = first_tile[e] + lane; tile < first_tile[e + 1]; tile += 32) {
            int row = first_row[e] + (tile - first_tile[e]) * TILE_ROWS;
            r.tile_list[tile] = make_int4(e, row, min(row + TILE_ROWS, first_row[e + 1]), 0);
        }
    }
    for (int tile = first_tile[E] + threadIdx.x; tile < tiles; tile += blockDim.x) {
        r.tile_list[tile] = make_int4(-1, 0, 0, 0);
    }
}

// A block owns the chunk that it owned in route_count_kernel3, each warp an eighth of it, in the order of the slots: so
// the sort is stable. chunk_counts (E, chunks) as the scan left it. Bound by latency: 32 slots at a time.
__global__ void __launch_bounds__(32 * ROUTE_WARPS)
route_place_kernel3(Routing r, const int* chunk_counts, const int* router_indices, int slots, int E, int K) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int* next = (int*)shared_bytes; // (ROUTE_WARPS, E): a warp's counts, then the rows of its next slots
    int warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < ROUTE_WARPS * E; i += blockDim.x) { next[i] = 0; }
    __syncthreads(); // the counters are zero
    int share = ROUTE_CHUNK_SLOTS / ROUTE_WARPS, begin = blockIdx.x * ROUTE_CHUNK_SLOTS + warp * share;
    int end = min(begin + share, slots);
    for (int slot = begin + threadIdx.x % 32; slot < end; slot += 32) {
        atomicAdd(&next[warp * E + router_indices[slot]], 1);
    }
    __syncthreads(); // the counts of all warps are there
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        int row = r.expert_offsets[e] + chunk_counts[(size_t)e * gridDim.x + blockIdx.x];
        for (int w = 0; w < ROUTE_WARPS; w++) {
            int count = next[w * E + e];
            next[w * E + e] = row;
            row += count;
        }
    }
    __syncthreads(); // the first rows of all warps are there
    route_place_warp(r, next + warp * E, router_indices, begin, end, K);
}

size_t route_chunk_ints(size_t slots, int E) { return ceil_div(slots, ROUTE_CHUNK_SLOTS) * E; }

void route_rows(Routing r, int* chunk_counts, const int* router_indices, size_t N, int E, int K, cudaStream_t stream) {
    // everything in r (=) from router_indices (N,K); chunk_counts (route_chunk_ints(N*K, E)) is scratch. No token is
    // dropped and the host learns nothing: whoever needs the counts reads them on the device.
    size_t slots = N * K;
    if (E < 1 || E > ROUTE_MAX_EXPERTS) { fatal("route_rows: experts must be 1 to %d, is %d", ROUTE_MAX_EXPERTS, E); }
    if (slots > INT_MAX / 2) { fatal("route_rows: tokens * experts per token must be at most 2^30, is %zu", slots); }
    int chunks = (int)ceil_div(slots, ROUTE_CHUNK_SLOTS), tiles = (int)(slots / TILE_ROWS + E);
    if (slots > 0) {
        route_count_kernel3<<<chunks, 32 * ROUTE_WARPS, E * sizeof(int), stream>>>(chunk_counts, router_indices,
                                                                                   (int)slots, E);
        launchCheck("route_count_kernel3");
    }
    route_scan_kernel3<<<1, 1024, 2 * (E + 1) * sizeof(int), stream>>>(r, chunk_counts, chunks, tiles, E);
    launchCheck("route_scan_kernel3");
    if (slots > 0) {
        route_place_kernel3<<<chunks, 32 * ROUTE_WARPS, ROUTE_WARPS * E * sizeof(int), stream>>>(
            r, chunk_counts, router_indices, (int)slots, E, K);
        launchCheck("route_place_kernel3");
    }
}

// A warp owns a row, 16 bytes a lane. Bound by bandwidth: R*C read, most of it once from memory and K-1 times from L2,
// and R*C written.
__global__ void __launch_bounds__(256)
permute_forward_kernel2(bf16* expert_in, const bf16* inp, const int* row_token, size_t R, size_t C) {
    size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= R) { return; }
    const bf16* token = inp + row_token[row] * C;
    for (size_t c = 8 * (threadIdx.x % 32); c < C; c += 256) { store16(expert_in + row * C + c, load16(token + c)); }
}

void permute_forward(bf16* expert_in, const bf16* inp, const int* row_token, size_t R, size_t C, cudaStream_t stream) {
    // expert_in (R,C)[row,:] = inp (N,C)[row_token[row],:]
    if (C % 8 != 0) { fatal("permute_forward: C must be a multiple of 8, is %zu", C); }
    if (R == 0) { return; }
    permute_forward_kernel2<<<ceil_div(R, 8), 256, 0, stream>>>(expert_in, inp, row_token, R, C);
    launchCheck("permute_forward_kernel2");
}

const int PERMUTE_TOKENS = 4; // of a warp of permute_backward_kernel2

// A warp owns four tokens, a lane 8 columns of them at a time, so that a row of the router that comes from L1 serves
// four tokens, and four rows of d_expert_in are on their way at once. Bound by bandwidth: R*C read, N*C written.
__global__ void __launch_bounds__(128)
permute_backward_kernel2(bf16* d_inp, const bf16* d_expert_in, const int* slot_row, const float* d_router_logits,
                         const bf16* router, size_t N, int K, size_t C, int E) {
    size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32 * PERMUTE_TOKENS;
    for (size_t c = 8 * (threadIdx.x % 32); c < C; c += 256) {
        float sums[PERMUTE_TOKENS][8] = {};
        for (int k = 0; k < K; k++) { // k and then e ascend, so the sum has one order and the result one value
            float rows[PERMUTE_TOKENS][8] = {};
            #pragma unroll
            for (int t = 0; t < PERMUTE_TOKENS; t++) {
                if (first + t < N) { load8(rows[t], d_expert_in + slot_row[(first + t) * K + k] * C + c); }
            }
            #pragma unroll
            for (int t = 0; t < PERMUTE_TOKENS; t++) {
                #pragma unroll
                for (int i = 0; i < 8; i++) { sums[t][i] += rows[t][i]; }
            }
        }
        for (int e = 0; e < E; e++) {
            float w[8];
            load8(w, router + e * C + c);
            #pragma unroll
            for (int t = 0; t < PERMUTE_TOKENS; t++) {
                float d_logit = first + t < N ? d_router_logits[(first + t) * E + e] : 0;
                #pragma unroll
                for (int i = 0; i < 8; i++) { sums[t][i] += d_logit * w[i]; }
            }
        }
        #pragma unroll
        for (int t = 0; t < PERMUTE_TOKENS; t++) {
            if (first + t < N) { store8(d_inp + (first + t) * C + c, sums[t]); }
        }
    }
}

void permute_backward(bf16* d_inp, const bf16* d_expert_in, const int* slot_row, const float* d_router_logits,
                      const bf16* router, size_t N, int K, size_t C, int E, cudaStream_t stream) {
    // d_inp (N,C)[n,:] = sum over k of d_expert_in (R,C)[slot_row[n,k],:] + sum over e of d_router_logits (N,E)[n,e]
    // router (E,C)[e,:]: all that reaches the router's and the experts' common input
    if (C % 8 != 0) { fatal("permute_backward: C must be a multiple of 8, is %zu", C); }
    if (N == 0) { return; }
    permute_backward_kernel2<<<ceil_div(N, 4 * PERMUTE_TOKENS), 128, 0, stream>>>(d_inp, d_expert_in, slot_row,
                                                                                  d_router_logits, router, N, K, C, E);
    launchCheck("permute_backward_kernel2");
}
// ---- train_moe.cu has up to here

// ----------------------------------------------------------------------------
// second rung of route_rows: one block owns everything, a warp an eighth of the slots, in their order. No scratch and
// one launch, but of the whole GPU one block works: 8 warps at 32 slots a turn.
__global__ void __launch_bounds__(32 * ROUTE_WARPS)
route_rows_kernel2(Routing r, const int* router_indices, int slots, int E, int K, int tiles) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int *next = (int*)shared_bytes, *first_row = next + ROUTE_WARPS * E, *first_tile = first_row + E + 1;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < ROUTE_WARPS * E; i += blockDim.x) { next[i] = 0; }
    __syncthreads(); // the counters are zero
    int share = (int)ceil_div(slots, ROUTE_WARPS), begin = min(warp * share, slots), end = min(begin + share, slots);
    for (int slot = begin + threadIdx.x % 32; slot < end; slot += 32) {
        atomicAdd(&next[warp * E + router_indices[slot]], 1);
    }
    __syncthreads(); // the counts of all warps are there
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        int total = 0;
        for (int w = 0; w < ROUTE_WARPS; w++) { total += next[w * E + e]; }
        r.tokens_per_expert[e] = total;
        first_row[e] = total;
        first_tile[e] = (int)ceil_div(total, TILE_ROWS);
    }
    __syncthreads(); // the counts of all experts are there
    if (warp < 2) {
        int* counts = warp == 0 ? first_row : first_tile;
        int total = route_scan_in_place(counts, E);
        if (lane == 0) { counts[E] = total; }
    }
    __syncthreads(); // all sums are there
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        int row = first_row[e];
        for (int w = 0; w < ROUTE_WARPS; w++) {
            int count = next[w * E + e];
            next[w * E + e] = row;
            row += count;
        }
        for (int tile = first_tile[e]; tile < first_tile[e + 1]; tile++) {
            int first = first_row[e] + (tile - first_tile[e]) * TILE_ROWS;
            r.tile_list[tile] = make_int4(e, first, min(first + TILE_ROWS, first_row[e + 1]), 0);
        }
    }
    for (int e = threadIdx.x; e <= E; e += blockDim.x) { r.expert_offsets[e] = first_row[e]; }
    for (int tile = first_tile[E] + threadIdx.x; tile < tiles; tile += blockDim.x) {
        r.tile_list[tile] = make_int4(-1, 0, 0, 0);
    }
    __syncthreads(); // the first rows of all warps are there
    route_place_warp(r, next + warp * E, router_indices, begin, end, K);
}

// ----------------------------------------------------------------------------
// launchers of all rungs

void run_route_rows(int kernel, Routing r, int* chunk_counts, const int* router_indices, size_t N, int E, int K) {
    int slots = (int)(N * K), tiles = slots / TILE_ROWS + E;
    if (kernel == 3) {
        route_rows(r, chunk_counts, router_indices, N, E, K, 0);
    } else if (kernel == 2) {
        size_t bytes = (ROUTE_WARPS * E + 2 * (E + 1)) * sizeof(int);
        route_rows_kernel2<<<1, 32 * ROUTE_WARPS, bytes>>>(r, router_indices, slots, E, K, tiles);
        launchCheck("route_rows_kernel2");
    } else {
        route_rows_kernel1<<<1, 1>>>(r, router_indices, slots, E, K, TILE_ROWS, tiles);
        launchCheck("route_rows_kernel1");
    }
}

void run_permute_forward(int kernel, bf16* expert_in, const bf16* inp, const int* row_token, size_t R, size_t C) {
    if (kernel >= 2) { return permute_forward(expert_in, inp, row_token, R, C, 0); }
    permute_forward_kernel1<<<ceil_div(R * C, 256), 256>>>(expert_in, inp, row_token, R, C);
    launchCheck("permute_forward_kernel1");
}

void run_permute_backward(int kernel, bf16* d_inp, const bf16* d_expert_in, const int* slot_row,
                          const float* d_router_logits, const bf16* router, size_t N, int K, size_t C, int E) {
    if (kernel >= 2) { return permute_backward(d_inp, d_expert_in, slot_row, d_router_logits, router, N, K, C, E, 0); }
    permute_backward_kernel1<<<ceil_div(N * C, 256), 256>>>(d_inp, d_expert_in, slot_row, d_router_logits, router, N, K,
                                                            C, E);
    launchCheck("permute_backward_kernel1");
}

// ----------------------------------------------------------------------------
// checks

enum Load { RANDOM, ONE_EXPERT, SKEWED }; // SKEWED: all experts but the last two, the first far more than the others

// K different experts a token (with ONE_EXPERT the last and the ones before it: experts with no and with all tokens)
std::vector<int> random_choice(size_t N, int E, int K, Load load) {
    std::vector<int> indices(N * K);
    std::vector<float> random = random_floats(N, 1, 21);
    for (size_t n = 0; n < N; n++) {
        int first = load == ONE_EXPERT ? E - 1 : (int)(fabsf(random[n]) * 0.999f * E);
        if (load == SKEWED) {
            first = std::min((int)(random[n] * random[n] * random[n] * random[n] * E), std::max(E - 3, 0));
        }
        for (int k = 0; k < K; k++) { indices[n * K + k] = load == ONE_EXPERT ? first - k : (first + k) % E; }
    }
    return indices;
}

struct DeviceRouting {
    Device<int> tokens_per_expert, expert_offsets, row_slot, slot_row, row_token;
    Device<int4> tile_list;
    DeviceRouting(size_t N, int E, int K)
        : tokens_per_expert(E), expert_offsets(E + 1), row_slot(N * K), slot_row(N * K), row_token(N * K),
          tile_list(N * K / TILE_ROWS + E) {}
    operator Routing() { return {tokens_per_expert, expert_offsets, row_slot, slot_row, row_token, tile_list}; }
};

struct CpuRouting {
    std::vector<int> tokens_per_expert, expert_offsets, expert_order, row_slot, slot_row;
    CpuRouting(const std::vector<int>& indices, size_t N, int E, int K)
        : tokens_per_expert(E), expert_offsets(E + 1), expert_order(E), row_slot(N * K), slot_row(N * K) {
        cpu::route_rows(tokens_per_expert.data(), expert_offsets.data(), expert_order.data(), row_slot.data(),
                        slot_row.data(), indices.data(), N, E, K);
    }
};

void route_rows_match_cpu(int kernel, size_t N, int E, int K, Load load) {
    char what[128];
    snprintf(what, sizeof(what), "route_rows %d N %zu E %d K %d load %d", kernel, N, E, K, load);
    std::vector<int> indices = random_choice(N, E, K, load);
    CpuRouting want(indices, N, E, K);
    DeviceRouting got(N, E, K);
    Device<int> d_indices(indices), chunk_counts(route_chunk_ints(N * K, E));
    run_route_rows(kernel, got, chunk_counts, d_indices, N, E, K);
    check_equal(what, got.tokens_per_expert.get(), want.tokens_per_expert);
    check_equal(what, got.expert_offsets.get(), want.expert_offsets);
    check_equal(what, got.row_slot.get(), want.row_slot);
    check_equal(what, got.slot_row.get(), want.slot_row);
    std::vector<int> tokens, tiles, got_tiles;
    for (int slot : want.row_slot) { tokens.push_back(slot / K); }
    check_equal(what, got.row_token.get(), tokens);
    for (int e = 0; e < E; e++) {
        for (int row = want.expert_offsets[e]; row < want.expert_offsets[e + 1]; row += TILE_ROWS) {
            tiles.insert(tiles.end(), {e, row, std::min(row + TILE_ROWS, want.expert_offsets[e + 1]), 0});
        }
    }
    while (tiles.size() < 4 * got.tile_list.count) { tiles.insert(tiles.end(), {-1, 0, 0, 0}); }
    for (int4 tile : got.tile_list.get()) { got_tiles.insert(got_tiles.end(), {tile.x, tile.y, tile.z, tile.w}); }
    check_equal(what, got_tiles, tiles);
}

void permute_matches_cpu(int kernel, size_t N, size_t C, int E, int K) {
    char what[128];
    snprintf(what, sizeof(what), "permute %d N %zu C %zu E %d K %d", kernel, N, C, E, K);
    size_t R = N * K;
    CpuRouting r(random_choice(N, E, K, RANDOM), N, E, K);
    std::vector<int> row_token;
    for (int slot : r.row_slot) { row_token.push_back(slot / K); }
    std::vector<float> inp = random_floats(N * C, 2, 22), want(R * C);
    Device<bf16> d_inp(to_bf16(inp)), expert_in(R * C);
    Device<int> d_row_token(row_token), slot_row(r.slot_row);
    run_permute_forward(kernel, expert_in, d_inp, d_row_token, R, C);
    cpu::permute_forward(want.data(), inp.data(), r.row_slot.data(), 0, R, K, C);
    check_equal(what, to_float(expert_in.get()), want);

    std::vector<float> d_expert_in = random_floats(R * C, 2, 23), d_logits = random_floats(N * E, 1, 24);
    std::vector<float> router = random_floats(E * C, 1, 25), want_back(N * C);
    Device<bf16> back(N * C), d_d_expert_in(to_bf16(d_expert_in)), d_router(to_bf16(router));
    Device<float> d_d_logits(d_logits);
    run_permute_backward(kernel, back, d_d_expert_in, slot_row, d_d_logits, d_router, N, K, C, E);
    cpu::permute_backward(want_back.data(), d_expert_in.data(), r.slot_row.data(), N, K, C);
    for (size_t n = 0; n < N; n++) {
        for (int e = 0; e < E; e++) {
            for (size_t c = 0; c < C; c++) { want_back[n * C + c] += d_logits[n * E + e] * router[e * C + c]; }
        }
    }
    check_bf16(what, back.get(), want_back);
}

void check_all(int kernel) {
    for (size_t N : {1, 17, 200, 5000}) {
        const int shapes[][2] = {{1, 1}, {3, 2}, {6, 6}, {16, 2}, {33, 7}, {128, 8}};
        for (const int* s : shapes) {
            if (N == 5000 && (s[0] == 33 || s[0] == 6)) { continue; } // the emulator's time
            route_rows_match_cpu(kernel, N, s[0], s[1], RANDOM);
            if (N != 5000 || s[0] == 16) { route_rows_match_cpu(kernel, N, s[0], s[1], ONE_EXPERT); }
        }
    }
    route_rows_match_cpu(kernel, 0, 5, 2, RANDOM);
    route_rows_match_cpu(kernel, 1031, 16, 1, SKEWED);
    route_rows_match_cpu(kernel, 1024, 1000, 4, SKEWED);
    route_rows_match_cpu(kernel, 30, 1024, 128, RANDOM);
    const size_t shapes[][4] = {{1, 8, 1, 1},    {17, 48, 3, 2},   {50, 72, 6, 6},
                                {9, 896, 16, 2}, {30, 264, 33, 4}, {6, 48, 128, 8}};
    for (const size_t* s : shapes) { permute_matches_cpu(kernel, s[0], s[1], (int)s[2], (int)s[3]); }
    if (!dev_is_large(kernel)) { return; }
    for (Load load : {RANDOM, ONE_EXPERT, SKEWED}) { route_rows_match_cpu(kernel, 8 * 4096, 16, 2, load); }
    route_rows_match_cpu(kernel, 131072, 128, 8, RANDOM);
    permute_matches_cpu(kernel, 8 * 4096, 896, 16, 2);
}

// The library's stable sort of slots by expert: row_slot alone, without its inverse, the counts and the tiles
void bench_cub_sort(const int* indices, size_t N, int E, int K) {
#ifdef HAVE_CUB
    int slots = (int)(N * K), bits = 1;
    while (1 << bits < E) { bits++; }
    std::vector<int> numbers(slots);
    for (int slot = 0; slot < slots; slot++) { numbers[slot] = slot; }
    Device<int> slot_numbers(numbers), sorted(slots), row_slot(slots);
    size_t bytes = 0;
    cudaCheck(cub::DeviceRadixSort::SortPairs(NULL, bytes, indices, sorted.data, slot_numbers.data, row_slot.data,
                                              slots, 0, bits));
    Device<unsigned char> scratch(bytes);
    bench_library("cub::DeviceRadixSort, row_slot only", 16.0 * slots, 0, [&] {
        cudaCheck(cub::DeviceRadixSort::SortPairs(scratch.data, bytes, indices, sorted.data, slot_numbers.data,
                                                  row_slot.data, slots, 0, bits));
    });
#else
    (void)indices, (void)N, (void)E, (void)K;
#endif
}

void bench_all(int kernel) {
    const size_t N = 8 * 4096, C = 896;
    const int E = 16, K = 2;
    const size_t R = N * K;
    Device<int> indices(random_choice(N, E, K, RANDOM)), chunk_counts(route_chunk_ints(R, E));
    DeviceRouting r(N, E, K);
    bench("route_rows", kernel, 4.0 * R * 4, 0, [&] { run_route_rows(kernel, r, chunk_counts, indices, N, E, K); });
    if (kernel == 3) { // permute has two kernels
        bench_cub_sort(indices, N, E, K);
        return;
    }
    Device<bf16> inp(to_bf16(random_floats(N * C, 2, 1))), rows(to_bf16(random_floats(R * C, 2, 2))),
        router(to_bf16(random_floats(E * C, 1, 3)));
    Device<float> d_logits(random_floats(N * E, 1, 4));
    bench("permute_forward", kernel, 2.0 * (N + R) * C + 4.0 * R, 0,
          [&] { run_permute_forward(kernel, rows, inp, r.row_token, R, C); });
    bench("permute_backward", kernel, 2.0 * (N + R) * C + 4.0 * R + 4.0 * N * E, 2.0 * N * C * E,
          [&] { run_permute_backward(kernel, inp, rows, r.slot_row, d_logits, router, N, K, C, E); });
}

int main(int argc, char** argv) {
    dev_open(argc, argv, NUM_KERNELS);
    for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    return dev_close();
}
