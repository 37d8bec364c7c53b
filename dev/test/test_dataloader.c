// dataloader.h: the tokens a rank sees, in which order, after which resume; and every broken shard named in one line.
// D1 ... D15 are entries of the list of known faults of such programs.
#include "testing.h"

#include "../../llmc/dataloader.h"

// ----------------------------------------------------------------------------
// making shards

typedef struct { int32_t magic, version, count, vocab_size, eot_plus_1; } Header;

// Writes a shard whose header may lie; tokens as uint32 (version 7) or uint16 (version 1). Returns the path, malloc'ed.
static char* write_shard(const char* name, const uint32_t* tokens, size_t n, Header h) {
    char* path = str_format("%s/%s", test_folder(), name);
    FILE* fp = fopenCheck(path, "wb");
    int32_t header[SHARD_HEADER_INTS] = {h.magic, h.version, h.count, h.vocab_size, h.eot_plus_1};
    fwriteCheck(header, sizeof(int32_t), SHARD_HEADER_INTS, fp, path);
    for (size_t i = 0; i < n; i++) {
        uint16_t narrow = (uint16_t)tokens[i];
        if (h.magic == SHARD_MAGIC_16) { fwriteCheck(&narrow, 2, 1, fp, path); }
        else { fwriteCheck(&tokens[i], 4, 1, fp, path); }
    }
    fcloseCheck(fp, path);
    return path;
}

static Header header_32(size_t n, int vocab_size, int eot_id) {
    Header h = {SHARD_MAGIC_32, 7, (int32_t)n, vocab_size, eot_id + 1};
    return h;
}

// n tokens 0, 1, 2, ...: a token tells its place
static char* write_counting_shard(const char* name, size_t n, uint32_t first) {
    uint32_t* tokens = (uint32_t*)mallocCheck(n * sizeof(uint32_t));
    for (size_t i = 0; i < n; i++) { tokens[i] = first + (uint32_t)i; }
    char* path = write_shard(name, tokens, n, header_32(n, 1 << 20, -1));
    free(tokens);
    return path;
}

static DataLoaderOptions options(const char* pattern, size_t B, size_t T) {
    DataLoaderOptions o;
    memset(&o, 0, sizeof(o));
    o.pattern = pattern;
    o.B = B;
    o.T = T;
    o.num_ranks = 1;
    o.seed = 42;
    o.shuffle = true;
    o.vocab_size = 1 << 20;
    o.eot_id = -1;
    return o;
}

static void open_and_close(DataLoaderOptions o) {
    DataLoader l;
    dataloader_open(&l, &o);
    dataloader_close(&l);
}

// ----------------------------------------------------------------------------
// what a batch holds

static void targets_are_the_tokens_one_further(void) {
    char* path = write_counting_shard("a.bin", 100, 0);
    DataLoaderOptions o = options(path, 3, 7);
    DataLoader l;
    dataloader_open(&l, &o);
    CHECK(dataloader_num_sequences(&l) == 14 && dataloader_total_tokens(&l) == 100);
    const Batch* batch = dataloader_next(&l);
    for (int b = 0; b < 3; b++) {
        for (int t = 0; t < 7; t++) {
            CHECK(batch->tokens[b * 7 + t] == batch->tokens[b * 7] + t);
            CHECK(batch->targets[b * 7 + t] == batch->tokens[b * 7 + t] + 1);
            CHECK(batch->doc_start[b * 7 + t] == 0); // no EOT is known: a row is one document
        }
        CHECK(batch->tokens[b * 7] % 7 == 0);
    }
    dataloader_close(&l);
    free(path);
}

static void sequences_of_one_token_work(void) {
    char* path = write_counting_shard("one.bin", 5, 0);
    DataLoaderOptions o = options(path, 1, 1);
    o.shuffle = false;
    DataLoader l;
    dataloader_open(&l, &o);
    CHECK(dataloader_num_sequences(&l) == 4);
    for (int i = 0; i < 4; i++) {
        const Batch* batch = dataloader_next(&l);
        CHECK(batch->tokens[0] == i && batch->targets[0] == i + 1);
    }
    dataloader_close(&l);
    free(path);
}

static void documents_begin_at_the_last_eot_in_the_row_and_end_before_the_next(void) { // D10
    //                         row 0             | row 1             | one more
    const uint32_t tokens[] = {9, 1, 2, 9, 9, 3, 4, 5, 6, 9, 7, 9, 8};
    const int expected[] = {0, 0, 0, 3, 4, 4, 0, 0, 0, 3, 3, 5}, ends[] = {3, 3, 3, 4, 6, 6, 3, 3, 3, 5, 5, 6};
    char* path = write_shard("doc.bin", tokens, 13, header_32(13, 10, 9));
    DataLoaderOptions o = options(path, 2, 6);
    o.shuffle = false;
    DataLoader l;
    dataloader_open(&l, &o);
    CHECK(dataloader_eot_id(&l) == 9 && dataloader_vocab_size(&l) == 10);
    const Batch* batch = dataloader_next(&l);
    CHECK(memcmp(batch->doc_start, expected, sizeof(expected)) == 0);
    CHECK(memcmp(batch->doc_end, ends, sizeof(ends)) == 0);
    dataloader_close(&l);
    o.one_document = true;
    dataloader_open(&l, &o);
    batch = dataloader_next(&l);
    for (int n = 0; n < 12; n++) { CHECK(batch->doc_start[n] == 0 && batch->doc_end[n] == 6); }
    o.one_document = false;
    dataloader_close(&l);
    free(path);

    path = write_shard("doc.bin", tokens, 13, header_32(13, 0, -1)); // llm.c's shard: the EOT comes from the caller
    o.pattern = path;
    o.eot_id = 9;
    dataloader_open(&l, &o);
    CHECK(memcmp(dataloader_next(&l)->doc_start, expected, sizeof(expected)) == 0);
    dataloader_close(&l);
    free(path);
}

static void shards_of_both_widths_and_several_files_give_their_tokens_in_order(void) { // D4
    uint32_t tokens[20], big[20];
    for (uint32_t i = 0; i < 20; i++) { tokens[i] = 65516 + i; big[i] = 151000 + i; }
    Header narrow = {SHARD_MAGIC_16, 1, 20, 0, 0};
    char* a = write_shard("w_0.bin", tokens, 20, narrow);
    char* b = write_shard("w_1.bin", big, 20, header_32(20, 151936, 151643));
    char* pattern = str_format("%s/w_*.bin", test_folder());
    DataLoaderOptions o = options(pattern, 1, 5);
    o.shuffle = false;
    o.vocab_size = 151936; // 16-bit ids that fit are welcome in a big vocabulary
    DataLoader l;
    dataloader_open(&l, &o);
    CHECK(dataloader_num_sequences(&l) == 6 && dataloader_total_tokens(&l) == 40);
    const int first[] = {65516, 65521, 65526, 151000, 151005, 151010};
    for (int i = 0; i < 6; i++) {
        const Batch* batch = dataloader_next(&l);
        for (int t = 0; t < 5; t++) {
            CHECK(batch->tokens[t] == first[i] + t && batch->targets[t] == first[i] + t + 1);
        }
    }
    dataloader_close(&l);
    free(a); free(b); free(pattern);
}

static void a_shard_above_2_31_bytes_is_read_at_its_end(void) {
    size_t n = 600000000; // 2.4 GB, but a hole: it takes no room on disk
    char* path = write_shard("big.bin", NULL, 0, header_32(n, 257, -1));
    uint32_t last = 77;
    FILE* fp = fopenCheck(path, "r+b");
    if (fseeko(fp, (off_t)(1024 + 4 * (n - 1)), SEEK_SET) != 0) { fatal("fseeko: %s", strerror(errno)); }
    fwriteCheck(&last, 4, 1, fp, path);
    fcloseCheck(fp, path);
    DataLoaderOptions o = options(path, 1, 1);
    o.shuffle = false;
    o.vocab_size = 257;
    DataLoader l;
    dataloader_open(&l, &o);
    CHECK(dataloader_num_sequences(&l) == n - 1);
    dataloader_seek(&l, n - 2);
    CHECK(dataloader_next(&l)->targets[0] == 77);
    dataloader_close(&l);
    unlink(path);
    free(path);
}

// ----------------------------------------------------------------------------
// the order

// Marks which sequences (their first token / T) one rank gets in `steps` microbatches.
static void collect(DataLoaderOptions o, size_t steps, int* times_seen) {
    DataLoader l;
    dataloader_open(&l, &o);
    for (size_t s = 0; s < steps; s++) {
        const Batch* batch = dataloader_next(&l);
        for (size_t b = 0; b < o.B; b++) { times_seen[(size_t)batch->tokens[b * o.T] / o.T]++; }
    }
    dataloader_close(&l);
}

static void ranks_see_disjoint_and_complete_data_in_an_epoch(void) { // D3
    size_t T = 4, sequences = 24;
    char* path = write_counting_shard("r.bin", sequences * T + 1, 0);
    for (int num_ranks = 1; num_ranks <= 4; num_ranks++) {
        int seen[24] = {0};
        for (int rank = 0; rank < num_ranks; rank++) {
            DataLoaderOptions o = options(path, 2, T);
            o.num_ranks = num_ranks;
            o.rank = rank;
            collect(o, sequences / (2 * (size_t)num_ranks), seen);
        }
        for (size_t i = 0; i < sequences; i++) { CHECK(seen[i] == 1); }
    }
    free(path);
}

static void the_union_of_ranks_is_what_one_rank_sees(void) { // D3: the first 12 sequences, split in any way
    char* path = write_counting_shard("u.bin", 200, 0);
    int alone[200] = {0};
    collect(options(path, 12, 4), 1, alone);
    const int splits[][3] = {{2, 6, 1}, {3, 4, 1}, {4, 1, 3}, {2, 2, 3}, {1, 3, 4}}; // ranks, B, steps
    for (int i = 0; i < 5; i++) {
        int seen[200] = {0};
        for (int rank = 0; rank < splits[i][0]; rank++) {
            DataLoaderOptions o = options(path, (size_t)splits[i][1], 4);
            o.num_ranks = splits[i][0];
            o.rank = rank;
            collect(o, (size_t)splits[i][2], seen);
        }
        CHECK(memcmp(alone, seen, sizeof(alone)) == 0);
    }
    free(path);
}

static void an_epoch_has_as_many_steps_as_whole_batches_fit(void) { // D2
    size_t B = 2, T = 8;
    for (int ranks = 1; ranks <= 3; ranks += 2) {
        for (int extra = -1; extra <= 2; extra++) {
            size_t tokens = 5 * (size_t)ranks * B * T + (size_t)(extra + 16) - 16;
            char* path = write_counting_shard("e.bin", tokens, 0);
            DataLoaderOptions o = options(path, B, T);
            o.num_ranks = ranks;
            DataLoader l;
            dataloader_open(&l, &o);
            size_t steps = 0;
            int seen[128] = {0};
            for (;; steps++) { // until a batch comes from the second epoch
                const Batch* batch = dataloader_next(&l);
                if (dataloader_position(&l) > dataloader_num_sequences(&l)) { break; }
                for (size_t b = 0; b < B; b++) { seen[(size_t)batch->tokens[b * T] / T]++; }
            }
            CHECK(steps == (tokens - 1) / ((size_t)ranks * B * T));
            for (int i = 0; i < 128; i++) { CHECK(seen[i] <= 1); }
            dataloader_close(&l);
            free(path);
        }
    }
}

static void order_depends_on_the_seed_and_the_epoch_alone(void) { // D12
    char* path = write_counting_shard("s.bin", 401, 0);
    int order[4][100];
    for (int i = 0; i < 4; i++) { // seed 42, again, seed 43, and seed 42's second epoch
        DataLoaderOptions o = options(path, 100, 4);
        o.seed = i == 2 ? 43 : 42;
        DataLoader l;
        dataloader_open(&l, &o);
        const Batch* batch = dataloader_next(&l);
        if (i == 3) { batch = dataloader_next(&l); }
        for (int b = 0; b < 100; b++) { order[i][b] = batch->tokens[b * 4]; }
        dataloader_close(&l);
    }
    CHECK(memcmp(order[0], order[1], sizeof(order[0])) == 0);
    CHECK(memcmp(order[0], order[2], sizeof(order[0])) != 0);
    CHECK(memcmp(order[0], order[3], sizeof(order[0])) != 0);
    free(path);
}

static void shuffling_leaves_no_trend_of_the_source_order(void) { // D12: ten blocks of rising "difficulty", 100 steps
    size_t n = 8001;
    uint32_t* tokens = (uint32_t*)mallocCheck(n * sizeof(uint32_t));
    for (size_t i = 0; i < n; i++) { tokens[i] = (uint32_t)(i / 801); }
    char* path = write_shard("blocks.bin", tokens, n, header_32(n, 10, -1));
    DataLoaderOptions o = options(path, 10, 8);
    DataLoader l;
    dataloader_open(&l, &o);
    double correlation = 0.0, square = 0.0;
    for (int s = 0; s < 100; s++) {
        const Batch* batch = dataloader_next(&l);
        double mean = 0.0;
        for (int b = 0; b < 10; b++) { mean += batch->tokens[b * 8] / 10.0; }
        correlation += (mean - 4.5) * (s - 49.5) / 100.0;
        square += (mean - 4.5) * (mean - 4.5) / 100.0;
    }
    correlation /= sqrt(square) * 28.87; // 28.87: the standard deviation of 0 ... 99
    CHECK_NEAR(correlation, 0.0, 0.4);   // 4 standard deviations of a correlation of 100 pairs; in source order it is 1
    dataloader_close(&l);
    free(tokens);
    free(path);
}

static void validation_reads_in_file_order(void) {
    char* path = write_counting_shard("v.bin", 41, 0);
    DataLoaderOptions o = options(path, 2, 4);
    o.shuffle = false;
    DataLoader l;
    dataloader_open(&l, &o);
    for (int epoch = 0; epoch < 2; epoch++) {
        for (int i = 0; i < 10; i += 2) {
            const Batch* batch = dataloader_next(&l);
            CHECK(batch->tokens[0] == 4 * i && batch->tokens[4] == 4 * i + 4);
        }
    }
    dataloader_close(&l);
    free(path);
}

// ----------------------------------------------------------------------------
// for the GPU: tokens sorted, batches in memory of the caller's choice

static void token_order_is_a_stable_sort(void) {
    uint32_t tokens[601];
    uint64_t rng = 5;
    for (int i = 0; i < 601; i++) { tokens[i] = (uint32_t)(rng_next(&rng) % 7 * 3); } // 0, 3, ... 18
    char* path = write_shard("sort.bin", tokens, 601, header_32(601, 19, -1));
    for (int prefetch = 0; prefetch < 2; prefetch++) {
        DataLoaderOptions o = options(path, 5, 12);
        o.vocab_size = 19;
        o.sort_tokens = true;
        o.prefetch = prefetch == 1;
        DataLoader l;
        dataloader_open(&l, &o);
        for (int s = 0; s < 25; s++) {
            const Batch* batch = dataloader_next(&l);
            int seen[60] = {0};
            for (int i = 0; i < 60; i++) {
                int at = batch->token_order[i];
                if (!CHECK(at >= 0 && at < 60)) { continue; }
                seen[at]++;
                if (i == 0) { continue; }
                int before = batch->token_order[i - 1];
                CHECK(batch->tokens[before] < batch->tokens[at] ||
                      (batch->tokens[before] == batch->tokens[at] && before < at));
            }
            for (int i = 0; i < 60; i++) { CHECK(seen[i] == 1); }
        }
        dataloader_close(&l);
    }
    DataLoaderOptions o = options(path, 5, 12);
    o.vocab_size = 0;
    o.sort_tokens = true;
    EXPECT_FATAL(open_and_close(o), "sorting tokens needs a vocabulary");
    free(path);
}

static int num_allocated, num_released;
static size_t allocated_bytes;
static void* count_allocate(size_t bytes) {
    num_allocated++;
    allocated_bytes = bytes;
    return mallocCheck(bytes);
}
static void count_release(void* memory) {
    num_released++;
    free(memory);
}

static void batches_in_memory_of_the_callers_are_the_same(void) {
    char* path = write_counting_shard("hook.bin", 1000, 0);
    DataLoaderOptions o = options(path, 3, 8);
    DataLoader a, b;
    dataloader_open(&a, &o);
    CHECK(dataloader_next(&a)->token_order == NULL);
    dataloader_seek(&a, 0);
    o.sort_tokens = o.prefetch = true;
    o.allocate = count_allocate;
    o.release = count_release;
    dataloader_open(&b, &o);
    CHECK(num_allocated == 2 && allocated_bytes == 5 * 24 * sizeof(int));
    for (int s = 0; s < 100; s++) {
        const Batch* x = dataloader_next(&a);
        const Batch* y = dataloader_next(&b);
        CHECK(memcmp(x->all, y->all, 4 * 24 * sizeof(int)) == 0);
        CHECK(y->tokens == y->all && y->targets == y->all + 24);
        CHECK(y->doc_start == y->all + 48 && y->doc_end == y->all + 72 && y->token_order == y->all + 96);
    }
    dataloader_close(&a);
    CHECK(num_released == 0);
    dataloader_close(&b);
    CHECK(num_released == 2 && num_allocated == 2);
    free(path);
}

static void one_pass_takes_every_sequence_once_whatever_the_batches(void) { // D16
    char* path = write_counting_shard("pass.bin", 10 * 8 + 1, 0); // 10 sequences
    for (int B = 1; B <= 12; B++) {
        for (int ranks = 1; ranks <= 3; ranks++) {
            int seen[10] = {0}, ignored = 0;
            for (int rank = 0; rank < ranks; rank++) {
                DataLoaderOptions o = options(path, (size_t)B, 8);
                o.num_ranks = ranks;
                o.rank = rank;
                o.shuffle = false;
                o.one_pass = true;
                o.prefetch = B % 2;
                DataLoader l;
                dataloader_open(&l, &o);
                for (int first = rank * B; first < 10; first += ranks * B) {
                    const Batch* batch = dataloader_next(&l);
                    for (int b = 0; b < B; b++) {
                        const int* y = batch->targets + b * 8;
                        CHECK((y[0] == -100) == (first + b >= 10) && (y[0] == -100) == (y[7] == -100));
                        if (y[0] == -100) { ignored++; }
                        else { seen[batch->tokens[b * 8] / 8]++; }
                    }
                }
                dataloader_close(&l);
            }
            for (int i = 0; i < 10; i++) { CHECK(seen[i] == 1); }
            CHECK(ignored == (10 + B - 1) / B * B - 10);
        }
    }
    DataLoaderOptions o = options(path, 4, 81);
    o.one_pass = true;
    EXPECT_FATAL(open_and_close(o), "are 0 sequences of 81, but validation needs 1 (82 tokens): at most --seq-len 80 fits");
    free(path);
}

// ----------------------------------------------------------------------------
// prefetch and resume

static void prefetch_gives_the_batches_of_inline(void) {
    char* path = write_counting_shard("p.bin", 3000, 0);
    DataLoaderOptions o = options(path, 3, 8);
    DataLoader a, b;
    dataloader_open(&a, &o);
    o.prefetch = true;
    dataloader_open(&b, &o);
    for (int s = 0; s < 300; s++) { // two epochs and a bit
        const Batch* x = dataloader_next(&a);
        const Batch* y = dataloader_next(&b);
        CHECK(memcmp(x->tokens, y->tokens, 24 * sizeof(int)) == 0);
        CHECK(memcmp(x->targets, y->targets, 24 * sizeof(int)) == 0);
        CHECK(memcmp(x->doc_start, y->doc_start, 24 * sizeof(int)) == 0);
        CHECK(dataloader_position(&a) == dataloader_position(&b) && y->wait_ms >= 0.0);
    }
    dataloader_close(&a);
    dataloader_close(&b);
    free(path);
}

static void a_batch_stays_as_it_is_until_the_next_call(void) {
    char* path = write_counting_shard("stay.bin", 3000, 0);
    DataLoaderOptions o = options(path, 3, 8);
    o.prefetch = true;
    DataLoader l;
    dataloader_open(&l, &o);
    for (int s = 0; s < 20; s++) {
        const Batch* batch = dataloader_next(&l);
        int copy[24];
        memcpy(copy, batch->tokens, sizeof(copy));
        usleep(1000); // the thread has filled the other buffer by now
        CHECK(memcmp(copy, batch->tokens, sizeof(copy)) == 0);
        if (s == 10) { // nor does a seek touch it
            dataloader_seek(&l, 3);
            usleep(1000);
            CHECK(memcmp(copy, batch->tokens, sizeof(copy)) == 0);
        }
    }
    dataloader_close(&l);
    free(path);
}

static void resume_continues_with_the_very_next_batch(void) { // D13, across ends of epochs, with and without prefetch
    char* path = write_counting_shard("resume.bin", 200, 0); // 24 sequences of 8: 8 batches of 3 an epoch
    for (int prefetch = 0; prefetch < 2; prefetch++) {
        for (int stop = 0; stop <= 20; stop += 4) {
            DataLoaderOptions o = options(path, 3, 8);
            o.prefetch = prefetch;
            DataLoader a, b;
            dataloader_open(&a, &o);
            for (int s = 0; s < stop; s++) { dataloader_next(&a); }
            dataloader_open(&b, &o);
            dataloader_seek(&b, dataloader_position(&a));
            for (int s = 0; s < 12; s++) {
                const Batch* x = dataloader_next(&a);
                const Batch* y = dataloader_next(&b);
                CHECK(memcmp(x->tokens, y->tokens, 24 * sizeof(int)) == 0);
            }
            CHECK(dataloader_position(&a) == dataloader_position(&b));
            dataloader_close(&a);
            dataloader_close(&b);
        }
    }
    free(path);
}

static void resume_with_other_ranks_or_batch_size_skips_and_repeats_nothing(void) { // D13
    char* path = write_counting_shard("other.bin", 24 * 8 + 1, 0);
    int seen[24] = {0};
    DataLoaderOptions o = options(path, 4, 8);
    DataLoader l;
    dataloader_open(&l, &o);
    for (int s = 0; s < 2; s++) {
        const Batch* batch = dataloader_next(&l);
        for (int b = 0; b < 4; b++) { seen[batch->tokens[b * 8] / 8]++; }
    }
    uint64_t position = dataloader_position(&l);
    dataloader_close(&l);
    for (int rank = 0; rank < 2; rank++) { // 16 sequences are left: 2 ranks of B=2, 4 steps
        o = options(path, 2, 8);
        o.num_ranks = 2;
        o.rank = rank;
        dataloader_open(&l, &o);
        dataloader_seek(&l, position);
        for (int s = 0; s < 4; s++) {
            const Batch* batch = dataloader_next(&l);
            for (int b = 0; b < 2; b++) { seen[batch->tokens[b * 8] / 8]++; }
        }
        CHECK(dataloader_position(&l) == 24);
        dataloader_close(&l);
    }
    for (int i = 0; i < 24; i++) { CHECK(seen[i] == 1); }
    free(path);
}

// ----------------------------------------------------------------------------
// vocabularies

static void vocabulary_of_the_model_may_be_equal_or_larger_but_not_smaller(void) { // D5, D6
    uint32_t tokens[40];
    for (uint32_t i = 0; i < 40; i++) { tokens[i] = i % 100; }
    tokens[20] = 99;
    for (int named = 0; named < 2; named++) { // a header that says 100, and one that says nothing
        char* path = write_shard("vocab.bin", tokens, 40, header_32(40, named ? 100 : 0, -1));
        DataLoaderOptions o = options(path, 1, 4);
        o.vocab_size = 100;
        open_and_close(o);
        o.vocab_size = 128; // a padded embedding
        open_and_close(o);
        o.vocab_size = 99;
        EXPECT_FATAL(open_and_close(o), named ? "tokenizer of 100 tokens, but the model's vocabulary has 99 (a fresh --model or --config "
                                                "takes --vocab-size 100)" : "token 20 (byte offset 1104) has id 99");
        o.vocab_size = 0; // unknown
        open_and_close(o);
        free(path);
    }
    // a header that says more than the model has, but its ids fit
    char* path = write_shard("vocab.bin", tokens, 40, header_32(40, 101, -1));
    DataLoaderOptions o = options(path, 1, 4);
    o.vocab_size = 100;
    EXPECT_FATAL(open_and_close(o), "made with a tokenizer of 101 tokens, but the model's vocabulary has 100");
    free(path);
}

static void a_token_outside_the_vocabulary_is_named_before_training(void) { // D7
    uint32_t tokens[40] = {0};
    const uint32_t bad[] = {257, 65536, 2147483647u, 2147483648u, 4294967295u};
    for (int i = 0; i < 5; i++) {
        tokens[31] = bad[i];
        char* path = write_shard("bad.bin", tokens, 40, header_32(40, 0, -1));
        DataLoaderOptions o = options(path, 1, 4);
        o.vocab_size = 257;
        char part[100];
        snprintf(part, sizeof(part), "bad.bin: token 31 (byte offset %d) has id %u, but", 1024 + 4 * 31, bad[i]);
        EXPECT_FATAL(open_and_close(o), part);
        free(path);
    }
    Header narrow = {SHARD_MAGIC_16, 1, 40, 0, 0};
    tokens[31] = 300;
    char* path = write_shard("bad.bin", tokens, 40, narrow);
    DataLoaderOptions o = options(path, 1, 4);
    o.vocab_size = 257;
    EXPECT_FATAL(open_and_close(o), "token 31 (byte offset 1086) has id 300");
    free(path);
}

static void next_batches(DataLoaderOptions o, int n) {
    DataLoader l;
    dataloader_open(&l, &o);
    for (int i = 0; i < n; i++) { dataloader_next(&l); }
    dataloader_close(&l);
}

static void a_header_that_lies_is_found_out_when_the_batch_is_read(void) { // D7, in either thread
    uint32_t tokens[41] = {0};
    tokens[17] = 4294967295u;
    char* path = write_shard("lie.bin", tokens, 41, header_32(41, 257, 256));
    for (int prefetch = 0; prefetch < 2; prefetch++) {
        DataLoaderOptions o = options(path, 1, 4);
        o.vocab_size = 257;
        o.shuffle = false;
        o.prefetch = prefetch;
        next_batches(o, 3); // what comes before is fine
        EXPECT_FATAL(next_batches(o, 5), "lie.bin: token 17 (byte offset 1092) has id 4294967295");
    }
    free(path);
}

// ----------------------------------------------------------------------------
// the bad-input table

static void expect_shard_error(const char* name, const uint32_t* tokens, size_t n, Header h, const char* part) {
    char* path = write_shard(name, tokens, n, h);
    DataLoaderOptions o = options(path, 1, 4);
    EXPECT_FATAL(open_and_close(o), part);
    EXPECT_FATAL(open_and_close(o), name); // the file is named, too
    free(path);
}

static void broken_shards_are_refused_with_the_reason(void) {
    const uint32_t t[40] = {0};
    const Header good = header_32(40, 257, 256);
    Header h;
    h = good; h.magic = 20240326; expect_shard_error("magic.bin", t, 40, h, "not a token shard (magic 20240326");
    h = good; h.version = 2; expect_shard_error("version.bin", t, 40, h, "version 2 is not known");
    h = good; h.magic = SHARD_MAGIC_16; expect_shard_error("mixed.bin", t, 40, h, "version 7 is not known");
    h = good; h.count = 0; expect_shard_error("none.bin", t, 0, h, "0 tokens");
    h = good; h.count = -5; expect_shard_error("negative.bin", t, 40, h, "-5 tokens");
    h = good; h.count = 41; expect_shard_error("cut.bin", t, 40, h, "says 41 tokens of 4 bytes, but 160 bytes follow");
    h = good; h.count = 39; expect_shard_error("long.bin", t, 40, h, "says 39 tokens");
    h = good; h.count = INT32_MAX; expect_shard_error("huge.bin", t, 40, h, "says 2147483647 tokens");
    h = good; h.vocab_size = -1; expect_shard_error("vocab.bin", t, 40, h, "header is damaged");
    h = good; h.eot_plus_1 = 258; expect_shard_error("eot.bin", t, 40, h, "header is damaged");
    h = good; h.eot_plus_1 = INT32_MIN + 1; expect_shard_error("eot.bin", t, 40, h, "header is damaged");
}

static void files_that_are_no_shards_are_refused_with_the_reason(void) {
    const char* folder = test_folder();
    char* path = str_format("%s/x.bin", folder);
    test_write_file(path, "", 0);
    EXPECT_FATAL(open_and_close(options(path, 1, 4)), "x.bin is empty");
    test_write_file(path, "Once upon a time", 16);
    EXPECT_FATAL(open_and_close(options(path, 1, 4)), "less than a shard's header");
    char text[2000];
    memset(text, 'a', sizeof(text));
    test_write_file(path, text, sizeof(text));
    EXPECT_FATAL(open_and_close(options(path, 1, 4)), "--tokenize inline");
    EXPECT_FATAL(open_and_close(options(folder, 1, 4)), "is a folder");
    EXPECT_FATAL(open_and_close(options("/dev/null", 1, 4)), "not a regular file");
    unlink(path);
    if (mkfifo(path, 0600) != 0) { fatal("mkfifo: %s", strerror(errno)); } // nobody writes to it: no waiting
    EXPECT_FATAL(open_and_close(options(path, 1, 4)), "not a regular file");
    EXPECT_FATAL(open_and_close(options("/nowhere/train_*.bin", 1, 4)), "no file matches '/nowhere/train_*.bin'");
    unlink(path);
    if (symlink("gone", path) != 0) { fatal("symlink: %s", strerror(errno)); }
    EXPECT_FATAL(open_and_close(options(path, 1, 4)), "x.bin");
    unlink(path);
    free(path);
}

static void shards_of_different_tokenizers_do_not_mix(void) {
    const uint32_t t[40] = {0};
    char* a = write_shard("mix_0.bin", t, 40, header_32(40, 257, 256));
    char* b = write_shard("mix_1.bin", t, 40, header_32(40, 151936, 151643));
    char* pattern = str_format("%s/mix_*.bin", test_folder());
    EXPECT_FATAL(open_and_close(options(pattern, 1, 4)), "mix_1.bin: end-of-text id 151643, but 256");
    unlink(a);
    unlink(b);
    free(a); free(b); free(pattern);
}

static void too_little_data_says_what_is_there_what_is_needed_and_what_fits(void) { // D1
    char* path = write_counting_shard("small.bin", 30000, 0);
    DataLoaderOptions o = options(path, 4, 1024);
    o.num_ranks = 8;
    EXPECT_FATAL(open_and_close(o),
                 "30000 tokens in 1 file are 29 sequences of 1024, but a batch of 4 on 8 ranks needs 32 (32769 "
                 "tokens): at most --batch-size 3 or --seq-len 937 fits");
    o.B = 3;
    open_and_close(o); // and that is true
    o.B = 4;
    o.T = 937;
    open_and_close(o);
    o.T = 938;
    EXPECT_FATAL(open_and_close(o), "--seq-len 937");
    o.T = 40000;
    EXPECT_FATAL(open_and_close(o), "at most --seq-len 937 fits");
    o.B = 10000;
    EXPECT_FATAL(open_and_close(o), "no --seq-len fits");
    o.B = SIZE_MAX / 4;
    EXPECT_FATAL(open_and_close(o), "overflow");
    free(path);
    path = write_counting_shard("tiny.bin", 1, 0);
    EXPECT_FATAL(open_and_close(options(path, 1, 1)), "no --seq-len fits");
    free(path);
}

static void impossible_options_are_refused(void) {
    char* path = write_counting_shard("o.bin", 100, 0);
    DataLoaderOptions o = options(path, 0, 4);
    EXPECT_FATAL(open_and_close(o), "batch size 0");
    o = options(path, 1, 0);
    EXPECT_FATAL(open_and_close(o), "sequence length 0");
    o = options(path, 1, 4);
    o.rank = 1;
    EXPECT_FATAL(open_and_close(o), "no rank 1 of 1");
    free(path);
}

// ----------------------------------------------------------------------------
// text

static DataLoaderOptions text_options(const char* pattern, size_t B, size_t T) {
    DataLoaderOptions o = options(pattern, B, T);
    o.text = true;
    o.vocab_size = 257;
    return o;
}

static void text_becomes_eot_and_bytes_of_each_document(void) {
    char* path = str_format("%s/t.txt", test_folder());
    const char* text = "\n\nab\nc\r\n<|endoftext|>\n\n<|endoftext|>d<|endoftext|>\xC3\xBC<|endoftext";
    test_write_file(path, text, strlen(text));
    const int expected[] = {256, 'a', 'b', '\n', 'c', 256, 'd', 256, 0xC3, 0xBC,
                            '<', '|', 'e', 'n', 'd', 'o', 'f', 't', 'e', 'x', 't'};
    const int n = (int)(sizeof(expected) / sizeof(expected[0]));
    for (int T = 1; T < n; T++) { // rows begin everywhere
        DataLoaderOptions o = text_options(path, 1, (size_t)T);
        o.shuffle = false;
        DataLoader l;
        dataloader_open(&l, &o);
        CHECK(dataloader_total_tokens(&l) == (uint64_t)n);
        CHECK(dataloader_vocab_size(&l) == 257 && dataloader_eot_id(&l) == 256);
        for (int row = 0; row < (n - 1) / T; row++) {
            const Batch* batch = dataloader_next(&l);
            CHECK(memcmp(batch->tokens, expected + row * T, (size_t)T * sizeof(int)) == 0);
            CHECK(memcmp(batch->targets, expected + row * T + 1, (size_t)T * sizeof(int)) == 0);
        }
        dataloader_close(&l);
    }
    unlink(path);
    free(path);
}

static void text_and_the_shards_made_of_it_give_the_same_batches(void) { // --tokenize inline = ahead, bit for bit
    char* text = str_format("%s/corpus_*.txt", test_folder());
    uint64_t rng = 3;
    for (int f = 0; f < 3; f++) {
        char* path = str_format("%s/corpus_%d.txt", test_folder(), f);
        FILE* fp = fopenCheck(path, "wb");
        for (int i = 0; i < 400; i++) {
            const char* words[] = {"a", "hedgehog ", "\n", "<|endoftext|>", "\r\n",
                                   "\xE2\x82\xAC", "<|", "endoftext|>", "% "};
            fputs(words[rng_next(&rng) % 9], fp);
        }
        fcloseCheck(fp, path);
        free(path);
    }
    char* command = str_format("python3 -B prepro/text.py --val-fraction 0 --out %s/ahead %s > %s/log",
                               test_folder(), text, test_folder());
    if (!CHECK(system(command) == 0)) { return; }
    char* shards = str_format("%s/ahead/train_*.bin", test_folder());
    DataLoaderOptions o = options(shards, 4, 16), p = text_options(text, 4, 16);
    o.vocab_size = 257;
    p.prefetch = true;
    DataLoader a, b;
    dataloader_open(&a, &o);
    dataloader_open(&b, &p);
    CHECK(dataloader_total_tokens(&a) == dataloader_total_tokens(&b));
    CHECK(dataloader_total_tokens(&a) > 3000);
    for (int s = 0; s < 200; s++) { // more than two epochs
        const Batch* x = dataloader_next(&a);
        const Batch* y = dataloader_next(&b);
        CHECK(memcmp(x->tokens, y->tokens, 64 * sizeof(int)) == 0);
        CHECK(memcmp(x->targets, y->targets, 64 * sizeof(int)) == 0);
        CHECK(memcmp(x->doc_start, y->doc_start, 64 * sizeof(int)) == 0);
    }
    dataloader_close(&a);
    dataloader_close(&b);
    free(text); free(shards); free(command);
}

static void text_of_a_tokenizer_with_merges_is_encoded_when_it_is_opened(void) {
    // bytes, then "ab" and the EOT
    char* json = str_format("%s/tokenizer.json", test_folder());
    FILE* fp = fopenCheck(json, "wb");
    int chars[256];
    byte_alphabet(chars);
    fputs("{\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": false}, \"added_tokens\": [{\"id\": 257, "
          "\"content\": \"<|endoftext|>\", \"special\": true}, {\"id\": 258, \"content\": \"<x>\"}], \"model\": {\"merges\": [\"a b\"], \"vocab\": {\"ab\": 256", fp);
    for (int b = 0; b < 256; b++) { fprintf(fp, ", \"\\u%04x\": %d", (unsigned)chars[b], b); }
    fputs("}}}", fp);
    fcloseCheck(fp, json);
    Tokenizer t;
    char err[1200];
    if (!CHECK(tokenizer_read(&t, json, err, sizeof(err)) && tokenizer_refusal(&t) == NULL)) { return; }
    char* path = str_format("%s/merged.txt", test_folder());
    const char* text = "\nabab\n<|endoftext|>\n\n<|endoftext|>\xC3\xBC<x>b<|endoftext|>aab";
    test_write_file(path, text, strlen(text));
    const int expected[] = {257, 256, 256, 257, 0xC3, 0xBC, 258, 'b', 257, 'a', 256};
    const int n = (int)(sizeof(expected) / sizeof(expected[0]));
    uint64_t fingerprint = 0;
    for (int T = 1; T < n; T++) { // rows begin everywhere
        DataLoaderOptions o = text_options(path, 1, (size_t)T);
        o.shuffle = false;
        o.prefetch = T % 2;
        o.tokenizer = &t;
        o.vocab_size = 259;
        DataLoader l;
        dataloader_open(&l, &o);
        CHECK(dataloader_total_tokens(&l) == (uint64_t)n);
        CHECK(dataloader_vocab_size(&l) == 259 && dataloader_eot_id(&l) == 257);
        CHECK(T == 1 || fingerprint == dataloader_fingerprint(&l));
        fingerprint = dataloader_fingerprint(&l);
        for (int row = 0; row < (n - 1) / T; row++) {
            const Batch* batch = dataloader_next(&l);
            CHECK(memcmp(batch->tokens, expected + row * T, (size_t)T * sizeof(int)) == 0);
            CHECK(memcmp(batch->targets, expected + row * T + 1, (size_t)T * sizeof(int)) == 0);
        }
        dataloader_close(&l);
    }
    DataLoaderOptions o = text_options(path, 1, 1);
    o.tokenizer = &t;
    o.vocab_size = 258;
    EXPECT_FATAL(open_and_close(o), "259 tokens, but the model's vocabulary only 258");
    o.vocab_size = 259;
    setenv("TMPDIR", "/nowhere", 1);
    EXPECT_FATAL(open_and_close(o), "cannot write tokens to /nowhere/moe-tokens-");
    unsetenv("TMPDIR");
    tokenizer_free(&t);
    unlink(path);
    unlink(json);
    free(path);
    free(json);
}

static void text_that_cannot_be_read_is_refused_with_the_reason(void) {
    char* path = str_format("%s/bad.txt", test_folder());
    test_write_file(path, "abc\xFFxyz", 7);
    EXPECT_FATAL(open_and_close(text_options(path, 1, 2)), "bad.txt is not UTF-8 text (byte offset 3)");
    test_write_file(path, "\n<|endoftext|>\n", 15);
    EXPECT_FATAL(open_and_close(text_options(path, 1, 2)), "no text in");
    test_write_file(path, "", 0);
    EXPECT_FATAL(open_and_close(text_options(path, 1, 2)), "no text in");
    test_write_file(path, "hello there", 11);
    DataLoaderOptions o = text_options(path, 1, 2);
    o.vocab_size = 256;
    EXPECT_FATAL(open_and_close(o), "257 tokens, but the model's vocabulary only 256");
    Tokenizer other;
    tokenizer_bytes(&other);
    other.refusal = strdupCheck("x.json: its normalizer is not implemented here");
    o = text_options(path, 1, 2);
    o.tokenizer = &other;
    EXPECT_FATAL(open_and_close(o), "--tokenize inline: x.json: its normalizer is not implemented");
    tokenizer_free(&other);
    tokenizer_bytes(&other);
    other.eot_id = -1;
    EXPECT_FATAL(open_and_close(o), "which token opens a document");
    tokenizer_free(&other);
    unlink(path);
    free(path);
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(targets_are_the_tokens_one_further);
    RUN(sequences_of_one_token_work);
    RUN(documents_begin_at_the_last_eot_in_the_row_and_end_before_the_next);
    RUN(shards_of_both_widths_and_several_files_give_their_tokens_in_order);
    RUN(a_shard_above_2_31_bytes_is_read_at_its_end);
    RUN(ranks_see_disjoint_and_complete_data_in_an_epoch);
    RUN(the_union_of_ranks_is_what_one_rank_sees);
    RUN(an_epoch_has_as_many_steps_as_whole_batches_fit);
    RUN(order_depends_on_the_seed_and_the_epoch_alone);
    RUN(shuffling_leaves_no_trend_of_the_source_order);
    RUN(validation_reads_in_file_order);
    RUN(one_pass_takes_every_sequence_once_whatever_the_batches);
    RUN(prefetch_gives_the_batches_of_inline);
    RUN(token_order_is_a_stable_sort);
    RUN(batches_in_memory_of_the_callers_are_the_same);
    RUN(a_batch_stays_as_it_is_until_the_next_call);
    RUN(resume_continues_with_the_very_next_batch);
    RUN(resume_with_other_ranks_or_batch_size_skips_and_repeats_nothing);
    RUN(vocabulary_of_the_model_may_be_equal_or_larger_but_not_smaller);
    RUN(a_token_outside_the_vocabulary_is_named_before_training);
    RUN(a_header_that_lies_is_found_out_when_the_batch_is_read);
    RUN(broken_shards_are_refused_with_the_reason);
    RUN(files_that_are_no_shards_are_refused_with_the_reason);
    RUN(shards_of_different_tokenizers_do_not_mix);
    RUN(too_little_data_says_what_is_there_what_is_needed_and_what_fits);
    RUN(impossible_options_are_refused);
    RUN(text_becomes_eot_and_bytes_of_each_document);
    RUN(text_and_the_shards_made_of_it_give_the_same_batches);
    RUN(text_of_a_tokenizer_with_merges_is_encoded_when_it_is_opened);
    RUN(text_that_cannot_be_read_is_refused_with_the_reason);
    return test_summary();
}
