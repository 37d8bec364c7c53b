// nccl_check.h: how a program of several ranks stops. ncclCheck and mpiCheck print call, reason, place and what to try,
// and end all ranks; a watchdog does the same where a library hangs and so returns nothing that could be checked.
#ifndef LLMC_NCCL_CHECK_H
#define LLMC_NCCL_CHECK_H

#include "check.h"
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/statvfs.h>
#include <unistd.h>
#define OMPI_SKIP_MPICXX 1 // C's interface is enough
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <nccl.h>

// ----------------------------------------------------------------------------
// all ranks stop together

static pthread_t ranks_main_thread;
static bool ranks_any_thread; // MPI may be called from any thread

// fatal's hook: the error of one rank ends all
static inline void ranks_abort(void) {
    alarm(10); // should MPI hang itself, the program ends without its help
    if (ranks_any_thread || pthread_equal(pthread_self(), ranks_main_thread)) { MPI_Abort(MPI_COMM_WORLD, 1); }
    _exit(1); // not from here: mpirun notices, and ends the others
}

// sleep() that a signal does not cut short: mpirun sends one to the ranks that wait for another's message
static inline void sleep_through(unsigned seconds) {
    while (seconds > 0) { seconds = sleep(seconds); }
}

// seconds for which a rank leaves those before it to speak: one message is enough, and it ends all of them
static inline int ranks_patience(int rank) { return rank == 0 ? 0 : 3 + 2 * (rank < 6 ? rank - 1 : 5); }

static char watchdog_message[1500];

static inline void watchdog_fires(int signal_number) {
    static volatile sig_atomic_t fired;
    (void)signal_number;
    if (fired || fatal_hook == NULL) { _exit(1); } // the alarm that ranks_abort has set
    fired = 1;
    if (write(STDERR_FILENO, watchdog_message, strlen(watchdog_message)) >= 0) { ranks_abort(); }
    _exit(1);
}

// what usually is the matter where NCCL fails or hangs, to be tried one after the other
static inline const char* nccl_advice(void) {
    static char text[700];
    struct statvfs shm;
    double mib = statvfs("/dev/shm", &shm) == 0 ? (double)shm.f_bavail * (double)shm.f_frsize / 1048576.0 : 1e9;
    int n = 0;
    if (mib < 1024) {
        n = snprintf(text, sizeof(text), "/dev/shm has only %.0f MiB left: give a container --shm-size=1g or "
                     "--ipc=host; ", mib);
    }
    snprintf(text + n, sizeof(text) - (size_t)n, "NCCL_P2P_DISABLE=1 shows whether it is that GPUs do not reach each "
             "other's memory, as with an IOMMU or PCIe ACS that is on (BIOS; kernel option iommu=pt); "
             "NCCL_SHM_DISABLE=1 and NCCL_SOCKET_IFNAME=... try other ways; NCCL_DEBUG=INFO says more");
    return text;
}

// Ends the program if watchdog_stop is not called within `seconds`.
static inline void watchdog_start(double seconds, int rank, const char* what) {
    snprintf(watchdog_message, sizeof(watchdog_message), "%s: error: %s is not done after %.0f s (MOE_NCCL_TIMEOUT): "
             "the ranks do not reach each other. Try: %s\n", program_name, what, seconds, nccl_advice());
    alarm((unsigned)ceil(seconds) + 2 * (unsigned)ranks_patience(rank)); // they do not begin at the same moment
}
static inline void watchdog_stop(void) { alarm(0); }

static inline void ranks_abort_together(void) { // from now on an error ends all ranks
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = watchdog_fires;
    action.sa_flags = SA_NODEFER; // the second alarm comes through while the first is handled
    sigaction(SIGALRM, &action, NULL);
    ranks_main_thread = pthread_self();
    fatal_hook = ranks_abort;
}

// ----------------------------------------------------------------------------
// checked calls

static inline void mpi_check(int status, const char* call, const char* file, int line) {
    if (status == MPI_SUCCESS) { return; }
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(status, reason, &length);
    fatal("%s failed: %s (%s:%d); one GPU needs no mpirun", call, reason, file, line);
}
#define mpiCheck(call) mpi_check((call), #call, __FILE__, __LINE__)

static inline void nccl_check(ncclResult_t status, const char* call, const char* file, int line) {
    if (status == ncclSuccess) { return; }
    if (status == ncclRemoteError) { sleep_through(3); } // another rank failed first: it says why and ends this one meanwhile
    const char* detail = ncclGetLastError(NULL);
    fatal("%s failed: %s%s%s (%s:%d); try: %s", call, ncclGetErrorString(status), detail != NULL && *detail ? ": " : "",
          detail != NULL ? detail : "", file, line, nccl_advice());
}
#define ncclCheck(call) nccl_check((call), #call, __FILE__, __LINE__)

#endif
