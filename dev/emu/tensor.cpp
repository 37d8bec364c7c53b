// Tensor-core instructions and asynchronous copies, as PTX ISA section 9.7 lays out their operands among the lanes.
#include <string.h>
#include "internal.h"

namespace emu {

static inline float bf16(uint32_t word, int half) {
    uint32_t bits = half ? word & 0xffff0000u : word << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static bool whole_warp(const char* what, unsigned arrived) {
    if (arrived == 0xffffffffu) return true;
    report_at("absent lane", worker->finishing->file, worker->finishing->line,
              "%s needs all 32 lanes, only %08x take part", what, arrived);
    return false;
}

// mma.sync.m16n8k16 row.col, bf16 in, fp32 accumulation: D (16,8) = A (16,16) B (16,8) + C.
// Lane l = 4g+t holds of A rows g, g+8 and columns 2t, 2t+1, 2t+8, 2t+9; of B the same columns as rows, column g; of C
// and D rows g, g+8, columns 2t, 2t+1. (The hardware's order of additions and its truncation are not known: compare by
// tolerance.)
void mma_done(void** args, unsigned arrived) {
    if (!whole_warp("mma", arrived)) return;
    float A[16][16], B[16][8], C[16][8];
    for (int l = 0; l < 32; l++) {
        auto* x = (MmaArg*)args[l];
        int g = l >> 2, t = (l & 3) * 2;
        for (int h = 0; h < 2; h++) {
            A[g][t + h] = bf16(x->a[0], h);
            A[g + 8][t + h] = bf16(x->a[1], h);
            A[g][t + 8 + h] = bf16(x->a[2], h);
            A[g + 8][t + 8 + h] = bf16(x->a[3], h);
            B[t + h][g] = bf16(x->b[0], h);
            B[t + 8 + h][g] = bf16(x->b[1], h);
            C[g][t + h] = x->c[h];
            C[g + 8][t + h] = x->c[2 + h];
        }
    }
    for (int i = 0; i < 16; i++) {
        float sum[8];
        for (int j = 0; j < 8; j++) sum[j] = C[i][j];
        for (int k = 0; k < 16; k++) for (int j = 0; j < 8; j++) sum[j] += A[i][k] * B[k][j];
        for (int j = 0; j < 8; j++) C[i][j] = sum[j];
    }
    for (int l = 0; l < 32; l++) {
        auto* x = (MmaArg*)args[l];
        int g = l >> 2, t = (l & 3) * 2;
        for (int h = 0; h < 2; h++) {
            x->d[h] = C[g][t + h];
            x->d[2 + h] = C[g + 8][t + h];
        }
    }
    count_mma();
}

// A row address of an ldmatrix: 16-byte aligned and in this block's shared memory, as the instruction demands.
static bool row_ok(Thread* lane, const LdmArg* x) {
    Block* b = worker->block;
    const char* p = (const char*)x->p;
    bool inside = p >= b->shared && p + 16 <= b->shared + SHARED_ARENA;
    ThreadId* me = cur;
    cur = lane;
    if (!inside)
        report("ldmatrix", x->pc, nullptr, "lane %d's row address %p is not in shared memory", lane->lane, x->p);
    else if ((uintptr_t)p & 15)
        report("misaligned", x->pc, nullptr, "ldmatrix: lane %d's row address %p is not a multiple of 16", lane->lane,
               x->p);
    cur = me;
    if (!inside || (uintptr_t)p & 15) return false;
    check_lane_touch(lane, p, 16, false, x->pc);
    return true;
}

// Matrix i comes from the row addresses of lanes 8i..8i+7; lane 4r+c receives elements 2c, 2c+1 of row r (or,
// transposed, of column r).
void ldm_done(void** args, unsigned arrived) {
    if (!whole_warp("ldmatrix", arrived)) return;
    static const uint16_t poison[8] = {0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff};
    int warp = this_thread()->warp;
    for (int i = 0; i < ((LdmArg*)args[0])->n; i++) {
        const uint16_t* row[8];
        for (int r = 0; r < 8; r++) {
            auto* x = (LdmArg*)args[i * 8 + r];
            row[r] =
                row_ok(&worker->block->threads[(size_t)(warp * 32 + i * 8 + r)], x) ? (const uint16_t*)x->p : poison;
        }
        for (int l = 0; l < 32; l++) {
            auto* x = (LdmArg*)args[l];
            int r = l >> 2, c = (l & 3) * 2;
            uint32_t low = x->trans ? row[c][r] : row[r][c], high = x->trans ? row[c + 1][r] : row[r][c + 1];
            x->r[i] = low | high << 16;
        }
    }
}

void ldmatrix(uint32_t* r, const void* p, int n, bool trans, const char* f, int l) {
    LdmArg x{r, p, n, trans, __builtin_return_address(0)};
    warp_op(0xffffffffu, trans ? "ldmatrix.trans" : "ldmatrix", &x, ldm_done, f, l);
}

// cp.async is lazy: at issue the destination becomes 0xff, and the data land in the wait of the thread that issued it.
// The source is read then, too.
static void land(const CpAsync& c) {
    check_cp_land(c);
    memcpy(c.dst, c.src, (size_t)c.bytes);
    memset((char*)c.dst + c.bytes, 0, (size_t)c.zeros);
}

void cp_async(void* dst, const void* src, int bytes, int zeros) {
    Thread* t = this_thread();
    void* pc = __builtin_return_address(0);
    if (!t) fatal("cp.async outside of a kernel");
    size_t size = (size_t)(bytes + zeros);
    Block* b = worker->block;
    if (size != 4 && size != 8 && size != 16) fatal("cp.async of %zu bytes: 4, 8 or 16", size);
    if ((uintptr_t)dst % size || (bytes && (uintptr_t)src % size)) {
        report("misaligned", pc, nullptr, "cp.async of %zu bytes from %p to %p", size, src, dst);
        return;
    }
    if ((char*)dst < b->shared || (char*)dst + size > b->shared + SHARED_ARENA) {
        report("cp.async", pc, nullptr, "the destination %p is not in shared memory", dst);
        return;
    }
    CpAsync c{dst, src, bytes, zeros, t->copy_group, pc};
    check_cp_issue(c);
    memset(dst, 0xff, size);
    t->copies.push_back(c);
}

void cp_commit() { this_thread()->copy_group++; }

void cp_wait(int in_flight) {
    Thread* t = this_thread();
    int done_below = in_flight < 0 ? t->copy_group + 1 : t->copy_group - in_flight;
    size_t kept = 0;
    for (CpAsync& c : t->copies) {
        if (c.group < done_below) land(c);
        else t->copies[kept++] = c;
    }
    t->copies.resize(kept);
}

void access16(const void* p, bool write, void* pc) {
    if (!cur) return;
    if ((uintptr_t)p & 15) report("misaligned", pc, nullptr, "a 16-byte access at address %p", p);
    check_touch(p, 16, write, pc);
}

}
