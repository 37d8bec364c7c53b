// unicode.h: UTF-8 taken apart, repaired, normalized, and made fit for a terminal.
#ifndef LLMC_UNICODE_H
#define LLMC_UNICODE_H

#include "check.h"
#ifdef USE_UTF8PROC
#include <utf8proc.h>
#endif

// ----------------------------------------------------------------------------
// characters

// Length of the character that this byte begins, 0: it begins none.
static inline int utf8_lead(unsigned char c) {
    return c < 0x80 ? 1 : c < 0xC2 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : c < 0xF5 ? 4 : 0;
}

// May `c` follow as byte number i (1, 2, 3) after the lead byte? Excludes overlong forms, surrogates and codes above
// U+10FFFF.
static inline bool utf8_continues(unsigned char lead, int i, unsigned char c) {
    unsigned char low = 0x80, high = 0xBF;
    if (i == 1) {
        if (lead == 0xE0) { low = 0xA0; }
        if (lead == 0xED) { high = 0x9F; }
        if (lead == 0xF0) { low = 0x90; }
        if (lead == 0xF4) { high = 0x8F; }
    }
    return c >= low && c <= high;
}

static inline size_t utf8_replacement(char* out) {
    memcpy(out, "\xEF\xBF\xBD", 3);
    return 3;
}

// A growing piece of memory.
typedef struct {
    char* bytes;
    size_t count, room;
} ByteBuffer;

// Makes room for n more and returns where they go; what is used of them is to be added to count.
static inline char* byte_buffer_reserve(ByteBuffer* b, size_t n) {
    if (b->room - b->count < n) {
        b->room = 2 * b->room + n;
        b->bytes = (char*)reallocCheck(b->bytes, b->room);
    }
    return b->bytes + b->count;
}

static inline void byte_buffer_add(ByteBuffer* b, const char* bytes, size_t n) {
    if (n == 0) { return; }
    memcpy(byte_buffer_reserve(b, n), bytes, n);
    b->count += n;
}

static inline void byte_buffer_free(ByteBuffer* b) {
    free(b->bytes);
    memset(b, 0, sizeof(*b));
}

// Length of the valid character at text[i], or minus the length of the longest piece there that only begins one or is
// none: that is what becomes one U+FFFD.
static inline int utf8_step(const char* text, size_t len, size_t i) {
    unsigned char lead = (unsigned char)text[i];
    int need = utf8_lead(lead), have = 1;
    while (have < need && (size_t)have < len - i && utf8_continues(lead, have, (unsigned char)text[i + (size_t)have])) { have++; }
    return have == need ? have : -have;
}

// Appends the text with U+FFFD for what is no UTF-8, as Python's errors="replace".
static inline void utf8_repair(ByteBuffer* out, const char* text, size_t len) {
    size_t good = 0; // text[good .. i-1] is valid and not copied yet
    for (size_t i = 0; i < len;) {
        int step = utf8_step(text, len, i);
        if (step > 0) { i += (size_t)step; continue; }
        byte_buffer_add(out, text + good, i - good);
        out->count += utf8_replacement(byte_buffer_reserve(out, 3));
        i += (size_t)-step;
        good = i;
    }
    byte_buffer_add(out, text + good, len - good);
}

// The character that begins at text[i] of a valid text, which is *len bytes long.
static inline int utf8_code(const char* text, int* len) {
    const unsigned char* u = (const unsigned char*)text;
    if (u[0] < 0x80) { *len = 1; return u[0]; }
    if (u[0] < 0xE0) { *len = 2; return (u[0] & 0x1F) << 6 | (u[1] & 0x3F); }
    if (u[0] < 0xF0) { *len = 3; return (u[0] & 0x0F) << 12 | (u[1] & 0x3F) << 6 | (u[2] & 0x3F); }
    *len = 4;
    return (u[0] & 0x07) << 18 | (u[1] & 0x3F) << 12 | (u[2] & 0x3F) << 6 | (u[3] & 0x3F);
}

// Where the character before text[i], i > 0, begins in a valid text.
static inline size_t utf8_before(const char* text, size_t i) {
    do { i--; } while (((unsigned char)text[i] & 0xC0) == 0x80);
    return i;
}

// Unicode's White_Space, which is what \s means in the patterns of tokenizers. Also as the inside of a pattern's class.
#define UNICODE_SPACE "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define UNICODE_NOT_SPACE "\\x{0}-\\x{8}\\x{e}-\\x{1f}!-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}" \
    "\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}"

static inline bool unicode_is_space(int c) {
    return (c >= 9 && c <= 13) || c == 32 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// ----------------------------------------------------------------------------
// NFC, the normal form in which letter and accent are one character where Unicode has one

// Characters that NFC leaves as they are whatever stands before them, and that keep apart what stands on either side:
// most of what is written. Of the others, libutf8proc is asked.
static inline bool nfc_is_stable(int c) {
    static const int ranges[][2] = {
        {0x0000, 0x02FF}, {0x0388, 0x0482}, {0x048A, 0x058F}, {0x05D0, 0x060F}, {0x061B, 0x064A}, {0x0671, 0x06D5}, // Latin ... Arabic
        {0x0900, 0x093B}, {0x093D, 0x094C}, {0x0E00, 0x0E37},                   // Devanagari, Thai
        {0x1E00, 0x1F70}, {0x2002, 0x20CF}, {0x2190, 0x2328}, {0x232B, 0x2ADB}, // more Latin and Greek, punctuation, symbols
        {0x2E00, 0x3029}, {0x3030, 0x3098}, {0x309B, 0xA66E}, {0xAC00, 0xD7A3}, // Chinese, Japanese, Korean
        {0xFE00, 0xFE1F}, {0xFE30, 0xFFFF}, {0x1F000, 0x1FAFF}, {0x20000, 0x2F7FF}}; // full width forms, emoji, rare Chinese
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]) && ranges[i][0] <= c; i++) {
        if (c <= ranges[i][1]) { return true; }
    }
    return false;
}

// Where the first character at or after i begins of which nfc_is_stable is `stable`, or len. The text is valid UTF-8.
static inline size_t nfc_find(const char* text, size_t len, size_t i, bool stable) {
    while (i < len) {
        int n;
        uint64_t eight;
        if (!stable && len - i >= 8) { // plain ASCII, quickly
            memcpy(&eight, text + i, 8);
            if ((eight & 0x8080808080808080u) == 0) { i += 8; continue; }
        }
        if (nfc_is_stable(utf8_code(text + i, &n)) == stable) { return i; }
        i += (size_t)n;
    }
    return len;
}

#ifdef USE_UTF8PROC
static inline int nfc_class(utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; }

// Brings each run of combining marks, which are those of a class above 0, into the order of their classes. libutf8proc
// would do that, too, but takes the square of a run's length, and a run may be as long as the text.
static inline void nfc_sort_marks(utf8proc_int32_t* codes, size_t n, ByteBuffer* scratch) {
    for (size_t begin = 0, end; begin < n; begin = end + 1) {
        for (end = begin; end < n && nfc_class(codes[end]) > 0;) { end++; }
        if (end - begin < 2) { continue; }
        size_t before[257] = {0}; // before[c + 1]: how many of class c; then before[c]: of a lower class
        for (size_t i = begin; i < end; i++) { before[nfc_class(codes[i]) + 1]++; }
        for (int c = 1; c < 257; c++) { before[c] += before[c - 1]; }
        scratch->count = 0;
        utf8proc_int32_t* sorted = (utf8proc_int32_t*)(void*)byte_buffer_reserve(scratch, (end - begin) * sizeof(codes[0]));
        for (size_t i = begin; i < end; i++) { sorted[before[nfc_class(codes[i])]++] = codes[i]; }
        memcpy(codes + begin, sorted, (end - begin) * sizeof(codes[0]));
    }
}

// Appends a text's NFC, which does not depend on what stands around it. scratch: two buffers.
static inline void nfc_add(ByteBuffer* out, const char* text, size_t len, ByteBuffer scratch[2]) {
    scratch[0].count = 0;
    for (size_t i = 0; i < len;) {
        int n;
        int code = utf8_code(text + i, &n);
        i += (size_t)n;
        utf8proc_int32_t* to = (utf8proc_int32_t*)(void*)byte_buffer_reserve(&scratch[0], 32 * sizeof(*to)); // real ones have at most 4
        utf8proc_ssize_t m = utf8proc_decompose_char(code, to, 32, (utf8proc_option_t)(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), NULL);
        if (m < 0 || m > 32) { fatal("libutf8proc cannot take U+%04X apart (%s)", (unsigned)code, utf8proc_errmsg(m)); }
        scratch[0].count += (size_t)m * sizeof(*to);
    }
    size_t count = scratch[0].count / sizeof(utf8proc_int32_t);
    byte_buffer_reserve(&scratch[0], sizeof(utf8proc_int32_t)); // for the 0 at the end
    utf8proc_int32_t* codes = (utf8proc_int32_t*)(void*)scratch[0].bytes;
    nfc_sort_marks(codes, count, &scratch[1]);
    utf8proc_ssize_t bytes = utf8proc_reencode(codes, (utf8proc_ssize_t)count, (utf8proc_option_t)(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    if (bytes < 0) { fatal("libutf8proc cannot compose a text (%s)", utf8proc_errmsg(bytes)); }
    byte_buffer_add(out, (const char*)codes, (size_t)bytes);
}

// NFC of a valid text: the text itself where it is so already, else what is built in *out. *len becomes its length.
static inline const char* nfc(const char* text, size_t* len, ByteBuffer* out, ByteBuffer scratch[2]) {
    size_t i = nfc_find(text, *len, 0, false), copied = 0;
    if (i == *len) { return text; }
    out->count = 0;
    while (i < *len) { // text[i] is not stable: from the stable character before it to the next one
        size_t begin = i > 0 ? utf8_before(text, i) : 0, end = nfc_find(text, *len, i, true);
        byte_buffer_add(out, text + copied, begin - copied);
        nfc_add(out, text + begin, end - begin, scratch);
        copied = end;
        i = nfc_find(text, *len, end, false);
    }
    byte_buffer_add(out, text + copied, *len - copied);
    *len = out->count;
    return out->bytes;
}
#endif

// ----------------------------------------------------------------------------
// bytes -> UTF-8 that a terminal can show. Models emit bytes in any order; this holds back an unfinished character
// until its last byte comes, and writes U+FFFD for what can be none: one for each longest piece that begins a
// character, as Python's errors="replace". Control characters could drive the terminal, so all but newline and tab
// come out as their pictures (U+2400 + code), C1 ones not at all.

typedef struct {
    unsigned char held[4]; // an unfinished character
    unsigned count, need;  // bytes held, bytes it will have
} Utf8Stream;

// Room that `out` of utf8_stream_push needs for n bytes in.
#define UTF8_STREAM_ROOM(n) (3 * ((size_t)(n) + 4))

// one whole character of n bytes to out, control characters made harmless
static inline size_t utf8_emit(char* out, const unsigned char* c, int n) {
    bool control = n == 1 && (c[0] < 32 || c[0] == 127) && c[0] != '\n' && c[0] != '\t';
    if (control) {
        out[0] = (char)0xE2;
        out[1] = (char)0x90;
        out[2] = (char)(0x80 + (c[0] == 127 ? 0x21 : c[0]));
        return 3;
    }
    if (n == 2 && c[0] == 0xC2 && c[1] < 0xA0) { return 0; }
    memcpy(out, c, (size_t)n);
    return (size_t)n;
}

// Takes n bytes, writes the characters that are whole by now to out (room for UTF8_STREAM_ROOM(n), no final NUL),
// returns how many bytes. *s starts as all zeros.
static inline size_t utf8_stream_push(Utf8Stream* s, const char* bytes, size_t n, char* out) {
    size_t written = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)bytes[i];
        if (s->count > 0 && !utf8_continues(s->held[0], s->count, c)) {
            written += utf8_replacement(out + written);
            s->count = 0; // and c is looked at as a first byte
        }
        if (s->count == 0) {
            s->need = utf8_lead(c);
            if (s->need == 0) {
                written += utf8_replacement(out + written);
                continue;
            }
        }
        s->held[s->count++] = c;
        if (s->count == s->need) {
            written += utf8_emit(out + written, s->held, s->count);
            s->count = 0;
        }
    }
    return written;
}

// The end of the text: an unfinished character becomes U+FFFD (out has room for 3). Returns the bytes written.
static inline size_t utf8_stream_flush(Utf8Stream* s, char* out) {
    bool unfinished = s->count > 0;
    s->count = 0;
    return unfinished ? utf8_replacement(out) : 0;
}

#endif
