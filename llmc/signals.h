// signals.h: a signal asks a training loop to finish its step, to save and to end; and streams that are not there.
#ifndef LLMC_SIGNALS_H
#define LLMC_SIGNALS_H

#include "check.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <unistd.h>

// No handler runs on a thread that computes: oneDNN's code has its stack pointer in the heap at times, and the handler's
// frame would overwrite what lies there. So the threads of the program block these signals, and one waits for them.
static bool signals_stop_the_loop, signal_came; // read and written by two threads: __atomic
static pthread_t signals_thread;
static void (*signals_before[NSIG])(int); // what each would have done

// For threads that a library began before main and that block nothing (OpenBLAS has such): they hand the signal on.
static inline void signals_pass_on(int number) { pthread_kill(signals_thread, number); }

static inline void* signals_wait(void* set) {
    for (;;) {
        int number;
        if (sigwait((const sigset_t*)set, &number) != 0) { continue; }
        if (__atomic_load_n(&signals_stop_the_loop, __ATOMIC_ACQUIRE) && !signal_came) {
            __atomic_store_n(&signal_came, true, __ATOMIC_RELEASE);
            continue;
        }
        signal(number, signal_came ? SIG_DFL : signals_before[number]); // a second Ctrl-C ends the program at once
        pthread_sigmask(SIG_UNBLOCK, (const sigset_t*)set, NULL);
        raise(number);
        pthread_sigmask(SIG_BLOCK, (const sigset_t*)set, NULL); // still here: it is ignored
        signal(number, signals_pass_on);
    }
    return NULL;
}

// Before any other thread begins.
static inline void signals_open(void) {
    static sigset_t set;
    struct sigaction hang_up;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM); // what mpirun makes of a Ctrl-C, and Slurm of a time limit
    sigaddset(&set, SIGUSR1); // what mpirun passes on and does not follow up with a kill
    if (sigaction(SIGHUP, NULL, &hang_up) == 0 && hang_up.sa_handler != SIG_IGN) { sigaddset(&set, SIGHUP); } // no nohup
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    signal(SIGXFSZ, SIG_IGN); // a write beyond a limit on the size of files fails, with a reason
    if (pthread_create(&signals_thread, NULL, signals_wait, &set) != 0) { fatal("cannot start a thread for signals"); }
    for (int number = 1; number < NSIG; number++) {
        if (sigismember(&set, number) == 1) { signals_before[number] = signal(number, signals_pass_on); }
    }
}

// From here on the first signal only asks. A Ctrl-C ends the `tee` behind a pipe, too: what is printed after that must
// not end the run before it has saved.
static inline void signals_begin_loop(void) {
    signal(SIGPIPE, SIG_IGN);
    __atomic_store_n(&signals_stop_the_loop, true, __ATOMIC_RELEASE);
}

// Has somebody asked for the end? That nobody reads stdout any more counts as well: `head` has seen enough.
static inline bool interrupted(void) {
    struct pollfd out = {STDOUT_FILENO, 0, 0};
    bool unread = poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0;
    return unread || __atomic_load_n(&signal_came, __ATOMIC_ACQUIRE);
}

// In a program begun with closed streams the next file to be opened would be stdout, and get what is printed.
static inline void streams_open(void) {
    int fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO) { fd = open("/dev/null", O_RDWR); }
    close(fd);
}

// For programs whose result is what they print.
static inline void stdout_check(void) {
    if (fflush(stdout) != 0 || ferror(stdout)) { fatal("cannot write to stdout: %s", strerror(errno)); }
}

#endif
