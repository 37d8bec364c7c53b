// safetensors.h: 8 bytes n, n bytes of JSON {"name": {"dtype", "shape", "data_offsets"}, ...}, then the data, gapless.
// Read by mmap with every header field checked, as strictly as https://github.com/huggingface/safetensors does.
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "check.h"
#include "json.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors are little-endian and so must be this machine"
#endif

#define ST_MAX_HEADER ((uint64_t)100000000) // the reference reader's limit
#define ST_MAX_DIMS 8

// ----------------------------------------------------------------------------
// element types

typedef enum {
    ST_F32, ST_BF16, ST_F16, ST_I32, ST_I64, ST_U8, // the ones this project computes with or writes
    ST_F64, ST_I16, ST_I8, ST_U16, ST_U32, ST_U64, ST_BOOL, ST_F8_E4M3, ST_F8_E5M2, ST_C64, // only recognised
    ST_NUM_DTYPES
} StDtype;

typedef struct { const char* name; size_t size; } StDtypeInfo;
static const StDtypeInfo st_dtypes[ST_NUM_DTYPES] = {
    {"F32", 4}, {"BF16", 2}, {"F16", 2}, {"I32", 4}, {"I64", 8}, {"U8", 1},
    {"F64", 8}, {"I16", 2}, {"I8", 1}, {"U16", 2}, {"U32", 4}, {"U64", 8}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
    {"C64", 8},
};

static inline size_t st_dtype_size(StDtype dtype) { return st_dtypes[dtype].size; }
static inline const char* st_dtype_name(StDtype dtype) { return st_dtypes[dtype].name; }

static inline float bf16_to_f32(uint16_t x) { // bf16 is the upper half of a float
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint16_t f32_to_bf16(float value) { // round to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    return (uint16_t)((value != value ? bits | 0x400000u : rounded) >> 16); // in a form that compilers vectorise
}

// 1 sign, 5 exponent, 10 mantissa bits; subnormals, infinities and NaN included
static inline float f16_to_f32(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = (x >> 10) & 31u, mantissa = x & 1023u, bits;
    if (exponent == 0) {
        float magnitude = (float)mantissa * 5.9604644775390625e-8f; // 2^-24
        memcpy(&bits, &magnitude, sizeof(bits));
    } else {
        bits = ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
    }
    bits |= sign;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// ----------------------------------------------------------------------------
// reader

typedef struct {
    const char* name;
    StDtype dtype;
    int ndim;
    size_t shape[ST_MAX_DIMS];
    size_t numel, nbytes;
    const unsigned char* data; // in the mapped file, at any alignment
} StTensor;

typedef struct {
    char* path;
    void* map;
    size_t map_size;
    StTensor* tensors; // sorted by name
    size_t count;
    char* names;       // the text of all names
} SafeTensors;

static inline void st_close(SafeTensors* st) {
    if (st->map != NULL) { munmap(st->map, st->map_size); }
    free(st->tensors);
    free(st->names);
    free(st->path);
    memset(st, 0, sizeof(*st));
}

// "[2, 3]" for messages
static inline const char* st_shape_text(char* out, size_t size, int ndim, const size_t* shape) {
    size_t n = (size_t)snprintf(out, size, "[");
    for (int i = 0; i < ndim && n < size; i++) {
        n += (size_t)snprintf(out + n, size - n, "%s%zu", i > 0 ? ", " : "", shape[i]);
    }
    if (n < size) { snprintf(out + n, size - n, "]"); }
    return out;
}

// One header entry -> one StTensor. The reason in err does not name the file.
static inline bool st_parse_tensor(StTensor* t, const cJSON* entry, const unsigned char* data, size_t data_size,
                                   char* err, size_t err_size) {
    const char* name = entry->string;
    const cJSON* dtype = cJSON_GetObjectItemCaseSensitive(entry, "dtype");
    const cJSON* shape = cJSON_GetObjectItemCaseSensitive(entry, "shape");
    const cJSON* offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    if (!cJSON_IsObject(entry) || !cJSON_IsString(dtype) || !cJSON_IsArray(shape) || !cJSON_IsArray(offsets)) {
        return fail_with(err, err_size,
                         "tensor \"%s\" must have a \"dtype\" text, a \"shape\" list and a \"data_offsets\" list",
                         name);
    }
    int type = 0;
    while (type < ST_NUM_DTYPES && strcmp(st_dtypes[type].name, dtype->valuestring) != 0) { type++; }
    if (type == ST_NUM_DTYPES) {
        return fail_with(err, err_size, "tensor \"%s\" has the unknown dtype \"%.40s\"", name, dtype->valuestring);
    }
    t->dtype = (StDtype)type;
    t->numel = 1;
    for (const cJSON* dim = shape->child; dim != NULL; dim = dim->next) {
        int64_t n;
        if (t->ndim == ST_MAX_DIMS) {
            return fail_with(err, err_size, "tensor \"%s\" has more than %d dimensions", name, ST_MAX_DIMS);
        }
        if (!json_integer(dim, 0, (int64_t)JSON_MAX_INTEGER, &n)) {
            return fail_with(err, err_size, "tensor \"%s\": its shape must be whole numbers of at least 0", name);
        }
        t->shape[t->ndim++] = (size_t)n;
        if (__builtin_mul_overflow(t->numel, (size_t)n, &t->numel)) {
            return fail_with(err, err_size, "tensor \"%s\": its shape overflows", name);
        }
    }
    int64_t begin = 0, end = 0;
    const cJSON* first = offsets->child;
    bool two = first != NULL && first->next != NULL && first->next->next == NULL;
    if (!two || !json_integer(first, 0, (int64_t)JSON_MAX_INTEGER, &begin) ||
        !json_integer(first->next, 0, (int64_t)JSON_MAX_INTEGER, &end) || begin > end) {
        return fail_with(err, err_size,
                         "tensor \"%s\": data_offsets must be two whole numbers, the first not above the second", name);
    }
    if ((uint64_t)end > data_size) {
        return fail_with(err, err_size,
                         "tensor \"%s\" ends at byte %lld of the data but the file has only %zu: it is cut off", name,
                         (long long)end, data_size);
    }
    t->nbytes = (size_t)(end - begin);
    t->data = data + begin;
    size_t expected;
    if (__builtin_mul_overflow(t->numel, st_dtypes[type].size, &expected) || expected != t->nbytes) {
        char text[200];
        return fail_with(err, err_size, "tensor \"%s\": shape %s of %s does not fill its %zu bytes exactly", name,
                         st_shape_text(text, sizeof(text), t->ndim, t->shape), st_dtypes[type].name, t->nbytes);
    }
    return true;
}

// by place in the file; empty tensors before what starts there
static inline int st_compare_places(const void* a, const void* b) {
    const StTensor* x = (const StTensor*)a;
    const StTensor* y = (const StTensor*)b;
    if (x->data != y->data) { return x->data < y->data ? -1 : 1; }
    return x->nbytes < y->nbytes ? -1 : x->nbytes > y->nbytes;
}

static inline int st_compare_names(const void* a, const void* b) {
    return strcmp(((const StTensor*)a)->name, ((const StTensor*)b)->name);
}

// Every byte of the data belongs to exactly one tensor.
static inline bool st_check_places(SafeTensors* st, const unsigned char* data, size_t data_size, char* err,
                                   size_t err_size) {
    qsort(st->tensors, st->count, sizeof(StTensor), st_compare_places);
    const unsigned char* at = data;
    for (size_t i = 0; i < st->count; i++) {
        const StTensor* t = &st->tensors[i];
        if (t->data < at) {
            return fail_with(err, err_size, "tensors \"%s\" and \"%s\" overlap", st->tensors[i - 1].name, t->name);
        }
        if (t->data > at) {
            return fail_with(err, err_size, "%zu bytes before tensor \"%s\" belong to no tensor",
                             (size_t)(t->data - at), t->name);
        }
        at += t->nbytes;
    }
    size_t rest = data_size - (size_t)(at - data);
    return rest == 0 || fail_with(err, err_size, "%zu bytes after the last tensor belong to no tensor", rest);
}

static inline bool st_parse_header(SafeTensors* st, const cJSON* header, size_t header_size, char* err,
                                   size_t err_size) {
    const unsigned char* data = (const unsigned char*)st->map + 8 + header_size;
    size_t data_size = st->map_size - 8 - header_size, entries = 0;
    for (const cJSON* entry = header->child; entry != NULL; entry = entry->next) { entries++; }
    st->tensors = (StTensor*)callocCheck(entries, sizeof(StTensor));
    st->names = (char*)mallocCheck(header_size); // unescaped and unquoted names are shorter than the header
    char* names = st->names;
    for (const cJSON* entry = header->child; entry != NULL; entry = entry->next) {
        if (strcmp(entry->string, "__metadata__") == 0) {
            for (const cJSON* item = entry->child; item != NULL; item = item->next) {
                if (!cJSON_IsString(item)) { return fail_with(err, err_size, "\"__metadata__\" must hold texts only"); }
            }
            if (!cJSON_IsObject(entry)) { return fail_with(err, err_size, "\"__metadata__\" must be an object"); }
            continue;
        }
        StTensor* t = &st->tensors[st->count++];
        size_t length = strlen(entry->string) + 1;
        memcpy(names, entry->string, length);
        t->name = names;
        names += length;
        if (!st_parse_tensor(t, entry, data, data_size, err, err_size)) { return false; }
    }
    if (!st_check_places(st, data, data_size, err, err_size)) { return false; }
    qsort(st->tensors, st->count, sizeof(StTensor), st_compare_names);
    return true;
}

// Maps the file if its size allows for the header it announces. The header's length is judged before a byte of it is
// read.
static inline bool st_map(SafeTensors* st, const char* path, size_t* header_size, char* err, size_t err_size) {
    struct stat info;
    unsigned char raw[8];
    int fd = open_to_read(path);
    if (fd < 0) { return fail_with(err, err_size, "cannot open %s: %s", path, strerror(errno)); }
    bool ok = false;
    uint64_t n = 0;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        fail_with(err, err_size, "%s is not a regular file", path);
    } else if (info.st_size < 8 || pread(fd, raw, 8, 0) != 8) {
        fail_with(err, err_size, "%s has only %lld bytes: not a safetensors file", path, (long long)info.st_size);
    } else {
        for (int i = 7; i >= 0; i--) { n = (n << 8) | raw[i]; }
        if (n > ST_MAX_HEADER) {
            fail_with(err, err_size,
                      "%s: its header claims %llu bytes, more than the 100 MB allowed: not a safetensors file", path,
                      (unsigned long long)n);
        } else if (n > (uint64_t)info.st_size - 8) {
            fail_with(err, err_size, "%s: its header claims %llu bytes but only %lld follow: it is cut off", path,
                      (unsigned long long)n, (long long)info.st_size - 8);
        } else {
            st->map_size = (size_t)info.st_size;
            st->map = mmap(NULL, st->map_size, PROT_READ, MAP_PRIVATE, fd, 0);
            ok = st->map != MAP_FAILED;
            if (!ok) {
                st->map = NULL;
                fail_with(err, err_size, "cannot map %s into memory: %s", path, strerror(errno));
            }
        }
    }
    close(fd);
    *header_size = (size_t)n;
    return ok;
}

// Opens a file and checks everything its header says. False and one line in err (path, tensor, reason) if anything is
// wrong; nothing is then left open.
static inline bool st_open(SafeTensors* st, const char* path, char* err, size_t err_size) {
    memset(st, 0, sizeof(*st));
    size_t header_size = 0;
    char reason[1024];
    if (!st_map(st, path, &header_size, err, err_size)) { return false; }
    st->path = strdupCheck(path);
    cJSON* header = json_parse((const char*)st->map + 8, header_size, path, err, err_size);
    bool ok = header != NULL;
    if (ok && !st_parse_header(st, header, header_size, reason, sizeof(reason))) {
        ok = fail_with(err, err_size, "%s: %s", path, reason);
    }
    cJSON_Delete(header);
    if (!ok) { st_close(st); }
    return ok;
}

// The tensor of that name, or NULL. By bisection: files of large models have 20,000 tensors.
static inline const StTensor* st_find(const SafeTensors* st, const char* name) {
    size_t lo = 0, hi = st->count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int order = strcmp(st->tensors[mid].name, name);
        if (order == 0) { return &st->tensors[mid]; }
        if (order < 0) { lo = mid + 1; } else { hi = mid; }
    }
    return NULL;
}

static inline const unsigned char* st_range(const StTensor* t, size_t begin, size_t count) {
    if (begin > t->numel || count > t->numel - begin) {
        fatal("elements %zu+%zu of tensor %s, which has %zu", begin, count, t->name, t->numel);
    }
    return t->data + begin * st_dtypes[t->dtype].size;
}

// Elements begin .. begin+count-1 as floats. F32, BF16 and F16 convert exactly; another type is fatal by name.
static inline void st_to_f32(const StTensor* t, size_t begin, size_t count, float* out) {
    const unsigned char* data = st_range(t, begin, count);
    uint16_t half;
    switch (t->dtype) {
        case ST_F32: memcpy(out, data, count * sizeof(float)); break;
        case ST_BF16:
            for (size_t i = 0; i < count; i++) {
                memcpy(&half, data + 2 * i, 2);
                out[i] = bf16_to_f32(half);
            }
            break;
        case ST_F16:
            for (size_t i = 0; i < count; i++) {
                memcpy(&half, data + 2 * i, 2);
                out[i] = f16_to_f32(half);
            }
            break;
        default:
            fatal("tensor %s has dtype %s; only F32, BF16 and F16 can be used as numbers here", t->name,
                  st_dtypes[t->dtype].name);
    }
}

// Elements begin .. begin+count-1 as int32. From I32 or I64; another type or a value that does not fit is fatal by
// name.
static inline void st_to_i32(const StTensor* t, size_t begin, size_t count, int32_t* out) {
    const unsigned char* data = st_range(t, begin, count);
    if (t->dtype == ST_I32) { memcpy(out, data, count * sizeof(int32_t)); return; }
    if (t->dtype != ST_I64) {
        fatal("tensor %s has dtype %s; I32 or I64 is needed", t->name, st_dtypes[t->dtype].name);
    }
    for (size_t i = 0; i < count; i++) {
        int64_t value;
        memcpy(&value, data + 8 * i, 8);
        if (value < INT32_MIN || value > INT32_MAX) {
            fatal("tensor %s: element %zu is %lld, too large for 32 bits", t->name, begin + i, (long long)value);
        }
        out[i] = (int32_t)value;
    }
}

#include "safetensors_write.h" // StWriter

#endif
