// text.h: what goes into and comes out of a model that generates: the prompt as tokens, and tokens as text on a
// terminal.
#ifndef LLMC_TEXT_H
#define LLMC_TEXT_H

#include "cli.h"
#include "config.h"
#include "tokenizer.h"

// How tokens become text: through the tokenizer where there is one, else as numbers.
typedef struct {
    const Tokenizer* tokenizer;
    Utf8Stream stream;
    FILE* file;
} TextOut;

static inline void text_out_token(TextOut* out, int token) {
    if (out->tokenizer == NULL) {
        fprintf(out->file, "%d ", token);
        return;
    }
    char bytes[TOKENIZER_MAX_BYTES], text[UTF8_STREAM_ROOM(TOKENIZER_MAX_BYTES)];
    size_t n = tokenizer_decode(out->tokenizer, token, bytes);
    fwrite(text, 1, utf8_stream_push(&out->stream, bytes, n, text), out->file);
    fflush(out->file);
}

// The end of a document: what is unfinished comes out, and the line ends.
static inline void text_out_end(TextOut* out) {
    char text[8];
    if (out->tokenizer != NULL) { fwrite(text, 1, utf8_stream_flush(&out->stream, text), out->file); }
    fprintf(out->file, "\n");
    fflush(out->file);
}

// What every sampled document begins with. The end-of-text token opens a document, so alone it is the empty prompt.
typedef struct {
    int* tokens;
    size_t count;
    int eot; // -1: the model has none, then a document has no end but the context's
} Prompt;

static inline Prompt prompt_read(const char* text, const Tokenizer* tokenizer, int eot, const MoEConfig* config) {
    text = text != NULL ? text : "";
    TokenList list;
    char err[1200];
    memset(&list, 0, sizeof(list));
    if (eot >= 0) { token_list_add(&list, eot); }
    if (text[0] != '\0' && tokenizer == NULL) {
        fatal("--prompt needs a tokenizer: there is no tokenizer.json beside the model or the data");
    }
    if (text[0] != '\0' && !tokenizer_encode(tokenizer, text, strlen(text), &list, err, sizeof(err))) { fatal("--prompt: %s", err); }
    Prompt p = {list.ids, list.count, eot};
    if (p.count == 0) { fatal("a sample needs a beginning: config.json names no eos_token_id, so give --prompt"); }
    for (size_t i = 0; i < p.count; i++) {
        if (p.tokens[i] < config->vocab_size) { continue; }
        fatal("--prompt: token id %d is outside the model's vocabulary of %d", p.tokens[i], config->vocab_size);
    }
    return p;
}

#endif
