// bits_per_byte.h: a loss per byte of text instead of per token, so that models with different tokenizers compare.
#ifndef LLMC_BITS_PER_BYTE_H
#define LLMC_BITS_PER_BYTE_H

#include "dataloader.h"
#include "json.h"

// Bytes of text in the targets of the first `sequences` sequences. The token that opens a document has none.
static inline double target_bytes(DataLoader* l, uint64_t sequences, const Tokenizer* tokenizer) {
    size_t T = l->opt.T;
    int* row = (int*)mallocCheck(mul_check(3 * T, sizeof(int)));
    double bytes = 0;
    for (uint64_t s = 0; s < sequences; s++) {
        if (!dataloader_fill_row(l, s, row, row + T, row + 2 * T)) { fatal("%s", l->error); }
        for (size_t t = 0; t < T; t++) {
            size_t length;
            tokenizer_token(tokenizer, row[T + t], &length);
            if (row[T + t] != l->eot_id) { bytes += (double)length; }
        }
    }
    free(row);
    return bytes;
}

// Bytes a token on average, as the manifest.json beside the shards says of their split; NAN where it does not.
static inline double manifest_bytes_per_token(const DataLoader* l) {
    const char* path = l->shards[0].path;
    const char* slash = strrchr(path, '/');
    const char* name = slash != NULL ? slash + 1 : path;
    char* manifest = str_format("%.*smanifest.json", (int)(name - path), path);
    char err[600];
    cJSON* json = json_read_file(manifest, (size_t)1 << 28, err, sizeof(err));
    free(manifest);
    double ratio = NAN;
    const cJSON *split, *shard;
    cJSON_ArrayForEach(split, cJSON_GetObjectItemCaseSensitive(json, "splits")) {
        double tokens = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(split, "tokens"));
        double bytes = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(split, "bytes"));
        cJSON_ArrayForEach(shard, cJSON_GetObjectItemCaseSensitive(split, "shards")) {
            const char* file = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(shard, "file"));
            if (file != NULL && strcmp(file, name) == 0 && tokens > 0 && bytes > 0) { ratio = bytes / tokens; }
        }
    }
    cJSON_Delete(json);
    return ratio;
}

// The mean loss in nats a token over the first `sequences` sequences, as bits a byte: of exactly these tokens through
// the tokenizer, if there is one of as many tokens as the data's; else by the manifest's average. NAN: nobody knows.
static inline double bits_per_byte(DataLoader* l, const Tokenizer* tokenizer, double loss, uint64_t sequences) {
    double tokens = (double)sequences * (double)l->opt.T, bytes = NAN;
    bool same = tokenizer != NULL && (l->vocab_size == 0 || l->vocab_size == tokenizer_vocab_size(tokenizer));
    if (same) { bytes = target_bytes(l, sequences, tokenizer); }
    if (!(bytes > 0)) { bytes = tokens * manifest_bytes_per_token(l); }
    return loss * tokens / log(2) / bytes;
}

#endif
