// tokenizer.h: the byte tokenizer, tokenizer.json files of any byte-level origin, UTF-8 that a terminal survives.
// What Python's errors="replace" writes was taken from Python and stands here as literals.
#include "testing.h"

#include "../../llmc/rand.h"
#include "../../llmc/tokenizer.h"

#include <limits.h>

static char why[1200]; // what encode and read_json said last

// The ids of a text, in a list that lives until the next call; the test fails where it cannot be encoded.
static const TokenList* encode(const Tokenizer* t, const char* text, size_t len) {
    static TokenList list;
    list.count = 0;
    why[0] = '\0';
    test_check(tokenizer_encode(t, text, len, &list, why, sizeof(why)), __FILE__, __LINE__, "\"%.100s\" is not encoded: %s", text, why);
    return &list;
}

// Compares with ids that end with -1.
static bool encodes_to(const Tokenizer* t, const char* text, const int* expected) {
    const TokenList* list = encode(t, text, strlen(text));
    char got[400] = "";
    bool same = true;
    size_t n = 0;
    for (; expected[n] >= 0; n++) { same = same && n < list->count && list->ids[n] == expected[n]; }
    for (size_t i = 0; i < list->count && strlen(got) < 380; i++) { sprintf(got + strlen(got), " %d", list->ids[i]); }
    return test_check(same && list->count == n, __FILE__, __LINE__, "\"%.100s\" gives%s", text, got);
}
#define ENCODES_TO(t, text, ...) do { const int ids_[] = {__VA_ARGS__, -1}; encodes_to((t), (text), ids_); } while (0)

static void bytes_encode_and_decode_are_inverse(void) {
    Tokenizer t;
    tokenizer_bytes(&t);
    char text[256], out[TOKENIZER_MAX_BYTES];
    for (int b = 0; b < 256; b++) { text[b] = (char)b; }
    CHECK(tokenizer_refusal(&t) == NULL && tokenizer_vocab_size(&t) == 257 && tokenizer_eot_id(&t) == 256);
    const TokenList* list = encode(&t, text, 256);
    if (!CHECK(list->count == 256)) { return; }
    for (int b = 0; b < 256; b++) {
        CHECK(list->ids[b] == b);
        CHECK(tokenizer_decode(&t, b, out) == 1 && out[0] == (char)b);
    }
    CHECK(encode(&t, "", 0)->count == 0);
    tokenizer_free(&t);
}

static void eot_in_a_text_is_one_token(void) {
    Tokenizer t;
    tokenizer_bytes(&t);
    ENCODES_TO(&t, "a<|endoftext|><|endoftext|>b<|endoftext|", 'a', 256, 256, 'b', '<', '|', 'e', 'n', 'd', 'o', 'f', 't', 'e', 'x', 't', '|');
    char out[TOKENIZER_MAX_BYTES];
    CHECK(tokenizer_decode(&t, 256, out) == 13 && memcmp(out, TOKENIZER_EOT, 13) == 0);
    tokenizer_free(&t);
}

static void ids_without_a_token_decode_to_nothing(void) {
    Tokenizer t;
    tokenizer_bytes(&t);
    char out[TOKENIZER_MAX_BYTES];
    CHECK(tokenizer_decode(&t, -1, out) == 0);
    CHECK(tokenizer_decode(&t, 257, out) == 0); // a padded embedding may have such rows
    CHECK(tokenizer_decode(&t, INT_MAX, out) == 0);
    tokenizer_free(&t);
}

static void written_files_read_back_as_the_byte_tokenizer(void) {
    Tokenizer t, u;
    char err[512] = "";
    tokenizer_bytes_write(test_folder());
    char* path = str_format("%s/tokenizer.json", test_folder());
    if (!CHECK(tokenizer_read(&u, path, err, sizeof(err)))) { return; }
    tokenizer_bytes(&t);
    CHECK(u.vocab_size == 257 && u.eot_id == 256 && tokenizer_refusal(&u) == NULL && u.encoder == NULL);
    for (int id = 0; id < 257; id++) {
        size_t n, m;
        const char* a = tokenizer_token(&t, id, &n);
        const char* b = tokenizer_token(&u, id, &m);
        CHECK(n == m && memcmp(a, b, n) == 0);
    }
    CHECK(memcmp(t.byte_ids, u.byte_ids, sizeof(t.byte_ids)) == 0);
    tokenizer_free(&t);
    tokenizer_free(&u);
    free(path);
}

static bool read_json(Tokenizer* t, const char* json, char* err, size_t err_size) {
    char* path = str_format("%s/case.json", test_folder());
    test_write_file(path, json, strlen(json));
    bool ok = tokenizer_read(t, path, err, err_size);
    free(path);
    return ok;
}

// ----------------------------------------------------------------------------
// tokenizer.json

// Reads a file that is made here: the bytes have the ids 0 .. 255, then come the tokens of `vocab` (",\"ab\": 256, ..."),
// `merges` ("\"a b\", ...") and `rest`, which begins with a comma and may be anything of the outer object.
static bool read_bpe(Tokenizer* t, const char* vocab, const char* merges, const char* rest) {
    static char json[300000];
    int chars[256];
    byte_alphabet(chars);
    size_t n = (size_t)sprintf(json, "{\"model\": {\"type\": \"BPE\", \"vocab\": {");
    for (int b = 0; b < 256; b++) { n += (size_t)sprintf(json + n, "%s\"\\u%04x\": %d", b > 0 ? ", " : "", (unsigned)chars[b], b); }
    snprintf(json + n, sizeof(json) - n, "%s}, \"merges\": [%s]}%s}", vocab, merges, rest);
    why[0] = '\0';
    return read_json(t, json, why, sizeof(why));
}

#define BYTE_LEVEL "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": false}"
#define PLAIN ", \"pre_tokenizer\": " BYTE_LEVEL // text is one word
#define SPLIT(pattern) ", \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": \"" pattern \
    "\"}, \"behavior\": \"Isolated\", \"invert\": false}, " BYTE_LEVEL "]}"

static void tokens_decode_through_the_byte_alphabet(void) {
    Tokenizer t;
    char err[512] = "", out[TOKENIZER_MAX_BYTES];
    // \u0120 is the space, \u010a the newline, \u00e4\u00bd\u0142 the three bytes of a Chinese character; id 5 is a gap
    bool ok = read_json(&t, "{\"added_tokens\": [{\"id\": 7, \"content\": \"<|endoftext|>\", \"special\": true},"
        " {\"id\": 8, \"content\": \"<tool call>\"}], \"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0,"
        " \"\\u0120hello\": 1, \"\\u010a\": 2, \"\\u00e4\\u00bd\\u0142\": 3, \"\xC4\xA0\xC4\xA0\": 4, \"ab\": 6},"
        " \"merges\": []}}", err, sizeof(err));
    if (!CHECK(ok)) { return; }
    const char* expected[] = {"a", " hello", "\n", "\xE4\xBD\xA0", "  ", "", "ab", "<|endoftext|>", "<tool call>"};
    CHECK(t.vocab_size == 9 && t.eot_id == 7);
    for (int id = 0; id < 9; id++) {
        size_t n = tokenizer_decode(&t, id, out);
        CHECK(n == strlen(expected[id]) && memcmp(out, expected[id], n) == 0);
    }
    TokenList list = {NULL, 0, 0, NULL, NULL, 0};
    CHECK(!tokenizer_encode(&t, "ab", 2, &list, err, sizeof(err)));
    CHECK_CONTAINS(err, "no token for the byte 0x00");
    tokenizer_free(&t);
}

static void added_token_may_stand_in_the_vocabulary_too(void) {
    Tokenizer t;
    char err[512] = "";
    CHECK(read_json(&t, "{\"added_tokens\": [{\"id\": 1, \"content\": \"<|endoftext|>\"}],"
                        " \"model\": {\"vocab\": {\"a\": 0, \"<|endoftext|>\": 1}, \"merges\": []}}",
                    err, sizeof(err)));
    CHECK(t.vocab_size == 2 && t.eot_id == 1 && tokenizer_refusal(&t) != NULL); // 255 bytes have no token
    tokenizer_free(&t);
}

static void token_longer_than_the_buffer_is_cut_not_overrun(void) {
    char json[1200] = "{\"model\": {\"vocab\": {\"";
    memset(json + strlen(json), 'x', 1000);
    strcat(json, "\": 0}}}");
    Tokenizer t;
    char err[512] = "", out[TOKENIZER_MAX_BYTES];
    size_t len;
    if (!CHECK(read_json(&t, json, err, sizeof(err)))) { return; }
    CHECK(tokenizer_decode(&t, 0, out) == TOKENIZER_MAX_BYTES);
    tokenizer_token(&t, 0, &len);
    CHECK(len == 1000);
    tokenizer_free(&t);
}

static void broken_tokenizer_files_are_refused_with_a_reason(void) {
    const char* cases[][2] = {
        {"", "JSON"},
        {"{\"model\": {\"vocab\": {\"a\": 0}", "JSON"},
        {"[]", "object"},
        {"{}", "vocab"},
        {"{\"model\": {\"type\": \"Unigram\", \"vocab\": [[\"a\", 0]]}}", "model is \"Unigram\""},
        {"{\"version\": \"2.0\", \"model\": {\"vocab\": {\"a\": 0}}}", "version is \"2.0\""},
        {"{\"decoder\": {\"type\": \"WordPiece\"}, \"model\": {\"vocab\": {\"a\": 0}}}", "decoder is \"WordPiece\""},
        {"{\"model\": {\"vocab\": {\"a\": 0}, \"merges\": {}}}", "not a list"},
        {"{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"ab\"]}}", "number 0 of its merges is not a pair"},
        {"{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a b\", \"a  b\"]}}", "number 1 of its merges is not a pair"},
        {"{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a \"]}}", "not a pair"},
        {"{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [[\"a\"]]}}", "not a pair"},
        {"{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [[\"a\", \"b\", \"c\"]]}}", "not a pair"},
        {"{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [[\"a\", 1]]}}", "not a pair"},
        {"{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [7]}}", "not a pair"},
        {"{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a b\", \"b a\"]}}", "\"b\" and \"a\", is about a token"},
        {"{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a c\"]}}", "not in the vocabulary"},
        {"{\"model\": {\"vocab\": {\"a\": 0}, \"ignore_merges\": 1}}", "ignore_merges"},
        {"{\"model\": {\"vocab\": {\"a\": 0}}, \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"use_regex\": 0}}", "neither true nor false"},
        {"{\"model\": {\"vocab\": {\"a\": 0}}, \"pre_tokenizer\": {\"type\": \"Split\", \"pattern\": \"a\"}}", "a Split needs"},
        {"{\"model\": {\"vocab\": {\"a\": 0}}, \"pre_tokenizer\": {\"type\": \"Split\", \"pattern\": {\"Regex\": \"a\"}, \"invert\": 1}}", "a Split needs"},
        {"{\"added_tokens\": [{\"id\": 1, \"content\": \"x\", \"lstrip\": 1}], \"model\": {\"vocab\": {\"a\": 0}}}", "\"x\" is neither true nor false"},
        {"{\"added_tokens\": [{\"id\": 0, \"content\": \"x\"}], \"model\": {\"vocab\": {\"a\": 0, \"bcdefghijk\": 0}}}", "two tokens"},
        {"{\"added_tokens\": [{\"id\": 1, \"content\": \"x\"}, {\"id\": 1, \"content\": \"y\"}], \"model\": {\"vocab\": {\"a\": 0}}}", "two tokens"},
        {"{\"model\": {\"vocab\": {}}}", "vocab"},
        {"{\"model\": {\"vocab\": {\"a\": -1}}}", "no valid id"},
        {"{\"model\": {\"vocab\": {\"a\": 1.5}}}", "no valid id"},
        {"{\"model\": {\"vocab\": {\"a\": 1e9}}}", "no valid id"},
        {"{\"model\": {\"vocab\": {\"a\": \"0\"}}}", "no valid id"},
        {"{\"model\": {\"vocab\": {\"a\": 3, \"b\": 3}}}", "two tokens"},
        {"{\"model\": {\"vocab\": {\"\\u2581the\": 0}}}", "byte-level"}, // SentencePiece's space
        {"{\"model\": {\"vocab\": {\"a b\": 0}}}", "byte-level"},
        {"{\"added_tokens\": [{\"id\": 1}], \"model\": {\"vocab\": {\"a\": 0}}}", "content"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Tokenizer t;
        char err[512] = "";
        if (!CHECK(!read_json(&t, cases[i][0], err, sizeof(err)))) { return; }
        CHECK_CONTAINS(err, cases[i][1]);
        CHECK_CONTAINS(err, "case.json");
    }
    Tokenizer t;
    char err[512] = "";
    CHECK(!tokenizer_read(&t, "/nowhere/tokenizer.json", err, sizeof(err)));
    CHECK_CONTAINS(err, "/nowhere/tokenizer.json");
    CHECK(!tokenizer_read(&t, test_folder(), err, sizeof(err))); // a folder
}

// ----------------------------------------------------------------------------
// encoding. Of whole texts test_tokenizer_bpe.py says more, against Hugging Face's tokenizers.

static void the_lowest_rank_is_joined_first_the_leftmost_of_equals(void) {
    Tokenizer t;
    const char* vocab = ", \"ab\": 256, \"bc\": 257, \"abc\": 258, \"aa\": 259, \"aaaa\": 260";
    if (!CHECK(read_bpe(&t, vocab, "\"b c\", \"a b\", [\"a\", \"bc\"], \"a a\", \"aa aa\"", PLAIN))) { return; }
    ENCODES_TO(&t, "abc", 258);     // bc before ab
    ENCODES_TO(&t, "ab", 256);
    ENCODES_TO(&t, "abab", 256, 256);
    ENCODES_TO(&t, "aaa", 259, 'a');
    ENCODES_TO(&t, "aaaaa", 260, 'a');
    ENCODES_TO(&t, "aaaab", 259, 'a', 256); // ab before aa
    ENCODES_TO(&t, "xabcx", 'x', 258, 'x');
    tokenizer_free(&t);
    CHECK(read_bpe(&t, vocab, "\"#version: 0.2\", \"a b\", \"b c\", \"a b\"", PLAIN)); // of the same pair twice the later counts
    ENCODES_TO(&t, "abc", 'a', 257);
    tokenizer_free(&t);
    CHECK(read_bpe(&t, vocab, "\"a b\"", ", \"model_max_length\": 5" PLAIN));
    ENCODES_TO(&t, "abc", 256, 'c');
    tokenizer_free(&t);
}

static void a_word_that_is_a_token_needs_no_merges_where_the_file_says_so(void) {
    Tokenizer t;
    const char* merges = "\"a b\"], \"ignore_merges\": true, \"z\": [1"; // closes the list, so that it stands in the model
    if (!CHECK(read_bpe(&t, ", \"ab\": 256, \"xyz\": 257, \"\\u0120ab\": 258", merges, PLAIN))) { return; }
    ENCODES_TO(&t, "xyz", 257);
    ENCODES_TO(&t, "xyzx", 'x', 'y', 'z', 'x');
    ENCODES_TO(&t, "abx", 256, 'x');
    ENCODES_TO(&t, " ab", 258);
    tokenizer_free(&t);
}

// What BPE is by its definition; ids (n) -> ids, their number
static size_t merge_slowly(const Bpe* b, int* ids, size_t n) {
    for (;;) {
        size_t best = n;
        uint32_t rank = BPE_NONE;
        for (size_t i = 0; i + 1 < n; i++) {
            uint32_t r = bpe_find(b, ids[i], ids[i + 1])->rank;
            if (r < rank) { rank = r; best = i; }
        }
        if (best == n) { return n; }
        ids[best] = bpe_find(b, ids[best], ids[best + 1])->id;
        memmove(ids + best + 1, ids + best + 2, (n - best - 2) * sizeof(int));
        n--;
    }
}

static void words_of_any_length_are_merged_as_the_definition_says(void) {
    enum { LETTERS = 3, MERGES = 40, LONGEST = 400 };
    static int slow[LONGEST];
    uint64_t rng = 7;
    for (int table = 0; table < 60; table++) { // random tables, and random words many times, so that the cache answers, too
        Bpe b;
        int byte_ids[256];
        TokenList list;
        memset(&list, 0, sizeof(list));
        for (int i = 0; i < 256; i++) { byte_ids[i] = i; }
        bpe_init(&b, MERGES, byte_ids);
        for (int i = 0; i < MERGES; i++) { // of letters and of what was joined before; ranks in another order
            int known = LETTERS + i, left = (int)(rng_next(&rng) % (uint64_t)known), right = (int)(rng_next(&rng) % (uint64_t)known);
            left = left < LETTERS ? 'a' + left : 256 + left - LETTERS;
            right = right < LETTERS ? 'a' + right : 256 + right - LETTERS;
            CHECK(bpe_add(&b, left, right, (uint32_t)(i * 17 % MERGES), 256 + i));
        }
        for (int word = 0; word < 400; word++) {
            char text[LONGEST];
            size_t n = 1 + (size_t)(rng_next(&rng) % (word % 4 == 0 ? LONGEST : word % 4 == 1 ? 60 : 5));
            for (size_t i = 0; i < n; i++) {
                text[i] = (char)('a' + rng_next(&rng) % LETTERS);
                slow[i] = text[i];
            }
            list.count = 0;
            bpe_encode(&b, text, n, &list);
            size_t m = merge_slowly(&b, slow, n);
            if (!CHECK(list.count == m && memcmp(list.ids, slow, m * sizeof(int)) == 0)) { return; }
        }
        token_list_free(&list);
        bpe_free(&b);
    }
}

static void words_that_share_a_line_of_the_cache_are_told_apart(void) {
    Bpe b;
    int byte_ids[256];
    TokenList list;
    memset(&list, 0, sizeof(list));
    for (int i = 0; i < 256; i++) { byte_ids[i] = 255 - i; }
    bpe_init(&b, 0, byte_ids);
    for (int round = 0; round < 2; round++) {
        for (uint32_t w = 0; w < 1 << 19; w++) { // four words a line; lengths 1 .. 9, zero bytes among them
            char text[9] = {0};
            size_t n = 1 + w % 9;
            uint32_t number = w / 9 * 2654435761u;
            for (size_t i = 0; i < n; i++) { text[i] = (char)(number >> (8 * (i % 4)) & (i < 5 ? 255 : 1)); }
            list.count = 0;
            bpe_encode(&b, text, n, &list);
            bool same = list.count == n;
            for (size_t i = 0; i < n && same; i++) { same = list.ids[i] == 255 - (unsigned char)text[i]; }
            if (!CHECK(same)) { return; }
        }
    }
    for (size_t len = 1; len <= BPE_LINE_BYTES; len++) { // every byte counts: for the key, and where lines are compared
        char one[BPE_LINE_BYTES], other[BPE_LINE_BYTES];
        uint64_t key[3], other_key[3];
        memset(one, 'x', len);
        uint64_t line = bpe_key(one, len, key) >> (64 - BPE_CACHE_BITS);
        for (size_t i = 0; i < len; i++) {
            memcpy(other, one, len);
            other[i] = 'y';
            bpe_key(other, len, other_key);
            CHECK(memcmp(key, other_key, sizeof(key)) != 0);
        }
        for (int part = 0; part < 3 && len == BPE_LINE_BYTES; part++) { // words of one line that differ in 4 bytes
            uint32_t number = 0;
            memcpy(other, one, len);
            do { number++; memcpy(other + 8 * part, &number, 4); } while (bpe_key(other, len, other_key) >> (64 - BPE_CACHE_BITS) != line);
            for (int turn = 0; turn < 2; turn++) {
                memcpy(b.cache[line].key, turn == 0 ? key : other_key, sizeof(key)); // as if it had few tokens
                b.cache[line].length = (uint8_t)len;
                b.cache[line].count = 1;
                b.cache[line].ids[0] = 1000 + turn;
                list.count = 0;
                bpe_encode(&b, turn == 0 ? other : one, len, &list);
                CHECK(list.count == len);
            }
        }
    }
    token_list_free(&list);
    bpe_free(&b);
}

static void a_list_with_a_file_keeps_its_order_and_its_memory(void) {
    char* path = str_format("%s/list", test_folder());
    Bpe b;
    int byte_ids[256];
    TokenList list;
    memset(&list, 0, sizeof(list));
    for (int i = 0; i < 256; i++) { byte_ids[i] = i; }
    bpe_init(&b, 0, byte_ids);
    list.file = fopenCheck(path, "w+b");
    list.path = path;
    token_list_reserve(&list, 100);
    size_t room = list.room;
    for (int i = 0; i < 20000; i++) { bpe_encode(&b, "abcdefghijklmnopqrstuvwxyz" + i % 20, 1 + (size_t)i % 6, &list); }
    token_list_flush(&list);
    CHECK(list.room == room && list.written == 20000 / 6 * 21 + 1 + 2);
    rewind(list.file);
    for (int i = 0; i < 20000; i++) {
        for (int k = 0; k <= i % 6; k++) {
            int id;
            if (!CHECK(fread(&id, sizeof(id), 1, list.file) == 1 && id == 'a' + i % 20 + k)) { return; }
        }
    }
    fclose(list.file);
    token_list_free(&list);
    bpe_free(&b);
    free(path);
}

#define ADDED(id, content, more) "{\"id\": " #id ", \"content\": \"" content "\"" more "}"

static void added_tokens_are_found_in_a_text_the_longest_first(void) {
    Tokenizer t;
    const char* rest = PLAIN ", \"added_tokens\": [" ADDED(257, "<|x|>", "") ", " ADDED(258, "<|x|>y", "") ", " ADDED(259, "\\u00e9\\u00e9", "")
        ", " ADDED(260, "<l>", ", \"lstrip\": true") ", " ADDED(261, "<r>", ", \"rstrip\": true") ", " ADDED(262, "  ", "") ", " ADDED(256, "ab", "") "]";
    if (!CHECK(read_bpe(&t, ", \"ab\": 256, \"<|\": 263", "\"a b\", \"< |\"", ", \"x\": 1"))) { return; }
    CHECK_CONTAINS(tokenizer_refusal(&t), "no ByteLevel pre-tokenizer");
    tokenizer_free(&t);
    if (!CHECK(read_bpe(&t, ", \"ab\": 256", "\"a b\"", rest))) { return; }
    ENCODES_TO(&t, "<|x|>", 257);
    ENCODES_TO(&t, "<|x|>y<|x|<|x|>", 258, '<', '|', 'x', '|', 257);
    ENCODES_TO(&t, "<<|x|>z\xC3\xA9\xC3\xA9\xC3", '<', 257, 'z', 259, 0xEF, 0xBF, 0xBD);
    ENCODES_TO(&t, "a b ab", 'a', ' ', 'b', ' ', 256);
    ENCODES_TO(&t, "a \n\xE3\x80\x80<l> b", 'a', 260, ' ', 'b'); // \xE3\x80\x80 is white space
    ENCODES_TO(&t, "a <r> \t\xC2\xA0" "b<r>", 'a', ' ', 261, 'b', 261);
    ENCODES_TO(&t, "<r> <l>", 261, 260);
    ENCODES_TO(&t, "   <l>", 262, 260);
    ENCODES_TO(&t, "<r>    x", 261, 262, 262, 'x'); // a quirk of tokenizers: found first, stripped later
    tokenizer_free(&t);
}

static void a_name_in_the_vocabulary_that_is_no_added_token_is_text(void) {
    Tokenizer t;
    if (!CHECK(read_bpe(&t, ", \"<|endoftext|>\": 256", "", PLAIN))) { return; }
    CHECK(t.eot_id == 256 && encode(&t, TOKENIZER_EOT, 13)->count == 13);
    tokenizer_free(&t);
    if (!CHECK(read_bpe(&t, "", "", PLAIN ", \"added_tokens\": [" ADDED(256, "<|endoftext|>", "") "]"))) { return; }
    CHECK(t.encoder == NULL); // each byte is a token: the quick way
    ENCODES_TO(&t, "a<|endoftext|>", 'a', 256);
    tokenizer_free(&t);
}

static void what_is_no_utf8_is_encoded_as_python_replaces_it(void) {
    Tokenizer t;
    if (!CHECK(read_bpe(&t, ", \"\\u00ef\\u00bf\": 256, \"\\u00ef\\u00bf\\u00bd\": 257, \"ab\": 258", "\"\\u00ef \\u00bf\", \"\\u00ef\\u00bf \\u00bd\", \"a b\"",
                        PLAIN))) { return; }
    ENCODES_TO(&t, "\xFF", 257);
    ENCODES_TO(&t, "ab\xF0\x9F\x98" "ab", 258, 257, 258);
    ENCODES_TO(&t, "ab\xF0\x9F", 258, 257);
    ENCODES_TO(&t, "\xED\xA0\x80", 257, 257, 257);
    ENCODES_TO(&t, "\xE4\xBD\xE4\xBD\xA0", 257, 0xE4, 0xBD, 0xA0);
    ENCODES_TO(&t, "\xF0\x9F\x98\x80", 0xF0, 0x9F, 0x98, 0x80);
    tokenizer_free(&t);
}

static void a_character_of_several_tokens_comes_out_whole(void) {
    Tokenizer t;
    if (!CHECK(read_bpe(&t, ", \"ab\": 256", "\"a b\"", PLAIN))) { return; }
    const char* text = "ab\xF0\x9F\x98\x80";
    const TokenList* list = encode(&t, text, strlen(text));
    Utf8Stream s = {{0}, 0, 0};
    char out[100], bytes[TOKENIZER_MAX_BYTES];
    size_t n = 0;
    for (size_t i = 0; i < list->count; i++) {
        n += utf8_stream_push(&s, bytes, tokenizer_decode(&t, list->ids[i], bytes), out + n);
        CHECK(n == (i + 1 < list->count ? 2 : 6));
    }
    CHECK(memcmp(out, text, 6) == 0);
    tokenizer_free(&t);
}

static void what_is_not_implemented_is_refused_by_name(void) {
    const char* cases[][3] = { // merges and more of the model, the rest, the reason
        {"\"a b\"", "", "no ByteLevel pre-tokenizer"},
        {"\"a b\"", ", \"pre_tokenizer\": null", "no ByteLevel pre-tokenizer"},
        {"\"a b\"", ", \"pre_tokenizer\": {\"type\": \"Metaspace\"}", "\"Metaspace\""},
        {"\"a b\"", ", \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [" BYTE_LEVEL ", {\"type\": \"Punctuation\"}]}",
         "\"Punctuation\" comes after ByteLevel"},
        {"\"a b\"", ", \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Whitespace\"}, " BYTE_LEVEL "]}", "\"Whitespace\""},
        {"\"a b\"", ", \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": \"a\"}, "
         "\"behavior\": \"MergedWithNext\"}, " BYTE_LEVEL "]}", "\"MergedWithNext\""},
        {"\"a b\"", ", \"normalizer\": {\"type\": \"Lowercase\"}" PLAIN, "normalizer \"Lowercase\""},
        {"\"a b\"", ", \"normalizer\": {\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFKC\"}]}" PLAIN, "normalizer \"NFKC\""},
        {"\"a b\"], \"dropout\": 0.1, \"z\": [1", PLAIN, "dropout"},
        {"\"a b\"], \"end_of_word_suffix\": \"</w>\", \"z\": [1", PLAIN, "end_of_word_suffix"},
        {"\"a b\"], \"continuing_subword_prefix\": \"##\", \"z\": [1", PLAIN, "continuing_subword_prefix"},
        {"\"a b\"", PLAIN ", \"added_tokens\": [" ADDED(257, "x", ", \"single_word\": true") "]", "\"single_word\""},
        {"\"a b\"", PLAIN ", \"added_tokens\": [" ADDED(300, "<x>", "") "]", "tokenizers would take that (257)"},
        {"\"a b\"", PLAIN ", \"added_tokens\": [" ADDED(257, "<x>", "") "," ADDED(258, "<x>", "") "]", "twice"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Tokenizer t;
        char err[1200] = "";
        TokenList list = {NULL, 0, 0, NULL, NULL, 0};
        if (!CHECK(read_bpe(&t, ", \"ab\": 256", cases[i][0], cases[i][1]))) { return; }
        if (!CHECK(tokenizer_refusal(&t) != NULL && t.encoder == NULL)) { fprintf(stderr, "%s\n", cases[i][2]); }
        CHECK(!tokenizer_encode(&t, "ab", 2, &list, err, sizeof(err)));
        CHECK_CONTAINS(err, cases[i][2]);
        CHECK_CONTAINS(err, "case.json");
        size_t len;
        CHECK(memcmp(tokenizer_token(&t, 256, &len), "ab", 2) == 0 && len == 2); // it decodes
        tokenizer_free(&t);
    }
    Tokenizer t; // these change nothing, and are accepted
    CHECK(read_bpe(&t, ", \"ab\": 256", "\"a b\"], \"dropout\": 0, \"unk_token\": \"\", \"end_of_word_suffix\": \"\", \"byte_fallback\": false, \"z\": [1",
                   PLAIN ", \"post_processor\": {\"type\": \"TemplateProcessing\"}, \"truncation\": {\"max_length\": 1}, \"normalizer\": null"));
    ENCODES_TO(&t, "abab", 256, 256);
    tokenizer_free(&t);
}

static void a_hash_table_that_a_file_fills_badly_is_given_up(void) {
    Bpe b;
    int byte_ids[256] = {0};
    bpe_init(&b, 2000, byte_ids);
    size_t added = 0;
    bool ok = true;
    for (uint64_t pair = 0; ok && added < 2000; pair++) { // pairs of one slot
        if (bpe_hash(pair) >> b.shift == 5) { ok = bpe_add(&b, (int)(pair >> 32), (int)(uint32_t)pair, (uint32_t)added++, 0); }
    }
    CHECK(!ok && added > BPE_MAX_PROBES && added < BPE_MAX_PROBES + 10);
    bpe_free(&b);
}

#ifdef USE_PCRE2
static void patterns_split_a_text_before_it_is_merged(void) {
    Tokenizer t;
    const char* vocab = ", \"ab\": 256, \"\\u0120a\": 257, \"bb\": 258, \"11\": 259";
    const char* merges = "\"a b\", \"\\u0120 a\", \"b b\", \"1 1\"";
    if (!CHECK(read_bpe(&t, vocab, merges, ", \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}"))) { return; }
    ENCODES_TO(&t, "a ab  a", 'a', ' ', 256, ' ', 257); // "a", " ab", " ", " a"
    ENCODES_TO(&t, "a'bb11a", 'a', '\'', 258, 259, 'a');
    tokenizer_free(&t);
    if (!CHECK(read_bpe(&t, vocab, merges, ", \"pre_tokenizer\": {\"type\": \"ByteLevel\"}"))) { return; }
    ENCODES_TO(&t, "a", 257); // a space before it
    ENCODES_TO(&t, " a", 257);
    CHECK(encode(&t, "", 0)->count == 0);
    tokenizer_free(&t);
    if (!CHECK(read_bpe(&t, vocab, merges, SPLIT("[^b]b|\\\\s")))) { return; }
    ENCODES_TO(&t, "bbab b", 258, 256, ' ', 'b');
    tokenizer_free(&t);
}

static void patterns_that_might_mean_something_else_are_refused(void) {
    const char* cases[][2] = {
        {"\\h+", "escape"}, {"\\w+", "escape"}, {"a\\b", "escape"}, {"(a)\\1", "escape"}, {"\\", "escape"}, {"\\x41", "escape"}, {"\\R", "escape"},
        {"\\p{Han}", "general category"}, {"\\p{L", "general category"}, {"\\p{l}", "general category"}, {"\\p{}", "general category"}, {"\\pL", "escape"},
        {"^a", "anchor"}, {"a$", "anchor"},
        {"[]", "class"}, {"[]a]", "class"}, {"[a", "class"}, {"[a&&b]", "intersection"}, {"[a[b]]", "class inside"}, {"[[:alpha:]]", "class inside"},
        {"[a-\\s]", "range"}, {"[\\s-a]", "range"}, {"[a--b]", "range"}, {"[a-b-c]", "range"}, {"[\\d-\\s]", "range"}, {"[b-a]", "PCRE2"},
        {"(?<a>b)", "group"}, {"(?<=a)b", "group"}, {"(?<!a)b", "group"}, {"(?>a)", "group"}, {"(?m:a)", "group"}, {"(?i)a", "group"}, {"(?#a)b", "group"},
        {"(*UTF)a", "group"}, {"(?i:[a])", "(?i:"}, {"(?i:ss)", "one character"}, {"(?i:fI)", "one character"}, {"(?i:\\xC3\\x9F)", "(?i:"},
        {"a{,3}", "{"}, {"a{", "{"}, {"a{x}", "{"}, {"a{3,2}", "{"}, {"a{2}?", "repetition"}, {"a{2}+", "repetition"}, {"a{2}{2}", "repetition"},
        {"a{1001}", "1000"}, {"a{99999999999999999999}", "1000"}, {"((a{1000}){1000}){1000}", "PCRE2"}, {"a**", "PCRE2"}, {"(", "PCRE2"}, {")", "PCRE2"},
        {"a*", "nothing"}, {"", "nothing"}, {"(?=a)", "nothing"}, {"a|", "nothing"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Regex r;
        char err[200] = "";
        if (!CHECK(!regex_compile(&r, cases[i][0], err, sizeof(err)))) { fprintf(stderr, "%s\n", cases[i][0]); return; }
        CHECK_CONTAINS(err, cases[i][1]);
    }
    const char* good[] = {"a++", "a?+b", "(a|b)+?c", "\\.\\-\\/\\'", "[-a]", "[a-]", "[^-]", "[a\\-z]", "[\\S]", "\\P{L}", "\\p{^Lu}", "a{2}", "a{2,}", "a{0,3}b", "]", "}"};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        Regex r;
        char err[200] = "";
        if (!CHECK(regex_compile(&r, good[i], err, sizeof(err)))) { fprintf(stderr, "%s: %s\n", good[i], err); return; }
        regex_free(&r);
    }
    char* endless = (char*)mallocCheck(SPLIT_MAX_PATTERN + 2);
    memset(endless, 'a', SPLIT_MAX_PATTERN + 1);
    endless[SPLIT_MAX_PATTERN + 1] = '\0';
    Regex r;
    char err[200] = "";
    CHECK(!regex_compile(&r, endless, err, sizeof(err)));
    free(endless);
}

static void a_pattern_that_takes_for_ever_is_stopped(void) {
    const char* patterns[] = {"(a|a)+b", "(a+)+b", "(a|aa)+b", "((a{1,9}){1,9}){1,9}b", "(.+)+x"};
    for (size_t i = 0; i < sizeof(patterns) / sizeof(patterns[0]); i++) {
        Tokenizer t;
        char* rest = str_format(", \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": \"%s\"}, "
                                "\"behavior\": \"Isolated\", \"invert\": false}, " BYTE_LEVEL "]}", patterns[i]);
        if (!CHECK(read_bpe(&t, ", \"ab\": 256", "\"a b\"", rest))) { return; }
        char text[5000], err[1200] = "";
        memset(text, 'a', sizeof(text));
        TokenList list = {NULL, 0, 0, NULL, NULL, 0};
        double begin = regex_clock();
        bool ok = tokenizer_encode(&t, text, sizeof(text), &list, err, sizeof(err));
        CHECK(regex_clock() - begin < 60);
        if (!ok) { CHECK_CONTAINS(err, "too long"); }
        token_list_free(&list);
        tokenizer_free(&t);
        free(rest);
    }
}

static void endless_words_and_runs_take_linear_time(void) {
    const size_t n = 3000000;
    Tokenizer t;
    if (!CHECK(read_bpe(&t, ", \"aa\": 256, \"aaaa\": 257, \"\\u0120\\u0120\": 258", "\"a a\", \"aa aa\", \"\\u0120 \\u0120\"",
                        SPLIT("'s|\\\\p{L}+|\\\\p{N}{1,3}| ?[^\\\\s\\\\p{L}\\\\p{N}]+|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+")))) { return; }
    char* text = (char*)mallocCheck(n);
    double begin = regex_clock();
    memset(text, 'a', n);
    CHECK(encode(&t, text, n)->count == n / 4);
    memset(text, ' ', n);
    CHECK(encode(&t, text, n)->count == n / 2);
    text[n - 1] = 'a';
    CHECK(encode(&t, text, n)->count == n / 2 + 1);
    memset(text, '!', n);
    CHECK(encode(&t, text, n)->count == n);
    for (size_t i = 0; i < n; i++) { text[i] = " a"[i % 2]; }
    CHECK(encode(&t, text, n)->count == n);
    CHECK(regex_clock() - begin < 60);
    text = (char*)reallocCheck(text, BPE_MAX_WORD + 1);
    memset(text, 'a', BPE_MAX_WORD + 1);
    TokenList list = {NULL, 0, 0, NULL, NULL, 0};
    CHECK(!tokenizer_encode(&t, text, BPE_MAX_WORD + 1, &list, why, sizeof(why)));
    CHECK_CONTAINS(why, "more than the");
    free(text);
    tokenizer_free(&t);
}
#endif

#ifdef USE_UTF8PROC
static bool nfc_equals(const char* text, const char* expected) {
    ByteBuffer out = {NULL, 0, 0}, scratch[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    size_t len = strlen(text);
    const char* got = nfc(text, &len, &out, scratch);
    bool ok = test_check(len == strlen(expected) && memcmp(got, expected, len) == 0, __FILE__, __LINE__, "NFC of \"%s\" is \"%.*s\", not \"%s\"", text,
                         (int)len, got, expected);
    byte_buffer_free(&out);
    byte_buffer_free(&scratch[0]);
    byte_buffer_free(&scratch[1]);
    return ok;
}

static void nfc_puts_letters_and_accents_together(void) {
    nfc_equals("plain", "plain");
    nfc_equals("caf" "e\xCC\x81!", "caf\xC3\xA9!");
    nfc_equals("\xCC\x81x", "\xCC\x81x");                          // nothing before it
    nfc_equals("a\xCC\x87\xCC\xA3", "\xE1\xBA\xA1\xCC\x87");       // the dot below goes first
    nfc_equals("\xE1\x84\x92\xE1\x85\xA1\xE1\x86\xAB", "\xED\x95\x9C");
    nfc_equals("\xE2\x84\xAB \xE2\x84\xA6", "\xC3\x85 \xCE\xA9");  // Angstrom, Ohm
    nfc_equals("\xE0\xA4\x95\xE0\xA4\xBC \xE0\xA5\x98", "\xE0\xA4\x95\xE0\xA4\xBC \xE0\xA4\x95\xE0\xA4\xBC"); // excluded from composition
    nfc_equals("\xE3\x81\x8B\xE3\x82\x99", "\xE3\x81\x8C");
}

static void characters_called_stable_are_and_any_text_becomes_what_utf8proc_makes_of_it(void) {
    static unsigned char joins[0x110000]; // is it the second character of a composition?
    utf8proc_int32_t parts[32];
    for (int c = 0; c < 0x110000; c++) {
        if (c >= 0xD800 && c < 0xE000) { continue; }
        utf8proc_ssize_t n = utf8proc_decompose_char(c, parts, 32, (utf8proc_option_t)(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), NULL);
        for (utf8proc_ssize_t i = 1; i < n; i++) { joins[parts[i]] = 1; }
        if (nfc_is_stable(c) && n > 1) { joins[c] |= utf8proc_get_property(parts[0])->combining_class != 0; }
    }
    for (int c = 1; c < 0x110000; c++) {
        if ((c >= 0xD800 && c < 0xE000) || !nfc_is_stable(c)) { continue; }
        utf8proc_uint8_t text[5] = {0};
        utf8proc_encode_char(c, text);
        utf8proc_uint8_t* same = utf8proc_NFC(text);
        bool stable = strcmp((char*)same, (char*)text) == 0 && !joins[c] && utf8proc_get_property(c)->combining_class == 0;
        free(same);
        if (!test_check(stable, __FILE__, __LINE__, "U+%04X is not stable", (unsigned)c)) { return; }
    }
    const int some[] = {'a', 'e', 'q', 0x41, 0x300, 0x301, 0x323, 0x327, 0x345, 0x3B1, 0x391, 0x1100, 0x1161, 0x11A8, 0xAC00, 0xAC01, 0x915, 0x93C, 0x958,
                        0x1F82, 0x212B, 0x1D15E, 0x344, 0xF71, 0xF73, 0x5B0, 0x5DC, 0x304B, 0x3099, 0x9C7, 0x9BE, 0x4E00, 0x1F600, ' '};
    uint64_t rng = 5;
    for (int round = 0; round < 20000; round++) {
        char text[200];
        size_t n = 0;
        for (int i = 0; i < 1 + round % 12; i++) {
            n += (size_t)utf8proc_encode_char(some[rng_next(&rng) % (sizeof(some) / sizeof(some[0]))], (utf8proc_uint8_t*)text + n);
        }
        text[n] = '\0';
        char* expected = (char*)utf8proc_NFC((utf8proc_uint8_t*)text);
        bool ok = nfc_equals(text, expected);
        free(expected);
        if (!ok) { return; }
    }
}

static void endless_combining_marks_take_linear_time(void) {
    const size_t n = 400000; // utf8proc's own sorting would take minutes
    char* text = (char*)mallocCheck(4 * n + 1);
    char* sorted = (char*)mallocCheck(4 * n + 1);
    for (size_t i = 0; i < n; i++) { memcpy(text + 4 * i, "\xCC\x81\xCC\x96", 4); } // classes 230 and 220
    for (size_t i = 0; i < n; i++) {
        memcpy(sorted + 2 * i, "\xCC\x96", 2);
        memcpy(sorted + 2 * (n + i), "\xCC\x81", 2);
    }
    text[4 * n] = sorted[4 * n] = '\0';
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    ByteBuffer out = {NULL, 0, 0}, scratch[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    size_t len = 4 * n;
    const char* got = nfc(text, &len, &out, scratch);
    clock_gettime(CLOCK_MONOTONIC, &end);
    CHECK(len == 4 * n && memcmp(got, sorted, len) == 0);
    CHECK(end.tv_sec - begin.tv_sec < 30);
    byte_buffer_free(&out);
    byte_buffer_free(&scratch[0]);
    byte_buffer_free(&scratch[1]);
    free(text);
    free(sorted);
}
#endif

// ----------------------------------------------------------------------------
// UTF-8 for a terminal

// pushes the bytes in pieces of `step`, then flushes; the result is NUL-terminated
static size_t stream(const char* bytes, size_t n, size_t step, char* out) {
    Utf8Stream s = {{0}, 0, 0};
    size_t written = 0;
    for (size_t i = 0; i < n; i += step) {
        written += utf8_stream_push(&s, bytes + i, step < n - i ? step : n - i, out + written);
    }
    written += utf8_stream_flush(&s, out + written);
    out[written] = '\0';
    return written;
}

static void characters_come_out_whole_when_pushed_byte_by_byte(void) {
    const char* text = "\xE4\xBD\xA0\xE5\xA5\xBD, z\xC3\xBC \xF0\x9F\x98\x80!\n\tok";
    char out[256];
    stream(text, strlen(text), 1, out);
    CHECK(strcmp(out, text) == 0);

    Utf8Stream s = {{0}, 0, 0};
    size_t n = 0; // nothing before the last byte of the emoji, then all of it
    for (int i = 0; i < 3; i++) { n += utf8_stream_push(&s, &"\xF0\x9F\x98\x80"[i], 1, out); }
    CHECK(n == 0);
    CHECK(utf8_stream_push(&s, "\x80", 1, out) == 4 && memcmp(out, "\xF0\x9F\x98\x80", 4) == 0);
    CHECK(utf8_stream_flush(&s, out) == 0);
}

#define FFFD "\xEF\xBF\xBD"

static void invalid_bytes_become_what_python_makes_of_them(void) {
    const char* cases[][2] = {
        {"a\xFF" "b", "a" FFFD "b"},                     // no character begins so
        {"\xF0\x9F\x98" "A", FFFD "A"},                  // unfinished, one sign for the longest beginning
        {"\xF0\x9F\x98", FFFD},                          // unfinished at the end of the text
        {"\xC3", FFFD},
        {"\x80\x80", FFFD FFFD},                         // continuation bytes alone
        {"\xC0\xAF", FFFD FFFD},                         // overlong slash
        {"\xE0\x80\xAF", FFFD FFFD FFFD},                // overlong slash in three bytes
        {"\xED\xA0\x80", FFFD FFFD FFFD},                // surrogate
        {"\xF4\x90\x80\x80", FFFD FFFD FFFD FFFD},       // above U+10FFFF
        {"\xE4\xBD\xE4\xBD\xA0", FFFD "\xE4\xBD\xA0"},   // a new character where the old one should go on
        {"\xF0\x9F\xC3\xBC", FFFD "\xC3\xBC"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (size_t step = 1; step <= 5; step++) {
            char out[256];
            stream(cases[i][0], strlen(cases[i][0]), step, out);
            CHECK(strcmp(out, cases[i][1]) == 0);
        }
    }
}

static void control_characters_cannot_reach_the_terminal(void) {
    char out[256];
    stream("\x1B[2J\a\r\b\x7F\n\t", 10, 1, out);
    CHECK(strcmp(out, "\xE2\x90\x9B[2J\xE2\x90\x87\xE2\x90\x8D\xE2\x90\x88\xE2\x90\xA1\n\t") == 0);
    stream("a\xC2\x9B" "b\xC2\xA0", 6, 1, out); // CSI as one character; U+00A0 is none of them
    CHECK(strcmp(out, "ab\xC2\xA0") == 0);
    CHECK(stream("\0", 1, 1, out) == 3 && memcmp(out, "\xE2\x90\x80", 3) == 0);
}

static void any_bytes_in_any_pieces_give_the_same_valid_utf8(void) {
    uint64_t rng = 1;
    for (int round = 0; round < 2000; round++) {
        char bytes[40], whole[400], pieces[400];
        size_t n = (size_t)(rng_next(&rng) % 40);
        for (size_t i = 0; i < n; i++) { // many lead and continuation bytes
            uint64_t r = rng_next(&rng);
            bytes[i] = (char)(r % 3 == 0 ? r >> 8 : r % 3 == 1 ? 0x80 | (r >> 8 & 0x3F) : 0xC0 | (r >> 8 & 0x3F));
        }
        size_t len = stream(bytes, n, 40, whole);
        CHECK(len <= UTF8_STREAM_ROOM(n));
        CHECK(utf8_first_invalid(whole, len) == len);
        CHECK(stream(bytes, n, 1 + (size_t)round % 7, pieces) == len && memcmp(whole, pieces, len) == 0);
    }
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(bytes_encode_and_decode_are_inverse);
    RUN(eot_in_a_text_is_one_token);
    RUN(ids_without_a_token_decode_to_nothing);
    RUN(written_files_read_back_as_the_byte_tokenizer);
    RUN(tokens_decode_through_the_byte_alphabet);
    RUN(added_token_may_stand_in_the_vocabulary_too);
    RUN(token_longer_than_the_buffer_is_cut_not_overrun);
    RUN(broken_tokenizer_files_are_refused_with_a_reason);
    RUN(the_lowest_rank_is_joined_first_the_leftmost_of_equals);
    RUN(a_word_that_is_a_token_needs_no_merges_where_the_file_says_so);
    RUN(words_of_any_length_are_merged_as_the_definition_says);
    RUN(words_that_share_a_line_of_the_cache_are_told_apart);
    RUN(a_list_with_a_file_keeps_its_order_and_its_memory);
    RUN(added_tokens_are_found_in_a_text_the_longest_first);
    RUN(a_name_in_the_vocabulary_that_is_no_added_token_is_text);
    RUN(what_is_no_utf8_is_encoded_as_python_replaces_it);
    RUN(a_character_of_several_tokens_comes_out_whole);
    RUN(what_is_not_implemented_is_refused_by_name);
    RUN(a_hash_table_that_a_file_fills_badly_is_given_up);
#ifdef USE_PCRE2
    RUN(patterns_split_a_text_before_it_is_merged);
    RUN(patterns_that_might_mean_something_else_are_refused);
    RUN(a_pattern_that_takes_for_ever_is_stopped);
    RUN(endless_words_and_runs_take_linear_time);
#endif
#ifdef USE_UTF8PROC
    RUN(nfc_puts_letters_and_accents_together);
    RUN(characters_called_stable_are_and_any_text_becomes_what_utf8proc_makes_of_it);
    RUN(endless_combining_marks_take_linear_time);
#endif
    RUN(characters_come_out_whole_when_pushed_byte_by_byte);
    RUN(invalid_bytes_become_what_python_makes_of_them);
    RUN(control_characters_cannot_reach_the_terminal);
    RUN(any_bytes_in_any_pieces_give_the_same_valid_utf8);
    return test_summary();
}
