// launcher.h: whether mpirun or srun has started this program, without asking MPI.
#ifndef LLMC_LAUNCHER_H
#define LLMC_LAUNCHER_H

#include "check.h"
#include <unistd.h>

// What a launcher says of the processes that it started, in the variables of Open MPI, MPICH and Intel MPI, MVAPICH, and
// Slurm's srun: how many there are, and which of them this is. 0: nobody says anything.
static const char* const launcher_size_names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"};
static const char* const launcher_rank_names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"};
static inline int launcher_number(const char* const names[4]) {
    for (int i = 0; i < 4; i++) {
        const char* value = getenv(names[i]);
        if (value != NULL && atoi(value) > 0) { return atoi(value); }
    }
    return 0;
}
static inline int launcher_ranks(void) { return launcher_number(launcher_size_names); }

// For a program that is one process: several would do the same thing several times. why: how the sentence "started as N
// processes, but this program" goes on.
static inline void launcher_refuse_ranks(const char* why) {
    if (launcher_ranks() <= 1) { return; }
    if (launcher_number(launcher_rank_names) > 0) { sleep(2); } // each is alone, and the first one says it
    fatal("started as %d processes, but this program %s", launcher_ranks(), why);
}

#endif
