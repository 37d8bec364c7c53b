// NCCL over MPI: collectives in stream order, one process a rank. Ranks first compare which collective they are about
// to run, so that a rank with another sequence is reported, and wait for each other with a time limit, so that none
// hangs. Sums are taken in fp32 in rank order and rounded once; EMU_NCCL=ring adds and rounds at every hop, as a ring
// does. An average is a sum of numbers times 1/ranks, both rounded to the data's type, as in NCCL. EMU_NCCL_LOG=FILE
// writes down what ran.
#include <math.h>
#include <mpi.h>
#include <nccl.h>
#include <string.h>
#include <unistd.h>
#include "internal.h"
#define MAY_FAIL if (failing(__func__)) return ncclInternalError

struct ncclComm {
    unsigned magic;
    MPI_Comm mpi;
    int ranks, rank;
    int64_t sequence;            // collectives run so far
    ncclResult_t error;
    bool aborted;
};

namespace emu {

const unsigned ALIVE = 0x4e43434c;
enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE };
static const char* kind_name[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclReduce"};
struct Meeting {                  // of the ranks before a collective
    bool begun;
    int64_t mine[6];             // what this rank is about to run
    std::vector<int64_t> all;    // what all are
    MPI_Request request;
};
struct Collective {
    Kind kind;
    const void* send;
    void* recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;
    ncclComm* comm;
    cudaStream_t stream;
    void* pc;
    std::shared_ptr<Meeting> meeting = std::make_shared<Meeting>();
};
static thread_local int group_depth;
static thread_local std::vector<Collective> group;

static size_t size_of(ncclDataType_t t) {
    switch (t) {
        case ncclFloat32: case ncclInt32: case ncclUint32: return 4;
        case ncclBfloat16: case ncclFloat16: return 2;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        case ncclInt8: case ncclUint8: return 1;
        default: return 0;
    }
}

// ---------------------------------------------------------------- numbers
static double load(const void* p, size_t i, ncclDataType_t t) {
    switch (t) {
        case ncclFloat32: return ((const float*)p)[i];
        case ncclBfloat16: return __bfloat162float(((const __nv_bfloat16*)p)[i]);
        case ncclFloat16: return __half2float(((const __half*)p)[i]);
        case ncclFloat64: return ((const double*)p)[i];
        case ncclInt32: return ((const int32_t*)p)[i];
        case ncclUint32: return ((const uint32_t*)p)[i];
        case ncclInt64: return (double)((const int64_t*)p)[i];
        case ncclUint64: return (double)((const uint64_t*)p)[i];
        case ncclInt8: return ((const int8_t*)p)[i];
        default: return ((const uint8_t*)p)[i];
    }
}

static void store(void* p, size_t i, ncclDataType_t t, double v) {
    switch (t) {
        case ncclFloat32: ((float*)p)[i] = (float)v; break;
        case ncclBfloat16: ((__nv_bfloat16*)p)[i] = __float2bfloat16((float)v); break;
        case ncclFloat16: ((__half*)p)[i] = __float2half((float)v); break;
        case ncclFloat64: ((double*)p)[i] = v; break;
        case ncclInt32: ((int32_t*)p)[i] = (int32_t)v; break;
        case ncclUint32: ((uint32_t*)p)[i] = (uint32_t)v; break;
        case ncclInt64: ((int64_t*)p)[i] = (int64_t)v; break;
        case ncclUint64: ((uint64_t*)p)[i] = (uint64_t)v; break;
        case ncclInt8: ((int8_t*)p)[i] = (int8_t)v; break;
        default: ((uint8_t*)p)[i] = (uint8_t)v;
    }
}

static double rounded(double v, ncclDataType_t t) {
    char room[8];
    store(room, 0, t, v);
    return load(room, 0, t);
}

static double combine(double a, double b, ncclRedOp_t op, ncclDataType_t t) {
    if (op == ncclMax) return fmax(a, b);
    if (op == ncclMin) return fmin(a, b);
    double v = op == ncclProd ? a * b : a + b;
    return t == ncclFloat32 || t == ncclBfloat16 || t == ncclFloat16 ? (double)(float)v : v;
}

// all: the ranks' buffers one after the other. In a ring the sum of chunk c begins at the rank after its owner and is
// rounded to the data's type at every hop.
static double reduce_one(const char* all, size_t i, size_t n, const Collective& c) {
    static const bool ring = getenv("EMU_NCCL") && !strcmp(getenv("EMU_NCCL"), "ring");
    int ranks = c.comm->ranks;
    size_t chunk = (n + (size_t)ranks - 1) / (size_t)ranks;
    int first = ring ? (int)((i / chunk + 1) % (size_t)ranks) : 0;
    bool whole = c.type == ncclInt8 || c.type == ncclUint8 || c.type == ncclInt32 || c.type == ncclUint32 ||
                 c.type == ncclInt64 || c.type == ncclUint64;
    double v = 0;
    for (int k = 0; k < ranks; k++) {
        double x = load(all + (size_t)((first + k) % ranks) * n * size_of(c.type), i, c.type);
        if (c.op == ncclAvg && !whole) x = rounded(x * rounded(1.0 / ranks, c.type), c.type);
        v = k == 0 ? x : combine(v, x, c.op, c.type);
        if (ring) v = rounded(v, c.type);
    }
    return c.op == ncclAvg && whole ? v / ranks : v;
}

// ---------------------------------------------------------------- meeting the other ranks
static bool finish(MPI_Request* request, const Collective& c, const char* stage) {
    static const double limit = getenv("EMU_NCCL_TIMEOUT") ? atof(getenv("EMU_NCCL_TIMEOUT")) : 30;
    double start = seconds();
    for (int done = 0;;) {
        MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (done) return true;
        if (seconds() - start > limit) break;
        usleep(50);
    }
    report("NCCL", c.pc, nullptr,
           "%s (number %ld of this communicator): other ranks did not come within %g s (%s; EMU_NCCL_TIMEOUT)",
           kind_name[c.kind], (long)c.comm->sequence, limit, stage);
    MPI_Abort(MPI_COMM_WORLD, 1);
    return false;
}

// EMU_NCCL_LOG=FILE: a line for each collective that rank 0 runs: its name, elements, bytes of an element, ranks
static void log_collective(const Collective& c) {
    if (c.comm->rank != 0 || !getenv("EMU_NCCL_LOG")) return;
    static FILE* file = fopen(getenv("EMU_NCCL_LOG"), "w");
    if (!file) return;
    fprintf(file, "%s %zu %zu %d\n", kind_name[c.kind], c.count, size_of(c.type), c.comm->ranks);
    fflush(file);
}

// Tells the others, once, which collective this rank is about to run.
static void meet(const Collective& c) {
    Meeting& m = *c.meeting;
    if (m.begun) return;
    m.begun = true;
    c.comm->sequence++;
    log_collective(c);
    if (c.comm->mpi == MPI_COMM_NULL) return;
    const int64_t mine[6] = {c.comm->sequence, c.kind, (int64_t)c.count, c.type, c.op, c.root};
    memcpy(m.mine, mine, sizeof mine);
    m.all.resize((size_t)c.comm->ranks * 6);
    MPI_Iallgather(m.mine, 6, MPI_INT64_T, m.all.data(), 6, MPI_INT64_T, c.comm->mpi, &m.request);
}

// True if the others have come to it, or nobody needs to wait for them.
static bool others_are_here(const Collective& c) {
    if (c.comm->mpi == MPI_COMM_NULL || c.comm->aborted || c.comm->error != ncclSuccess) return true;
    meet(c);
    int done = 0;
    MPI_Test(&c.meeting->request, &done, MPI_STATUS_IGNORE);
    return done;
}

// Waits for the others. True if all ranks are about to run the same collective.
static bool agreed(const Collective& c) {
    const Meeting& m = *c.meeting;
    if (!finish(&c.meeting->request, c, "comparing")) return false;
    for (int i = 0; i < c.comm->ranks; i++) {
        const int64_t* other = &m.all[(size_t)i * 6];
        if (!memcmp(m.mine, other, sizeof m.mine)) continue;
        report("NCCL", c.pc, nullptr,
               "rank %d runs %s of %zu elements as collective number %ld, rank %d runs %s of %ld elements (or another "
               "type, operation or root)",
               c.comm->rank, kind_name[c.kind], c.count, (long)c.comm->sequence, i, kind_name[other[1]],
               (long)other[2]);
        c.comm->error = ncclInvalidUsage;
        return false;
    }
    return true;
}

static std::vector<char> gather(const Collective& c, size_t bytes) {
    std::vector<char> all(bytes * (size_t)c.comm->ranks);
    if (c.comm->mpi == MPI_COMM_NULL) {                // a single rank needs no MPI
        memcpy(all.data(), c.send, bytes);
        return all;
    }
    MPI_Request r;
    MPI_Iallgather(c.send, (int)bytes, MPI_BYTE, all.data(), (int)bytes, MPI_BYTE, c.comm->mpi, &r);
    finish(&r, c, "exchanging");
    return all;
}

static void run(const Collective& c) {
    ncclComm* comm = c.comm;
    if (comm->aborted || comm->error != ncclSuccess) {
        static std::vector<std::shared_ptr<Meeting>> abandoned; // MPI may still write into them
        abandoned.push_back(c.meeting);
        return;
    }
    meet(c);
    c.meeting->begun = false;                          // a captured one may run again
    if (comm->mpi != MPI_COMM_NULL && !agreed(c)) return;
    size_t size = size_of(c.type), ranks = (size_t)comm->ranks, rank = (size_t)comm->rank;
    size_t sent = c.kind == REDUCE_SCATTER ? c.count * ranks : c.count,
           received = c.kind == ALL_GATHER ? c.count * ranks : c.count;
    bool gives = c.kind != BROADCAST || comm->rank == c.root, takes = c.kind != REDUCE || comm->rank == c.root;
    if (gives) check_op_touch(c.send, sent * size, false);
    std::vector<char> all =
        gather(gives ? c : Collective{c.kind, c.recv, c.recv, c.count, c.type, c.op, c.root, c.comm, c.stream, c.pc},
               sent * size);
    if (!takes) return;
    check_op_touch(c.recv, received * size, true);
    if (c.kind == ALL_GATHER) memcpy(c.recv, all.data(), received * size);
    else if (c.kind == BROADCAST) memcpy(c.recv, all.data() + (size_t)c.root * sent * size, received * size);
    else
        for (size_t i = 0; i < received; i++)
            store(c.recv, i, c.type,
                  reduce_one(all.data(), c.kind == REDUCE_SCATTER ? rank * c.count + i : i, sent, c));
}

// ---------------------------------------------------------------- issuing
static ncclResult_t wrong(const Collective& c, const char* text) {
    report("NCCL", c.pc, nullptr, "%s: %s", kind_name[c.kind], text);
    return ncclInvalidArgument;
}

static bool alive(ncclComm* c, const char* call, void* pc) {
    if (c && c->magic == ALIVE) return true;
    report("NCCL", pc, nullptr, "%s: the communicator was never created, or was destroyed or aborted", call);
    return false;
}

static OpRef enqueue_collective(const Collective& c) {
    return enqueue(c.stream, kind_name[c.kind], c.pc, [c] { run(c); }, [c] { return others_are_here(c); });
}

static ncclResult_t issue(const Collective& c) {
    if (!alive(c.comm, kind_name[c.kind], c.pc)) return ncclInvalidArgument;
    if (!size_of(c.type)) return wrong(c, "this data type is not emulated");
    size_t left, ranks = (size_t)c.comm->ranks, size = size_of(c.type);
    size_t sent = (c.kind == REDUCE_SCATTER ? c.count * ranks : c.count) * size,
           received = (c.kind == ALL_GATHER ? c.count * ranks : c.count) * size;
    bool gives = c.kind != BROADCAST || c.comm->rank == c.root;
    if (gives && !valid_device_range(c.send, sent, &left))
        return wrong(c, "the send buffer is not device memory of that size");
    if (!valid_device_range(c.recv, received, &left))
        return wrong(c, "the receive buffer is not device memory of that size");
    const char *s = (const char*)c.send, *r = (const char*)c.recv;
    const char* in_place = c.kind == ALL_GATHER       ? r + (size_t)c.comm->rank * sent
                           : c.kind == REDUCE_SCATTER ? r - (size_t)c.comm->rank * received
                                                      : r;
    if (gives && s < r + received && r < s + sent && s != in_place)
        return wrong(c, "the buffers overlap, but not as in-place operation demands");
    if (group_depth) {
        group.push_back(c);
        return ncclSuccess;
    }
    return enqueue_collective(c) ? ncclSuccess : ncclInvalidArgument;
}

}
using namespace emu;

extern "C" {
const char* ncclGetErrorString(ncclResult_t r) {
    static const char* text[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                                 "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
    return r >= 0 && r < 8 ? text[r] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetVersion(int* v) {
    MAY_FAIL;
    *v = NCCL_VERSION_CODE;
    return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    MAY_FAIL;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "emu %d %.9f", (int)getpid(), seconds());
    return ncclSuccess;
}
static ncclResult_t init_rank(ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank, void* pc) {
    int ready = 0, world = 1;
    MPI_Initialized(&ready);
    if (ready) MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (ranks < 1 || rank < 0 || rank >= ranks || (ranks > 1 && ranks != world)) {
        report("NCCL", pc, nullptr,
               "ncclCommInitRank(%d ranks, rank %d): MPI runs %d processes (mpirun -np), a communicator has one or all "
               "of them",
               ranks, rank, world);
        return ncclInvalidArgument;
    }
    auto* c = new ncclComm{ALIVE, MPI_COMM_NULL, ranks, rank, 0, ncclSuccess, false};
    if (ranks > 1) {
        MPI_Comm_split(MPI_COMM_WORLD, 0, rank, &c->mpi);
        ncclUniqueId first = id;
        MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, c->mpi);
        if (memcmp(&first, &id, sizeof id)) {
            report("NCCL", pc, nullptr,
                   "ncclCommInitRank: rank %d has another unique id than rank 0 (it was not broadcast)", rank);
            return ncclInvalidArgument;
        }
    }
    *out = c;
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* c, int ranks, ncclUniqueId id, int rank) {
    MAY_FAIL;
    return init_rank(c, ranks, id, rank, PC);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
    MAY_FAIL;
    return init_rank(c, ranks, id, rank, PC);
}
ncclResult_t ncclCommFinalize(ncclComm_t) { MAY_FAIL; return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    MAY_FAIL;
    if (!alive(c, "ncclCommDestroy", PC)) return ncclInvalidArgument;
    synchronize("ncclCommDestroy", PC);
    int over = 0;
    MPI_Finalized(&over);
    if (c->mpi != MPI_COMM_NULL && !over && !c->aborted) MPI_Comm_free(&c->mpi);
    c->magic = 0;
    bury(c);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) {
    MAY_FAIL;
    if (!alive(c, "ncclCommAbort", PC)) return ncclInvalidArgument;
    c->aborted = true;                                 // what was issued and has not run never will
    c->magic = 0;
    bury(c);
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* r) {
    MAY_FAIL;
    if (!alive(c, "ncclCommGetAsyncError", PC)) return ncclInvalidArgument;
    *r = c->error;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
    MAY_FAIL;
    if (!alive(c, "ncclCommCount", PC)) return ncclInvalidArgument;
    *n = c->ranks;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* r) {
    MAY_FAIL;
    if (!alive(c, "ncclCommUserRank", PC)) return ncclInvalidArgument;
    *r = c->rank;
    return ncclSuccess;
}
ncclResult_t ncclGroupStart(void) {
    MAY_FAIL;
    group_depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    MAY_FAIL;
    if (group_depth == 0) {
        report("NCCL", PC, nullptr, "ncclGroupEnd without ncclGroupStart");
        return ncclInvalidUsage;
    }
    if (--group_depth) return ncclSuccess;
    std::vector<Collective> all;
    all.swap(group);
    for (auto& c : all) enqueue_collective(c);
    return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t st) {
    MAY_FAIL;
    return issue({ALL_REDUCE, s, r, n, t, op, 0, c, st, PC});
}
ncclResult_t ncclReduceScatter(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t st) {
    MAY_FAIL;
    return issue({REDUCE_SCATTER, s, r, n, t, op, 0, c, st, PC});
}
ncclResult_t ncclAllGather(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
    MAY_FAIL;
    return issue({ALL_GATHER, s, r, n, t, ncclSum, 0, c, st, PC});
}
ncclResult_t ncclBroadcast(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t st) {
    MAY_FAIL;
    return issue({BROADCAST, s, r, n, t, ncclSum, root, c, st, PC});
}
ncclResult_t ncclBcast(void* p, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) {
    MAY_FAIL;
    return issue({BROADCAST, p, p, n, t, ncclSum, root, c, st, PC});
}
ncclResult_t ncclReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c,
                        cudaStream_t st) {
    MAY_FAIL;
    return issue({REDUCE, s, r, n, t, op, root, c, st, PC});
}
}
