// The learning rate of a step: a linear warm-up, then constant, cosine or warmup-stable-decay.
// A pure function of the step, so a resumed run goes on with the table it began.
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include "check.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

#define WSD_DECAY_SHARE 0.2 // of the steps: MiniCPM (arXiv 2404.06395) takes 10%, Haegele et al. (2405.18392) 20%

// The rate of 0-based `step` of `steps`. The warm-up climbs lr/W, 2lr/W ... lr: no step is spent at rate 0. The decay
// over n steps runs from lr at its first step towards min_lr, which the step after the last would have (the convention
// of llm.c, nanoGPT and transformers). Any warmup_steps >= 0 is taken: one longer than the run is cut off by its end,
// and where nothing is left to decay there is no denominator of zero. "constant" does not use min_lr.
static inline double learning_rate(const char* schedule, int64_t step, int64_t warmup_steps, int64_t steps,
                                   double lr, double min_lr) {
    if (step < warmup_steps) { return lr * (double)(step + 1) / (double)warmup_steps; }
    if (strcmp(schedule, "constant") == 0) { return lr; }
    if (step >= steps) { return min_lr; } // past the end; from here on steps > warmup_steps
    double x, left;                       // x: how far the decay has come; left: what remains of lr - min_lr
    if (strcmp(schedule, "cosine") == 0) {
        x = (double)(step - warmup_steps) / (double)(steps - warmup_steps);
        left = 0.5 * (1.0 + cos(3.14159265358979323846 * x));
    } else if (strcmp(schedule, "wsd") == 0) {
        int64_t start = steps - (int64_t)((double)steps * WSD_DECAY_SHARE + 0.5);
        if (start < warmup_steps) { start = warmup_steps; }
        x = step < start ? 0.0 : (double)(step - start) / (double)(steps - start);
        left = 1.0 - x;
    } else {
        fatal("learning-rate schedule '%s' is not constant, cosine or wsd", schedule);
    }
    return min_lr + (lr - min_lr) * left;
}

#endif // LLMC_SCHEDULE_H
