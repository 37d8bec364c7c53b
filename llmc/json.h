// json.h: JSON files through cJSON, read as something a stranger may have written.
// cJSON alone keeps duplicate keys, ignores text after the document and takes any bytes; here each is an error.
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include "check.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#define JSON_MAX_VALUES ((size_t)1 << 23) // in one document: each takes some 100 bytes; a model of a million tensors has as many
#define JSON_MAX_INTEGER 9007199254740992.0 // 2^53: cJSON keeps numbers as doubles, above this they are no longer exact

// ----------------------------------------------------------------------------
// checks of the raw text and of the parsed tree

// Position of the first byte that is not valid UTF-8 (overlong forms and surrogates included), or n.
static inline size_t utf8_first_invalid(const char* text, size_t n) {
    const unsigned char* s = (const unsigned char*)text;
    size_t i = 0;
    while (i < n) {
        if (s[i] < 0x80) { i++; continue; }
        int extra = 0; // bytes that follow the first
        if (s[i] >= 0xC2 && s[i] < 0xE0) { extra = 1; }
        if (s[i] >= 0xE0 && s[i] < 0xF0) { extra = 2; }
        if (s[i] >= 0xF0 && s[i] <= 0xF4) { extra = 3; }
        if (extra == 0 || n - i <= (size_t)extra) { return i; }
        for (int k = 1; k <= extra; k++) {
            if ((s[i + k] & 0xC0) != 0x80) { return i; }
        }
        bool overlong = (s[i] == 0xE0 && s[i + 1] < 0xA0) || (s[i] == 0xF0 && s[i + 1] < 0x90);
        bool beyond = (s[i] == 0xED && s[i + 1] >= 0xA0) || (s[i] == 0xF4 && s[i + 1] >= 0x90);
        if (overlong || beyond) { return i; }
        i += 1 + (size_t)extra;
    }
    return n;
}

static inline int json_compare_keys(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

// A key that stands twice in one object of the tree (malloc'ed copy), or NULL. Sorting keeps 20,000 tensor names quick.
static inline char* json_duplicate_key(const cJSON* node) {
    size_t count = 0;
    char* found = NULL;
    for (const cJSON* child = node->child; child != NULL; child = child->next) { count++; }
    if (cJSON_IsObject(node) && count > 1) {
        const char** keys = (const char**)mallocCheck(mul_check(count, sizeof(char*)));
        size_t n = 0;
        for (const cJSON* child = node->child; child != NULL; child = child->next) { keys[n++] = child->string; }
        qsort(keys, count, sizeof(char*), json_compare_keys);
        for (size_t i = 1; i < count && found == NULL; i++) {
            if (strcmp(keys[i - 1], keys[i]) == 0) { found = strdupCheck(keys[i]); }
        }
        free((void*)keys);
    }
    for (const cJSON* child = node->child; child != NULL && found == NULL; child = child->next) {
        if (child->child != NULL) { found = json_duplicate_key(child); }
    }
    return found;
}

// Is there a "\u0000" in a string? cJSON's strings would end there, and be others than the file's.
static inline bool json_has_escaped_zero(const char* text, size_t n) {
    for (size_t i = 0; i + 6 <= n; i++) {
        if (text[i] != '\\') { continue; }
        if (memcmp(text + i, "\\u0000", 6) == 0) { return true; }
        i++; // what is escaped may be a backslash
    }
    return false;
}

// ----------------------------------------------------------------------------
// reading and writing

// Parses n bytes that must be one JSON object and nothing else but white space around it. `where` names the source in
// the message. NULL and a reason in err if it is not; else a tree for cJSON_Delete.
static inline cJSON* json_parse(const char* text, size_t n, const char* where, char* err, size_t err_size) {
    size_t bad = utf8_first_invalid(text, n);
    if (bad < n) { fail_with(err, err_size, "%s: byte %zu of the JSON is not valid UTF-8", where, bad); return NULL; }
    if (memchr(text, 0, n) != NULL || json_has_escaped_zero(text, n)) {
        fail_with(err, err_size, "%s: the JSON contains a zero byte", where);
        return NULL;
    }
    size_t values = 0; // or a few more: the signs inside strings count, too
    for (size_t i = 0; i < n; i++) { values += text[i] == ',' || text[i] == '[' || text[i] == '{'; }
    if (values > JSON_MAX_VALUES) {
        fail_with(err, err_size, "%s: the JSON has more than %zu values", where, JSON_MAX_VALUES);
        return NULL;
    }
    char* copy = (char*)mallocCheck(n + 1); // before 1.7.18 cJSON may look at the byte behind the text
    memcpy(copy, text, n);
    copy[n] = '\0';
    const char* end = copy;
    cJSON* tree = cJSON_ParseWithLengthOpts(copy, n + 1, &end, false);
    size_t at = end != NULL && end >= copy && end <= copy + n ? (size_t)(end - copy) : 0;
    free(copy);
    if (tree == NULL) { fail_with(err, err_size, "%s: not valid JSON near byte %zu", where, at); return NULL; }
    while (at < n && (text[at] == ' ' || text[at] == '\n' || text[at] == '\r' || text[at] == '\t')) { at++; }
    char* duplicate = NULL;
    if (at < n) {
        fail_with(err, err_size, "%s: the JSON ends at byte %zu but %zu more bytes follow", where, at, n - at);
    } else if (!cJSON_IsObject(tree)) {
        fail_with(err, err_size, "%s: the JSON must be an object {...}", where);
    } else if ((duplicate = json_duplicate_key(tree)) != NULL) {
        fail_with(err, err_size, "%s: the name \"%s\" stands there twice", where, duplicate);
    } else {
        return tree;
    }
    free(duplicate);
    cJSON_Delete(tree);
    return NULL;
}

// Reads a whole JSON file of at most max_bytes. NULL and a reason (path included) in err if that fails.
static inline cJSON* json_read_file(const char* path, size_t max_bytes, char* err, size_t err_size) {
    struct stat st;
    int fd = open_to_read(path);
    FILE* fp = fd >= 0 ? fdopen(fd, "rb") : NULL;
    if (fp == NULL) {
        fail_with(err, err_size, "cannot open %s: %s", path, strerror(errno));
        if (fd >= 0) { close(fd); }
        return NULL;
    }
    cJSON* tree = NULL;
    if (fstat(fileno(fp), &st) != 0 || !S_ISREG(st.st_mode)) {
        fail_with(err, err_size, "%s is not a regular file", path);
    } else if ((uint64_t)st.st_size > (uint64_t)max_bytes) {
        fail_with(err, err_size, "%s has %lld bytes, more than the %zu such a file can need", path,
                  (long long)st.st_size, max_bytes);
    } else {
        size_t n = (size_t)st.st_size;
        char* text = (char*)mallocCheck(n + 1);
        size_t got = fread(text, 1, n, fp);
        if (got != n) {
            fail_with(err, err_size, "cannot read %s: %s", path,
                      ferror(fp) ? strerror(errno) : "it shrank while being read");
        } else {
            tree = json_parse(text, n, path, err, err_size);
        }
        free(text);
    }
    fclose(fp);
    return tree;
}

// Writes the tree, readable, to path (fatal if that fails).
static inline void json_write_file(const cJSON* tree, const char* path) {
    char* text = cJSON_Print(tree);
    if (text == NULL) { fatal("out of memory while writing %s", path); }
    FILE* fp = fopenCheck(path, "wb");
    fwriteCheck(text, 1, strlen(text), fp, path);
    fwriteCheck("\n", 1, 1, fp, path);
    fcloseCheck(fp, path);
    cJSON_free(text);
}

// ----------------------------------------------------------------------------
// values

// True and *out if the node is a whole number in [lo, hi]; 1.5, 1e300 and "1" are not.
static inline bool json_integer(const cJSON* node, int64_t lo, int64_t hi, int64_t* out) {
    if (!cJSON_IsNumber(node)) { return false; }
    double value = node->valuedouble;
    if (!(fabs(value) <= JSON_MAX_INTEGER) || value != floor(value)) { return false; }
    int64_t whole = (int64_t)value;
    if (whole < lo || whole > hi) { return false; }
    *out = whole;
    return true;
}

// A float as Python writes one, shortest form that reads back the same and always with a point or exponent:
// transformers 5 checks types and does not take 10000000 for a float.
static inline void json_add_float(cJSON* object, const char* name, double value) {
    char text[40];
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, value);
        if (strtod(text, NULL) == value) { break; }
    }
    if (strpbrk(text, ".eEn") == NULL) { strcat(text, ".0"); }
    cJSON_AddRawToObject(object, name, text);
}

// 64-bit counters do not fit in a double, so they are written as decimal strings.
static inline void json_add_u64(cJSON* object, const char* name, uint64_t value) {
    char text[24];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
    cJSON_AddStringToObject(object, name, text);
}

// True and *out if the node is a decimal string of an unsigned 64-bit number, or such a number small enough to be
// exact.
static inline bool json_u64(const cJSON* node, uint64_t* out) {
    int64_t whole;
    if (json_integer(node, 0, (int64_t)JSON_MAX_INTEGER, &whole)) { *out = (uint64_t)whole; return true; }
    if (!cJSON_IsString(node) || node->valuestring[0] < '0' || node->valuestring[0] > '9') { return false; }
    char* end;
    errno = 0;
    unsigned long long value = strtoull(node->valuestring, &end, 10);
    if (errno != 0 || *end != '\0') { return false; }
    *out = (uint64_t)value;
    return true;
}

#endif
