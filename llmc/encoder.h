// encoder.h: text -> token ids, in the steps of Hugging Face's tokenizers: added tokens are found in the text, what is
// between them is normalized, other added tokens are found in that, what is between them is split into words, and each
// word goes through byte pair encoding. What the steps are is read from tokenizer.json by tokenizer.h.
#ifndef LLMC_ENCODER_H
#define LLMC_ENCODER_H

#include "bpe.h"
#include "split.h"
#include "unicode.h"

#define ENCODER_MAX_STEPS 8        // pre-tokenizers, one after the other
#define ENCODER_MAX_ADDED_BYTES 256 // of an added token

typedef struct {
    char* text;
    size_t len;
    int id;
    bool takes_left, takes_right; // white space on that side becomes part of it
} AddedToken;

typedef struct {
    AddedToken* tokens; // sorted by their bytes
    size_t count;
    size_t first[257];  // those that begin with byte b are first[b] .. first[b+1]-1
} AddedTokens;

// A pre-tokenizer: cuts each piece of text that comes into pieces.
typedef struct {
    bool space_before;              // a piece that does not begin with a space gets one
    bool splits;                    // there is a pattern; it cuts at both ends of each match, and ...
    bool drop_matches, drop_others; // ... these pieces are thrown away
    Regex pattern;
    ByteBuffer with_space;
} SplitStep;

typedef struct {
    AddedTokens added[2]; // found in the text as it is, and in normalized text
    bool nfc;
    SplitStep steps[ENCODER_MAX_STEPS];
    int num_steps;
    Bpe bpe;
    ByteBuffer repaired, normalized, scratch[2];
} Encoder;

static inline void added_tokens_free(AddedTokens* a) {
    for (size_t i = 0; i < a->count; i++) { free(a->tokens[i].text); }
    free(a->tokens);
    memset(a, 0, sizeof(*a));
}

static inline void encoder_free(Encoder* e) {
    for (int i = 0; i < 2; i++) {
        added_tokens_free(&e->added[i]);
        byte_buffer_free(&e->scratch[i]);
    }
    for (int i = 0; i < ENCODER_MAX_STEPS; i++) {
        regex_free(&e->steps[i].pattern);
        byte_buffer_free(&e->steps[i].with_space);
    }
    bpe_free(&e->bpe);
    byte_buffer_free(&e->repaired);
    byte_buffer_free(&e->normalized);
}

// ----------------------------------------------------------------------------
// added tokens

static inline int added_token_compare(const void* a, const void* b) {
    const AddedToken* x = (const AddedToken*)a;
    const AddedToken* y = (const AddedToken*)b;
    int order = memcmp(x->text, y->text, x->len < y->len ? x->len : y->len);
    return order != 0 ? order : x->len < y->len ? -1 : x->len > y->len;
}

// After all were put in: makes them ready to be found. The token that stands there twice, or NULL.
static inline const char* added_tokens_sort(AddedTokens* a) {
    if (a->count == 0) { return NULL; }
    qsort(a->tokens, a->count, sizeof(AddedToken), added_token_compare);
    size_t i = 0;
    for (int b = 0; b <= 256; b++) {
        while (i < a->count && (unsigned char)a->tokens[i].text[0] < b) { i++; }
        a->first[b] = i;
    }
    for (i = 1; i < a->count; i++) {
        if (added_token_compare(&a->tokens[i - 1], &a->tokens[i]) == 0) { return a->tokens[i].text; }
    }
    return NULL;
}

// The longest added token that the text begins with, or NULL.
static inline const AddedToken* added_token_here(const AddedTokens* a, const char* text, size_t len) {
    const AddedToken* longest = NULL;
    size_t low = a->first[(unsigned char)text[0]], high = a->first[(unsigned char)text[0] + 1];
    for (size_t n = 1; low < high; n++) { // tokens low .. high-1 are those that agree with the text in n bytes
        if (a->tokens[low].len == n) { longest = &a->tokens[low++]; }
        if (n == len) { break; }
        unsigned char next = (unsigned char)text[n];
        size_t bounds[2]; // the first with a byte at n of at least `next`, of more than `next`
        for (int k = 0; k < 2; k++) {
            size_t from = k == 0 ? low : bounds[0], to = high;
            while (from < to) {
                size_t mid = from + (to - from) / 2;
                if ((unsigned char)a->tokens[mid].text[n] < next + k) { from = mid + 1; } else { to = mid; }
            }
            bounds[k] = from;
        }
        low = bounds[0];
        high = bounds[1];
    }
    return longest;
}

// The first one at or after *at, where *at becomes its place; NULL: there is none.
static inline const AddedToken* added_token_next(const AddedTokens* a, const char* text, size_t len, size_t* at) {
    if (a->count == 0) { return NULL; }
    for (size_t i = *at; i < len; i++) {
        if (a->first[(unsigned char)text[i]] == a->first[(unsigned char)text[i] + 1]) { continue; }
        const AddedToken* token = added_token_here(a, text + i, len - i);
        if (token != NULL) { *at = i; return token; }
    }
    return NULL;
}

// ----------------------------------------------------------------------------
// the way of a text. All functions append to list; false: err says why they cannot.

static inline bool encoder_word(Encoder* e, const char* word, size_t len, TokenList* list, char* err, size_t err_size) {
    if (len > BPE_MAX_WORD) {
        return fail_with(err, err_size, "a word of %zu bytes, which begins with \"%.20s\", is more than the %zu that can be encoded",
                         len, word, BPE_MAX_WORD);
    }
    bpe_encode(&e->bpe, word, len, list);
    return true;
}

// A piece before pre-tokenizer number `step`.
static inline bool encoder_split(Encoder* e, int step, const char* text, size_t len, TokenList* list, char* err, size_t err_size) {
    if (len == 0) { return true; }
    if (step == e->num_steps) { return encoder_word(e, text, len, list, err, err_size); }
    SplitStep* s = &e->steps[step];
    if (s->space_before && text[0] != ' ') {
        s->with_space.count = 0;
        byte_buffer_add(&s->with_space, " ", 1);
        byte_buffer_add(&s->with_space, text, len);
        text = s->with_space.bytes;
        len++;
    }
    if (!s->splits) { return encoder_split(e, step + 1, text, len, list, err, err_size); }
#ifdef USE_PCRE2
    regex_begin(&s->pattern, len);
    for (size_t at = 0, begin, end; at < len; at = end) {
        int found = regex_next(&s->pattern, text, len, at, &begin, &end);
        if (found < 0) { return fail_with(err, err_size, "the pattern of tokenizer.json takes too long on this text"); }
        if (found == 0) { begin = end = len; }
        if (!s->drop_others && !encoder_split(e, step + 1, text + at, begin - at, list, err, err_size)) { return false; }
        if (!s->drop_matches && !encoder_split(e, step + 1, text + begin, end - begin, list, err, err_size)) { return false; }
    }
#endif
    return true;
}

// A valid text before added tokens of kind `level`, 2: after both.
static inline bool encoder_find_added(Encoder* e, int level, const char* text, size_t len, TokenList* list, char* err, size_t err_size) {
    if (len == 0) { return true; }
    if (level == 2) { return encoder_split(e, 0, text, len, list, err, err_size); }
#ifdef USE_UTF8PROC
    if (level == 1 && e->nfc) { text = nfc(text, &len, &e->normalized, e->scratch); }
#endif
    size_t done = 0, space_end = 0, at = 0; // how far the text is encoded, and how far it is known to be white
    const AddedToken* token;
    while ((token = added_token_next(&e->added[level], text, len, &at)) != NULL) {
        size_t begin = at, end = at + token->len;
        int n;
        at = end;
        while (token->takes_left && begin > done && unicode_is_space(utf8_code(text + utf8_before(text, begin), &n))) {
            begin = utf8_before(text, begin);
        }
        if (token->takes_right && end < space_end) { end = space_end; }
        while (token->takes_right && end < len && unicode_is_space(utf8_code(text + end, &n))) { space_end = end += (size_t)n; }
        if (begin > done && !encoder_find_added(e, level + 1, text + done, begin - done, list, err, err_size)) { return false; }
        token_list_add(list, token->id);
        done = end;
    }
    return encoder_find_added(e, level + 1, text + done, len - done, list, err, err_size);
}

// Any bytes; what is no UTF-8 becomes U+FFFD.
static inline bool encoder_encode(Encoder* e, const char* text, size_t len, TokenList* list, char* err, size_t err_size) {
    size_t i = 0;
    while (i < len) { // the first byte that is not UTF-8
        int step = utf8_step(text, len, i);
        if (step < 0) { break; }
        i += (size_t)step;
    }
    if (i < len) {
        e->repaired.count = 0;
        utf8_repair(&e->repaired, text, len);
        text = e->repaired.bytes;
        len = e->repaired.count;
    }
    return encoder_find_added(e, 0, text, len, list, err, err_size);
}

#endif
