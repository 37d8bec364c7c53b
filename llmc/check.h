// check.h: how every program here stops: one clear line on stderr (what, where, what to do) and exit code 1.
// Also the checked forms of malloc and stdio. Include it before system headers: it asks the C library for POSIX.
#ifndef LLMC_CHECK_H
#define LLMC_CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE // fsync, flock, mmap ... which -std=c11 hides otherwise
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char* program_name = "moe";   // main sets it to its own name
static void (*fatal_hook)(void) = NULL;    // called after the message, before exit: several ranks stop each other here
static void (*fatal_patience)(void) = NULL; // called before the message: all ranks but the first wait, should it fail, too

#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))

// ----------------------------------------------------------------------------
// messages

static inline void message_line(const char* kind, const char* fmt, va_list args) {
    // always exactly one line, written by one call; names in it may come from a hostile file: no control characters
    char line[8192];
    int used = snprintf(line, sizeof(line), "%s: %s: ", program_name, kind);
    size_t n = used < 0 ? 0 : (size_t)used < sizeof(line) ? (size_t)used : sizeof(line) - 1;
    vsnprintf(line + n, sizeof(line) - n - 1, fmt, args);
    n = strlen(line);
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)line[i] < 32 || line[i] == 127) { line[i] = '?'; }
    }
    line[n] = '\n';
    fwrite(line, 1, n + 1, stderr);
    fflush(stderr); // who redirected it may have made it buffered
}

// What comes before the message of an error, once.
static inline void fatal_wait(void) {
    void (*patience)(void) = fatal_patience;
    fatal_patience = NULL;
    if (patience != NULL) { patience(); }
}

// Prints "program: error: <message>" and ends the program with exit code 1. The message has no newline.
__attribute__((noreturn)) PRINTF_LIKE(1, 2)
static inline void fatal(const char* fmt, ...) {
    fflush(stdout); // so that the error comes after what was printed before it
    fatal_wait();
    va_list args;
    va_start(args, fmt);
    message_line("error", fmt, args);
    va_end(args);
    void (*hook)(void) = fatal_hook;
    fatal_hook = NULL; // a hook that fails itself must not come back here
    if (hook != NULL) { hook(); }
    exit(1);
}

// Prints "program: warning: <message>" and goes on.
PRINTF_LIKE(1, 2)
static inline void warn(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    message_line("warning", fmt, args);
    va_end(args);
}

// For functions that report instead of stopping: writes the reason to err (cut if too long) and returns false.
PRINTF_LIKE(3, 4)
static inline bool fail_with(char* err, size_t err_size, const char* fmt, ...) {
    if (err != NULL && err_size > 0) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(err, err_size, fmt, args);
        va_end(args);
    }
    return false;
}

// ----------------------------------------------------------------------------
// sizes and memory

// a * b, or fatal where the product does not fit: a size that comes from a file or an option may be anything.
static inline size_t mul_check(size_t a, size_t b) {
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        fatal("size overflow: %zu * %zu does not fit in %zu bits", a, b, 8 * sizeof(size_t));
    }
    return product;
}

static inline void* memory_check(void* p, size_t bytes, const char* call, const char* file, int line) {
    if (p == NULL) {
        fatal("out of memory: %s of %zu bytes (%.2f GiB) failed (%s:%d); try a smaller --batch-size or --seq-len", call,
              bytes, (double)bytes / (1024.0 * 1024.0 * 1024.0), file, line);
    }
    return p;
}

static inline void* calloc_check(size_t n, size_t size, const char* file, int line) {
    size_t bytes = mul_check(n, size);
    return memory_check(calloc(bytes > 0 ? bytes : 1, 1), bytes, "calloc", file, line);
}

static inline char* strdup_check(const char* s, const char* file, int line) {
    size_t bytes = strlen(s) + 1;
    char* copy = (char*)memory_check(malloc(bytes), bytes, "strdup", file, line);
    memcpy(copy, s, bytes);
    return copy;
}

// 0 bytes give a pointer that free() takes, never NULL
#define mallocCheck(bytes) memory_check(malloc((bytes) > 0 ? (bytes) : 1), (bytes), "malloc", __FILE__, __LINE__)
#define callocCheck(n, size) calloc_check((n), (size), __FILE__, __LINE__)
#define reallocCheck(p, n) memory_check(realloc((p), (n) > 0 ? (n) : 1), (n), "realloc", __FILE__, __LINE__)
#define strdupCheck(s) strdup_check((s), __FILE__, __LINE__)

// A malloc'ed string of any length, for paths: printf into memory.
PRINTF_LIKE(1, 2)
static inline char* str_format(const char* fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0) { fatal("cannot format the text \"%s\"", fmt); }
    char* s = (char*)mallocCheck((size_t)n + 1);
    vsnprintf(s, (size_t)n + 1, fmt, again);
    va_end(again);
    return s;
}

// ----------------------------------------------------------------------------
// files: every result is looked at, also fclose's, where a full disk often shows first

// A descriptor for reading, -1 as open() gives it. Opening a pipe that nobody writes to would wait for ever; so it is
// opened at once, and found to be no regular file by whoever asked.
static inline int open_to_read(const char* path) { return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); }

static inline FILE* fopen_check(const char* path, const char* mode, const char* file, int line) {
    FILE* fp = fopen(path, mode);
    if (fp == NULL) {
        fatal("cannot open %s for %s: %s (%s:%d)", path, mode[0] == 'r' ? "reading" : "writing", strerror(errno), file,
              line);
    }
    return fp;
}

// What to do about a write that failed for this reason, to go behind its message.
static inline const char* write_advice(int reason) {
    return reason == ENOSPC || reason == EDQUOT ? "; make room there, or name a folder on another disk"
           : reason == EFBIG                    ? "; there is a limit on the size of files (ulimit -f)"
                                                : "";
}

static inline void fclose_check(FILE* fp, const char* path, const char* file, int line) {
    bool failed_before = ferror(fp) != 0;
    errno = 0;
    if (fclose(fp) != 0 || failed_before) {
        fatal("writing %s failed: %s (%s:%d)%s", path, errno != 0 ? strerror(errno) : "earlier write error", file, line,
              errno != 0 ? write_advice(errno) : "; is the disk full?");
    }
}

static inline void fwrite_check(const void* ptr, size_t size, size_t n, FILE* fp, const char* path, const char* file,
                                int line) {
    if (size == 0 || n == 0) { return; }
    errno = 0;
    if (fwrite(ptr, size, n, fp) != n) {
        fatal("writing %zu bytes to %s failed: %s (%s:%d)%s", mul_check(size, n), path,
              errno != 0 ? strerror(errno) : "short write", file, line, write_advice(errno));
    }
}

#define fopenCheck(path, mode) fopen_check((path), (mode), __FILE__, __LINE__)
#define fcloseCheck(fp, path) fclose_check((fp), (path), __FILE__, __LINE__)
#define fwriteCheck(ptr, size, n, fp, path) fwrite_check((ptr), (size), (n), (fp), (path), __FILE__, __LINE__)

#endif
