// For test_tokenizer_bpe.py: tokenize TOKENIZER.JSON reads texts on stdin, each after its length (uint32), and writes for
// each the number of ids (uint32), the ids, the number of bytes they decode to, and these. With --refusal it says why the
// file cannot encode, or nothing.
#include "../../llmc/tokenizer.h"

int main(int argc, char** argv) {
    program_name = "tokenize";
    char err[1200];
    Tokenizer t;
    if (!tokenizer_read(&t, argv[1], err, sizeof(err))) { fatal("%s", err); }
    if (argc > 2 && strcmp(argv[2], "--refusal") == 0) {
        puts(tokenizer_refusal(&t) != NULL ? tokenizer_refusal(&t) : "");
        tokenizer_free(&t);
        return 0;
    }
    TokenList list;
    ByteBuffer decoded;
    memset(&list, 0, sizeof(list));
    memset(&decoded, 0, sizeof(decoded));
    uint32_t n;
    while (fread(&n, sizeof(n), 1, stdin) == 1) {
        char* bytes = (char*)mallocCheck(n); // of just this size, so that a sanitizer sees a step too far
        if (fread(bytes, 1, n, stdin) != n) { fatal("the input ends early"); }
        list.count = decoded.count = 0;
        if (!tokenizer_encode(&t, bytes, n, &list, err, sizeof(err))) { fatal("%s", err); }
        for (size_t i = 0; i < list.count; i++) {
            size_t len;
            const char* token = tokenizer_token(&t, list.ids[i], &len);
            byte_buffer_add(&decoded, token, len);
        }
        uint32_t sizes[2] = {(uint32_t)list.count, (uint32_t)decoded.count};
        fwriteCheck(&sizes[0], sizeof(uint32_t), 1, stdout, "stdout");
        fwriteCheck(list.ids, sizeof(int), list.count, stdout, "stdout");
        fwriteCheck(&sizes[1], sizeof(uint32_t), 1, stdout, "stdout");
        fwriteCheck(decoded.bytes, 1, decoded.count, stdout, "stdout");
        free(bytes);
    }
    token_list_free(&list);
    byte_buffer_free(&decoded);
    tokenizer_free(&t);
    return 0;
}
