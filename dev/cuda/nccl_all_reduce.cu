// nccl_all_reduce.cu: gradients averaged over several GPUs, one process each.
//
//   out[i] = (1/R) sum over ranks r of grads_r[i]          grads (count) fp32, the same result on all R ranks
//
// train_moe_cpu.c is one process and so has no reference for it: the checks know what all ranks have, and average that
// in float64.
// In fp32 that is one call of NCCL. Two bytes of four are saved on the wire if gradients travel as bf16: a kernel
// divides them by R and converts them into a staging buffer, NCCL adds that, and the kernel converts it back. (NCCL's
// own average multiplies by 1/R in the type that travels, which is 0.2% too much for three ranks in bf16.) NCCL adds in
// rings or trees and rounds to bf16 at every hop, so R ranks cost up to R roundings. The kernel only moves bytes, 6 a
// number: a bucket of 25M numbers costs 0.15 ms at 1 TB/s, beside 2.5 ms on a wire of 20 GB/s.
//
//   kernel 1: a thread a number: 4 bytes a lane on one side, 2 on the other, many small requests in flight.
//   kernel 2: a thread owns 4 neighbours, 16 bytes of fp32, so that a warp reads and writes whole lines.
//
// winner: 2
//
//   dev/emu/emucc -I. -o build/dev/nccl_all_reduce dev/cuda/nccl_all_reduce.cu -lcjson
//   EMU_DEVICES=2 mpirun -n 2 build/dev/nccl_all_reduce      (without mpirun: one rank)
#define OMPI_SKIP_MPICXX 1
#include <functional>
#include <mpi.h>
#include <nccl.h>
#include "common.h"

// ----------------------------------------------------------------------------
// kernels

// A thread owns a number, a block 256. Bound by memory, in requests of 64 and 128 bytes a warp.
template <class Out, class Inp>
__global__ void all_reduce_convert_kernel1(Out* out, const Inp* inp, float factor, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { out[i] = (Out)((float)inp[i] * factor); }
}

// A thread owns 4 neighbours, a block 1024; n is a multiple of 8 and the arrays are 16-byte aligned. Bound by memory, 6
// bytes a number.
template <class Out, class Inp>
__global__ void all_reduce_convert_kernel2(Out* out, const Inp* inp, float factor, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= n) { return; } // n is a multiple of 8
    float x[4];
    load4(x, inp + i);
    for (int j = 0; j < 4; j++) { x[j] *= factor; }
    store4(out + i, x);
}

// ----------------------------------------------------------------------------
// launchers

static const int NUM_KERNELS = 2;
static int rank = 0, num_ranks = 1;
static ncclComm_t comm;

static void check_nccl(ncclResult_t status, const char* call) {
    if (status != ncclSuccess) { fatal("%s failed: %s", call, ncclGetErrorString(status)); }
}

template <class Out, class Inp>
void convert(int kernel, Out* out, const Inp* inp, float factor, size_t n, cudaStream_t stream) {
    unsigned blocks = (unsigned)(kernel == 1 ? ceil_div(n, 256) : ceil_div(n / 4, 256));
    if (kernel == 1) { all_reduce_convert_kernel1<<<blocks, 256, 0, stream>>>(out, inp, factor, n); }
    else { all_reduce_convert_kernel2<<<blocks, 256, 0, stream>>>(out, inp, factor, n); }
    launchCheck("all_reduce_convert");
}

static void all_reduce(int kernel, float* grads, bf16* staging, size_t n, bool as_bf16, cudaStream_t stream) {
    if (!as_bf16) {
        check_nccl(ncclAllReduce(grads, grads, n, ncclFloat32, ncclAvg, comm, stream), "ncclAllReduce");
        return;
    }
    convert<bf16, float>(kernel, staging, grads, 1.0f / (float)num_ranks, n, stream);
    check_nccl(ncclAllReduce(staging, staging, n, ncclBfloat16, ncclSum, comm, stream), "ncclAllReduce");
    convert<float, bf16>(kernel, grads, staging, 1, n, stream);
}

// ----------------------------------------------------------------------------
// checks

// the average of random gradients, in double precision: each rank knows the others' seeds
static std::vector<float> average(size_t n, uint64_t seed) {
    std::vector<double> sum(n);
    for (int r = 0; r < num_ranks; r++) {
        std::vector<float> x = random_floats(n, 1, seed + (uint64_t)r);
        for (size_t i = 0; i < n; i++) { sum[i] += x[i]; }
    }
    std::vector<float> result(n);
    for (size_t i = 0; i < n; i++) { result[i] = (float)(sum[i] / num_ranks); }
    return result;
}

// Buckets through one staging buffer, without a wait of the host between them, as in the trainer.
static void check_average(int kernel, const std::vector<size_t>& buckets, bool as_bf16) {
    std::vector<float> mine, want;
    for (size_t n : buckets) {
        uint64_t seed = mine.size() + 100;
        std::vector<float> x = random_floats(n, 1, seed + (uint64_t)rank), y = average(n, seed);
        mine.insert(mine.end(), x.begin(), x.end());
        want.insert(want.end(), y.begin(), y.end());
    }
    Device<float> grads(mine);
    Device<bf16> staging(*std::max_element(buckets.begin(), buckets.end()));
    cudaStream_t stream;
    cudaEvent_t ready;
    cudaCheck(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaCheck(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    cudaCheck(cudaEventRecord(ready, 0)); // the copy of `mine` was on the default stream
    cudaCheck(cudaStreamWaitEvent(stream, ready, 0));
    size_t begin = 0;
    for (size_t n : buckets) {
        all_reduce(kernel, grads + begin, staging, n, as_bf16, stream);
        begin += n;
    }
    cudaCheck(cudaStreamSynchronize(stream));
    std::vector<float> got = grads.get();
    char what[100];
    snprintf(what, sizeof(what), "rank %d of %d: average of %zu numbers in %s, kernel %d", rank, num_ranks, want.size(),
             as_bf16 ? "bf16" : "fp32", kernel);
    if (!as_bf16) { check_f32(what, got, want, 1e-6); } // a rounding of 2^-24 a rank
    else {
        // R parts of at most 1/R are rounded by 2^-9 of themselves, R - 1 sums of at most 1 by 2^-9 of theirs: together
        // less than 2^-8 R.
        double worst = 0, product = 0, square = 0;
        for (size_t i = 0; i < want.size(); i++) {
            double off = fabs((double)got[i] - want[i]);
            if (!(off <= worst)) { worst = off; } // a NaN stays
            product += (double)got[i] * want[i];
            square += (double)want[i] * want[i];
        }
        char detail[100];
        snprintf(detail, sizeof(detail), "off by %g, more than 2^-8 R", worst);
        check_result(worst <= num_ranks / 256.0, what, detail);
        double factor = product / square; // roundings go either way: all numbers together are neither longer nor shorter
        snprintf(detail, sizeof(detail), "all numbers together are %g times too long", factor);
        check_result(want.size() < 5000 || fabs(factor - 1) < 5e-4, what, detail);
        snprintf(what, sizeof(what), "rank %d: every result is a bf16", rank);
        std::vector<float> rounded = to_float(to_bf16(got));
        check_equal(what, got, rounded);
    }
    // bit for bit the same on all ranks, or their weights would drift apart
    std::vector<float> first = got;
    MPI_Bcast(first.data(), (int)first.size(), MPI_FLOAT, 0, MPI_COMM_WORLD);
    snprintf(what, sizeof(what), "rank %d has what rank 0 has", rank);
    check_equal(what, got, first);
    cudaCheck(cudaEventDestroy(ready));
    cudaCheck(cudaStreamDestroy(stream));
}

// converting alone: rounds to nearest even as the CPU does, and leaves NaN and infinity what they are
static void check_pack(int kernel, size_t n) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) {
        uint64_t state = hash64(i);
        x[i] = (float)(rng_uniform(&state) - 0.5) * exp2f((float)(i % 40) - 20);
    }
    if (n > 16) { x[3] = INFINITY, x[9] = -INFINITY, x[10] = NAN, x[11] = -0.0f; }
    Device<float> in(x), back(n + 8);
    Device<bf16> packed(n + 8);
    const float third = 1.0f / 3;
    convert<bf16, float>(kernel, packed, in, third, n, 0);
    convert<float, bf16>(kernel, back, packed, 1, n, 0);
    std::vector<float> got = back.get(), want(n);
    for (size_t i = 0; i < n; i++) { want[i] = bf16_to_f32(f32_to_bf16(x[i] * third)); }
    bool nan_stays = n <= 16 || isnan(got[10]);
    if (n > 16) { got[10] = want[10]; } // one NaN is as good as another
    char what[100];
    snprintf(what, sizeof(what), "%zu numbers to bf16 and back, kernel %d", n, kernel);
    bool untouched = true; // fresh memory is 0xff: nothing may be written behind the end
    for (size_t i = n; i < n + 8; i++) { untouched = untouched && isnan(got[i]); }
    got.resize(n);
    check_equal(what, got, want);
    check_result(nan_stays && untouched, what, "a NaN was lost, or something written behind the end");
}

// Milliseconds of launch() on the slowest rank: the median of many runs that all ranks begin together, as bench()
static double all_ranks_ms(int runs, const std::function<void()>& launch) {
    Stopwatch watch;
    std::vector<float> times;
    for (int run = -5; run < runs; run++) {
        MPI_Barrier(MPI_COMM_WORLD);
        float ms = watch.ms(launch);
        if (run >= 0) { times.push_back(ms); } // the others warm up
    }
    MPI_Allreduce(MPI_IN_PLACE, times.data(), runs, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
    return median(times);
}

// GB/s from each GPU to the next one in a ring, all at once: what a link carries in one direction, as in a ring of NCCL
static double peer_bandwidth(size_t bytes, int runs) {
    int next = (rank + 1) % num_ranks, direct = 0;
    cudaCheck(cudaDeviceCanAccessPeer(&direct, rank, next));
    if (direct && cudaDeviceEnablePeerAccess(next, 0) != cudaSuccess) { (void)cudaGetLastError(); } // it is enabled
    Device<unsigned char> from(bytes);
    cudaCheck(cudaSetDevice(next));
    Device<unsigned char> to(bytes);
    cudaCheck(cudaSetDevice(rank));
    double ms = all_ranks_ms(runs, [&] { cudaCheck(cudaMemcpyPeerAsync(to, next, from, rank, bytes, 0)); });
    return (double)bytes / ms / 1e6;
}

// bus bandwidth as nccl-tests counts it: what each link carries in a ring
static double bus_bandwidth(double bytes, double ms) { return bytes * 2 * (num_ranks - 1) / num_ranks / ms / 1e6; }

// the way to the times of several GPUs: what it measures is a time, and the same one on all ranks
static void check_times(int kernel) {
    const size_t n = 2048;
    Device<float> grads(random_floats(n, 1, 1));
    Device<bf16> staging(n);
    float times[2] = {(float)all_ranks_ms(3, [&] { all_reduce(kernel, grads, staging, n, true, 0); }),
                      (float)peer_bandwidth(n, 3)}, first[2] = {times[0], times[1]};
    MPI_Bcast(first, 2, MPI_FLOAT, 0, MPI_COMM_WORLD);
    bool same = times[0] == first[0] && times[1] == first[1];
    check_result(same && times[0] > 0 && times[1] > 0 && isfinite(times[0]) && isfinite(times[1]),
                 "all_ranks_ms and peer_bandwidth", "no time, or not the same on all ranks");
    check_result(fabs(bus_bandwidth(1e9, 1000) - 2.0 * (num_ranks - 1) / num_ranks) < 1e-9, "bus_bandwidth",
                 "a GB in a second over two GPUs is 1 GB/s");
}

// numbers in a layer of smol-500m: two norms of 896 and two of 64, qkv and o, router, experts
static const size_t SMOL_500M_LAYER =
    2 * 896 + 2 * 64 + (size_t)(3 + 1) * 1024 * 896 + 16 * 896 + (size_t)16 * 3 * 512 * 896;

static void check_all(int kernel) {
    for (size_t n : {(size_t)8, (size_t)24, (size_t)2048, (size_t)2056, (size_t)5000}) {
        check_pack(kernel, n);
        for (int as_bf16 = 0; as_bf16 < 2; as_bf16++) { check_average(kernel, {n, n, n}, as_bf16 != 0); }
    }
    if (dev_is_large(kernel)) { // of smol-500m, in the trainer's order: the last norm with lm_head, and a layer
        const std::vector<size_t> buckets = {896 + 896 * 151936, SMOL_500M_LAYER};
        for (int as_bf16 = 0; as_bf16 < 2; as_bf16++) { check_average(kernel, buckets, as_bf16 != 0); }
        check_pack(kernel, SMOL_500M_LAYER);
    }
    if (kernel == 1) { check_pack(kernel, 2049); } // kernel 2 wants multiples of 8
    check_times(kernel);
}

// one layer's bucket of smol-500m, 25.7M numbers
static void bench_all(int kernel) {
    const size_t n = SMOL_500M_LAYER;
    Device<float> grads(n);
    Device<bf16> staging(n);
    fill_random(grads, 1, 1);
    char name[80];
    snprintf(name, sizeof(name), "all_reduce_convert_kernel%d to bf16", kernel);
    if (rank == 0) { bench(name, 6.0 * n, 0, [&] { convert<bf16, float>(kernel, staging, grads, 1, n, 0); }); }
    snprintf(name, sizeof(name), "all_reduce_convert_kernel%d to fp32", kernel);
    if (rank == 0) { bench(name, 6.0 * n, 0, [&] { convert<float, bf16>(kernel, grads, staging, 1, n, 0); }); }
    if (num_ranks == 1) { return; }
    double peer = peer_bandwidth((size_t)256 << 20, 20);
    for (int as_bf16 = 0; as_bf16 < 2; as_bf16++) {
        double bytes = (as_bf16 ? 2.0 : 4.0) * n;
        double ms = all_ranks_ms(50, [&] { all_reduce(kernel, grads, staging, n, as_bf16 != 0, 0); });
        if (rank > 0) { continue; }
        double bus = bus_bandwidth(bytes, ms);
        printf("bench all_reduce %d of %.0f MB in %s over %d GPUs: %.4f ms, %.0f GB/s = %.1f %% of peer copy %.0f\n",
               kernel, bytes / 1e6, as_bf16 ? "bf16" : "fp32", num_ranks, ms, bus, 100 * bus / peer, peer);
    }
}

// ----------------------------------------------------------------------------

static void end_all_ranks(void) { MPI_Abort(MPI_COMM_WORLD, 1); }

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
    fatal_hook = end_all_ranks;
    dev_open(argc, argv, NUM_KERNELS);
    int devices;
    cudaCheck(cudaGetDeviceCount(&devices));
    if (num_ranks > devices) {
        if (rank > 0) { sleep(10); } // rank 0's message ends all
        fatal("%d ranks, but only %d GPU%s (in the emulator: EMU_DEVICES=%d)", num_ranks, devices,
              devices == 1 ? "" : "s", num_ranks);
    }
    cudaCheck(cudaSetDevice(rank)); // ranks of one machine
    ncclUniqueId id;
    if (rank == 0) { check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId"); }
    MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    check_nccl(ncclCommInitRank(&comm, num_ranks, id, rank), "ncclCommInitRank");
    for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    // rank 0 speaks for all
    int counts[2] = {checks_passed, checks_failed};
    MPI_Allreduce(MPI_IN_PLACE, counts, 2, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    checks_passed = counts[0];
    checks_failed = counts[1];
    check_nccl(ncclCommDestroy(comm), "ncclCommDestroy");
    if (rank > 0 && freopen("/dev/null", "w", stdout) == NULL) { fatal("cannot open /dev/null"); }
    int code = dev_close();
    MPI_Finalize();
    return code;
}
