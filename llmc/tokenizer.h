// Token ids <-> bytes: the byte tokenizer (256 bytes + <|endoftext|> = 256), and the vocabulary of any byte-level
// tokenizer.json. Decoding works for every such file; encoding only where a token is one byte (no merges). Also:
// bytes -> a clean UTF-8 stream.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "check.h"
#include "json.h"

#define TOKENIZER_EOT "<|endoftext|>" // opens every document; the only special token of the byte tokenizer
#define TOKENIZER_MAX_ID (1 << 24)    // a vocabulary index above this is taken for a broken file
#define TOKENIZER_MAX_FILE ((size_t)1 << 28) // bytes of tokenizer.json; the largest known have some 30 MB
#define TOKENIZER_MAX_BYTES 256       // what tokenizer_decode writes at most

typedef struct {
    int vocab_size;    // largest id + 1; ids without an entry decode to nothing
    int eot_id;        // the token that opens a document, -1: the file names none
    int byte_ids[256]; // id of the token that is exactly this byte, -1: none
    bool can_encode;   // every byte has its token and there are no merges
    size_t* begin;     // (vocab_size + 1): token id's bytes are bytes[begin[id]] .. bytes[begin[id+1]-1]
    char* bytes;
} Tokenizer;

static inline int tokenizer_vocab_size(const Tokenizer* t) { return t->vocab_size; }
static inline int tokenizer_eot_id(const Tokenizer* t) { return t->eot_id; }

// True if tokenizer_encode works: the byte tokenizer. Vocabularies with merges are encoded ahead, by prepro/.
static inline bool tokenizer_can_encode(const Tokenizer* t) { return t->can_encode; }

static inline void tokenizer_free(Tokenizer* t) {
    free(t->begin);
    free(t->bytes);
    t->begin = NULL;
    t->bytes = NULL;
    t->vocab_size = 0;
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

// Text to ids, one a byte; the literal <|endoftext|> becomes the one id it names, as in Hugging Face's encoders. ids
// has room for len. Returns the number of ids. Nothing is put in front: a caller that starts a document writes eot_id
// itself.
static inline size_t tokenizer_encode(const Tokenizer* t, const char* text, size_t len, int* ids) {
    if (!t->can_encode) { fatal("this tokenizer has merges, which only prepro/ encodes; use shards made with it"); }
    const size_t eot_len = sizeof(TOKENIZER_EOT) - 1;
    size_t n = 0;
    for (size_t i = 0; i < len;) {
        if (t->eot_id >= 0 && text[i] == '<' && len - i >= eot_len && memcmp(text + i, TOKENIZER_EOT, eot_len) == 0) {
            ids[n++] = t->eot_id;
            i += eot_len;
        } else {
            ids[n++] = t->byte_ids[(unsigned char)text[i]];
            i++;
        }
    }
    return n;
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

// One character of valid UTF-8 (cJSON hands out nothing else for \u escapes; raw bytes are checked): its code and
// length, -1: invalid.
static inline int utf8_char(const char* s, int* len) {
    const unsigned char* u = (const unsigned char*)s;
    int n = u[0] < 0x80 ? 1 : (u[0] >> 5) == 6 ? 2 : (u[0] >> 4) == 14 ? 3 : (u[0] >> 3) == 30 ? 4 : 0;
    if (n == 0) { return -1; }
    int code = n == 1 ? u[0] : u[0] & (0x7F >> n);
    for (int i = 1; i < n; i++) {
        if ((u[i] & 0xC0) != 0x80) { return -1; } // also the final NUL
        code = code << 6 | (u[i] & 0x3F);
    }
    *len = n;
    return code;
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
    for (size_t i = 0; i < n; i++) {
        if (kept > 0 && entries[kept - 1].id == entries[i].id) {
            if (entries[kept - 1].literal) { continue; } // an added token is usually listed in the vocabulary, too
            fail_with(err, err_size, "%s: id %d belongs to two tokens, \"%.40s\" and \"%.40s\"", path, entries[i].id,
                      entries[kept - 1].text, entries[i].text);
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
        int code = utf8_char(s, &len);
        if (code < 0 || code >= 512 || byte_of_char[code] < 0) { return -1; }
        out[n++] = (char)byte_of_char[code];
    }
    return n;
}

// Lays the entries out as one block of bytes with offsets, and notes which tokens are single bytes.
static inline bool tokenizer_fill(Tokenizer* t, const TokenEntry* entries, size_t count, const char* path,
                                  char* err, size_t err_size) {
    int chars[256], byte_of_char[512];
    byte_alphabet(chars);
    for (int i = 0; i < 512; i++) { byte_of_char[i] = -1; }
    for (int b = 0; b < 256; b++) { byte_of_char[chars[b]] = b; t->byte_ids[b] = -1; }

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
        if (len == 1 && !entries[i].literal) { t->byte_ids[(unsigned char)t->bytes[used]] = entries[i].id; }
        if (strcmp(entries[i].text, TOKENIZER_EOT) == 0) { t->eot_id = entries[i].id; }
        used += (size_t)len;
    }
    t->begin[id] = used;
    return true;
}

// Reads a Hugging Face tokenizer.json whose vocabulary is byte level (GPT-2, Llama 3, Qwen, ours). False: err says why
// in one line and there is nothing to free.
static inline bool tokenizer_read(Tokenizer* t, const char* tokenizer_json, char* err, size_t err_size) {
    memset(t, 0, sizeof(*t));
    cJSON* root = json_read_file(tokenizer_json, TOKENIZER_MAX_FILE, err, err_size);
    if (root == NULL) { return false; }
    size_t count = 0;
    TokenEntry* entries = token_entries(root, tokenizer_json, &count, err, err_size);
    bool ok = entries != NULL && tokenizer_fill(t, entries, count, tokenizer_json, err, err_size);
    if (ok) {
        const cJSON* model = cJSON_GetObjectItemCaseSensitive(root, "model");
        const cJSON* merges = cJSON_GetObjectItemCaseSensitive(model, "merges");
        t->can_encode = cJSON_GetArraySize(merges) == 0;
        for (int b = 0; b < 256; b++) { t->can_encode = t->can_encode && t->byte_ids[b] >= 0; }
    }
    free(entries);
    cJSON_Delete(root);
    return ok;
}

// The byte tokenizer: id b is byte b, id 256 is <|endoftext|>.
static inline void tokenizer_bytes(Tokenizer* t) {
    memset(t, 0, sizeof(*t));
    t->vocab_size = 257;
    t->eot_id = 256;
    t->can_encode = true;
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

static inline size_t utf8_replacement(char* out) {
    memcpy(out, "\xEF\xBF\xBD", 3);
    return 3;
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

#endif // LLMC_TOKENIZER_H
