// tokenizer.h: the byte tokenizer, tokenizer.json files of any byte-level origin, UTF-8 that a terminal survives.
// What Python's errors="replace" writes was taken from Python and stands here as literals.
#include "testing.h"

#include "../../llmc/rand.h"
#include "../../llmc/tokenizer.h"

#include <limits.h>

static void bytes_encode_and_decode_are_inverse(void) {
    Tokenizer t;
    tokenizer_bytes(&t);
    char text[256], out[TOKENIZER_MAX_BYTES];
    int ids[256];
    for (int b = 0; b < 256; b++) { text[b] = (char)b; }
    CHECK(tokenizer_can_encode(&t) && tokenizer_vocab_size(&t) == 257 && tokenizer_eot_id(&t) == 256);
    CHECK(tokenizer_encode(&t, text, 256, ids) == 256);
    for (int b = 0; b < 256; b++) {
        CHECK(ids[b] == b);
        CHECK(tokenizer_decode(&t, b, out) == 1 && out[0] == (char)b);
    }
    CHECK(tokenizer_encode(&t, "", 0, ids) == 0);
    tokenizer_free(&t);
}

static void eot_in_a_text_is_one_token(void) {
    Tokenizer t;
    tokenizer_bytes(&t);
    const char* text = "a<|endoftext|><|endoftext|>b<|endoftext|";
    int ids[64];
    size_t n = tokenizer_encode(&t, text, strlen(text), ids);
    CHECK(n == 4 + 12 && ids[0] == 'a' && ids[1] == 256 && ids[2] == 256 && ids[3] == 'b' && ids[4] == '<');
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
    CHECK(u.vocab_size == 257 && u.eot_id == 256 && tokenizer_can_encode(&u));
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

static void byte_level_bpe_with_merges_decodes_but_does_not_encode(void) {
    Tokenizer t;
    char err[512] = "", out[TOKENIZER_MAX_BYTES];
    int ids[8];
    const char text[16] = "ab";
    // \u0120 is the space, \u010a the newline, \u00e4\u00bd\u0142 the three bytes of a Chinese character; id 5 is a gap
    bool ok = read_json(&t, "{\"added_tokens\": [{\"id\": 7, \"content\": \"<|endoftext|>\", \"special\": true},"
        " {\"id\": 8, \"content\": \"<tool call>\"}], \"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0,"
        " \"\\u0120hello\": 1, \"\\u010a\": 2, \"\\u00e4\\u00bd\\u0142\": 3, \"\xC4\xA0\xC4\xA0\": 4, \"ab\": 6},"
        " \"merges\": [\"a b\"]}}", err, sizeof(err));
    if (!CHECK(ok)) { return; }
    const char* expected[] = {"a", " hello", "\n", "\xE4\xBD\xA0", "  ", "", "ab", "<|endoftext|>", "<tool call>"};
    CHECK(t.vocab_size == 9 && t.eot_id == 7 && !tokenizer_can_encode(&t));
    for (int id = 0; id < 9; id++) {
        size_t n = tokenizer_decode(&t, id, out);
        CHECK(n == strlen(expected[id]) && memcmp(out, expected[id], n) == 0);
    }
    EXPECT_FATAL(tokenizer_encode(&t, text, 2, ids), "merges");
    tokenizer_free(&t);
}

static void added_token_may_stand_in_the_vocabulary_too(void) {
    Tokenizer t;
    char err[512] = "";
    CHECK(read_json(&t, "{\"added_tokens\": [{\"id\": 1, \"content\": \"<|endoftext|>\"}],"
                        " \"model\": {\"vocab\": {\"a\": 0, \"<|endoftext|>\": 1}, \"merges\": []}}",
                    err, sizeof(err)));
    CHECK(t.vocab_size == 2 && t.eot_id == 1 && !tokenizer_can_encode(&t)); // 255 bytes have no token
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
        {"{\"model\": {\"type\": \"Unigram\", \"vocab\": [[\"a\", 0]]}}", "vocab"},
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
    RUN(byte_level_bpe_with_merges_decodes_but_does_not_encode);
    RUN(added_token_may_stand_in_the_vocabulary_too);
    RUN(token_longer_than_the_buffer_is_cut_not_overrun);
    RUN(broken_tokenizer_files_are_refused_with_a_reason);
    RUN(characters_come_out_whole_when_pushed_byte_by_byte);
    RUN(invalid_bytes_become_what_python_makes_of_them);
    RUN(control_characters_cannot_reach_the_terminal);
    RUN(any_bytes_in_any_pieces_give_the_same_valid_utf8);
    return test_summary();
}
