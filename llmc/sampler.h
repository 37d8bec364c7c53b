// Draws the next token from logits: temperature, then top-k, then top-p, in the order transformers applies them.
// Softmax subtracts the largest logit first, so no logit and no temperature overflows.
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include "check.h"
#include "rand.h"
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    float p;  // probability, times a constant common to all tokens
    int id;
} Candidate;

// is a likelier than b? Ties go to the lower id, so the result does not depend on how the heap was built.
static inline bool candidate_before(Candidate a, Candidate b) {
    return a.p > b.p || (a.p == b.p && a.id < b.id);
}

// heap[i] may be smaller than its children: let it sink. The likeliest of heap[0..n) ends at heap[0].
static inline void candidates_sift(Candidate* heap, int i, int n) {
    while (true) {
        int best = i;
        for (int child = 2 * i + 1; child <= 2 * i + 2 && child < n; child++) {
            if (candidate_before(heap[child], heap[best])) { best = child; }
        }
        if (best == i) { return; }
        Candidate swap = heap[i];
        heap[i] = heap[best];
        heap[best] = swap;
        i = best;
    }
}

// Moves the likeliest of heap[0..n) to heap[n - 1]; the rest, heap[0..n - 1), is a heap again.
static inline Candidate candidates_pop(Candidate* heap, int n) {
    Candidate top = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = top;
    candidates_sift(heap, 0, n - 1);
    return top;
}

// The first of the largest logits; NaN is never one. 0 if there is nothing else.
static inline int argmax_token(const float* logits, int n) {
    int best = -1;
    for (int i = 0; i < n; i++) {
        if (logits[i] == logits[i] && (best < 0 || logits[i] > logits[best])) { best = i; }
    }
    return best < 0 ? 0 : best;
}

// Leaves what top-k and top-p allow at c[n - 1], c[n - 2] ..., likeliest first; returns how many. *total: their sum.
// A heap in place of a sort: of a vocabulary of 150,000 only the few that are kept are put in order.
static inline int candidates_keep(Candidate* c, int n, int top_k, float top_p, double* total) {
    int kept = 0;
    double sum = *total;
    for (int i = n / 2 - 1; i >= 0; i--) { candidates_sift(c, i, n); }
    if (top_k > 0 && top_k < n) {
        sum = 0.0;
        for (; kept < top_k; kept++) { sum += candidates_pop(c, n - kept).p; }
    }
    *total = sum;
    if (!(top_p < 1.0f)) { return kept; } // top-k alone: all k are kept
    double reached = 0.0;
    for (int i = 0; i < (kept > 0 ? kept : n); i++) { // top-p counts within what top-k left
        reached += kept > 0 ? c[n - 1 - i].p : candidates_pop(c, n - i).p;
        if (reached >= (double)top_p * sum) {
            *total = reached;
            return i + 1;
        }
    }
    return kept > 0 ? kept : n;
}

// One of n tokens, drawn from softmax(logits / temperature) with top_k (0: off) and top_p (1: off). logits (n) are not
// changed. temperature 0: the likeliest, no number drawn; otherwise one number of *rng_state. scratch: n * 16 bytes.
// Logits that are NaN never come out; with an infinite one the sampler is as at temperature 0.
static inline int sample_token(const float* logits, int n, float temperature, int top_k, float top_p,
                               uint64_t* rng_state, void* scratch) {
    int best = argmax_token(logits, n);
    float top = logits[best];
    if (!(temperature > 0.0f) || !(fabsf(top) < INFINITY)) { return best; }
    Candidate* c = (Candidate*)scratch;
    double total = 0.0;
    for (int i = 0; i < n; i++) {
        float p = expf((logits[i] - top) / temperature); // at most 1, and exactly 1 for the likeliest
        c[i].p = p == p ? p : 0.0f;
        c[i].id = i;
        total += c[i].p;
    }
    bool cut = (top_k > 0 && top_k < n) || top_p < 1.0f;
    int kept = cut ? candidates_keep(c, n, top_k, top_p, &total) : n;
    double left = (double)rng_uniform(rng_state) * total;
    for (int i = 0; i < kept; i++) {
        Candidate it = c[cut ? n - 1 - i : i];
        left -= it.p;
        if (left < 0.0) { return it.id; }
    }
    return best; // rounding has eaten the last sliver of probability
}

#endif // LLMC_SAMPLER_H
