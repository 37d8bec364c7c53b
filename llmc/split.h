// split.h: the regular expressions of tokenizer.json, which cut text into words. Hugging Face's tokenizers hand them to
// Oniguruma, we to PCRE2: what means the same in both is taken over, what PCRE2 writes in another way is rewritten, and
// what might mean something else is refused by name.
#ifndef LLMC_SPLIT_H
#define LLMC_SPLIT_H

#include "check.h"
#include "unicode.h"
#include <time.h>
#ifdef USE_PCRE2
#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>
#endif

#define SPLIT_GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+" // of ByteLevel itself
#define SPLIT_MAX_PATTERN 20000  // bytes; real ones have some 200
#define SPLIT_MAX_REPEAT 1000    // in {n,m}
#define SPLIT_WINDOW 256         // one match is looked for at so many places at a time, each of them worth ...
#define SPLIT_MAX_STEPS 1000000  // ... so many steps of backtracking, and ...
#define SPLIT_STEPS_PER_BYTE 20  // ... more in a long text, which may be one word
#define SPLIT_SECONDS 10         // for a text, and more for a long one; real patterns take microseconds
#define SPLIT_BYTES_PER_SECOND 100000

// ----------------------------------------------------------------------------
// translation: Oniguruma's pattern -> PCRE2's

typedef struct {
    const char* p; // what is left of the pattern
    ByteBuffer out;
    char* err;
    size_t err_size;
} SplitTranslator;

static inline void split_put(SplitTranslator* t, const char* text) { byte_buffer_add(&t->out, text, strlen(text)); }

static inline bool split_refuse(SplitTranslator* t, const char* what) {
    return fail_with(t->err, t->err_size, "%s at \"%.20s\"", what, t->p);
}

static inline bool split_is_digit(char c) { return c >= '0' && c <= '9'; }
static inline bool split_is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Is this the name of a general category, which both libraries know by the same name?
static inline bool split_is_category(const char* name, size_t n) {
    const char* names = " L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp ";
    char word[8];
    if (n < 1 || n > 2) { return false; }
    snprintf(word, sizeof(word), " %.*s ", (int)n, name);
    return strstr(names, word) != NULL;
}

// What follows a backslash. *set: it stands for several characters, so it cannot be the end of a range.
static inline bool split_escape(SplitTranslator* t, bool in_class, bool* set) {
    char c = t->p[1];
    *set = true;
    if (c == 's' || c == 'S') {
        split_put(t, in_class ? "" : "[");
        split_put(t, c == 's' ? UNICODE_SPACE : UNICODE_NOT_SPACE);
        split_put(t, in_class ? "" : "]");
        t->p += 2;
        return true;
    }
    if (c == 'd') {
        split_put(t, "\\p{Nd}");
        t->p += 2;
        return true;
    }
    if ((c == 'p' || c == 'P') && t->p[2] == '{') {
        const char* name = t->p + 3 + (t->p[3] == '^');
        size_t n = strcspn(name, "}");
        if (name[n] != '}' || !split_is_category(name, n)) { return split_refuse(t, "a property that is no general category"); }
        byte_buffer_add(&t->out, t->p, (size_t)(name - t->p) + n + 1);
        t->p = name + n + 1;
        return true;
    }
    *set = false;
    bool control = c == 'r' || c == 'n' || c == 't' || c == 'f';
    bool sign = c > 32 && c < 127 && !split_is_digit(c) && !split_is_letter(c);
    if (!control && !sign) { return split_refuse(t, "an escape that is not among \\s \\S \\d \\p \\P \\r \\n \\t \\f"); }
    byte_buffer_add(&t->out, t->p, 2);
    t->p += 2;
    return true;
}

// [...]
static inline bool split_class(SplitTranslator* t) {
    const char* begin = t->p;
    size_t n = 1 + (t->p[1] == '^');
    byte_buffer_add(&t->out, t->p, n);
    t->p += n;
    bool set = false, range = false; // what came last cannot begin a range; it is the - of one
    for (bool first = true; first || *t->p != ']'; first = false) {
        bool was_range = range;
        range = false;
        if (*t->p == '\0' || (first && *t->p == ']')) { t->p = begin; return split_refuse(t, "an empty or endless class"); }
        if (*t->p == '[') { return split_refuse(t, "a class inside a class"); }
        if (t->p[0] == '&' && t->p[1] == '&') { return split_refuse(t, "an intersection of classes"); }
        if (*t->p == '\\') {
            if (!split_escape(t, true, &set)) { return false; }
            if (set && was_range) { return split_refuse(t, "a range without an end, before what stands"); }
            set = set || was_range;
        } else if (*t->p == '-') { // between two characters a range, at either end itself
            range = !first && t->p[1] != ']';
            if (range && (set || was_range)) { return split_refuse(t, "a range without a beginning"); }
            split_put(t, range ? "-" : "\\-");
            t->p++;
        } else {
            int len;
            utf8_code(t->p, &len);
            byte_buffer_add(&t->out, t->p, (size_t)len);
            t->p += len;
            set = was_range;
        }
    }
    split_put(t, "]");
    t->p++;
    return true;
}

// (?i:...): letters and signs only, for there Oniguruma also takes one character for several, as the German sharp s for ss.
static inline bool split_ignore_case(SplitTranslator* t) {
    size_t n = 4;
    while (split_is_letter(t->p[n]) || t->p[n] == '\'' || t->p[n] == '|') { n++; }
    if (t->p[n] != ')') { return split_refuse(t, "more than letters, ' and | in (?i:...)"); }
    const char* several[] = {"ss", "ff", "fi", "fl", "st"};
    for (size_t i = 4; i < n; i++) {
        for (int k = 0; k < 5; k++) {
            bool same = (t->p[i] | 32) == several[k][0] && (t->p[i + 1] | 32) == several[k][1];
            if (same) { return split_refuse(t, "(?i:...) of letters that may be written as one character"); }
        }
    }
    byte_buffer_add(&t->out, t->p, n + 1);
    t->p += n + 1;
    return true;
}

// {n} {n,} {n,m}
static inline bool split_repeat(SplitTranslator* t) {
    const char* p = t->p + 1;
    bool ok = split_is_digit(*p);
    long low = strtol(p, (char**)&p, 10), high = low;
    if (ok && *p == ',') {
        p++;
        if (split_is_digit(*p)) { high = strtol(p, (char**)&p, 10); }
    }
    if (!ok || *p != '}' || high < low) { return split_refuse(t, "a { that is not one of {n} {n,} {n,m}"); }
    if (high > SPLIT_MAX_REPEAT) { return split_refuse(t, "more than 1000 repetitions"); }
    if (p[1] == '?' || p[1] == '+' || p[1] == '*' || p[1] == '{') { return split_refuse(t, "a repetition of a repetition"); }
    byte_buffer_add(&t->out, t->p, (size_t)(p - t->p) + 1);
    t->p = p + 1;
    return true;
}

// True: t->out holds the pattern for PCRE2, with a final NUL. False: err says what is refused. The caller frees t->out.
static inline bool split_translate(SplitTranslator* t) {
    bool set;
    while (*t->p != '\0') {
        char c = *t->p;
        bool ok = true;
        if (c == '\\') { ok = split_escape(t, false, &set); }
        else if (c == '[') { ok = split_class(t); }
        else if (c == '{') { ok = split_repeat(t); }
        else if (strncmp(t->p, "(?i:", 4) == 0) { ok = split_ignore_case(t); }
        else if (c == '(') {
            bool known = t->p[1] != '?' || t->p[2] == ':' || t->p[2] == '=' || t->p[2] == '!';
            if (!known || t->p[1] == '*') { return split_refuse(t, "a group other than (...) (?:...) (?i:...) (?=...) (?!...)"); }
            split_put(t, t->p[1] != '?' ? "(?:" : t->p[2] == ':' ? "(?:" : t->p[2] == '=' ? "(?=" : "(?!"); // nobody asks what a group held
            t->p += t->p[1] == '?' ? 3 : 1;
        } else if (c == '^' || c == '$') {
            return split_refuse(t, "an anchor");
        } else if (c == '.') {
            split_put(t, "[^\\n]");
            t->p++;
        } else {
            byte_buffer_add(&t->out, t->p, 1);
            t->p++;
        }
        if (!ok) { return false; }
    }
    byte_buffer_add(&t->out, "", 1);
    return true;
}

// A pattern that matches just this text.
static inline char* split_quote(const char* text) {
    char* out = (char*)mallocCheck(2 * strlen(text) + 1);
    size_t n = 0;
    for (; *text; text++) {
        if (*text > 32 && *text < 127 && !split_is_digit(*text) && !split_is_letter(*text)) { out[n++] = '\\'; }
        out[n++] = *text;
    }
    out[n] = '\0';
    return out;
}

// ----------------------------------------------------------------------------
// matching

#ifdef USE_PCRE2
typedef struct {
    pcre2_code* code;
    pcre2_match_data* data;
    pcre2_match_context* context;
    double deadline;
    unsigned calls;
} Regex;

static inline void regex_free(Regex* r) {
    pcre2_code_free(r->code); // NULL is allowed
    pcre2_match_data_free(r->data);
    pcre2_match_context_free(r->context);
    memset(r, 0, sizeof(*r));
}

// Compiles a pattern as it stands in tokenizer.json. False: err says why it cannot be used.
static inline bool regex_compile(Regex* r, const char* pattern, char* err, size_t err_size) {
    memset(r, 0, sizeof(*r));
    if (strlen(pattern) > SPLIT_MAX_PATTERN) { return fail_with(err, err_size, "it has more than %d bytes", SPLIT_MAX_PATTERN); }
    SplitTranslator t = {pattern, {NULL, 0, 0}, err, err_size};
    bool ok = split_translate(&t);
    if (ok) {
        int code;
        PCRE2_SIZE at;
        r->code = pcre2_compile((PCRE2_SPTR)t.out.bytes, t.out.count - 1, PCRE2_UTF | PCRE2_USE_OFFSET_LIMIT, &code, &at, NULL);
        if (r->code == NULL) {
            PCRE2_UCHAR reason[200];
            pcre2_get_error_message(code, reason, sizeof(reason));
            ok = fail_with(err, err_size, "PCRE2 does not take it: %s", (const char*)reason);
        }
    }
    byte_buffer_free(&t.out);
    if (!ok) { return false; }
    uint32_t may_be_empty = 0;
    pcre2_pattern_info(r->code, PCRE2_INFO_MATCHEMPTY, &may_be_empty);
    if (may_be_empty) {
        regex_free(r);
        return fail_with(err, err_size, "it also matches where there is nothing");
    }
    pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE); // where that cannot be had, matching is slower
    r->data = pcre2_match_data_create(1, NULL);
    r->context = pcre2_match_context_create(NULL);
    if (r->data == NULL || r->context == NULL) { fatal("out of memory for PCRE2"); }
    pcre2_set_heap_limit(r->context, 256 * 1024); // KiB
    return true;
}

static inline double regex_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Before a text of this length: how much work it may be. A pattern may be written to take for ever.
static inline void regex_begin(Regex* r, size_t len) {
    uint64_t steps = SPLIT_MAX_STEPS + SPLIT_STEPS_PER_BYTE * (uint64_t)len;
    pcre2_set_match_limit(r->context, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
    r->calls = 0;
    if (len > SPLIT_WINDOW) { r->deadline = regex_clock() + SPLIT_SECONDS + (double)len / SPLIT_BYTES_PER_SECOND; }
}

// The next match at or after `from` in a valid text: 1 and where it is, 0: there is none, -1: it takes too long.
static inline int regex_next(Regex* r, const char* text, size_t len, size_t from, size_t* begin, size_t* end) {
    for (;;) {
        size_t last = from + SPLIT_WINDOW; // where a match may begin
        while (last < len && ((unsigned char)text[last] & 0xC0) == 0x80) { last++; }
        pcre2_set_offset_limit(r->context, last);
        if (len > SPLIT_WINDOW && r->calls++ % 16 == 15 && regex_clock() > r->deadline) { return -1; }
        int result = pcre2_match(r->code, (PCRE2_SPTR)text, len, from, PCRE2_NO_UTF_CHECK, r->data, r->context);
        if (result == PCRE2_ERROR_JIT_STACKLIMIT) { // the slower way needs no stack
            result = pcre2_match(r->code, (PCRE2_SPTR)text, len, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, r->data, r->context);
        }
        if (result == PCRE2_ERROR_NOMATCH) {
            if (last >= len) { return 0; }
            from = last;
            continue;
        }
        if (result < 0) { return -1; }
        const PCRE2_SIZE* at = pcre2_get_ovector_pointer(r->data);
        *begin = at[0];
        *end = at[1];
        return 1;
    }
}
#else
typedef struct { int unused; } Regex; // tokenizers that need one are refused
static inline void regex_free(Regex* r) { r->unused = 0; }
#endif

#endif
