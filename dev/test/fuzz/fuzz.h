// fuzz.h: what a libFuzzer target here needs. A target reads a folder of files that a stranger wrote; libFuzzer's input
// is these files one after the other, a line of its own between them. Readers end by fatal(), which here jumps back, and
// gives back what the reader held: leaks count only where a reader returns.
#ifndef FUZZ_H
#define FUZZ_H

#include "../../../llmc/check.h"
#include <ctype.h>
#include <glob.h>
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
static int fuzz_stderr = 2; // a copy: libFuzzer may close the other
static inline void fuzz_failed(const char* what, const char* file, int line) {
    dprintf(fuzz_stderr, "%s:%d: %s does not hold\n", file, line, what);
    abort();
}

// ----------------------------------------------------------------------------
// what a reader holds: every piece of memory, by the sanitizer's hooks, whoever took it

#define FUZZ_SLOTS ((size_t)1 << 18)
static const void* fuzz_live[FUZZ_SLOTS]; // open addressing; NULL: free
static size_t fuzz_num_live;
static __thread bool fuzz_running; // in the thread that reads: libFuzzer's own takes memory, too, whenever it likes

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
        if (fd < 0 || write(fd, parts[i], sizes[i]) != (ssize_t)sizes[i]) { // no fault of a reader
            dprintf(fuzz_stderr, "cannot write %s: %s\n", path, strerror(errno));
            _exit(3);
        }
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
// mutation: of one of the files at a time. Bytes changed at random seldom leave JSON that is one, so most changes put
// a value in another's place.

size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// The JSON value (or key) that begins at or after `from`, len 0: none.
FUZZ_PLAIN static inline size_t fuzz_value(const char* text, size_t n, size_t from, size_t* len) {
    const char* begins = "0123456789\"[{ntf";
    size_t i = from, end;
    while (i < n && (text[i] == '\0' || strchr(begins, text[i]) == NULL)) { i++; }
    *len = 0;
    if (i == n) { return n; }
    if (text[i] == '"') {
        for (end = i + 1; end < n && text[end] != '"'; end++) { end += text[end] == '\\'; }
        end++;
    } else if (text[i] == '[' || text[i] == '{') {
        int depth = 0;
        for (end = i; end < n; end++) {
            depth += (text[end] == '[' || text[end] == '{') - (text[end] == ']' || text[end] == '}');
            if (depth == 0) { break; }
        }
        end++;
    } else {
        for (end = i; end < n && (isalnum((unsigned char)text[end]) || text[end] == '.'); end++) {}
    }
    *len = end <= n ? end - i : 0;
    return i;
}

FUZZ_PLAIN static inline size_t fuzz_mutate_json(char* text, size_t n, size_t room, unsigned seed) {
    static const char* const words[] = {"0", "1", "-1", "2", "7", "64", "255", "65536", "2147483647", "2147483648", "4294967296", "1e999",
        "16777215", "1000000000", "9007199254740992", "18446744073709551615", "0.5", "1e-320", "null", "true", "false", "[]", "{}", "\"\"", "\"a\\u0000b\"", "\"..\""};
    uint64_t random = seed * 0x9E3779B97F4A7C15u;
    size_t len, by_len, at = fuzz_value(text, n, n > 0 ? (random >> 32) % n : 0, &len), kind = (random >> 20) % 8;
    if (len == 0) { return LLVMFuzzerMutate((uint8_t*)text, n, room); }
    random *= 0xD6E8FEB86659FD93u;
    const char* by = words[(random >> 32) % (sizeof(words) / sizeof(words[0]))];
    char number[32];
    by_len = strlen(by);
    if (kind < 3 && isdigit((unsigned char)text[at]) && len < 18) { // a number not far from it
        snprintf(number, sizeof(number), "%lld", atoll(text + at) + (long long)((random >> 32) % 9) - 4);
        by = number;
        by_len = strlen(by);
    } else if (kind < 5) { // another value of this file
        by = text + fuzz_value(text, n, (random >> 24) % n, &by_len);
    } else if (kind == 5) { // itself once more
        by = text + at;
        by_len = len;
    }
    size_t keep = kind == 5 ? len + 1 : 0; // "value,"
    char* copy = (char*)malloc(by_len + 1);
    memcpy(copy, by, by_len);
    if (n - len + keep + by_len <= room && by_len > 0) {
        memmove(text + at + keep + by_len, text + at + len, n - at - len);
        if (keep > 0) { text[at + len] = ','; }
        memcpy(text + at + keep, copy, by_len);
        n = n - len + keep + by_len;
    }
    free(copy);
    return n;
}

FUZZ_PLAIN static inline size_t fuzz_mutate(uint8_t* data, size_t n, size_t room, bool json, unsigned seed) {
    return json && n > 0 && seed % 8 != 0 ? fuzz_mutate_json((char*)data, n, room, seed / 8) : LLVMFuzzerMutate(data, n, room);
}

// The right files in ./dev/test/fuzz/corpus/TARGET. Libfuzzer soon has a thousand broken ones which its choice falls on;
// a third of all inputs are a change or two away from a right one.
static struct { uint8_t* data; size_t size; } fuzz_seeds[64];
static size_t fuzz_num_seeds;

static inline void fuzz_load_seeds(void) {
    glob_t files;
    char pattern[256];
    snprintf(pattern, sizeof(pattern), "dev/test/fuzz/corpus/%s/*", fuzz_target->name);
    if (glob(pattern, 0, NULL, &files) != 0) { return; }
    for (size_t i = 0; i < files.gl_pathc && i < 64; i++) {
        FILE* fp = fopenCheck(files.gl_pathv[i], "rb");
        uint8_t* data = (uint8_t*)mallocCheck(1 << 16);
        fuzz_seeds[i].size = fread(data, 1, 1 << 16, fp);
        fuzz_seeds[i].data = data;
        fuzz_num_seeds++;
        fclose(fp);
    }
    globfree(&files);
}

FUZZ_PLAIN size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    seed = (unsigned)(seed * 0x9E3779B97F4A7C15u >> 32);
    size_t right = fuzz_num_seeds > 0 ? seed / 64 % fuzz_num_seeds : 0;
    if (seed % 3 == 0 && fuzz_num_seeds > 0 && fuzz_seeds[right].size <= max_size) {
        size = fuzz_seeds[right].size;
        memcpy(data, fuzz_seeds[right].data, size);
    }
    const uint8_t* parts[FUZZ_MAX_PARTS];
    size_t sizes[FUZZ_MAX_PARTS], count = fuzz_split(fuzz_target, data, size, parts, sizes);
    seed = (unsigned)(seed * 0xD6E8FEB86659FD93u >> 32);
    if (seed % 32 == 0 || size > max_size) { return LLVMFuzzerMutate(data, size, max_size); }
    size_t which = (seed / 32) % count, room = max_size - size + sizes[which];
    size_t before = (size_t)(parts[which] - data), after = size - before - sizes[which], n;
    const char* name = fuzz_target->parts[which];
    bool has_header = strstr(name, ".safetensors") != NULL && strstr(name, ".json") == NULL && sizes[which] >= 8 && (seed / 256) % 16 != 0;
    uint8_t* work = (uint8_t*)malloc(room + 1);
    memcpy(work, parts[which], sizes[which]);
    uint64_t header = 0;
    if (has_header) { memcpy(&header, work, 8); }
    if (has_header && header <= sizes[which] - 8) { // its JSON, and then the number of its bytes
        size_t rest = sizes[which] - 8 - (size_t)header;
        uint8_t* text = (uint8_t*)malloc(room + 1);
        memcpy(text, work + 8, (size_t)header);
        uint64_t length = header;
        if (seed / 4096 % 4 == 0 && rest > 0) { // the data alone
            LLVMFuzzerMutate(work + 8 + header, rest, rest);
        } else {
            length = fuzz_mutate(text, (size_t)header, room - 8 - rest, true, seed / 16384);
            memcpy(work + 8 + length, parts[which] + 8 + header, rest);
            memcpy(work + 8, text, (size_t)length);
            memcpy(work, &length, 8);
        }
        free(text);
        n = 8 + (size_t)length + rest;
    } else {
        n = fuzz_mutate(work, sizes[which], room, strstr(name, ".json") != NULL, seed / 4096);
    }
    memmove(data + before + n, data + before + sizes[which], after);
    memcpy(data + before, work, n);
    free(work);
    return before + n + after;
}

#endif
