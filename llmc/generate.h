// generate.h: samples from a model, token by token, and prints the text as it comes. The model is a function.
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "cli.h"
#include "sampler.h"
#include "text.h"

// Feeds one token at `position` (0 opens a document) and returns the logits (vocab_size) for the one that follows, which
// need not be computed where nobody wants them.
typedef const float* (*DecodeToken)(void* decoder, int token, size_t position, bool want_logits);

// Samples `count` tokens, each document after its prompt. A document ends with the end-of-text token or after `context`
// positions; the next one starts from the prompt again, after an empty line. one_document: stops at the first end.
static inline void generate_text(DecodeToken decode, void* decoder, size_t context, int vocab_size, const Prompt* prompt,
                                 TextOut* out, const Options* opt, uint64_t rng, int64_t count, bool one_document) {
    int vocab = vocab_size;
    if (out->tokenizer != NULL && tokenizer_vocab_size(out->tokenizer) < vocab) {
        vocab = tokenizer_vocab_size(out->tokenizer); // a model may have more rows than the tokenizer has tokens
    }
    void* scratch = mallocCheck((size_t)vocab * 16);
    const float* logits = NULL;
    size_t position = 0;
    bool fresh = true;
    for (int64_t i = 0; i < count; i++) {
        if (fresh) {
            for (position = 0; position < prompt->count; position++) {
                logits = decode(decoder, prompt->tokens[position], position, position + 1 == prompt->count);
                if (prompt->tokens[position] != prompt->eot) { text_out_token(out, prompt->tokens[position]); }
            }
        }
        if (isnan(logits[argmax_token(logits, vocab)])) {
            text_out_end(out);
            fatal("the model's logits are not numbers: its weights have grown too large, or are no language model's");
        }
        int token = sample_token(logits, vocab, (float)opt->temperature, (int)opt->top_k, (float)opt->top_p, &rng, scratch);
        fresh = token == prompt->eot || position == context;
        if (token != prompt->eot) { text_out_token(out, token); }
        if (fresh && one_document) { break; }
        if (fresh && i + 1 < count) {
            text_out_end(out);
            fprintf(out->file, "\n");
        }
        if (!fresh && i + 1 < count) { logits = decode(decoder, token, position++, true); }
    }
    text_out_end(out);
    free(scratch);
}

#endif
