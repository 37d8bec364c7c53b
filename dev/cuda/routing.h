// routing.h: where the tokens of one MoE layer go, as in train_moe.cu; route_rows (permute.cu) fills it.
#ifndef DEV_CUDA_ROUTING_H
#define DEV_CUDA_ROUTING_H

#include "common.h"

const int TILE_ROWS = 128; // of a tile of the experts' products

typedef struct {            // everything on the device
    int* tokens_per_expert; // (E)
    int* expert_offsets;    // (E+1) expert e owns rows expert_offsets[e] .. expert_offsets[e+1]
    int* row_slot;          // (R) row -> slot n*K+k
    int* slot_row;          // (N,K) slot -> row
    int* row_token;         // (R) row -> token
    int4* tile_list;        // (R/TILE_ROWS + E) {expert, first row, end row, 0}; {-1,0,0,0} past the last
} Routing;

#endif
