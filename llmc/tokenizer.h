// tokenizer.h: token ids <-> text: the byte tokenizer (256 bytes + <|endoftext|> = 256), and every byte-level
// tokenizer.json (GPT-2, Llama 3, Qwen, ours). The ids are those of Hugging Face's tokenizers before post-processor,
// truncation and padding. What else a file asks for and is not implemented here is a reason not to encode, by name;
// decoding works nevertheless.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "check.h"
#include "encoder.h"
#include "json.h"
#include "unicode.h"

#define TOKENIZER_EOT "<|endoftext|>" // opens every document; the only special token of the byte tokenizer
#define TOKENIZER_MAX_ID (1 << 24)    // a vocabulary index above this is taken for a broken file
#define TOKENIZER_MAX_FILE ((size_t)40 << 20) // bytes of tokenizer.json; the largest known have some 30 MB
#define TOKENIZER_MAX_BYTES 256       // what tokenizer_decode writes at most

typedef struct {
    int vocab_size;    // largest id + 1; ids without an entry decode to nothing
    int eot_id;        // the token that opens a document, -1: the file names none
    int byte_ids[256]; // id of the token that is exactly this byte, -1: none
    size_t* begin;     // (vocab_size + 1): token id's bytes are bytes[begin[id]] .. bytes[begin[id+1]-1]
    char* bytes;
    char* refusal;     // why it cannot encode, NULL: it can
    Encoder* encoder;  // NULL: each byte is a token
} Tokenizer;

static inline int tokenizer_vocab_size(const Tokenizer* t) { return t->vocab_size; }
static inline int tokenizer_eot_id(const Tokenizer* t) { return t->eot_id; }

// NULL if tokenizer_encode works, else why it does not: a line that names the file.
static inline const char* tokenizer_refusal(const Tokenizer* t) { return t->refusal; }

static inline void tokenizer_free_encoder(Tokenizer* t) {
    if (t->encoder != NULL) { encoder_free(t->encoder); }
    free(t->encoder);
    t->encoder = NULL;
}

static inline void tokenizer_free(Tokenizer* t) {
    tokenizer_free_encoder(t);
    free(t->refusal);
    free(t->begin);
    free(t->bytes);
    memset(t, 0, sizeof(*t));
}

// The bytes of one token and how many; ids outside the vocabulary have none. Special tokens give their literal text.
static inline const char* tokenizer_token(const Tokenizer* t, int id, size_t* len) {
    if (id < 0 || id >= t->vocab_size) {
        *len = 0;
        return "";
    }
    *len = t->begin[id + 1] - t->begin[id];
    return t->bytes + t->begin[id];
}

// Copies the bytes of one token to out (room for 256; the rest of a longer token is cut) and returns how many. No
// final NUL.
static inline size_t tokenizer_decode(const Tokenizer* t, int id, char* out) {
    size_t len;
    const char* bytes = tokenizer_token(t, id, &len);
    if (len > TOKENIZER_MAX_BYTES) { len = TOKENIZER_MAX_BYTES; }
    memcpy(out, bytes, len);
    return len;
}

// Appends the ids of a text. Added tokens in it, such as <|endoftext|>, become the ids they name. Of the byte tokenizer
// any bytes are tokens, elsewhere U+FFFD stands for what is no UTF-8, as after Python's errors="replace". Nothing is put
// in front: a caller that starts a document writes eot_id itself. False: err says why it cannot. Not from two threads.
static inline bool tokenizer_encode(const Tokenizer* t, const char* text, size_t len, TokenList* list, char* err, size_t err_size) {
    if (t->refusal != NULL) { return fail_with(err, err_size, "%s", t->refusal); }
    if (t->encoder != NULL) { return encoder_encode(t->encoder, text, len, list, err, err_size); }
    const size_t eot_len = sizeof(TOKENIZER_EOT) - 1;
    for (size_t i = 0; i < len;) {
        if (t->eot_id >= 0 && text[i] == '<' && len - i >= eot_len && memcmp(text + i, TOKENIZER_EOT, eot_len) == 0) {
            token_list_add(list, t->eot_id);
            i += eot_len;
        } else {
            token_list_add(list, t->byte_ids[(unsigned char)text[i]]);
            i++;
        }
    }
    return true;
}

// ----------------------------------------------------------------------------
// the alphabet of byte-level tokenizers (GPT-2's): each byte has a printable character. Printable Latin-1 bytes stand
// for themselves, the other 68 take U+0100, U+0101, ... in order.

static inline bool byte_is_itself(int byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
}

// chars[b] = the character of byte b
static inline void byte_alphabet(int chars[256]) {
    int next = 256;
    for (int b = 0; b < 256; b++) { chars[b] = byte_is_itself(b) ? b : next++; }
}

// The character of a byte as UTF-8, which has 1 or 2 bytes; returns how many.
static inline size_t byte_alphabet_utf8(const int chars[256], int byte, char out[2]) {
    int c = chars[byte];
    if (c < 0x80) { out[0] = (char)c; return 1; }
    out[0] = (char)(0xC0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3F));
    return 2;
}

// ----------------------------------------------------------------------------
// reading tokenizer.json

typedef struct {
    int id;
    bool literal; // the text itself, not in the byte alphabet
    const char* text;
} TokenEntry;

static inline int token_entry_compare(const void* a, const void* b) {
    const TokenEntry* x = (const TokenEntry*)a;
    const TokenEntry* y = (const TokenEntry*)b;
    if (x->id != y->id) { return x->id < y->id ? -1 : 1; }
    return (int)y->literal - (int)x->literal; // an added token goes before the vocabulary's entry of the same id
}

static inline bool token_id_of(const cJSON* item, int* id) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble < TOKENIZER_MAX_ID)) { return false; }
    *id = (int)item->valuedouble;
    return (double)*id == item->valuedouble;
}

// Collects the vocabulary and the added tokens of a parsed file; *count entries, malloc'ed, sorted by id, one an id.
static inline TokenEntry* token_entries(const cJSON* root, const char* path, size_t* count,
                                        char* err, size_t err_size) {
    const cJSON* vocab = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(root, "model"), "vocab");
    const cJSON* added = cJSON_GetObjectItemCaseSensitive(root, "added_tokens");
    size_t room = 0, n = 0;
    const cJSON* item;
    cJSON_ArrayForEach(item, vocab) { room++; }
    cJSON_ArrayForEach(item, added) { room++; }
    TokenEntry* entries = (TokenEntry*)callocCheck(room, sizeof(TokenEntry));
    const char* bad = NULL;
    cJSON_ArrayForEach(item, vocab) {
        entries[n].text = item->string;
        if (!token_id_of(item, &entries[n].id)) { bad = item->string; }
        n++;
    }
    cJSON_ArrayForEach(item, added) {
        entries[n].text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "content"));
        entries[n].literal = true;
        bool id_ok = token_id_of(cJSON_GetObjectItemCaseSensitive(item, "id"), &entries[n].id);
        if (entries[n].text == NULL) { bad = "an added token without content"; }
        else if (!id_ok) { bad = entries[n].text; }
        n++;
    }
    if (!cJSON_IsObject(vocab) || bad != NULL || n == 0) {
        if (bad != NULL) {
            fail_with(err, err_size, "%s: token \"%.60s\" has no valid id (an integer from 0 to %d)", path, bad,
                      TOKENIZER_MAX_ID - 1);
        } else {
            fail_with(err, err_size, "%s: no \"vocab\" in its \"model\"; only byte-level BPE files are read", path);
        }
        free(entries);
        return NULL;
    }
    qsort(entries, n, sizeof(TokenEntry), token_entry_compare);
    size_t kept = 0;
    for (size_t i = 0, same; i < n; i += same) {
        for (same = 1; i + same < n && entries[i + same].id == entries[i].id; same++) { // of one id: literal ones, then others
            const TokenEntry* a = &entries[i + same - 1];
            const TokenEntry* b = &entries[i + same];
            bool listed_too = a->literal && !b->literal; // an added token is usually listed in the vocabulary, too
            if (listed_too || (a->literal && strcmp(a->text, b->text) == 0)) { continue; }
            fail_with(err, err_size, "%s: id %d belongs to two tokens, \"%.40s\" and \"%.40s\"", path, a->id, a->text, b->text);
            free(entries);
            return NULL;
        }
        entries[kept++] = entries[i];
    }
    *count = kept;
    return entries;
}

// Appends the bytes of one entry at out; returns how many, or -1 if a character is outside the byte alphabet.
static inline int token_entry_bytes(const TokenEntry* e, const int byte_of_char[512], char* out) {
    if (e->literal) {
        size_t len = strlen(e->text);
        memcpy(out, e->text, len);
        return (int)len;
    }
    int n = 0, len = 0;
    for (const char* s = e->text; *s; s += len) {
        int code = utf8_code(s, &len); // cJSON hands out valid UTF-8 of what was valid UTF-8
        if (code >= 512 || byte_of_char[code] < 0) { return -1; }
        out[n++] = (char)byte_of_char[code];
    }
    return n;
}

// Lays the entries out as one block of bytes with offsets.
static inline bool tokenizer_fill(Tokenizer* t, const TokenEntry* entries, size_t count, const char* path,
                                  char* err, size_t err_size) {
    int chars[256], byte_of_char[512];
    byte_alphabet(chars);
    for (int i = 0; i < 512; i++) { byte_of_char[i] = -1; }
    for (int b = 0; b < 256; b++) { byte_of_char[chars[b]] = b; }

    size_t total = 0;
    for (size_t i = 0; i < count; i++) { total += strlen(entries[i].text); }
    t->vocab_size = entries[count - 1].id + 1;
    t->eot_id = -1;
    t->begin = (size_t*)callocCheck((size_t)t->vocab_size + 1, sizeof(size_t));
    t->bytes = (char*)mallocCheck(total);
    size_t used = 0;
    int id = 0;
    for (size_t i = 0; i < count; i++) {
        while (id <= entries[i].id) { t->begin[id++] = used; } // ids in a gap are empty
        int len = token_entry_bytes(&entries[i], byte_of_char, t->bytes + used);
        if (len < 0) {
            fail_with(err, err_size, "%s: token %d \"%.40s\" is not written in the byte-level alphabet; "
                      "only byte-level BPE files are read", path, entries[i].id, entries[i].text);
            tokenizer_free(t);
            return false;
        }
        if (strcmp(entries[i].text, TOKENIZER_EOT) == 0) { t->eot_id = entries[i].id; }
        used += (size_t)len;
    }
    t->begin[id] = used;
    return true;
}

// ----------------------------------------------------------------------------
// reading how to encode. A file that is not well formed is an error; one that asks for more than is implemented gets a
// refusal, the first that is met.

typedef struct {
    Tokenizer* t;
    Encoder* e;
    const char* path;
    TokenMap vocab;     // the vocabulary's tokens as the file writes them
    size_t* begin;      // of `vocab`
    ByteBuffer names;   // of `vocab`
    size_t vocab_count; // entries of the vocabulary
    bool splits_only;   // no merges, no spaces added, nothing dropped: each byte is a token whatever the pieces
    bool finds_eot;     // it is an added token
    char* err;
    size_t err_size;
} EncoderReader;

PRINTF_LIKE(2, 3)
static inline void encoder_refuse(EncoderReader* r, const char* fmt, ...) {
    if (r->t->refusal != NULL) { return; }
    char why[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(why, sizeof(why), fmt, args);
    va_end(args);
    r->t->refusal = str_format("%s: %s; it decodes, but encoding is left to prepro/", r->path, why);
}

// The string of a key, "" where there is none.
static inline const char* json_text(const cJSON* object, const char* key) {
    const char* text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));
    return text != NULL ? text : "";
}

// The truth value of a key, `standard` where there is none or null; *ok becomes false where it is something else.
static inline bool json_flag(const cJSON* object, const char* key, bool standard, bool* ok) {
    const cJSON* flag = cJSON_GetObjectItemCaseSensitive(object, key);
    if (flag == NULL || cJSON_IsNull(flag)) { return standard; }
    if (!cJSON_IsBool(flag)) { *ok = false; }
    return cJSON_IsTrue(flag);
}

// Every token of the vocabulary as it is written in the file.
static inline bool encoder_read_vocab(EncoderReader* r, const cJSON* vocab) {
    size_t bytes = 0, n = 0;
    const cJSON* item;
    cJSON_ArrayForEach(item, vocab) { bytes += strlen(item->string); n++; }
    r->vocab_count = n;
    r->begin = (size_t*)callocCheck((size_t)r->t->vocab_size + 1, sizeof(size_t));
    cJSON_ArrayForEach(item, vocab) { r->begin[item->valueint + 1] = strlen(item->string); } // the ids were checked
    for (int id = 0; id < r->t->vocab_size; id++) { r->begin[id + 1] += r->begin[id]; }
    byte_buffer_reserve(&r->names, bytes + 1);
    cJSON_ArrayForEach(item, vocab) { memcpy(r->names.bytes + r->begin[item->valueint], item->string, strlen(item->string)); }
    token_map_init(&r->vocab, n, r->begin, r->names.bytes);
    cJSON_ArrayForEach(item, vocab) {
        int* slot = token_map_slot(&r->vocab, item->string, strlen(item->string));
        if (slot == NULL) { return fail_with(r->err, r->err_size, "%s: its vocabulary is made to be slow to read", r->path); }
        *slot = item->valueint;
    }
    return true;
}

// One of "merges": "a b", or as newer files write it ["a", "b"]. False if it is neither.
static inline bool encoder_read_merge(const cJSON* item, const char** left, size_t* left_len, const char** right) {
    if (cJSON_IsString(item)) {
        const char* space = strchr(item->valuestring, ' ');
        if (space == NULL || strchr(space + 1, ' ') != NULL) { return false; }
        *left = item->valuestring;
        *left_len = (size_t)(space - *left);
        *right = space + 1;
        return *left_len > 0 && **right != '\0';
    }
    const cJSON* second = cJSON_IsArray(item) && item->child != NULL ? item->child->next : NULL;
    if (second == NULL || second->next != NULL || !cJSON_IsString(item->child) || !cJSON_IsString(second)) { return false; }
    *left = item->child->valuestring;
    *left_len = strlen(*left);
    *right = second->valuestring;
    return *left_len > 0 && **right != '\0';
}

static inline bool encoder_read_merges(EncoderReader* r, const cJSON* merges) {
    if (merges != NULL && !cJSON_IsArray(merges)) {
        return fail_with(r->err, r->err_size, "%s: \"merges\" is not a list", r->path);
    }
    bpe_init(&r->e->bpe, (size_t)cJSON_GetArraySize(merges), r->t->byte_ids);
    uint32_t rank = 0;
    ByteBuffer whole = {NULL, 0, 0};
    bool ok = true;
    const cJSON* item;
    cJSON_ArrayForEach(item, merges) {
        if (cJSON_IsString(item) && strncmp(item->valuestring, "#version", 8) == 0) { continue; }
        const char* left;
        const char* right;
        size_t left_len;
        ok = encoder_read_merge(item, &left, &left_len, &right);
        if (!ok) {
            fail_with(r->err, r->err_size, "%s: number %u of its merges is not a pair of tokens", r->path, rank);
            break;
        }
        whole.count = 0;
        byte_buffer_add(&whole, left, left_len);
        byte_buffer_add(&whole, right, strlen(right));
        int a = token_map_find(&r->vocab, whole.bytes, left_len), b = token_map_find(&r->vocab, right, strlen(right));
        int both = token_map_find(&r->vocab, whole.bytes, whole.count);
        ok = a >= 0 && b >= 0 && both >= 0;
        if (!ok) {
            fail_with(r->err, r->err_size, "%s: number %u of its merges, \"%.*s\" and \"%.40s\", is about a token that is not in "
                      "the vocabulary", r->path, rank, left_len < 40 ? (int)left_len : 40, left, right);
            break;
        }
        ok = bpe_add(&r->e->bpe, a, b, rank++, both);
        if (!ok) { fail_with(r->err, r->err_size, "%s: its merges are made to be slow to read", r->path); break; }
    }
    byte_buffer_free(&whole);
    r->splits_only = rank == 0;
    return ok;
}

// The model: vocabulary, merges, and what changes their meaning.
static inline bool encoder_read_model(EncoderReader* r, const cJSON* model) {
    if (!encoder_read_vocab(r, cJSON_GetObjectItemCaseSensitive(model, "vocab"))) { return false; }
    int chars[256];
    byte_alphabet(chars);
    for (int b = 0; b < 256; b++) {
        char name[2];
        r->t->byte_ids[b] = token_map_find(&r->vocab, name, byte_alphabet_utf8(chars, b, name));
        if (r->t->byte_ids[b] < 0) { encoder_refuse(r, "it has no token for the byte 0x%02X", (unsigned)b); }
    }
    if (!encoder_read_merges(r, cJSON_GetObjectItemCaseSensitive(model, "merges"))) { return false; }
    const cJSON* dropout = cJSON_GetObjectItemCaseSensitive(model, "dropout");
    bool drops = dropout != NULL && !cJSON_IsNull(dropout) && !(cJSON_IsNumber(dropout) && dropout->valuedouble == 0);
    if (drops) { encoder_refuse(r, "its model has a dropout"); }
    const char* affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++) {
        if (json_text(model, affixes[i])[0] != '\0') { encoder_refuse(r, "its model has a \"%s\"", affixes[i]); }
    }
    bool ok = true;
    if (json_flag(model, "ignore_merges", false, &ok)) { // a word that is a token is that token
        r->splits_only = false;
        token_map_init(&r->e->bpe.words, (size_t)r->t->vocab_size, r->t->begin, r->t->bytes);
        for (int id = 0; id < r->t->vocab_size && ok; id++) {
            size_t len = r->begin[id + 1] - r->begin[id]; // 0: not of the vocabulary, an added token
            if (len == 0) { continue; }
            int* slot = token_map_slot(&r->e->bpe.words, r->t->bytes + r->t->begin[id], r->t->begin[id + 1] - r->t->begin[id]);
            if (slot == NULL) { return fail_with(r->err, r->err_size, "%s: its vocabulary is made to be slow to read", r->path); }
            *slot = id;
        }
    }
    return ok || fail_with(r->err, r->err_size, "%s: \"ignore_merges\" is neither true nor false", r->path);
}

// null, NFC, or a sequence of these.
static inline void encoder_read_normalizer(EncoderReader* r, const cJSON* node) {
    if (node == NULL || cJSON_IsNull(node)) { return; }
    const char* type = json_text(node, "type");
    if (strcmp(type, "Sequence") == 0) {
        const cJSON* item;
        cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(node, "normalizers")) { encoder_read_normalizer(r, item); }
    } else if (strcmp(type, "NFC") == 0) {
        r->e->nfc = true;
        r->splits_only = false;
#ifndef USE_UTF8PROC
        encoder_refuse(r, "its normalizer is NFC, for which this program was built without libutf8proc (install libutf8proc-dev, then "
                       "make again)");
#endif
    } else {
        encoder_refuse(r, "its normalizer \"%.40s\" is not implemented here, only NFC is", type);
    }
}

// The next step, with a pattern or (NULL) without.
static inline void encoder_add_step(EncoderReader* r, const char* pattern, bool space_before, bool drop_matches, bool drop_others) {
    if (r->e->num_steps == ENCODER_MAX_STEPS) {
        encoder_refuse(r, "it has more than %d pre-tokenizers", ENCODER_MAX_STEPS);
        return;
    }
    SplitStep* s = &r->e->steps[r->e->num_steps++];
    s->space_before = space_before;
    s->splits = pattern != NULL;
    s->drop_matches = drop_matches;
    s->drop_others = drop_others;
    if (space_before || drop_matches || drop_others) { r->splits_only = false; }
    if (pattern == NULL || r->t->refusal != NULL) { return; }
#ifdef USE_PCRE2
    char why[200];
    if (!regex_compile(&s->pattern, pattern, why, sizeof(why))) {
        encoder_refuse(r, "its pre-tokenizer's pattern is not implemented here: %s", why);
    }
#else
    encoder_refuse(r, "its pre-tokenizer has a pattern, for which this program was built without PCRE2 (install libpcre2-dev, then make "
                   "again)");
#endif
}

// {"type": "Split", "pattern": {"Regex": "..."} or {"String": "..."}, "behavior": "Isolated", "invert": false}
static inline bool encoder_read_split(EncoderReader* r, const cJSON* node) {
    const cJSON* pattern = cJSON_GetObjectItemCaseSensitive(node, "pattern");
    const char* regex = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(pattern, "Regex"));
    const char* text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(pattern, "String"));
    bool ok = true;
    bool invert = json_flag(node, "invert", false, &ok);
    if ((regex == NULL) == (text == NULL) || !ok) {
        return fail_with(r->err, r->err_size, "%s: a Split needs either a \"Regex\" or a \"String\" as its pattern, and \"invert\" is "
                         "true or false", r->path);
    }
    const char* behavior = json_text(node, "behavior");
    bool removed = strcmp(behavior, "Removed") == 0;
    if (!removed && strcmp(behavior, "Isolated") != 0) {
        encoder_refuse(r, "its pre-tokenizer's \"behavior\": \"%.40s\" is not implemented here, only Isolated and Removed are", behavior);
    }
    char* quoted = text != NULL ? split_quote(text) : NULL;
    encoder_add_step(r, text != NULL ? quoted : regex, false, removed && !invert, removed && invert);
    free(quoted);
    return true;
}

// ByteLevel, or a sequence of splits that ends with it. *done: it has come.
static inline bool encoder_read_pre_tokenizer(EncoderReader* r, const cJSON* node, bool* done) {
    const char* type = json_text(node, "type");
    bool ok = true;
    if (strcmp(type, "Sequence") == 0) {
        const cJSON* item;
        cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(node, "pretokenizers")) {
            if (!encoder_read_pre_tokenizer(r, item, done)) { return false; }
        }
        return true;
    }
    if (*done) {
        encoder_refuse(r, "its pre-tokenizer \"%.40s\" comes after ByteLevel", type);
    } else if (strcmp(type, "Split") == 0) {
        return encoder_read_split(r, node);
    } else if (strcmp(type, "Digits") == 0) {
        bool each = json_flag(node, "individual_digits", false, &ok);
        encoder_add_step(r, each ? "\\p{N}" : "\\p{N}+", false, false, false);
    } else if (strcmp(type, "ByteLevel") == 0) {
        bool space_before = json_flag(node, "add_prefix_space", true, &ok), regex = json_flag(node, "use_regex", true, &ok);
        if (space_before || regex) { encoder_add_step(r, regex ? SPLIT_GPT2 : NULL, space_before, false, false); }
        *done = true;
    } else {
        encoder_refuse(r, "its pre-tokenizer \"%.40s\" is not implemented here; ByteLevel, Split and Digits are", type);
    }
    return ok || fail_with(r->err, r->err_size, "%s: a setting of its pre-tokenizer \"%s\" is neither true nor false", r->path, type);
}

// One of "added_tokens". `id` is what tokenizers would number it.
static inline bool encoder_read_added(EncoderReader* r, const cJSON* item, const char* content, int id) {
    bool ok = true;
    bool special = json_flag(item, "special", false, &ok), normalized = json_flag(item, "normalized", !special, &ok);
    AddedToken token;
    memset(&token, 0, sizeof(token));
    token.takes_left = json_flag(item, "lstrip", false, &ok);
    token.takes_right = json_flag(item, "rstrip", false, &ok);
    bool single_word = json_flag(item, "single_word", false, &ok);
    if (!ok) { return fail_with(r->err, r->err_size, "%s: a setting of the added token \"%.60s\" is neither true nor false", r->path, content); }
    if (single_word) { encoder_refuse(r, "its added token \"%.60s\" is a \"single_word\", which is not implemented here", content); }
    if (cJSON_GetObjectItemCaseSensitive(item, "id")->valueint != id) { // their numbers come from the order, not from the file
        encoder_refuse(r, "its added token \"%.60s\" has an id that is not the next free one, and tokenizers would take that (%d)", content, id);
    }
    token.id = id;
    token.len = strlen(content);
    const char* text = content;
#ifdef USE_UTF8PROC
    if (normalized && r->e->nfc) { text = nfc(text, &token.len, &r->e->normalized, r->e->scratch); }
#endif
    if (token.len > ENCODER_MAX_ADDED_BYTES) {
        encoder_refuse(r, "its added token \"%.60s...\" has more than %d bytes", content, ENCODER_MAX_ADDED_BYTES);
        return true;
    }
    token.text = (char*)mallocCheck(token.len + 1);
    memcpy(token.text, text, token.len);
    token.text[token.len] = '\0';
    AddedTokens* a = &r->e->added[normalized];
    a->tokens[a->count++] = token;
    bool is_eot = strcmp(content, TOKENIZER_EOT) == 0 && !token.takes_left && !token.takes_right;
    if (is_eot) { r->finds_eot = true; } else { r->splits_only = false; }
    return true;
}

static inline bool encoder_read_added_tokens(EncoderReader* r, const cJSON* list) {
    const cJSON* item;
    size_t room = 0;
    cJSON_ArrayForEach(item, list) { room++; }
    for (int i = 0; i < 2; i++) { r->e->added[i].tokens = (AddedToken*)callocCheck(room, sizeof(AddedToken)); }
    int next = (int)r->vocab_count; // what a token that is not in the vocabulary gets
    cJSON_ArrayForEach(item, list) {
        const char* content = json_text(item, "content"); // its id was checked
        if (content[0] == '\0') { continue; }
        int id = token_map_find(&r->vocab, content, strlen(content));
        if (!encoder_read_added(r, item, content, id >= 0 ? id : next++)) { return false; }
    }
    for (int i = 0; i < 2; i++) {
        const char* twice = added_tokens_sort(&r->e->added[i]);
        if (twice != NULL) { encoder_refuse(r, "its added token \"%.60s\" stands there twice", twice); }
    }
    if (r->finds_eot != (r->t->eot_id >= 0)) { r->splits_only = false; }
    return true;
}

static inline bool encoder_read_parts(EncoderReader* r, const cJSON* root) {
    if (!encoder_read_model(r, cJSON_GetObjectItemCaseSensitive(root, "model"))) { return false; }
    encoder_read_normalizer(r, cJSON_GetObjectItemCaseSensitive(root, "normalizer"));
    bool done = false;
    const cJSON* pre_tokenizer = cJSON_GetObjectItemCaseSensitive(root, "pre_tokenizer");
    if (cJSON_IsObject(pre_tokenizer) && !encoder_read_pre_tokenizer(r, pre_tokenizer, &done)) { return false; }
    if (!done) { encoder_refuse(r, "it has no ByteLevel pre-tokenizer"); }
    return encoder_read_added_tokens(r, cJSON_GetObjectItemCaseSensitive(root, "added_tokens"));
}

// What is around the vocabulary: t->encoder, or t->refusal, or neither where each byte is a token.
static inline bool tokenizer_read_encoder(Tokenizer* t, const cJSON* root, const char* path, char* err, size_t err_size) {
    EncoderReader r;
    memset(&r, 0, sizeof(r));
    r.t = t;
    r.e = t->encoder = (Encoder*)callocCheck(1, sizeof(Encoder));
    r.path = path;
    r.err = err;
    r.err_size = err_size;
    bool ok = encoder_read_parts(&r, root);
    token_map_free(&r.vocab);
    free(r.begin);
    byte_buffer_free(&r.names);
    if (t->refusal != NULL || r.splits_only || !ok) { tokenizer_free_encoder(t); }
    return ok;
}

// Is this a file that can be read at all? Its model, its version, and how it decodes.
static inline bool tokenizer_check_kind(const cJSON* root, const char* path, char* err, size_t err_size) {
    const cJSON* model = cJSON_GetObjectItemCaseSensitive(root, "model");
    const cJSON* decoder = cJSON_GetObjectItemCaseSensitive(root, "decoder");
    const char* type = json_text(model, "type");
    const char* version = json_text(root, "version");
    if (type[0] != '\0' && strcmp(type, "BPE") != 0) {
        return fail_with(err, err_size, "%s: its model is \"%.40s\"; only byte-level BPE files are read", path, type);
    }
    if (version[0] != '\0' && strcmp(version, "1.0") != 0) {
        return fail_with(err, err_size, "%s: its version is \"%.40s\"; only 1.0 is known", path, version);
    }
    if (cJSON_IsObject(decoder) && strcmp(json_text(decoder, "type"), "ByteLevel") != 0) {
        return fail_with(err, err_size, "%s: its decoder is \"%.40s\"; only ByteLevel is implemented", path, json_text(decoder, "type"));
    }
    return true;
}

// Reads a Hugging Face tokenizer.json whose vocabulary is byte level. False: err says why in one line and there is
// nothing to free.
static inline bool tokenizer_read(Tokenizer* t, const char* tokenizer_json, char* err, size_t err_size) {
    memset(t, 0, sizeof(*t));
    cJSON* root = json_read_file(tokenizer_json, TOKENIZER_MAX_FILE, err, err_size);
    if (root == NULL) { return false; }
    size_t count = 0;
    bool ok = tokenizer_check_kind(root, tokenizer_json, err, err_size);
    TokenEntry* entries = ok ? token_entries(root, tokenizer_json, &count, err, err_size) : NULL;
    ok = entries != NULL && tokenizer_fill(t, entries, count, tokenizer_json, err, err_size) &&
         tokenizer_read_encoder(t, root, tokenizer_json, err, err_size);
    if (!ok) { tokenizer_free(t); }
    free(entries);
    cJSON_Delete(root);
    return ok;
}

// The byte tokenizer: id b is byte b, id 256 is <|endoftext|>.
static inline void tokenizer_bytes(Tokenizer* t) {
    memset(t, 0, sizeof(*t));
    t->vocab_size = 257;
    t->eot_id = 256;
    t->begin = (size_t*)mallocCheck(258 * sizeof(size_t));
    t->bytes = (char*)mallocCheck(256 + sizeof(TOKENIZER_EOT));
    for (int b = 0; b < 256; b++) {
        t->byte_ids[b] = b;
        t->bytes[b] = (char)b;
        t->begin[b] = (size_t)b;
    }
    memcpy(t->bytes + 256, TOKENIZER_EOT, sizeof(TOKENIZER_EOT));
    t->begin[256] = 256;
    t->begin[257] = 256 + sizeof(TOKENIZER_EOT) - 1;
}

// ----------------------------------------------------------------------------
// writing the byte tokenizer so that transformers' AutoTokenizer opens it. prepro/shards.py writes the same bytes (a
// test compares).

static inline void tokenizer_bytes_json(FILE* fp) {
    int chars[256];
    byte_alphabet(chars);
    fputs("{\n \"version\": \"1.0\",\n \"truncation\": null,\n \"padding\": null,\n \"added_tokens\": [\n"
          "  {\"id\": 256, \"content\": \"" TOKENIZER_EOT "\", \"single_word\": false, "
          "\"lstrip\": false, \"rstrip\": false, \"normalized\": false, \"special\": true}\n ],\n"
          " \"normalizer\": null,\n"
          " \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
          "\"trim_offsets\": true, \"use_regex\": false},\n"
          " \"post_processor\": null,\n"
          " \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
          "\"trim_offsets\": true, \"use_regex\": true},\n"
          " \"model\": {\n  \"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
          "\"continuing_subword_prefix\": null, \"end_of_word_suffix\": null,\n"
          "  \"fuse_unk\": false, \"byte_fallback\": false, \"ignore_merges\": false,\n  \"vocab\": {\n", fp);
    for (int b = 0; b < 256; b++) { fprintf(fp, "   \"\\u%04x\": %d%s\n", (unsigned)chars[b], b, b < 255 ? "," : ""); }
    fputs("  },\n  \"merges\": []\n }\n}\n", fp);
}

// Writes dir/tokenizer.json and dir/tokenizer_config.json; fatal if that fails.
static inline void tokenizer_bytes_write(const char* dir) {
    char* path = str_format("%s/tokenizer.json", dir);
    FILE* fp = fopenCheck(path, "wb");
    tokenizer_bytes_json(fp);
    fcloseCheck(fp, path);
    free(path);
    path = str_format("%s/tokenizer_config.json", dir);
    fp = fopenCheck(path, "wb");
    fputs("{\n \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n \"bos_token\": \"" TOKENIZER_EOT "\",\n"
          " \"eos_token\": \"" TOKENIZER_EOT "\",\n \"clean_up_tokenization_spaces\": false,\n"
          " \"model_input_names\": [\"input_ids\", \"attention_mask\"]\n}\n", fp); // 4.x adds token_type_ids otherwise
    fcloseCheck(fp, path);
    free(path);
}

#endif // LLMC_TOKENIZER_H
