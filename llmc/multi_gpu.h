// multi_gpu.h: the processes of a run, one a GPU: who they are, how they begin, are connected and end together. MPI
// starts them and carries what lies in host memory. What travels between their GPUs stands in train_moe.cu. With one rank
// nothing here touches MPI or NCCL; built with NO_MPI=1 or NO_NCCL=1 there is one rank only.
#ifndef LLMC_MULTI_GPU_H
#define LLMC_MULTI_GPU_H

#include "check.h"
#include "checkpoint.h"
#include "cli.h"
#include "config_json.h"
#include "cuda_check.h"
#include "cuda_device.h"
#include "launcher.h"
#include "profiler.h"
#include "signals.h"
#include <cuda_bf16.h>
#if defined(NO_MPI) || defined(NO_NCCL)
#define ONE_RANK_ONLY
typedef void* ncclComm_t; // so that train_moe.cu's collectives compile; with one rank nobody comes to them
#define ncclAllReduce(from, to, ...) ((void)(from), (void)(to))
#define ncclCheck(call) (call)
#else
#include "nccl_check.h" // MPI and NCCL
#endif

enum { MOST_COLLECTIVES = 16 }; // issued and not done; the host goes no further ahead

typedef struct {
    int rank, num_ranks;            // among all processes
    int local_rank, local_ranks;    // among those of this machine
    int device, num_devices;        // the GPU of this rank; how many this machine has
    cudaDeviceProp properties;      // of that GPU
    bool bf16_gradients;            // what travels: bf16 or fp32
    double timeout;                 // seconds after which ranks no longer wait for each other's gradients
    int nccl_version;               // 22809 is 2.28.9; 0 with one rank
    double connect_ms;              // for connecting and the self-test
    cudaStream_t stream;            // of all collectives
    cudaEvent_t ready;              // what compute had to write for the collective issued last is written
    cudaEvent_t begun[MOST_COLLECTIVES], ended[MOST_COLLECTIVES]; // of collective i at i % MOST_COLLECTIVES
    unsigned issued, oldest;        // how many collectives there were; the first that is not known to be done
    __nv_bfloat16* staging;         // (largest bucket) gradients on their way
    bool first;                     // rank 0, while the others wait for it to go first
    ncclComm_t comm;
} MultiGpu;

// all_reduce_bucket of train_moe.cu: grads[0..count) = their average over all ranks, once compute has written them
typedef void (*AllReduce)(MultiGpu* g, float* grads, size_t count, cudaStream_t compute, bool overlap);

#ifdef ONE_RANK_ONLY

static inline void multi_gpu_open(MultiGpu* g, int* argc, char*** argv) {
    (void)argc, (void)argv;
    memset(g, 0, sizeof(*g));
    g->num_ranks = g->local_ranks = 1;
    launcher_refuse_ranks("was built without MPI or NCCL (NO_MPI=1, NO_NCCL=1) and knows one GPU: build it anew with both, "
                          "or start it without mpirun");
}
static inline void multi_gpu_first(MultiGpu* g) { (void)g; }
static inline void multi_gpu_rest(MultiGpu* g) { (void)g; }
static inline void multi_gpu_let_rank0_speak(const MultiGpu* g, int seconds) { (void)g, (void)seconds; }
template <class Kernel> void multi_gpu_device(MultiGpu* g, Kernel kernel) {
    g->num_devices = cuda_count_devices();
    g->properties = cuda_use_device(g->device, kernel);
}
static inline void multi_gpu_connect(MultiGpu* g, AllReduce all_reduce, size_t largest_bucket, bool bf16_gradients) {
    (void)g, (void)all_reduce, (void)largest_bucket, (void)bf16_gradients;
}
static inline void multi_gpu_wait(MultiGpu* g, cudaEvent_t event) {
    (void)g;
    cudaCheck(cudaEventSynchronize(event));
}
static inline void multi_gpu_wait_for_collectives(MultiGpu* g) { (void)g; }
static inline void multi_gpu_barrier(MultiGpu* g) { (void)g; }
static inline void multi_gpu_broadcast(MultiGpu* g, void* data, size_t bytes) { (void)g, (void)data, (void)bytes; }
static inline void multi_gpu_sum(MultiGpu* g, double* sums, size_t n) { (void)g, (void)sums, (void)n; }
static inline bool multi_gpu_stop_flag(MultiGpu* g, bool mine) {
    (void)g;
    return mine;
}
static inline void multi_gpu_close(MultiGpu* g) { (void)g; }

#else

static MultiGpu* multi_gpu_at_exit; // whose MPI has to be finished, NULL: none
static int multi_gpu_own_rank;

// Waits for a message of `rank`, without using a core. Who is not here after the time-out is named, who is not after
// `seconds` ends the run: rank 0 may read data or write a checkpoint for minutes.
static inline void multi_gpu_receive(MultiGpu* g, MPI_Request* request, int rank, double seconds) {
    double begin = profiler_clock_us();
    int others = g->rank - (rank < g->rank); // wait, too, and come before this rank: each says it a time-out later
    double patience = g->timeout * (1 + others);
    bool said = false;
    for (int done = 0;; usleep(100)) {
        mpiCheck(MPI_Test(request, &done, MPI_STATUS_IGNORE));
        if (done) { return; }
        double waited = (profiler_clock_us() - begin) / 1e6;
        if (waited >= seconds) { fatal("rank %d has not come for %.6g s (MOE_NCCL_TIMEOUT): has it been stopped?", rank, seconds); }
        if (waited >= patience && !said) {
            fprintf(stderr, "%s: waiting for rank %d for %.6g s: is it busy with files, or has it been stopped?\n",
                    program_name, rank, patience);
            said = true;
        }
    }
}

// All ranks tell each other a number, and get the largest. Nobody goes on before all are here.
static inline int multi_gpu_meet(MultiGpu* g, int mine, double seconds) {
    size_t R = (size_t)g->num_ranks;
    MPI_Request* requests = (MPI_Request*)mallocCheck(2 * R * sizeof(MPI_Request));
    int* theirs = (int*)callocCheck(R, sizeof(int));
    for (int r = 0; r < g->num_ranks; r++) {
        mpiCheck(MPI_Irecv(&theirs[r], 1, MPI_INT, r, 0, MPI_COMM_WORLD, &requests[r]));
        mpiCheck(MPI_Isend(&mine, 1, MPI_INT, r, 0, MPI_COMM_WORLD, &requests[R + (size_t)r]));
    }
    int largest = mine;
    for (int r = 0; r < g->num_ranks; r++) {
        multi_gpu_receive(g, &requests[r], r, seconds);
        largest = theirs[r] > largest ? theirs[r] : largest;
    }
    for (int r = 0; r < g->num_ranks; r++) { multi_gpu_receive(g, &requests[R + (size_t)r], r, seconds); }
    free(theirs);
    free(requests);
    return largest;
}
// Whatever one rank does alone (a checkpoint, a sample) needs a barrier after it: a rank that waits in an all-reduce
// takes the others for lost much sooner.
static inline void multi_gpu_barrier(MultiGpu* g) {
    if (g->num_ranks > 1) { multi_gpu_meet(g, 0, 60 * g->timeout); }
}
// true on all ranks if it is on any: a Ctrl-C that one of them got stops all after the same step
static inline bool multi_gpu_stop_flag(MultiGpu* g, bool mine) {
    return g->num_ranks > 1 ? multi_gpu_meet(g, mine, g->timeout) != 0 : mine;
}
// what rank 0 has in data (host memory), for all
static inline void multi_gpu_broadcast(MultiGpu* g, void* data, size_t bytes) {
    if (g->num_ranks == 1) { return; }
    MPI_Request request;
    mpiCheck(MPI_Ibcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD, &request));
    multi_gpu_receive(g, &request, 0, 60 * g->timeout);
}

// sums[0..n) (host memory) = their sum over all ranks. The order of the terms is MPI's: all but one of them
// must be 0, or all of them integers.
static inline void multi_gpu_sum(MultiGpu* g, double* sums, size_t n) {
    if (g->num_ranks == 1) { return; }
    multi_gpu_barrier(g); // MPI's own collective would wait for a stopped rank without a word
    watchdog_start(20 + g->timeout, g->rank, "adding up over the ranks (MPI)");
    mpiCheck(MPI_Allreduce(MPI_IN_PLACE, sums, (int)n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD));
    watchdog_stop();
}

// Waits for another rank's message to end this one, too. mpirun sends a signal after the time that it leaves ranks to end by
// themselves (odls_base_sigkill_timeout), and kills them when as much has passed again.
static inline void multi_gpu_await_the_end(int seconds) {
    bool before = interrupted(); // by somebody else, long ago
    for (int i = 0; i < 10 * seconds; i++) {
        usleep(100000);
        if (interrupted() && !before) {
            sleep_through(600);
            return;
        }
    }
}
// before a fatal() that other ranks, too, come to: one message is enough, and rank 0's ends them all. So long the others
// hold back their own.
static inline void multi_gpu_let_rank0_speak(const MultiGpu* g, int seconds) {
    if (g->rank > 0) { multi_gpu_await_the_end(seconds); }
}

// One GPU a rank, the same for the whole run. kernel: any of the program's, to see that the GPU can load it.
template <class Kernel> void multi_gpu_device(MultiGpu* g, Kernel kernel) {
    if (cudaGetDeviceCount(&g->num_devices) != cudaSuccess) { multi_gpu_let_rank0_speak(g, 10); }
    g->num_devices = cuda_count_devices();
    g->device = g->local_rank % g->num_devices;
    g->properties = cuda_use_device(g->device, kernel);
}

// Slurm may show each rank its own GPU only; that two ranks do not share one is therefore seen by the GPUs' names, not
// by their number.
static inline void multi_gpu_check_devices(MultiGpu* g) {
    typedef struct { char bus[32]; cudaUUID_t uuid; } Name; // the uuid tells the parts of a GPU from each other (MIG)
    watchdog_start(20 + g->timeout, g->rank, "comparing the GPUs of this machine (MPI)");
    MPI_Comm node;
    mpiCheck(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, g->rank, MPI_INFO_NULL, &node));
    Name mine, *names = (Name*)callocCheck((size_t)g->local_ranks, sizeof(Name));
    memset(&mine, 0, sizeof(mine));
    cudaCheck(cudaDeviceGetPCIBusId(mine.bus, sizeof(mine.bus), g->device));
    mine.uuid = g->properties.uuid;
    mpiCheck(MPI_Allgather(&mine, sizeof(mine), MPI_BYTE, names, sizeof(mine), MPI_BYTE, node));
    int different = 0;
    for (int i = 0; i < g->local_ranks; i++) {
        int earlier = 0;
        while (memcmp(&names[earlier], &names[i], sizeof(Name)) != 0) { earlier++; }
        different += earlier == i;
    }
    if (different < g->local_ranks) {
        multi_gpu_let_rank0_speak(g, 10);
        fatal("%d ranks on this machine, but only %d GPU%s for them: one process a GPU, mpirun -n %d "
              "(CUDA_VISIBLE_DEVICES chooses which)", g->local_ranks, different, different == 1 ? "" : "s", different);
    }
    free(names);
    mpiCheck(MPI_Comm_free(&node));
    watchdog_stop();
}

// What stands between multi_gpu_first and multi_gpu_rest rank 0 does before the others do it, so that a wrong option or
// a missing file is reported once. Where it ends the program there (--help), the others end with it.
static inline void multi_gpu_first(MultiGpu* g) {
    int go_on = 0;
    g->first = g->rank == 0;
    if (g->rank > 0) { multi_gpu_broadcast(g, &go_on, sizeof(go_on)); }
    if (g->rank > 0 && !go_on) { exit(0); }
}
static inline void multi_gpu_rest(MultiGpu* g) {
    int go_on = 1;
    if (g->first) { multi_gpu_broadcast(g, &go_on, sizeof(go_on)); }
    g->first = false;
    multi_gpu_barrier(g); // MPI's own collectives would wait for a stopped rank without a word
    if (g->num_ranks > 1) { multi_gpu_check_devices(g); }
}

static inline void finish_at_exit(void) {
    MultiGpu* g = multi_gpu_at_exit;
    if (g == NULL) { return; }
    multi_gpu_at_exit = NULL;
    int go_on = 0;
    if (g->first) { multi_gpu_broadcast(g, &go_on, sizeof(go_on)); }
    watchdog_start(20 + g->timeout, g->rank, "taking leave of the other ranks (MPI)");
    MPI_Finalize(); // a rank that leaves without it looks like a crash to mpirun
    watchdog_stop();
    fatal_hook = NULL;
}

static inline void multi_gpu_name_rank(const MultiGpu* g) { // its messages begin with "train_moe: rank 3: "
    static char name[80];
    snprintf(name, sizeof(name), "%.60s: rank %d", program_name, g->rank);
    program_name = name;
}

// A fault that all ranks come to is reported once: the first that can speaks for all and ends them.
static inline void multi_gpu_patience(void) { multi_gpu_await_the_end(ranks_patience(multi_gpu_own_rank)); }

// MPI, and who we are; nothing of CUDA yet. Afterwards only rank 0 prints to stdout.
static inline void multi_gpu_open(MultiGpu* g, int* argc, char*** argv) {
    memset(g, 0, sizeof(*g));
    g->num_ranks = g->local_ranks = 1;
    const char* seconds = getenv("MOE_NCCL_TIMEOUT");
    bool told = seconds != NULL && atof(seconds) > 0 && atof(seconds) <= 1e6;
    g->timeout = told ? atof(seconds) : 60;
    int started = launcher_ranks();
    if (started == 1 || (started == 0 && getenv("PMIX_RANK") == NULL)) { return; } // one rank: no MPI
    // NCCL shall make all connections at the start, where a watchdog looks on and the card has room. By itself it makes
    // them in the first collective that wants them, within ncclAllReduce (since 2.22).
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);
    int threads;
    if (MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &threads) != MPI_SUCCESS) { fatal("MPI_Init failed"); }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN); // mpiCheck prints them
    mpiCheck(MPI_Comm_rank(MPI_COMM_WORLD, &g->rank));
    mpiCheck(MPI_Comm_size(MPI_COMM_WORLD, &g->num_ranks));
    if (g->num_ranks == 1 && launcher_ranks() > 1) {
        launcher_let_first_speak();
        fatal("%d processes were started, but this program's MPI sees only itself: mpirun belongs to another MPI than "
              "the one it was built with (or srun needs --mpi=pmix)", launcher_ranks());
    }
    ranks_any_thread = threads == MPI_THREAD_MULTIPLE; // the loader's thread may fail, too
    ranks_abort_together();
    multi_gpu_at_exit = g;
    multi_gpu_own_rank = g->rank;
    atexit(finish_at_exit);
    watchdog_start(20 + g->timeout, g->rank, "meeting the ranks of this machine (MPI)");
    MPI_Comm node;
    mpiCheck(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, g->rank, MPI_INFO_NULL, &node));
    mpiCheck(MPI_Comm_rank(node, &g->local_rank));
    mpiCheck(MPI_Comm_size(node, &g->local_ranks));
    mpiCheck(MPI_Comm_free(&node));
    watchdog_stop();
    if (g->rank > 0) {
        fatal_patience = multi_gpu_patience;
        multi_gpu_name_rank(g);
        if (freopen("/dev/null", "w", stdout) == NULL) { fatal("cannot open /dev/null"); }
    }
    if (seconds != NULL && !told) {
        fatal("MOE_NCCL_TIMEOUT=%s: it must be a number of seconds above 0 and up to 1e6 (without it ranks wait 60)",
              seconds);
    }
}

// Moves `oldest` on. Whether this rank's GPU has come to that collective and is not through it: it waits for other ranks, or
// data is on its way.
static inline bool multi_gpu_in_collective(MultiGpu* g) {
    while (g->oldest != g->issued && cudaEventQuery(g->ended[g->oldest % MOST_COLLECTIVES]) == cudaSuccess) { g->oldest++; }
    bool within = g->oldest != g->issued && cudaEventQuery(g->begun[g->oldest % MOST_COLLECTIVES]) == cudaSuccess;
    cudaGetLastError(); // "not ready" is no error, but is kept as the last one
    return within;
}

// The host waits for an event of this rank's GPU. A collective that some rank never joins does not end by itself, so
// the host looks for NCCL's errors meanwhile, and at how long its GPU has been in one and the same collective.
static inline void multi_gpu_wait(MultiGpu* g, cudaEvent_t event) {
    if (g->num_ranks == 1) {
        cudaCheck(cudaEventSynchronize(event));
        return;
    }
    double since = 0; // when this rank's GPU was first seen in the collective that it is in; 0: it is in none
    unsigned which = 0;
    for (;;) {
        cudaError_t status = cudaEventQuery(event);
        bool within = multi_gpu_in_collective(g);
        if (status == cudaSuccess) { return; }
        if (status != cudaErrorNotReady) { cuda_check(status, "cudaEventQuery(event)", __FILE__, __LINE__); }
        ncclResult_t result = ncclSuccess;
        ncclCheck(ncclCommGetAsyncError(g->comm, &result));
        if (result != ncclSuccess && result != ncclInProgress) {
            nccl_check(result, "averaging over ranks", __FILE__, __LINE__);
        }
        double now = profiler_clock_us();
        if (!within || since == 0 || which != g->oldest) { since = within ? now : 0; }
        which = g->oldest;
        if (within && now - since > 1e6 * g->timeout) {
            fatal("other ranks have not come to an all-reduce within %.0f s (MOE_NCCL_TIMEOUT): has one been stopped, "
                  "or a GPU been lost? Try: %s", g->timeout, nccl_advice());
        }
        usleep(100);
    }
}
static inline void multi_gpu_wait_for_collectives(MultiGpu* g) { // all that were issued
    if (g->issued == 0) { return; }
    cuda_waits++;
    multi_gpu_wait(g, g->ended[(g->issued - 1) % MOST_COLLECTIVES]);
}

// Averages numbers that everyone knows, on the very path that the gradients will take.
static inline void multi_gpu_self_test(MultiGpu* g, AllReduce all_reduce, size_t n) {
    float *host = (float*)mallocCheck(n * sizeof(float)), *numbers;
    cudaCheck(cudaMalloc((void**)&numbers, n * sizeof(float)));
    for (size_t i = 0; i < n; i++) { host[i] = (float)(i % 7) + (float)g->rank; }
    cudaCheck(cudaMemcpyAsync(numbers, host, n * sizeof(float), cudaMemcpyHostToDevice, g->stream));
    all_reduce(g, numbers, n, g->stream, true);
    cudaCheck(cudaMemcpyAsync(host, numbers, n * sizeof(float), cudaMemcpyDeviceToHost, g->stream));
    cudaCheck(cudaEventRecord(g->ready, g->stream));
    multi_gpu_wait(g, g->ready);
    double rounding = g->bf16_gradients ? g->num_ranks / 256.0 : 1e-5; // of sums in bf16, one a hop; of sums in fp32
    for (size_t i = 0; i < n; i++) {
        double want = (double)(i % 7) + (g->num_ranks - 1) / 2.0;
        if (!(fabs(host[i] - want) <= rounding * (want + 1))) {
            fatal("all-reduce self-test (%s): number %zu is %g, not %g: GPUs read each other's memory wrongly. Try: %s",
                  g->bf16_gradients ? "bf16" : "fp32", i, host[i], want, nccl_advice());
        }
    }
    cudaCheck(cudaFree(numbers));
    free(host);
}

// NCCL's communicator, proven to work. largest_bucket: elements of the longest all_reduce
static inline void multi_gpu_connect(MultiGpu* g, AllReduce all_reduce, size_t largest_bucket, bool bf16_gradients) {
    if (g->num_ranks == 1) { return; }
    double begin = profiler_clock_us();
    if (g->rank == 0) { multi_gpu_name_rank(g); } // from here on each rank can be the one that fails
    // Of a higher priority than compute: else a collective waits until all blocks of the kernel before it have begun.
    int lowest, highest;
    cudaCheck(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaCheck(cudaStreamCreateWithPriority(&g->stream, cudaStreamNonBlocking, highest));
    cudaCheck(cudaEventCreateWithFlags(&g->ready, cudaEventDisableTiming));
    for (int i = 0; i < MOST_COLLECTIVES; i++) {
        cudaCheck(cudaEventCreateWithFlags(&g->begun[i], cudaEventDisableTiming));
        cudaCheck(cudaEventCreateWithFlags(&g->ended[i], cudaEventDisableTiming));
    }
    largest_bucket = (largest_bucket + 7) / 8 * 8;
    if (bf16_gradients) { cudaCheck(cudaMalloc((void**)&g->staging, largest_bucket * sizeof(__nv_bfloat16))); }
    ncclUniqueId id;
    if (g->rank == 0) { ncclCheck(ncclGetUniqueId(&id)); }
    multi_gpu_broadcast(g, &id, sizeof(id));
    watchdog_start(g->timeout, g->rank, "connecting the ranks (NCCL)");
    ncclCheck(ncclGetVersion(&g->nccl_version));
    ncclCheck(ncclCommInitRank(&g->comm, g->num_ranks, id, g->rank));
    watchdog_start(g->timeout, g->rank, "the all-reduce self-test");
    size_t n = largest_bucket < 262144 ? largest_bucket : 262144;
    multi_gpu_self_test(g, all_reduce, n); // in fp32
    g->bf16_gradients = bf16_gradients;
    if (bf16_gradients) { multi_gpu_self_test(g, all_reduce, n); }
    watchdog_stop();
    g->connect_ms = (profiler_clock_us() - begin) / 1e3;
}

static inline void multi_gpu_close(MultiGpu* g) {
    if (g->num_ranks > 1 && g->comm != NULL) {
        multi_gpu_barrier(g); // rank 0 may have a file to write
        watchdog_start(20 + g->timeout, g->rank, "taking leave of the other ranks (NCCL)");
        cudaCheck(cudaStreamSynchronize(g->stream));
        ncclCheck(ncclCommDestroy(g->comm));
        watchdog_stop();
        cudaCheck(cudaStreamDestroy(g->stream));
        cudaCheck(cudaEventDestroy(g->ready));
        for (int i = 0; i < MOST_COLLECTIVES; i++) {
            cudaCheck(cudaEventDestroy(g->begun[i]));
            cudaCheck(cudaEventDestroy(g->ended[i]));
        }
        cudaCheck(cudaFree(g->staging));
        g->comm = NULL;
    }
    finish_at_exit();
}
#endif

// of_rank0[0..n) = what rank 0 has as mine
static inline void multi_gpu_of_rank0(MultiGpu* g, uint64_t* of_rank0, const uint64_t* mine, size_t n) {
    memcpy(of_rank0, mine, n * sizeof(*mine));
    multi_gpu_broadcast(g, of_rank0, n * sizeof(*mine));
}

// mpirun can give each rank options of its own, and files may be others on other machines: what all must have in common
// is compared before they meet on their GPUs.
static inline void multi_gpu_check_run(MultiGpu* g, const Options* opt, const MoEConfig* config) {
    if (g->num_ranks == 1) { return; }
    cJSON* json = config_to_json(config, "");
    char* text = cJSON_PrintUnformatted(json);
    uint64_t mine[2 + OPTIONS_MAX], of_rank0[2 + OPTIONS_MAX];
    mine[0] = (uint64_t)opt->done_steps;
    mine[1] = hash_string(text);
    options_agreement(opt, mine + 2);
    int val_steps = option_find("val-steps"); // --eval takes all sequences unless it is told how many
    if (opt->eval) { mine[2 + val_steps] ^= opt->given[val_steps] && !opt->inherited[val_steps]; }
    if (opt->eval_choices) { file_hash(opt->eval_choices, &mine[2 + option_find("eval-choices")]); }
    multi_gpu_of_rank0(g, of_rank0, mine, 2 + OPTIONS_MAX);
    if (of_rank0[0] != mine[0]) {
        fatal("rank 0 resumes step %llu, this rank step %llu: do all machines see the same --out?",
              (unsigned long long)of_rank0[0], (unsigned long long)mine[0]);
    }
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (of_rank0[2 + i] == mine[2 + i]) { continue; }
        fatal("this rank comes to another --%s than rank 0: do all have the same options and files?",
              option_table[i].name);
    }
    if (of_rank0[1] != mine[1]) {
        fatal("this rank has another model than rank 0: do all have the same config.json and --train-data?");
    }
    cJSON_free(text);
    cJSON_Delete(json);
    multi_gpu_barrier(g); // no rank waits for one that still wants to say what is wrong
}

// the same for what was loaded: hashes of it
static inline void multi_gpu_check_loaded(MultiGpu* g, uint64_t weights, uint64_t train_data, uint64_t val_data) {
    if (g->num_ranks == 1) { return; }
    const char* whats[3] = {"starts from other weights", "sees other --train-data", "sees other --val-data"};
    const uint64_t mine[3] = {weights, train_data, val_data};
    uint64_t of_rank0[3];
    multi_gpu_of_rank0(g, of_rank0, mine, 3);
    for (int i = 0; i < 3; i++) {
        if (of_rank0[i] == mine[i]) { continue; }
        fatal("this rank %s than rank 0: do all machines have the same files?", whats[i]);
    }
    multi_gpu_barrier(g); // nobody waits in an all-reduce for a rank that has a slow disk
}

// The machine in words: how many of which GPU, FLOP/s of one by its data sheet and measured (NAN: not known), the ranks.
static inline void multi_gpu_describe(const MultiGpu* g, char* text, size_t size, double nominal_peak,
                                      double measured_peak) {
    char nominal[60] = "", measured[60] = "", ranks[100] = "";
    if (isfinite(nominal_peak)) { snprintf(nominal, sizeof(nominal), ", %.1f TFLOP/s nominal", nominal_peak / 1e12); }
    if (isfinite(measured_peak)) { snprintf(measured, sizeof(measured), ", %.1f measured", measured_peak / 1e12); }
    if (g->num_ranks > 1) {
        snprintf(ranks, sizeof(ranks), "\nranks      %d, NCCL %d, all-reduce tested in %.0f ms", g->num_ranks,
                 g->nccl_version, g->connect_ms);
    }
    snprintf(text, size, "%d x %s (sm_%d%d, %.1f GiB)%s%s%s", g->num_ranks, g->properties.name, g->properties.major,
             g->properties.minor, (double)g->properties.totalGlobalMem / (1 << 30), nominal, measured, ranks);
}

#endif
