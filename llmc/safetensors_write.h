// safetensors_write.h: the writing half of safetensors.h, which includes it: declare tensors, header, data.
// A failed write (disk full ...) ends the program with path and reason; callers write to temporary names.
#ifndef LLMC_SAFETENSORS_WRITE_H
#define LLMC_SAFETENSORS_WRITE_H

#include "safetensors.h"

typedef struct { char* name; StDtype dtype; int ndim; size_t shape[ST_MAX_DIMS]; size_t nbytes; } StDeclared;

typedef struct {
    char* path;
    FILE* fp;
    StDeclared* tensors;
    size_t count, capacity;
    size_t total;            // bytes of data declared
    size_t current, written; // the tensor that is being filled, and how much of it is there
} StWriter;

static inline void st_writer_open(StWriter* w, const char* path) {
    memset(w, 0, sizeof(*w));
    w->path = strdupCheck(path);
    w->fp = fopenCheck(path, "wb");
    setvbuf(w->fp, NULL, _IOFBF, (size_t)1 << 20);
}

// Announces the next tensor. Each starts at a multiple of its element size: readers that map the file rely on it
// (declare wide types first).
static inline void st_writer_declare(StWriter* w, const char* name, StDtype dtype, int ndim, const size_t* shape) {
    for (const char* p = name; *p != '\0'; p++) {
        if ((unsigned char)*p < 32 || *p == '"' || *p == '\\') {
            fatal("%s: the tensor name %s cannot be written", w->path, name);
        }
    }
    if (ndim > ST_MAX_DIMS) { fatal("%s: tensor %s has %d dimensions", w->path, name, ndim); }
    if (w->total % st_dtype_size(dtype) != 0) {
        fatal("%s: tensor %s would not be aligned; declare wide types first", w->path, name);
    }
    if (w->count == w->capacity) {
        w->capacity = w->capacity == 0 ? 256 : 2 * w->capacity;
        w->tensors = (StDeclared*)reallocCheck(w->tensors, mul_check(w->capacity, sizeof(StDeclared)));
    }
    StDeclared* t = &w->tensors[w->count++];
    memset(t, 0, sizeof(*t));
    t->name = strdupCheck(name);
    t->dtype = dtype;
    t->ndim = ndim;
    t->nbytes = st_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) { t->shape[i] = shape[i]; t->nbytes = mul_check(t->nbytes, shape[i]); }
    w->total += t->nbytes;
}

static inline int st_compare_declared(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

static inline void st_writer_check_names(const StWriter* w) {
    const char** names = (const char**)mallocCheck(mul_check(w->count, sizeof(char*)));
    for (size_t i = 0; i < w->count; i++) { names[i] = w->tensors[i].name; }
    qsort((void*)names, w->count, sizeof(char*), st_compare_declared);
    for (size_t i = 1; i < w->count; i++) {
        if (strcmp(names[i - 1], names[i]) == 0) { fatal("%s: tensor %s is declared twice", w->path, names[i]); }
    }
    free((void*)names);
}

// Writes the header, padded with spaces so that the data starts at a multiple of 8. "format": "pt" is what transformers
// asks for.
static inline void st_writer_header(StWriter* w) {
    st_writer_check_names(w);
    char* text = NULL;
    size_t size = 0, offset = 0;
    FILE* memory = open_memstream(&text, &size);
    if (memory == NULL) { fatal("out of memory for the header of %s", w->path); }
    fprintf(memory, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < w->count; i++) {
        const StDeclared* t = &w->tensors[i];
        fprintf(memory, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, st_dtype_name(t->dtype));
        for (int d = 0; d < t->ndim; d++) { fprintf(memory, "%s%zu", d > 0 ? "," : "", t->shape[d]); }
        fprintf(memory, "],\"data_offsets\":[%zu,%zu]}", offset, offset + t->nbytes);
        offset += t->nbytes;
    }
    fprintf(memory, "}");
    fflush(memory);
    while (size % 8 != 0) { fputc(' ', memory); fflush(memory); }
    if (ferror(memory) || fclose(memory) != 0) { fatal("out of memory for the header of %s", w->path); }
    if (size > ST_MAX_HEADER) {
        fatal("%s: a header of %zu bytes is more than the 100 MB the format allows", w->path, size);
    }
    unsigned char raw[8];
    for (int i = 0; i < 8; i++) { raw[i] = (unsigned char)((uint64_t)size >> (8 * i)); }
    fwriteCheck(raw, 1, 8, w->fp, w->path);
    fwriteCheck(text, 1, size, w->fp, w->path);
    free(text);
}

// The tensor that the next byte belongs to (empty ones need none).
static inline const StDeclared* st_writer_current(StWriter* w) {
    while (w->current < w->count && w->written == w->tensors[w->current].nbytes) { w->current++; w->written = 0; }
    if (w->current == w->count) { fatal("%s: more data than was declared", w->path); }
    return &w->tensors[w->current];
}

// The next bytes, of one tensor, in its own type.
static inline void st_writer_data(StWriter* w, const void* bytes, size_t n) {
    if (n == 0) { return; }
    const StDeclared* t = st_writer_current(w);
    if (n > t->nbytes - w->written) { fatal("%s: %zu bytes are too many for tensor %s", w->path, n, t->name); }
    fwriteCheck(bytes, 1, n, w->fp, w->path);
    w->written += n;
}

// The next `count` floats of one tensor, stored as it was declared: F32, or BF16 rounded to nearest even.
static inline void st_writer_f32(StWriter* w, const float* values, size_t count) {
    if (count == 0) { return; }
    const StDeclared* t = st_writer_current(w);
    if (t->dtype == ST_F32) { st_writer_data(w, values, mul_check(count, sizeof(float))); return; }
    if (t->dtype != ST_BF16) { fatal("%s: tensor %s is not stored as F32 or BF16", w->path, t->name); }
    uint16_t buffer[4096];
    for (size_t begin = 0; begin < count; begin += 4096) {
        size_t n = count - begin < 4096 ? count - begin : 4096;
        for (size_t i = 0; i < n; i++) { buffer[i] = f32_to_bf16(values[begin + i]); }
        st_writer_data(w, buffer, n * sizeof(uint16_t));
    }
}

// Ends the file: everything declared must be there, and is on the disk when this returns.
static inline void st_writer_close(StWriter* w) {
    while (w->current < w->count && w->written == w->tensors[w->current].nbytes) { w->current++; w->written = 0; }
    if (w->current != w->count) {
        fatal("%s: tensor %s was not written completely", w->path, w->tensors[w->current].name);
    }
    if (fflush(w->fp) != 0 || fsync(fileno(w->fp)) != 0) {
        fatal("writing %s failed: %s%s", w->path, strerror(errno), write_advice(errno));
    }
    fcloseCheck(w->fp, w->path);
    for (size_t i = 0; i < w->count; i++) { free(w->tensors[i].name); }
    free(w->tensors);
    free(w->path);
    memset(w, 0, sizeof(*w));
}

#endif
