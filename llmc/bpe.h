// bpe.h: byte pair encoding: the bytes of one word -> token ids. A word starts as its bytes; of all neighbours that the
// table joins, those with the lowest rank are joined first, the leftmost of equals, until the table joins none. Words
// that were seen before come from a cache.
#ifndef LLMC_BPE_H
#define LLMC_BPE_H

#include "check.h"
#include "rand.h"

#define BPE_MAX_WORD ((size_t)1 << 25) // bytes; a longer word would take more than a gigabyte to encode
#define BPE_MAX_PROBES 1000            // steps in a hash table; real files need some 50, one that needs more means harm
#define BPE_NONE UINT32_MAX            // the rank of neighbours that are not joined

// ----------------------------------------------------------------------------
// a growing list of token ids. With a file, it is written there whenever it is full, and memory does not grow.

typedef struct {
    int* ids;
    size_t count, room;
    FILE* file; // NULL: all stay in memory
    const char* path;
    uint64_t written;
} TokenList;

static inline void token_list_flush(TokenList* list) {
    fwriteCheck(list->ids, sizeof(int), list->count, list->file, list->path);
    list->written += list->count;
    list->count = 0;
}

// Makes room for n more.
static inline void token_list_reserve(TokenList* list, size_t n) {
    if (list->room - list->count >= n) { return; }
    if (list->file != NULL) { token_list_flush(list); }
    if (list->room - list->count >= n) { return; }
    list->room = 2 * list->room + n + 1024;
    list->ids = (int*)reallocCheck(list->ids, mul_check(list->room, sizeof(int)));
}

static inline void token_list_add(TokenList* list, int id) {
    token_list_reserve(list, 1);
    list->ids[list->count++] = id;
}

static inline void token_list_free(TokenList* list) {
    free(list->ids);
    memset(list, 0, sizeof(*list));
}

// ----------------------------------------------------------------------------
// bytes -> the token that has just these bytes

typedef struct {
    int* slots;          // ids, -1: free; open addressing, a power of two, at most half of them taken
    size_t mask;
    const size_t* begin; // token id's bytes are bytes[begin[id]] .. bytes[begin[id+1]-1]
    const char* bytes;
} TokenMap;

// The slot of these bytes, or a free one for them; NULL: too many tokens before it, the file means harm.
static inline int* token_map_slot(const TokenMap* map, const char* bytes, size_t len) {
    uint64_t hash = len;
    for (size_t i = 0; i < len; i++) { hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001B3u; }
    size_t at = hash64(hash) & map->mask;
    for (int probes = 0; probes <= BPE_MAX_PROBES; probes++) {
        int id = map->slots[at];
        if (id < 0) { return &map->slots[at]; }
        if (map->begin[id + 1] - map->begin[id] == len && memcmp(map->bytes + map->begin[id], bytes, len) == 0) {
            return &map->slots[at];
        }
        at = (at + 1) & map->mask;
    }
    return NULL;
}

// -1: there is none
static inline int token_map_find(const TokenMap* map, const char* bytes, size_t len) {
    const int* slot = map->slots != NULL ? token_map_slot(map, bytes, len) : NULL;
    return slot != NULL ? *slot : -1;
}

// An empty map for up to `count` tokens.
static inline void token_map_init(TokenMap* map, size_t count, const size_t* begin, const char* bytes) {
    size_t slots = 16;
    while (slots < 2 * count) { slots *= 2; }
    map->slots = (int*)mallocCheck(mul_check(slots, sizeof(int)));
    memset(map->slots, 0xFF, slots * sizeof(int));
    map->mask = slots - 1;
    map->begin = begin;
    map->bytes = bytes;
}

static inline void token_map_free(TokenMap* map) {
    free(map->slots);
    memset(map, 0, sizeof(*map));
}

// ----------------------------------------------------------------------------
// the table of merges

typedef struct {
    uint64_t pair; // left id, right id
    uint32_t rank; // BPE_NONE: the slot is free
    int id;        // what they become
} BpeMerge;

#define BPE_LINE_BYTES 24 // a longer word, or one of more tokens, is encoded anew each time
#define BPE_LINE_TOKENS 8
#define BPE_CACHE_BITS 17

typedef struct { // a token of a long word, at the place of its first byte
    int id;                  // -1: it was joined to the one before it
    uint32_t previous, next; // places; UINT32_MAX: none
} BpeSymbol;

typedef struct { // 64 bytes, one cache line
    uint64_t key[3];
    int ids[BPE_LINE_TOKENS];
    uint8_t length, count; // length 0: free
} BpeLine;

typedef struct {
    int byte_ids[256];    // the token of each byte
    BpeMerge* merges;     // open addressing, a power of two of slots, at most half of them taken
    size_t mask;
    int shift;            // 64 - log2(slots)
    uint64_t* filter;     // 4 bits a slot, set for the hashes of pairs that are there: most neighbours are not joined, and
                          // this is small enough to stay near the processor
    BpeMerge none;        // what is found of them
    BpeLine* cache;       // (1 << BPE_CACHE_BITS) words, each in the one line that its hash names; a newer word replaces an older one
    TokenMap words;       // a word that is a token as a whole needs no merging; empty where the file does not say so
    BpeSymbol* symbols;   // for long words
    uint64_t* heap;
    size_t scratch_room;  // the longest word that they have room for
} Bpe;

static inline uint64_t bpe_pair(int left, int right) { return (uint64_t)(uint32_t)left << 32 | (uint32_t)right; }

static inline uint64_t bpe_hash(uint64_t pair) { return pair * RAND_GOLDEN; }

// The merge of two neighbours, or one whose rank is BPE_NONE.
static inline const BpeMerge* bpe_find(const Bpe* b, int left, int right) {
    uint64_t pair = bpe_pair(left, right), hash = bpe_hash(pair);
    size_t bit = (size_t)(hash >> (b->shift - 2)), at = (size_t)(hash >> b->shift);
    if ((b->filter[bit / 64] >> (bit % 64) & 1) == 0) { return &b->none; }
    while (b->merges[at].rank != BPE_NONE && b->merges[at].pair != pair) { at = (at + 1) & b->mask; }
    return &b->merges[at];
}

// An empty table for up to `count` merges.
static inline void bpe_init(Bpe* b, size_t count, const int byte_ids[256]) {
    memset(b, 0, sizeof(*b));
    memcpy(b->byte_ids, byte_ids, sizeof(b->byte_ids));
    size_t slots = 16;
    b->shift = 60;
    for (; slots < 2 * count; slots *= 2) { b->shift--; }
    b->mask = slots - 1;
    b->merges = (BpeMerge*)mallocCheck(mul_check(slots, sizeof(BpeMerge)));
    for (size_t i = 0; i < slots; i++) { b->merges[i].rank = BPE_NONE; }
    b->filter = (uint64_t*)callocCheck(slots / 16, sizeof(uint64_t));
    b->none.rank = BPE_NONE;
    b->cache = (BpeLine*)callocCheck((size_t)1 << BPE_CACHE_BITS, sizeof(BpeLine));
}

// Of the same pair twice, the later one counts, as in Hugging Face's table. False: a file that means harm.
static inline bool bpe_add(Bpe* b, int left, int right, uint32_t rank, int id) {
    uint64_t pair = bpe_pair(left, right), hash = bpe_hash(pair);
    size_t bit = (size_t)(hash >> (b->shift - 2)), at = (size_t)(hash >> b->shift);
    for (int probes = 0; b->merges[at].rank != BPE_NONE && b->merges[at].pair != pair; probes++) {
        if (probes == BPE_MAX_PROBES) { return false; }
        at = (at + 1) & b->mask;
    }
    b->merges[at].pair = pair;
    b->merges[at].rank = rank;
    b->merges[at].id = id;
    b->filter[bit / 64] |= (uint64_t)1 << (bit % 64);
    return true;
}

static inline void bpe_free(Bpe* b) {
    free(b->merges);
    free(b->filter);
    free(b->cache);
    token_map_free(&b->words);
    free(b->symbols);
    free(b->heap);
    memset(b, 0, sizeof(*b));
}

// ----------------------------------------------------------------------------
// merging. ids begins as one token a byte, (n); what it becomes is at its beginning, and its length is returned.

#define BPE_SHORT 48 // up to here a search through all neighbours is quicker than a heap

static inline size_t bpe_merge_short(const Bpe* b, int* ids, size_t n) {
    uint32_t rank[BPE_SHORT]; // rank[i], into[i]: of ids[i] and ids[i+1]
    int into[BPE_SHORT];
    for (size_t i = 0; i + 1 < n; i++) {
        const BpeMerge* m = bpe_find(b, ids[i], ids[i + 1]);
        rank[i] = m->rank;
        into[i] = m->id;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            if (rank[i] < rank[best]) { best = i; }
        }
        if (rank[best] == BPE_NONE) { break; }
        ids[best] = into[best];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            ids[i] = ids[i + 1];
            rank[i - 1] = rank[i];
            into[i - 1] = into[i];
        }
        for (size_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const BpeMerge* m = bpe_find(b, ids[i], ids[i + 1]);
            rank[i] = m->rank;
            into[i] = m->id;
        }
    }
    return n;
}

static inline void bpe_heap_push(uint64_t* heap, size_t* size, uint64_t x) {
    size_t i = (*size)++;
    while (i > 0 && heap[(i - 1) / 2] > x) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = x;
}

static inline uint64_t bpe_heap_pop(uint64_t* heap, size_t* size) {
    uint64_t top = heap[0], x = heap[--*size];
    size_t i = 0;
    for (size_t child = 1; child < *size; child = 2 * i + 1) {
        if (child + 1 < *size && heap[child + 1] < heap[child]) { child++; }
        if (heap[child] >= x) { break; }
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = x;
    return top;
}

// The heap's entries are rank * 2^32 + place, so that the smallest is the next to join. One whose neighbours have
// changed is passed over. It holds at most 2n: n - 1 at first, and each merge takes one out and puts two in.
static inline size_t bpe_merge_long(Bpe* b, int* ids, size_t n) {
    if (n > b->scratch_room) {
        b->scratch_room = n;
        b->symbols = (BpeSymbol*)reallocCheck(b->symbols, mul_check(n, sizeof(BpeSymbol)));
        b->heap = (uint64_t*)reallocCheck(b->heap, mul_check(n, 2 * sizeof(uint64_t)));
    }
    BpeSymbol* s = b->symbols;
    size_t size = 0;
    for (uint32_t i = 0; i < n; i++) {
        s[i].id = ids[i];
        s[i].previous = i > 0 ? i - 1 : UINT32_MAX;
        s[i].next = i + 1 < n ? i + 1 : UINT32_MAX;
        uint32_t rank = i + 1 < n ? bpe_find(b, ids[i], ids[i + 1])->rank : BPE_NONE;
        if (rank != BPE_NONE) { bpe_heap_push(b->heap, &size, (uint64_t)rank << 32 | i); }
    }
    while (size > 0) {
        uint64_t top = bpe_heap_pop(b->heap, &size);
        uint32_t i = (uint32_t)top, j = s[i].next;
        if (s[i].id < 0 || j == UINT32_MAX) { continue; }
        const BpeMerge* m = bpe_find(b, s[i].id, s[j].id);
        if (m->rank != top >> 32) { continue; }
        s[i].id = m->id;
        s[i].next = s[j].next;
        s[j].id = -1;
        if (s[i].next != UINT32_MAX) { s[s[i].next].previous = i; }
        uint32_t begin = s[i].previous != UINT32_MAX ? s[i].previous : i;
        for (uint32_t k = begin; k <= i && s[k].next != UINT32_MAX; k = s[k].next) { // the pairs that it is part of
            uint32_t rank = bpe_find(b, s[k].id, s[s[k].next].id)->rank;
            if (rank != BPE_NONE) { bpe_heap_push(b->heap, &size, (uint64_t)rank << 32 | k); }
        }
    }
    size_t count = 0;
    for (uint32_t i = 0; i != UINT32_MAX; i = s[i].next) { ids[count++] = s[i].id; }
    return count;
}

// ----------------------------------------------------------------------------
// words

static inline uint64_t bpe_load(const char* p, size_t n) { // n is 4 or 8
    uint64_t x = 0;
    memcpy(&x, p, n);
    return x;
}

// A word of 1 to 24 bytes as three numbers, which differ where words of that length do. Returns their hash.
static inline uint64_t bpe_key(const char* word, size_t len, uint64_t key[3]) {
    key[0] = key[1] = key[2] = 0;
    if (len >= 8) {
        key[0] = bpe_load(word, 8);
        if (len > 16) { key[1] = bpe_load(word + 8, 8); }
        key[2] = bpe_load(word + len - 8, 8); // overlaps what is there already
    } else if (len >= 4) {
        key[0] = bpe_load(word, 4) | bpe_load(word + len - 4, 4) << 32;
    } else {
        key[0] = (uint64_t)(unsigned char)word[0] | (uint64_t)(unsigned char)word[len / 2] << 8 |
                 (uint64_t)(unsigned char)word[len - 1] << 16;
    }
    uint64_t h = (key[0] ^ len) * 0x9E3779B97F4A7C15u ^ key[1] * 0xC2B2AE3D27D4EB4Fu ^ (key[2] + 1) * 0x165667B19E3779F9u;
    h ^= h >> 32;
    return h * 0xD6E8FEB86659FD93u;
}

// Appends the tokens of a word that is not in the cache.
static inline void bpe_encode_anew(Bpe* b, const char* word, size_t len, TokenList* list) {
    int whole = token_map_find(&b->words, word, len);
    if (whole >= 0) {
        token_list_add(list, whole);
        return;
    }
    token_list_reserve(list, len);
    int* ids = list->ids + list->count;
    for (size_t i = 0; i < len; i++) { ids[i] = b->byte_ids[(unsigned char)word[i]]; }
    list->count += len <= BPE_SHORT ? bpe_merge_short(b, ids, len) : bpe_merge_long(b, ids, len);
}

// Appends the tokens of a word of 1 to BPE_MAX_WORD bytes.
static inline void bpe_encode(Bpe* b, const char* word, size_t len, TokenList* list) {
    if (len > BPE_LINE_BYTES) {
        bpe_encode_anew(b, word, len, list);
        return;
    }
    uint64_t key[3], hash = bpe_key(word, len, key);
    BpeLine* line = &b->cache[hash >> (64 - BPE_CACHE_BITS)];
    if (line->length == len && line->key[0] == key[0] && line->key[1] == key[1] && line->key[2] == key[2]) {
        token_list_reserve(list, BPE_LINE_TOKENS);
        memcpy(list->ids + list->count, line->ids, sizeof(line->ids)); // all: one length is quicker than the right one
        list->count += line->count;
        return;
    }
    token_list_reserve(list, len); // so that they are not written to the file before they are copied
    size_t before = list->count;
    bpe_encode_anew(b, word, len, list);
    size_t count = list->count - before;
    if (count > BPE_LINE_TOKENS) { return; }
    memcpy(line->key, key, sizeof(key));
    memcpy(line->ids, list->ids + before, count * sizeof(int));
    line->length = (uint8_t)len;
    line->count = (uint8_t)count;
}

#endif
