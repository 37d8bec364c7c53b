// Token shards (or text, tokenised here) -> batches of tokens and targets, in a seeded order that any rank can
// compute. Memory does not grow with the data: files are mapped, the shuffle is a formula, one thread prepares one
// batch ahead.
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include "check.h"

#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "rand.h"
#include "tokenizer.h"

#define SHARD_HEADER_INTS 256     // magic, version, number of tokens, vocab_size (0: unknown), EOT id + 1 (0: none)
#define SHARD_MAGIC_32 20240801   // version 7: uint32 tokens follow
#define SHARD_MAGIC_16 20240520   // version 1: uint16 tokens follow

typedef struct {
    const char* pattern;        // glob of the shards, or of the text files; not copied
    bool text;                  // tokenise text while training; else the pattern names shards
    const Tokenizer* tokenizer; // for text; NULL: the byte tokenizer
    size_t B, T;                // sequences a microbatch on this rank, tokens a sequence
    int rank, num_ranks;
    uint64_t seed;
    bool shuffle;               // false (validation): sequences in file order
    bool one_pass;              // validation: once through all sequences; rows after the last have no targets (-100)
    bool prefetch;              // a thread prepares the next batch while the caller computes; same batches
    int vocab_size;             // of the model: a larger token id is an error; 0: unknown
    int eot_id;                 // used where the shards name none; -1: unknown, then every row counts as one document
    bool one_document;          // so does it, whatever EOTs it holds (--doc-mask 0)
    bool sort_tokens;           // a batch brings token_order; needs vocab_size
    void* (*allocate)(size_t bytes); // where batches live, say in pinned memory; never returns NULL. NULL: malloc
    void (*release)(void* memory);   // NULL: free
} DataLoaderOptions;

typedef struct {
    const int* tokens;      // (B,T)
    const int* targets;     // (B,T) the token that follows each; -100: none that counts (one_pass)
    const int* doc_start;   // (B,T) where t's document begins in its row: at the last EOT up to t, else 0
    const int* doc_end;     // (B,T) one past where it ends in its row
    const int* token_order; // (B*T) sort_tokens of tokens; NULL unless the options ask for it
    const int* all;         // (5,B*T) tokens, targets, doc_start, doc_end, token_order: one piece, so one copy to a GPU
    double wait_ms;         // how long the caller stood still for this batch
    double fill_ms[2];      // when it was prepared, from and to, by CLOCK_MONOTONIC
} Batch;

// One stream of tokens: a mapped shard, or all the text files together as one.
typedef struct {
    char* path;
    unsigned char* map;      // NULL where the stream is text, byte by byte
    size_t map_size;
    int token_bytes;         // 4 or 2
    bool vouched;            // its header says that all ids are below a vocab_size the model has
    uint64_t num_tokens;
    uint64_t first_sequence; // its sequences are first_sequence ... first_sequence + (num_tokens - 1) / T - 1
} Shard;

typedef struct {
    const unsigned char* text; // the document's bytes, in a mapped file
    uint64_t first_token;      // the place of its EOT in the stream; the bytes follow
} Document;

typedef struct {
    int* all; // one allocation, the others point into it
    int* tokens;
    int* targets;
    int* doc_start;
    int* doc_end;
    int* token_order;
    uint64_t next_position; // where the loader stands once this batch is used
    double fill_ms[2];
} BatchBuffer;

typedef struct {
    DataLoaderOptions opt;
    Shard* shards;
    size_t num_shards;
    uint64_t num_sequences; // whole sequences of T tokens and one more, all shards
    uint64_t total_tokens;
    int vocab_size;         // largest the shards' headers name, 0: unknown
    int eot_id;

    Document* documents;    // of text whose bytes are its tokens, else NULL; one more at the end, where the stream ends
    size_t num_documents;
    Tokenizer own_tokenizer;
    unsigned char** text_maps;
    size_t* text_map_sizes;
    size_t num_text_maps;

    uint64_t position;      // sequences consumed so far by all ranks, whole epochs included
    BatchBuffer buffers[2]; // one is the caller's, the other is being filled
    int current;
    int* sort_scratch;      // (vocab_size)
    Batch batch;

    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool thread_running, wanted, ready, closing; // wanted: the thread shall fill the other buffer; ready: it has
    uint64_t wanted_position;
    char error[1024];       // what is wrong with the data, found while filling; the caller's thread reports it
} DataLoader;

static inline uint64_t dataloader_total_tokens(const DataLoader* l) { return l->total_tokens; }
static inline uint64_t dataloader_num_sequences(const DataLoader* l) { return l->num_sequences; }
static inline int dataloader_vocab_size(const DataLoader* l) { return l->vocab_size; }
static inline int dataloader_eot_id(const DataLoader* l) { return l->eot_id; }

// ----------------------------------------------------------------------------
// opening shards: every header field is checked against the file before a token is read

// Maps a whole file for reading; an empty file gives NULL and size 0. Fatal if it cannot be read.
static inline unsigned char* map_file(const char* path, size_t* size) {
    int fd = open_to_read(path);
    if (fd < 0) { fatal("cannot open %s: %s", path, strerror(errno)); }
    struct stat st;
    if (fstat(fd, &st) != 0) { fatal("cannot look at %s: %s", path, strerror(errno)); }
    if (S_ISDIR(st.st_mode)) { fatal("%s is a folder; name the files in it, as in '%s/train*.bin'", path, path); }
    if (!S_ISREG(st.st_mode)) { fatal("%s is not a regular file", path); }
    *size = (size_t)st.st_size;
    void* map = NULL;
    if (*size > 0) {
        map = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) { fatal("cannot map %s (%zu bytes): %s", path, *size, strerror(errno)); }
    }
    close(fd); // the map stays
    return (unsigned char*)map;
}

static inline uint32_t shard_token(const Shard* s, uint64_t i) {
    const unsigned char* data = s->map + SHARD_HEADER_INTS * sizeof(int32_t);
    if (s->token_bytes == 2) { return ((const uint16_t*)(const void*)data)[i]; }
    return ((const uint32_t*)(const void*)data)[i];
}

// Writes the message about a token id that the model has no row for: which, where in the file, what the limit is.
static inline void shard_bad_token(const Shard* s, uint64_t i, int vocab_size, char* err, size_t err_size) {
    unsigned long long at = SHARD_HEADER_INTS * sizeof(int32_t) + i * (unsigned)s->token_bytes;
    fail_with(err, err_size, "%s: token %llu (byte offset %llu) has id %u, but the model's vocabulary ends at %d; "
              "was this shard made with another tokenizer?", s->path, (unsigned long long)i, at, shard_token(s, i),
              vocab_size - 1);
}

// Fatal unless the first 12 bytes are those of a shard; sets token_bytes and num_tokens.
static inline void shard_check_magic(Shard* s) {
    if (s->map_size == 0) { fatal("%s is empty; make shards with prepro/text.py", s->path); }
    if (s->map_size < SHARD_HEADER_INTS * sizeof(int32_t)) {
        fatal("%s has %zu bytes, less than a shard's header (%zu); is it truncated, or text (then --tokenize inline)?",
              s->path, s->map_size, SHARD_HEADER_INTS * sizeof(int32_t));
    }
    const int32_t* header = (const int32_t*)(const void*)s->map;
    int version = header[0] == SHARD_MAGIC_32 ? 7 : header[0] == SHARD_MAGIC_16 ? 1 : 0;
    if (version == 0) {
        fatal("%s is not a token shard (magic %d, not %d or %d); make shards with prepro/text.py, "
              "or read text with --tokenize inline", s->path, (int)header[0], SHARD_MAGIC_32, SHARD_MAGIC_16);
    }
    if (header[1] != version) {
        fatal("%s: shard version %d is not known (magic %d has version %d)", s->path, (int)header[1], (int)header[0],
              version);
    }
    s->token_bytes = version == 7 ? 4 : 2;
    if (header[2] <= 0) { fatal("%s: its header says that it holds %d tokens", s->path, (int)header[2]); }
    s->num_tokens = (uint64_t)header[2];
    uint64_t body = s->map_size - SHARD_HEADER_INTS * sizeof(int32_t);
    if (body != s->num_tokens * (unsigned)s->token_bytes) {
        fatal("%s: its header says %llu tokens of %d bytes, but %llu bytes follow; was it cut, or is it not complete?",
              s->path, (unsigned long long)s->num_tokens, s->token_bytes, (unsigned long long)body);
    }
}

// Reads the slots that llm.c leaves 0, and settles vocabulary and EOT over all shards.
static inline void shard_check_vocab(DataLoader* l, Shard* s) {
    const int32_t* header = (const int32_t*)(const void*)s->map;
    int vocab_size = header[3], model = l->opt.vocab_size;
    int eot_id = header[4] >= 0 ? header[4] - 1 : -2; // INT_MIN has nothing below it
    if (vocab_size < 0 || eot_id < -1 || (vocab_size > 0 && eot_id >= vocab_size)) {
        fatal("%s: its header is damaged (vocab_size %d, end-of-text id + 1: %d)", s->path, vocab_size, (int)header[4]);
    }
    if (eot_id >= 0) {
        if (l->eot_id >= 0 && l->eot_id != eot_id) {
            fatal("%s: end-of-text id %d, but %d in the shards before it; they come from different tokenizers", s->path,
                  eot_id, l->eot_id);
        }
        l->eot_id = eot_id;
    }
    if (vocab_size > l->vocab_size) { l->vocab_size = vocab_size; }
    s->vouched = vocab_size > 0 && vocab_size <= model;
    if (s->vouched || model <= 0) { return; }
    if (vocab_size > model) {
        fatal("%s was made with a tokenizer of %d tokens, but the model's vocabulary has %d (a fresh --model or --config takes "
              "--vocab-size %d)", s->path, vocab_size, model, vocab_size);
    }
    for (uint64_t i = 0; i < s->num_tokens; i++) { // the whole file, once: better now than after hours of training
        if (shard_token(s, i) >= (uint32_t)model) {
            shard_bad_token(s, i, model, l->error, sizeof(l->error));
            fatal("%s", l->error);
        }
    }
}

static inline void shard_open(DataLoader* l, Shard* s, const char* path) {
    s->path = strdupCheck(path);
    s->map = map_file(path, &s->map_size);
    shard_check_magic(s);
    shard_check_vocab(l, s);
}

// ----------------------------------------------------------------------------
// opening text: where each document begins. prepro/text.py cuts the same documents, so both roads give the same tokens.

static inline const unsigned char* find_eot_text(const unsigned char* p, const unsigned char* end) {
    const size_t n = sizeof(TOKENIZER_EOT) - 1;
    while ((size_t)(end - p) >= n) {
        p = (const unsigned char*)memchr(p, '<', (size_t)(end - p) - n + 1);
        if (p == NULL) { return end; }
        if (memcmp(p, TOKENIZER_EOT, n) == 0) { return p; }
        p++;
    }
    return end;
}

static inline bool is_newline(unsigned char c) { return c == '\n' || c == '\r'; }

static inline void document_add(DataLoader* l, size_t* room, const unsigned char* text, uint64_t first_token) {
    if (l->num_documents == *room) {
        *room = *room > 0 ? 2 * *room : 1024;
        l->documents = (Document*)reallocCheck(l->documents, mul_check(*room, sizeof(Document)));
    }
    l->documents[l->num_documents].text = text;
    l->documents[l->num_documents].first_token = first_token;
    l->num_documents++;
}

// Adds the documents of one mapped file: the pieces between <|endoftext|>, without newlines at their ends, if
// anything is left. Returns the stream's new length: a document is its EOT and a token for each byte.
static inline uint64_t documents_of_file(DataLoader* l, size_t* room, const unsigned char* p, size_t size,
                                         uint64_t num_tokens) {
    if (size == 0) { return num_tokens; }
    const unsigned char* end = p + size;
    if (size >= 3 && memcmp(p, "\xEF\xBB\xBF", 3) == 0) { p += 3; } // a byte-order mark is no text
    while (p < end) {
        const unsigned char* cut = find_eot_text(p, end);
        const unsigned char* first = p;
        const unsigned char* last = cut;
        while (first < last && is_newline(*first)) { first++; }
        while (first < last && is_newline(last[-1])) { last--; }
        if (first < last) {
            document_add(l, room, first, num_tokens);
            num_tokens += 1 + (uint64_t)(last - first);
        }
        p = cut < end ? cut + sizeof(TOKENIZER_EOT) - 1 : end;
    }
    return num_tokens;
}

// Where a token may have several bytes, nobody knows which is the thousandth without those before it: so the documents
// are encoded now, into a file without a name, which is mapped like any shard.
static inline void text_encode(DataLoader* l) {
    const char* folder = getenv("TMPDIR");
    char* path = str_format("%s/moe-tokens-XXXXXX", folder != NULL && folder[0] != '\0' ? folder : "/tmp");
    int fd = mkstemp(path);
    FILE* fp = fd >= 0 ? fdopen(fd, "w+b") : NULL;
    if (fp == NULL) { fatal("cannot write tokens to %s: %s; name another folder with TMPDIR", path, strerror(errno)); }
    unlink(path);
    TokenList list;
    char err[1200];
    const int32_t header[SHARD_HEADER_INTS] = {0};
    memset(&list, 0, sizeof(list));
    list.file = fp;
    list.path = path;
    token_list_reserve(&list, 1 << 16);
    fwriteCheck(header, sizeof(header), 1, fp, path);
    for (size_t d = 0; d < l->num_documents; d++) {
        const Document* doc = &l->documents[d];
        size_t length = (size_t)(doc[1].first_token - doc->first_token - 1);
        token_list_add(&list, l->eot_id);
        if (!tokenizer_encode(l->opt.tokenizer, (const char*)doc->text, length, &list, err, sizeof(err))) {
            fatal("%s: %s", l->opt.pattern, err);
        }
    }
    token_list_flush(&list);
    if (fflush(fp) != 0) { fatal("writing tokens to %s failed: %s%s (TMPDIR)", path, strerror(errno), write_advice(errno)); }
    Shard* s = &l->shards[0];
    s->num_tokens = list.written;
    s->token_bytes = sizeof(int);
    s->map_size = sizeof(header) + (size_t)list.written * sizeof(int);
    s->map = (unsigned char*)mmap(NULL, s->map_size, PROT_READ, MAP_PRIVATE, fileno(fp), 0);
    if (s->map == MAP_FAILED) { fatal("cannot map %s (%zu bytes): %s", path, s->map_size, strerror(errno)); }
    fclose(fp); // the map stays
    token_list_free(&list);
    free(path);
    free(l->documents);
    l->documents = NULL;
}

// All text files, in the glob's order, as one stream.
static inline void text_open(DataLoader* l, const glob_t* files) {
    if (l->opt.tokenizer == NULL) {
        tokenizer_bytes(&l->own_tokenizer);
        l->opt.tokenizer = &l->own_tokenizer;
    }
    const Tokenizer* tok = l->opt.tokenizer;
    if (tokenizer_refusal(tok) != NULL) { fatal("--tokenize inline: %s", tokenizer_refusal(tok)); }
    l->eot_id = tok->eot_id >= 0 ? tok->eot_id : l->opt.eot_id;
    if (l->eot_id < 0) { fatal("--tokenize inline: neither the tokenizer nor the model says which token opens a document"); }
    if (l->opt.vocab_size > 0 && tok->vocab_size > l->opt.vocab_size) {
        fatal("the tokenizer has %d tokens, but the model's vocabulary only %d (a fresh --model or --config takes --vocab-size %d)",
              tok->vocab_size, l->opt.vocab_size, tok->vocab_size);
    }
    l->num_text_maps = files->gl_pathc;
    l->text_maps = (unsigned char**)callocCheck(files->gl_pathc, sizeof(unsigned char*));
    l->text_map_sizes = (size_t*)callocCheck(files->gl_pathc, sizeof(size_t));
    Shard* s = &l->shards[0];
    s->path = strdupCheck(l->opt.pattern);
    size_t room = 0;
    for (size_t i = 0; i < files->gl_pathc; i++) {
        size_t size;
        const char *path = files->gl_pathv[i], *end = strrchr(path, '.');
        if (end != NULL && (strcmp(end, ".jsonl") == 0 || strcmp(end, ".parquet") == 0 || strcmp(end, ".gz") == 0)) {
            fatal("--tokenize inline reads plain text, not %s: make shards of it with prepro/text.py", path);
        }
        unsigned char* map = map_file(path, &size);
        size_t invalid = utf8_first_invalid((const char*)map, size);
        if (invalid < size) {
            fatal("%s is not UTF-8 text (byte offset %zu); make shards of it with prepro/text.py --encoding ..., and "
                  "say --tokenize ahead", path, invalid);
        }
        l->text_maps[i] = map;
        l->text_map_sizes[i] = size;
        s->num_tokens = documents_of_file(l, &room, map, size, s->num_tokens);
    }
    if (l->num_documents == 0) { fatal("no text in %s", l->opt.pattern); }
    document_add(l, &room, NULL, s->num_tokens);
    l->num_documents--; // the last one only marks the end
    l->vocab_size = tok->vocab_size;
    l->num_shards = 1;
    if (tok->encoder != NULL) { text_encode(l); }
}

// ----------------------------------------------------------------------------
// the order of sequences when training. Position p counts sequences over all ranks since the start of training: epoch p /
// num_sequences, place p % num_sequences. A microbatch takes B * num_ranks places, rank r the r-th B of them. Where
// fewer are left in an epoch, they are skipped. So but for these few neither the order nor a
// saved position depends on the number of ranks or on B.

static inline uint64_t dataloader_count_sequences(const DataLoader* l, uint64_t T) {
    uint64_t n = 0;
    for (size_t i = 0; i < l->num_shards; i++) { n += (l->shards[i].num_tokens - 1) / T; }
    return n;
}

// Where the microbatch at or after `position` begins: at the next epoch if this one has no whole microbatch left.
static inline uint64_t dataloader_align(const DataLoader* l, uint64_t position) {
    uint64_t rows = (uint64_t)l->opt.B * (uint64_t)l->opt.num_ranks;
    uint64_t place = position % l->num_sequences;
    return place + rows <= l->num_sequences ? position : position - place + l->num_sequences;
}

// The sequence at a position, a number below num_sequences.
static inline uint64_t dataloader_sequence_at(const DataLoader* l, uint64_t position) {
    uint64_t epoch = position / l->num_sequences, place = position % l->num_sequences;
    if (!l->opt.shuffle) { return place; }
    return permute_index(place, l->num_sequences, hash64(hash64(l->opt.seed) + epoch));
}

// Fatal if one microbatch needs more sequences than there are; says what would fit.
static inline void dataloader_check_size(const DataLoader* l) {
    uint64_t rows = l->opt.one_pass ? 1 : mul_check(l->opt.B, (size_t)l->opt.num_ranks);
    if (l->num_sequences >= rows) { return; }
    uint64_t low = 0, high = l->opt.T; // largest T that fits: enough at low, too few at high
    while (high - low > 1) {
        uint64_t mid = low + (high - low) / 2;
        if (dataloader_count_sequences(l, mid) >= rows) { low = mid; } else { high = mid; }
    }
    unsigned long long tokens = l->total_tokens, sequences = l->num_sequences, need = rows, largest_T = low;
    unsigned long long largest_B = l->num_sequences / (uint64_t)l->opt.num_ranks;
    char advice[160] = "no --seq-len fits";
    if (largest_T > 0) { snprintf(advice, sizeof(advice), "at most --seq-len %llu fits", largest_T); }
    if (largest_B > 0 && largest_T > 0) {
        snprintf(advice, sizeof(advice), "at most --batch-size %llu or --seq-len %llu fits", largest_B, largest_T);
    }
    char who[80] = "validation";
    if (!l->opt.one_pass) {
        snprintf(who, sizeof(who), "a batch of %zu on %d rank%s", l->opt.B, l->opt.num_ranks, l->opt.num_ranks == 1 ? "" : "s");
    }
    fatal("%s: %llu tokens in %zu file%s are %llu sequences of %zu, but %s needs %llu (%llu tokens): %s", l->opt.pattern,
          tokens, l->num_shards, l->num_shards == 1 ? "" : "s", sequences, l->opt.T, who, need, need * l->opt.T + 1, advice);
}

// ----------------------------------------------------------------------------
// filling a batch

// last entry of an ascending table of n whose first_token is not above `token`
static inline size_t document_at(const Document* documents, size_t n, uint64_t token) {
    size_t low = 0, high = n;
    while (high - low > 1) {
        size_t mid = low + (high - low) / 2;
        if (documents[mid].first_token <= token) { low = mid; } else { high = mid; }
    }
    return low;
}

// out[0..count-1] = tokens begin, begin+1, ... of the text stream
static inline void text_tokens(const DataLoader* l, uint64_t begin, size_t count, int* out) {
    const int* byte_ids = l->opt.tokenizer->byte_ids;
    size_t d = document_at(l->documents, l->num_documents, begin);
    for (size_t n = 0; n < count; d++) {
        const Document* doc = &l->documents[d];
        uint64_t length = doc[1].first_token - doc->first_token;
        for (uint64_t i = begin + n - doc->first_token; i < length && n < count; i++) {
            out[n++] = i == 0 ? l->eot_id : byte_ids[doc->text[i - 1]];
        }
    }
}

// The same for a shard; false with l->error set if an id is not in the model's vocabulary.
static inline bool shard_tokens(DataLoader* l, const Shard* s, uint64_t begin, size_t count, int* out) {
    uint32_t limit = l->opt.vocab_size > 0 ? (uint32_t)l->opt.vocab_size : (uint32_t)INT_MAX;
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t id = shard_token(s, begin + i);
        largest = id > largest ? id : largest;
        out[i] = (int)id;
    }
    if (largest < limit) { return true; }
    uint64_t i = begin;
    while (shard_token(s, i) < limit) { i++; }
    shard_bad_token(s, i, (int)limit, l->error, sizeof(l->error));
    return false;
}

// One row: x = tokens i*T ... i*T+T-1 of the sequence's shard, y one further, and where x's documents begin.
static inline bool dataloader_fill_row(DataLoader* l, uint64_t sequence, int* x, int* y, int* doc_start) {
    const Shard* s = l->shards;
    while (s + 1 < l->shards + l->num_shards && s[1].first_sequence <= sequence) { s++; }
    size_t T = l->opt.T;
    uint64_t begin = (sequence - s->first_sequence) * T;
    int last; // the target of the row's last token
    if (l->documents != NULL) {
        text_tokens(l, begin, T, x);
        text_tokens(l, begin + T, 1, &last);
    } else if (!shard_tokens(l, s, begin, T, x) || !shard_tokens(l, s, begin + T, 1, &last)) {
        return false;
    }
    memcpy(y, x + 1, (T - 1) * sizeof(int));
    y[T - 1] = last;
    int start = 0;
    for (size_t t = 0; t < T; t++) {
        if (x[t] == l->eot_id && !l->opt.one_document) { start = (int)t; }
        doc_start[t] = start;
    }
    return true;
}

// doc_end (N) = one past the last position of each token's document in its row of T, from doc_start (N)
static inline void doc_ends(int* doc_end, const int* doc_start, size_t N, size_t T) {
    for (size_t n = N; n-- > 0;) {
        bool last = n % T == T - 1 || doc_start[n + 1] != doc_start[n];
        doc_end[n] = last ? (int)(n % T) + 1 : doc_end[n + 1];
    }
}

// order (N) = the positions of tokens (N), sorted by token; equal tokens keep their order. So the positions of a token
// are neighbours, and the gradient of its embedding is a sum over a piece of order. A counting sort; scratch is
// (vocab_size).
static inline void sort_tokens(int* order, const int* tokens, size_t N, int vocab_size, int* scratch) {
    memset(scratch, 0, (size_t)vocab_size * sizeof(int));
    for (size_t n = 0; n < N; n++) { scratch[tokens[n]]++; }
    int before = 0; // how many tokens are smaller
    for (int token = 0; token < vocab_size; token++) {
        int count = scratch[token];
        scratch[token] = before;
        before += count;
    }
    for (size_t n = 0; n < N; n++) { order[scratch[tokens[n]]++] = (int)n; }
}

// The last two arrays of an `all` (Batch) whose first three are there.
static inline void batch_complete(int* all, size_t N, size_t T, int vocab_size, int* scratch) {
    doc_ends(all + 3 * N, all + 2 * N, N, T);
    sort_tokens(all + 4 * N, all, N, vocab_size, scratch);
}

static inline double dataloader_clock_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

// The batch at `position` into buf; false with l->error set if the data is bad.
static inline bool dataloader_fill(DataLoader* l, BatchBuffer* buf, uint64_t position) {
    size_t B = l->opt.B, T = l->opt.T;
    buf->fill_ms[0] = dataloader_clock_ms();
    if (!l->opt.one_pass) { position = dataloader_align(l, position); }
    for (size_t b = 0; b < B; b++) {
        uint64_t at = position + (uint64_t)l->opt.rank * B + b;
        bool beyond = l->opt.one_pass && at >= l->num_sequences;
        uint64_t sequence = dataloader_sequence_at(l, beyond ? 0 : at);
        size_t row = b * T;
        bool ok = dataloader_fill_row(l, sequence, buf->tokens + row, buf->targets + row, buf->doc_start + row);
        if (!ok) { return false; }
        for (size_t t = 0; t < T && beyond; t++) { buf->targets[row + t] = -100; }
    }
    doc_ends(buf->doc_end, buf->doc_start, B * T, T);
    if (l->opt.sort_tokens) {
        sort_tokens(buf->token_order, buf->tokens, B * T, l->opt.vocab_size, l->sort_scratch);
    }
    buf->next_position = position + (uint64_t)B * (uint64_t)l->opt.num_ranks;
    buf->fill_ms[1] = dataloader_clock_ms();
    return true;
}

// Tells other data from the data a checkpoint was made with: a hash of the lengths and of a hundred tokens of each
// stream. Text read inline and the one shard made of it agree.
static inline uint64_t dataloader_fingerprint(const DataLoader* l) {
    enum { SAMPLES = 100 };
    uint64_t hash = hash64(l->num_shards);
    for (size_t i = 0; i < l->num_shards; i++) {
        const Shard* s = &l->shards[i];
        hash = hash64(hash ^ s->num_tokens);
        uint64_t stride = s->num_tokens / SAMPLES + 1;
        for (uint64_t at = 0; at < s->num_tokens; at += stride) {
            int id;
            if (l->documents != NULL) { text_tokens(l, at, 1, &id); } else { id = (int)shard_token(s, at); }
            hash = hash64(hash ^ (uint32_t)id);
        }
    }
    return hash;
}

// ----------------------------------------------------------------------------
// one batch ahead

static inline void* dataloader_thread(void* arg) {
    DataLoader* l = (DataLoader*)arg;
    pthread_mutex_lock(&l->mutex);
    for (;;) {
        while (!l->wanted && !l->closing) { pthread_cond_wait(&l->changed, &l->mutex); }
        if (l->closing) { break; }
        l->wanted = false;
        BatchBuffer* buf = &l->buffers[1 - l->current]; // `current` changes only while nothing is being filled
        uint64_t position = l->wanted_position;
        pthread_mutex_unlock(&l->mutex);
        dataloader_fill(l, buf, position); // a failure is in l->error
        pthread_mutex_lock(&l->mutex);
        l->ready = true;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}

// Asks the thread for the batch at `position`; it must be idle.
static inline void dataloader_want(DataLoader* l, uint64_t position) {
    pthread_mutex_lock(&l->mutex);
    l->wanted = true;
    l->ready = false;
    l->wanted_position = position;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
}

// Waits until what was asked for is there.
static inline void dataloader_wait(DataLoader* l) {
    pthread_mutex_lock(&l->mutex);
    while (!l->ready) { pthread_cond_wait(&l->changed, &l->mutex); }
    pthread_mutex_unlock(&l->mutex);
}

// The next microbatch of this rank, valid until the next call. Fatal if its data is bad.
static inline const Batch* dataloader_next(DataLoader* l) {
    double begin = dataloader_clock_ms();
    if (l->thread_running) {
        dataloader_wait(l);
    } else {
        dataloader_fill(l, &l->buffers[1 - l->current], l->position);
    }
    if (l->error[0] != '\0') { fatal("%s", l->error); }
    l->current = 1 - l->current;
    const BatchBuffer* buf = &l->buffers[l->current];
    l->position = buf->next_position;
    if (l->thread_running) { dataloader_want(l, l->position); }
    l->batch.tokens = buf->tokens;
    l->batch.targets = buf->targets;
    l->batch.doc_start = buf->doc_start;
    l->batch.doc_end = buf->doc_end;
    l->batch.token_order = l->opt.sort_tokens ? buf->token_order : NULL;
    l->batch.all = buf->all;
    l->batch.fill_ms[0] = buf->fill_ms[0];
    l->batch.fill_ms[1] = buf->fill_ms[1];
    l->batch.wait_ms = dataloader_clock_ms() - begin;
    return &l->batch;
}

// What a checkpoint stores: sequences consumed by all ranks since the start of training.
static inline uint64_t dataloader_position(const DataLoader* l) { return l->position; }

// The next batch will be the one at `position`, as after a resume; the batch in the caller's hands stays valid.
static inline void dataloader_seek(DataLoader* l, uint64_t position) {
    l->position = position;
    if (l->thread_running) {
        dataloader_wait(l); // what was prepared is thrown away
        l->error[0] = '\0';
        dataloader_want(l, position);
    }
}

// ----------------------------------------------------------------------------
// open and close

static inline void dataloader_allocate(DataLoader* l) {
    size_t tokens = mul_check(l->opt.B, l->opt.T), bytes = mul_check(tokens, 5 * sizeof(int));
    for (int i = 0; i < 2; i++) {
        BatchBuffer* buf = &l->buffers[i];
        buf->all = (int*)(l->opt.allocate != NULL ? l->opt.allocate(bytes) : mallocCheck(bytes));
        buf->tokens = buf->all;
        buf->targets = buf->all + tokens;
        buf->doc_start = buf->all + 2 * tokens;
        buf->doc_end = buf->all + 3 * tokens;
        buf->token_order = buf->all + 4 * tokens;
    }
    if (!l->opt.sort_tokens) { return; }
    if (l->opt.vocab_size <= 0 || tokens > INT_MAX) {
        fatal("sorting tokens needs a vocabulary (it is %d) and at most %d tokens a batch (there are %zu)",
              l->opt.vocab_size, INT_MAX, tokens);
    }
    l->sort_scratch = (int*)mallocCheck(mul_check((size_t)l->opt.vocab_size, sizeof(int)));
}

// Opens the data and starts the thread. Every mistake in options, names or files ends the program with one line that
// says what and where.
static inline void dataloader_open(DataLoader* l, const DataLoaderOptions* opt) {
    memset(l, 0, sizeof(*l));
    l->opt = *opt;
    if (opt->B == 0 || opt->T == 0 || opt->T > INT_MAX) {
        fatal("batch size %zu and sequence length %zu must be between 1 and %d", opt->B, opt->T, INT_MAX);
    }
    if (opt->rank < 0 || opt->rank >= opt->num_ranks) { fatal("there is no rank %d of %d", opt->rank, opt->num_ranks); }
    l->eot_id = -1;

    glob_t files;
    int status = glob(opt->pattern, GLOB_ERR, NULL, &files); // sorted by name
    if (status != 0 || files.gl_pathc == 0) {
        bool unreadable = status == GLOB_ABORTED && errno != ENOENT;
        fatal("no file matches '%s'%s", opt->pattern, unreadable ? ": a folder on the way cannot be read" : "");
    }
    l->shards = (Shard*)callocCheck(files.gl_pathc, sizeof(Shard));
    if (opt->text) {
        text_open(l, &files);
    } else {
        for (size_t i = 0; i < files.gl_pathc; i++) { shard_open(l, &l->shards[l->num_shards++], files.gl_pathv[i]); }
    }
    globfree(&files);
    if (l->eot_id < 0) { l->eot_id = opt->eot_id; }

    for (size_t i = 0; i < l->num_shards; i++) {
        l->shards[i].first_sequence = l->num_sequences;
        l->num_sequences += (l->shards[i].num_tokens - 1) / opt->T;
        l->total_tokens += l->shards[i].num_tokens;
    }
    dataloader_check_size(l);
    dataloader_allocate(l);
    if (opt->prefetch) {
        pthread_mutex_init(&l->mutex, NULL);
        pthread_cond_init(&l->changed, NULL);
        int failed = pthread_create(&l->thread, NULL, dataloader_thread, l);
        if (failed) { fatal("cannot start the loader's thread: %s; try --loader inline", strerror(failed)); }
        l->thread_running = true;
        dataloader_want(l, 0);
    }
}

static inline void dataloader_close(DataLoader* l) {
    if (l->thread_running) {
        pthread_mutex_lock(&l->mutex);
        l->closing = true;
        pthread_cond_broadcast(&l->changed);
        pthread_mutex_unlock(&l->mutex);
        pthread_join(l->thread, NULL);
        pthread_mutex_destroy(&l->mutex);
        pthread_cond_destroy(&l->changed);
    }
    for (int i = 0; i < 2; i++) {
        if (l->opt.release != NULL) { l->opt.release(l->buffers[i].all); } else { free(l->buffers[i].all); }
    }
    free(l->sort_scratch);
    for (size_t i = 0; i < l->num_shards; i++) {
        if (l->shards[i].map != NULL) { munmap(l->shards[i].map, l->shards[i].map_size); }
        free(l->shards[i].path);
    }
    for (size_t i = 0; i < l->num_text_maps; i++) {
        if (l->text_maps[i] != NULL) { munmap(l->text_maps[i], l->text_map_sizes[i]); }
    }
    free(l->text_maps);
    free(l->text_map_sizes);
    free(l->documents);
    free(l->shards);
    tokenizer_free(&l->own_tokenizer);
    memset(l, 0, sizeof(*l));
}

#endif // LLMC_DATALOADER_H
