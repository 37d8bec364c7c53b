// testing.h: the few words a C test needs. A test is a function named after its claim; main lists them with RUN and
// ends with `return test_summary();`. Prints "ok   name" or "FAIL name: file:line reason", then "N passed, N failed";
// exit code 1 on failure.
#ifndef TESTING_H
#define TESTING_H

#include "../../llmc/check.h"
#include <ftw.h>
#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static int test_passed = 0, test_failed = 0;
static bool test_ok = true;          // of the test that runs now
static char test_reason[2048];       // its first failure
static char test_folder_path[512];   // see test_folder
static const char* test_filter = ""; // test_arguments: only tests whose name contains this

// ----------------------------------------------------------------------------
// checks; each returns whether it held, so that `if (!CHECK(p != NULL)) { return; }` works

PRINTF_LIKE(4, 5)
static inline bool test_check(bool ok, const char* file, int line, const char* fmt, ...) {
    if (!ok && test_ok) {
        test_ok = false;
        size_t n = (size_t)snprintf(test_reason, sizeof(test_reason), "%s:%d ", file, line);
        va_list args;
        va_start(args, fmt);
        vsnprintf(test_reason + n, sizeof(test_reason) - n, fmt, args);
        va_end(args);
    }
    return ok;
}

static inline bool test_near(double a, double b, double tol, const char* what, const char* file, int line) {
    bool ok = fabs(a - b) <= tol; // NaN compares false, hence fails
    return test_check(ok, file, line, "%s: %.9g and %.9g differ by more than %.3g", what, a, b, tol);
}

static inline bool test_contains(const char* text, const char* part, const char* file, int line) {
    if (text == NULL) { text = "(NULL)"; }
    return test_check(strstr(text, part) != NULL, file, line, "\"%s\" does not contain \"%s\"", text, part);
}

#define CHECK(cond) test_check((cond), __FILE__, __LINE__, "%s", #cond)
#define CHECK_NEAR(a, b, tol) test_near((double)(a), (double)(b), (double)(tol), #a ", " #b, __FILE__, __LINE__)
#define CHECK_CONTAINS(text, part) test_contains((text), (part), __FILE__, __LINE__)

// ----------------------------------------------------------------------------
// EXPECT_FATAL(expr, "part of the message"): expr, run in a forked child, must end the program with exit code 1 and
// exactly one line on stderr. (A child of a process that already used OpenMP threads cannot use them: run such tests
// first or with one thread.)

typedef struct { pid_t pid; int err_fd; } FatalChild;

// Without the exit handlers: the leak checker would add lines of its own.
static inline void fatal_child_leave(void) { _exit(1); }

static inline bool fatal_child_start(FatalChild* child) {
    int fds[2];
    fflush(NULL);
    if (pipe(fds) != 0) { fatal("pipe: %s", strerror(errno)); }
    child->pid = fork();
    if (child->pid < 0) { fatal("fork: %s", strerror(errno)); }
    child->err_fd = fds[0];
    if (child->pid > 0) { close(fds[1]); return false; }
    dup2(fds[1], 2);
    close(fds[0]);
    close(fds[1]);
    if (freopen("/dev/null", "w", stdout) == NULL) { _exit(3); }
    fatal_hook = fatal_child_leave;
    alarm(120); // a hang becomes a failure
    return true;
}

static inline void fatal_child_check(FatalChild* child, const char* part, const char* what, const char* file,
                                     int line) {
    char text[16384];
    size_t n = 0;
    ssize_t got;
    while ((got = read(child->err_fd, text + n, sizeof(text) - 1 - n)) > 0) { n += (size_t)got; }
    text[n] = '\0';
    close(child->err_fd);
    int status = 0;
    waitpid(child->pid, &status, 0);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    char* newline = strchr(text, '\n');
    bool one_line = newline != NULL && newline[1] == '\0';
    if (newline != NULL && one_line) { *newline = '\0'; }
    test_check(code == 1, file, line, "%s: exit code %d, not 1; stderr: %s", what, code, text);
    test_check(one_line, file, line, "%s: not exactly one line on stderr: %s", what, text);
    test_check(strstr(text, part) != NULL, file, line, "%s: \"%s\" does not contain \"%s\"", what, text, part);
}

#define EXPECT_FATAL(expr, part) \
    do { \
        FatalChild fatal_child; \
        if (fatal_child_start(&fatal_child)) { expr; _exit(0); } \
        fatal_child_check(&fatal_child, (part), #expr, __FILE__, __LINE__); \
    } while (0)

// ----------------------------------------------------------------------------
// a folder for the test's files: made at the first call, removed by test_summary

static inline const char* test_folder(void) {
    if (test_folder_path[0] == '\0') {
        const char* base = getenv("TMPDIR");
        snprintf(test_folder_path, sizeof(test_folder_path), "%s/moe-test-XXXXXX",
                 base != NULL && base[0] != '\0' ? base : "/tmp");
        if (mkdtemp(test_folder_path) == NULL) {
            fatal("cannot make a folder %s: %s", test_folder_path, strerror(errno));
        }
    }
    return test_folder_path;
}

static inline int test_remove_entry(const char* path, const struct stat* st, int kind, struct FTW* where) {
    (void)st; (void)kind; (void)where;
    remove(path);
    return 0;
}

static inline void test_remove_tree(const char* path) { nftw(path, test_remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

static inline void test_write_file(const char* path, const void* bytes, size_t n) {
    FILE* fp = fopenCheck(path, "wb");
    fwriteCheck(bytes, 1, n, fp, path);
    fcloseCheck(fp, path);
}

// ----------------------------------------------------------------------------
// running

static inline void test_arguments(int argc, char** argv) { if (argc > 1) { test_filter = argv[1]; } }

static inline void test_run(void (*test)(void), const char* name) {
    if (strstr(name, test_filter) == NULL) { return; }
    test_ok = true;
    test();
    if (test_ok) { test_passed++; printf("ok   %s\n", name); }
    else { test_failed++; printf("FAIL %s: %s\n", name, test_reason); }
    fflush(stdout);
}

#define RUN(test) test_run(test, #test)

static inline int test_summary(void) {
    if (test_folder_path[0] != '\0') { test_remove_tree(test_folder_path); }
    printf("%d passed, %d failed\n", test_passed, test_failed);
    return test_failed > 0 ? 1 : 0;
}

#endif
