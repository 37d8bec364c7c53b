// launcher.h: whether mpirun or srun has started this program, without asking MPI.
#ifndef LLMC_LAUNCHER_H
#define LLMC_LAUNCHER_H

#include "check.h"
#include <unistd.h>

// What a launcher says of the processes that it started, in the variables of Open MPI, MPICH and Intel MPI, MVAPICH, and
// Slurm's srun: how many there are, and which of them this is. 0: nobody says anything.
static const char* const launcher_size_names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"};
static const char* const launcher_rank_names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"};
static inline const char* launcher_variable(const char* const names[4]) { // which of them is a number above 0
    for (int i = 0; i < 4; i++) {
        const char* value = getenv(names[i]);
        if (value != NULL && atoi(value) > 0) { return names[i]; }
    }
    return NULL;
}
static inline int launcher_ranks(void) {
    const char* name = launcher_variable(launcher_size_names);
    return name != NULL ? atoi(getenv(name)) : 0;
}

// before a message of processes that know nothing of each other
static inline void launcher_let_first_speak(void) {
    if (launcher_variable(launcher_rank_names) != NULL) { sleep(2); }
}

// For a program that is one process: several would do the same thing several times. why: how the sentence "started as N
// processes, but this program" goes on.
static inline void launcher_refuse_ranks(const char* why) {
    if (launcher_ranks() <= 1) { return; }
    launcher_let_first_speak();
    fatal("started as %d processes, but this program %s (for runs that have nothing to do with each other: env -u %s)",
          launcher_ranks(), why, launcher_variable(launcher_size_names));
}

#endif
