// fuzz.h: what a libFuzzer target here needs. A target reads a folder of files that a stranger wrote; libFuzzer's input
// is these files one after the other, a line of its own between them. Readers end by fatal(), which here jumps back, and
// gives back what the reader held: leaks count only where a reader returns.
#ifndef FUZZ_H
#define FUZZ_H

#include "../../../llmc/check.h"
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FUZZ_BETWEEN "\n====\n" // between the files of one input
#define FUZZ_MAX_PARTS 5
#define FUZZ_PLAIN __attribute__((no_sanitize("coverage", "address", "undefined"))) // not what is tested, and often called

typedef struct {
    const char* name;
    void (*read)(const char* folder); // calls the reader; what it accepts must hold: fuzz_check
    const char* parts[FUZZ_MAX_PARTS]; // the files; an empty one is not there at all. Those named *.safetensors keep a
                                       // right length of their header through most mutations
} FuzzTarget;

#define fuzz_check(cond) ((cond) ? (void)0 : fuzz_failed(#cond, __FILE__, __LINE__))
static inline void fuzz_failed(const char* what, const char* file, int line) {
    dprintf(2, "%s:%d: %s does not hold\n", file, line, what);
    abort();
}

// ----------------------------------------------------------------------------
// what a reader holds: every piece of memory, by the sanitizer's hooks, whoever took it

#define FUZZ_SLOTS ((size_t)1 << 18)
static const void* fuzz_live[FUZZ_SLOTS]; // open addressing; NULL: free
static size_t fuzz_num_live;
static bool fuzz_running;

int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, size_t), void (*)(const volatile void*));

FUZZ_PLAIN static inline size_t fuzz_slot(const void* p) { return (size_t)((uintptr_t)p * 0x9E3779B97F4A7C15u >> 46); }

FUZZ_PLAIN static inline void fuzz_took(const volatile void* p, size_t bytes) {
    (void)bytes;
    if (!fuzz_running || p == NULL) { return; }
    if (++fuzz_num_live > FUZZ_SLOTS / 2) { fuzz_failed("so many pieces of memory for so short an input", __FILE__, __LINE__); }
    size_t at = fuzz_slot((const void*)p);
    while (fuzz_live[at] != NULL) { at = (at + 1) % FUZZ_SLOTS; }
    fuzz_live[at] = (const void*)p;
}

FUZZ_PLAIN static inline void fuzz_gave(const volatile void* p) {
    if (!fuzz_running || p == NULL) { return; }
    size_t at = fuzz_slot((const void*)p);
    while (fuzz_live[at] != NULL && fuzz_live[at] != p) { at = (at + 1) % FUZZ_SLOTS; }
    if (fuzz_live[at] == NULL) { return; } // taken before
    fuzz_num_live--;
    for (size_t next = (at + 1) % FUZZ_SLOTS; fuzz_live[next] != NULL; next = (next + 1) % FUZZ_SLOTS) {
        size_t home = fuzz_slot(fuzz_live[next]); // what follows moves up unless it is between its home and here
        if ((next - home) % FUZZ_SLOTS < (next - at) % FUZZ_SLOTS) { continue; }
        fuzz_live[at] = fuzz_live[next];
        at = next;
    }
    fuzz_live[at] = NULL;
}

// After fatal(): the rest.
FUZZ_PLAIN static inline void fuzz_give_all(void) {
    for (size_t i = 0; i < FUZZ_SLOTS && fuzz_num_live > 0; i++) {
        if (fuzz_live[i] == NULL) { continue; }
        free((void*)(uintptr_t)fuzz_live[i]);
        fuzz_live[i] = NULL;
        fuzz_num_live--;
    }
}

// Maps are copies on the heap, as long as the file to the byte: the sanitizer sees a step too far.
static inline void* fuzz_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    (void)at; (void)protection; (void)flags;
    void* p = malloc(bytes);
    size_t got = 0;
    while (got < bytes) {
        ssize_t n = pread(fd, (char*)p + got, bytes - got, offset + (off_t)got);
        if (n <= 0) { fuzz_failed("the file has what is mapped of it", __FILE__, __LINE__); }
        got += (size_t)n;
    }
    return p;
}
static inline int fuzz_munmap(void* p, size_t bytes) { (void)bytes; free(p); return 0; }
#define mmap fuzz_mmap
#define munmap fuzz_munmap

// ----------------------------------------------------------------------------
// the files of an input

// parts[i] .. of sizes[i] bytes, inside data; what there is too much of belongs to the last one.
FUZZ_PLAIN static inline size_t fuzz_split(const FuzzTarget* target, const uint8_t* data, size_t size, const uint8_t* parts[], size_t sizes[]) {
    const size_t between = strlen(FUZZ_BETWEEN);
    size_t count = 0, n = 0;
    while (n < FUZZ_MAX_PARTS && target->parts[n] != NULL) { n++; }
    for (;;) {
        const uint8_t* cut = count + 1 < n ? (const uint8_t*)memmem(data, size, FUZZ_BETWEEN, between) : NULL;
        parts[count] = data;
        sizes[count++] = cut != NULL ? (size_t)(cut - data) : size;
        if (cut == NULL) { return count; }
        size -= (size_t)(cut - data) + between;
        data = cut + between;
    }
}

FUZZ_PLAIN static inline void fuzz_write_files(const FuzzTarget* target, const char* folder, const uint8_t* data, size_t size) {
    const uint8_t* parts[FUZZ_MAX_PARTS];
    size_t sizes[FUZZ_MAX_PARTS], count = fuzz_split(target, data, size, parts, sizes);
    for (size_t i = 0; i < FUZZ_MAX_PARTS && target->parts[i] != NULL; i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/%s", folder, target->parts[i]);
        unlink(path);
        if (i >= count || sizes[i] == 0) { continue; }
        int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
        if (fd < 0 || write(fd, parts[i], sizes[i]) != (ssize_t)sizes[i]) { fuzz_failed("files can be written", __FILE__, __LINE__); }
        close(fd);
    }
}

// ----------------------------------------------------------------------------
// a run

static const FuzzTarget* fuzz_target; // set by LLVMFuzzerInitialize
static char fuzz_folder[256];
static jmp_buf fuzz_exit;
static bool fuzz_fatal; // fatal() was called

static inline void fuzz_leave(void) { longjmp(fuzz_exit, 1); }

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    fuzz_write_files(fuzz_target, fuzz_folder, data, size);
    int first_fd = open("/dev/null", O_RDONLY);
    close(first_fd);
    fatal_hook = fuzz_leave;
    fuzz_num_live = 0;
    fuzz_running = true;
    fuzz_fatal = setjmp(fuzz_exit) != 0;
    if (!fuzz_fatal) { fuzz_target->read(fuzz_folder); }
    fuzz_running = false;
    if (!fuzz_fatal) {
        fuzz_check(fuzz_num_live == 0); // it gave back what it took
        int fd = open("/dev/null", O_RDONLY);
        fuzz_check(fd == first_fd);
        close(fd);
        return 0;
    }
    close_range((unsigned)first_fd, ~0u, 0);
    fuzz_give_all();
    return 0;
}

// ----------------------------------------------------------------------------
// mutation: of one of the files at a time

size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

FUZZ_PLAIN size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    const uint8_t* parts[FUZZ_MAX_PARTS];
    size_t sizes[FUZZ_MAX_PARTS], count = fuzz_split(fuzz_target, data, size, parts, sizes);
    if (seed % 16 == 0) { return LLVMFuzzerMutate(data, size, max_size); }
    size_t which = (seed / 16) % count, room = max_size - size + sizes[which];
    size_t before = (size_t)(parts[which] - data), after = size - before - sizes[which];
    const char* extension = strrchr(fuzz_target->parts[which], '.');
    bool has_header = strcmp(extension, ".safetensors") == 0 && sizes[which] >= 8 && (seed / 256) % 8 != 0;
    uint8_t* work = (uint8_t*)malloc(room + 1); // the part; its header and what follows
    memcpy(work, parts[which], sizes[which]);
    uint64_t header = 0;
    if (has_header) { memcpy(&header, work, 8); }
    has_header = has_header && header <= sizes[which] - 8;
    size_t n;
    if (has_header) {
        size_t rest = sizes[which] - 8 - (size_t)header;
        uint8_t* text = (uint8_t*)malloc(room + 1);
        memcpy(text, work + 8, (size_t)header);
        uint64_t length = LLVMFuzzerMutate(text, (size_t)header, room - 8 - rest);
        memcpy(work, &length, 8);
        memcpy(work + 8, text, (size_t)length);
        memcpy(work + 8 + length, parts[which] + 8 + header, rest);
        free(text);
        n = 8 + (size_t)length + rest;
    } else {
        n = LLVMFuzzerMutate(work, sizes[which], room);
    }
    memmove(data + before + n, data + before + sizes[which], after);
    memcpy(data + before, work, n);
    free(work);
    return before + n + after;
}

#endif
