// make_shard.c: writes a token shard of made-up documents, for measuring where there is no text.
//
//   cc -O2 -fopenmp -I. -o build/make_shard dev/bench/make_shard.c -lm
//   build/make_shard FILE.bin TOKENS VOCAB_SIZE EOT
//
// Tokens follow Zipf's law, as those of text do, so that the embedding's rows and the experts are hit unevenly; a
// document has about 600 tokens and begins with EOT. The same arguments give the same file.
#include "llmc/check.h"
#include "llmc/rand.h"
#include <math.h>

int main(int argc, char** argv) {
    program_name = "make_shard";
    if (argc != 5) { fatal("usage: make_shard FILE.bin TOKENS VOCAB_SIZE EOT"); }
    long tokens = atol(argv[2]), vocab = atol(argv[3]), eot = atol(argv[4]);
    if (tokens < 1 || tokens > 2000000000 || vocab < 2 || vocab > 2000000000 || eot < 0 || eot >= vocab) {
        fatal("TOKENS and VOCAB_SIZE must be 2 to 2000000000, EOT less than VOCAB_SIZE");
    }
    int32_t header[256] = {20240801, 7, (int32_t)tokens, (int32_t)vocab, (int32_t)eot + 1}; // see llmc/dataloader.h
    uint32_t* out = (uint32_t*)mallocCheck((size_t)tokens * sizeof(uint32_t));
    uint64_t random = hash64(1);
    for (long i = 0; i < tokens; i++) {
        if (i == 0 || rng_uniform(&random) < 1.0 / 600) {
            out[i] = (uint32_t)eot;
            continue;
        }
        long rank = (long)pow((double)vocab, rng_uniform(&random)) - 1; // uniform on a logarithmic scale: p ~ 1 / rank
        out[i] = (uint32_t)(rank < vocab ? rank : vocab - 1);
    }
    FILE* file = fopenCheck(argv[1], "wb");
    fwriteCheck(header, sizeof(int32_t), 256, file, argv[1]);
    fwriteCheck(out, sizeof(uint32_t), (size_t)tokens, file, argv[1]);
    fcloseCheck(file, argv[1]);
    free(out);
    return 0;
}
