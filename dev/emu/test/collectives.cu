// NCCL over MPI: each collective against plain loops: `mpirun -np N collectives [wrong_order|abort|missing_rank]`.
#include "cases.h"
#include <cuda_bf16.h>
#include <mpi.h>
#include <nccl.h>
#include <unistd.h>

static int rank, ranks, failed;
static ncclComm_t comm;
static cudaStream_t stream;

static void expect(const char* what, double got, double want, double tolerance) {
    if (fabs(got - want) <= tolerance) return;
    printf("rank %d: %s: %g, expected %g\n", rank, what, got, want);
    failed = 1;
}

static void sums(ncclRedOp_t op, double factor) {
    std::vector<float> h(10), r(10);
    for (int i = 0; i < 10; i++) h[i] = rank + i;
    float* d = upload(h);
    ncclAllReduce(d, d, 10, ncclFloat32, op, comm, stream);
    cudaStreamSynchronize(stream);
    r = download(d, 10);
    for (int i = 0; i < 10; i++) expect("AllReduce", r[i], factor * (ranks * (ranks - 1) / 2 + ranks * i), 1e-6);
    cudaFree(d);
}

static void bf16_sum() {  // 256 + 1 + 1 ... : a ring loses the ones, a single rounding does not
    std::vector<__nv_bfloat16> h(ranks, __float2bfloat16(rank == 0 ? 256.0f : 1.0f));
    __nv_bfloat16* d = upload(h);
    ncclAllReduce(d, d, ranks, ncclBfloat16, ncclSum, comm, stream);
    cudaStreamSynchronize(stream);
    bool ring = getenv("EMU_NCCL") && !strcmp(getenv("EMU_NCCL"), "ring");
    for (__nv_bfloat16 v : download(d, ranks)) {
        float x = __bfloat162float(v), once = __bfloat162float(__float2bfloat16(256.0f + ranks - 1));
        if (!ring) expect("bf16 sum", x, once, 0);
        else expect("bf16 ring sum", x, 256, ranks);
    }
    cudaFree(d);
}

static void scatter_gather() {
    std::vector<float> h(4 * ranks);
    for (size_t i = 0; i < h.size(); i++) h[i] = i * (rank + 1);
    float *in = upload(h), *part = device<float>(4), *all = device<float>(4 * ranks);
    ncclGroupStart();
    ncclReduceScatter(in, part, 4, ncclFloat32, ncclSum, comm, stream);
    ncclAllGather(part, all, 4, ncclFloat32, comm, stream);
    ncclGroupEnd();
    cudaStreamSynchronize(stream);
    std::vector<float> r = download(all, h.size());
    for (size_t i = 0; i < r.size(); i++)
        expect("ReduceScatter + AllGather", r[i], (double)i * ranks * (ranks + 1) / 2, 1e-5);
    ncclBroadcast(in, all, 4, ncclFloat32, ranks - 1, comm, stream);
    cudaStreamSynchronize(stream);
    r = download(all, 4);
    for (int i = 0; i < 4; i++) expect("Broadcast", r[i], (double)i * ranks, 0);
}

static void polling() {  // who only asks is told "not ready" until the other ranks have come
    float* d = zeros<float>(4);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank > 0) usleep(300000);
    ncclAllReduce(d, d, 4, ncclFloat32, ncclSum, comm, stream);
    int asked = 0;
    for (; cudaStreamQuery(stream) == cudaErrorNotReady; asked++) usleep(1000);
    if (rank == 0 && ranks > 1 && asked < 20) {
        printf("done after %d questions, before the others came\n", asked);
        failed = 1;
    }
    cudaFree(d);
}

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    ncclUniqueId id;
    if (rank == 0) ncclGetUniqueId(&id);
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    cudaStreamCreate(&stream);
    if (ncclCommInitRank(&comm, ranks, id, rank) != ncclSuccess) return 1;
    const char* mode = argc > 1 ? argv[1] : "";
    float* x = zeros<float>(16);
    if (!strcmp(mode, "wrong_order")) {
        if (rank == 0) ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, comm, stream);
        else ncclAllGather(x + 4 * rank, x, 4, ncclFloat32, comm, stream);
        cudaStreamSynchronize(stream);
        ncclResult_t e;
        ncclCommGetAsyncError(comm, &e);
        printf("async error: %s\n", ncclGetErrorString(e));
        ncclCommAbort(comm);
    } else if (!strcmp(mode, "abort")) {               // rank 1 gives up; nobody waits for what was issued
        if (rank == 0) ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, comm, stream);
        if (cudaStreamQuery(stream) != (rank == 0 ? cudaErrorNotReady : cudaSuccess)) failed = 1;
        ncclResult_t e;
        if (ncclCommGetAsyncError(comm, &e) != ncclSuccess || e != ncclSuccess) failed = 1;
        if (ncclCommAbort(comm) != ncclSuccess) failed = 1;
        cudaStreamSynchronize(stream);
        if (!failed) printf("aborted\n");
    } else if (!strcmp(mode, "missing_rank")) {
        if (rank != 1) ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, comm, stream);
        cudaStreamSynchronize(stream);
        MPI_Barrier(MPI_COMM_WORLD);
    } else {
        sums(ncclSum, 1);
        sums(ncclAvg, 1.0 / ranks);
        bf16_sum();
        scatter_gather();
        polling();
        ncclCommDestroy(comm);
        if (!failed && rank == 0) printf("collectives ok\n");
    }
    MPI_Finalize();
    return failed;
}
