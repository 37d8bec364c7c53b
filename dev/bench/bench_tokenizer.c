// For bench_tokenizer.py: bench_tokenizer TOKENIZER.JSON TEXTS loads both (TEXTS: texts, each after its length as uint32);
// for each line on stdin it encodes all texts once and writes the processor seconds that took, and the number of ids.
#include "../../llmc/tokenizer.h"
#include <time.h>

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char** argv) {
    program_name = "bench_tokenizer";
    if (argc != 3) { fatal("usage: bench_tokenizer TOKENIZER.JSON TEXTS"); }
    char err[1200], line[16];
    Tokenizer t;
    double begin = cpu_seconds();
    if (!tokenizer_read(&t, argv[1], err, sizeof(err))) { fatal("%s", err); }
    printf("%.3f seconds to load\n", cpu_seconds() - begin);
    fflush(stdout);
    FILE* fp = fopenCheck(argv[2], "rb");
    ByteBuffer texts;
    TokenList list;
    memset(&texts, 0, sizeof(texts));
    memset(&list, 0, sizeof(list));
    size_t got;
    while ((got = fread(byte_buffer_reserve(&texts, 1 << 20), 1, 1 << 20, fp)) > 0) { texts.count += got; }
    fclose(fp);
    while (fgets(line, sizeof(line), stdin) != NULL) {
        size_t ids = 0;
        begin = cpu_seconds();
        for (size_t at = 0; at < texts.count;) {
            uint32_t n;
            memcpy(&n, texts.bytes + at, sizeof(n));
            list.count = 0;
            if (!tokenizer_encode(&t, texts.bytes + at + sizeof(n), n, &list, err, sizeof(err))) { fatal("%s", err); }
            ids += list.count;
            at += sizeof(n) + n;
        }
        printf("%.9f %zu\n", cpu_seconds() - begin, ids);
        fflush(stdout);
    }
    return 0;
}
