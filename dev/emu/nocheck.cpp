// The checker's entry points in a program built without --check: nothing is watched.
#include <map>
#include "internal.h"
namespace emu {
const bool checking = false;
void* check_malloc(size_t, MemoryKind) { return nullptr; }
void check_free(void*, size_t) {}
void check_register(void*, size_t) {}
void check_unregister(void*) {}
void check_grid_begin(Grid&) {}
void check_block_begin(Block*) {}
void check_shared_alloc(Block*, char*, size_t) {}
void check_barrier(Block*) {}
void check_syncwarp(Block*, int, unsigned) {}
void check_fence(bool) {}
void check_atomic(const void*, size_t, AtomicKind, void*) {}
void check_touch(const void*, size_t, bool, void*) {}
void check_lane_touch(Thread*, const void*, size_t, bool, void*) {}
void check_cp_issue(const CpAsync&) {}
void check_cp_land(const CpAsync&) {}
void check_settle() {}
void check_op_touch(const void*, size_t, bool) {}
void check_op_copy(void*, const void*, size_t) {}
void check_host_pending(Op*, const void*, size_t) {}

// counters: without the checker, how often and how wide kernels were launched, and their products
struct Launches { long launches, blocks, threads, mma; };
static std::map<std::string, Launches>& kernels() { static auto* m = new std::map<std::string, Launches>; return *m; }
static std::mutex kernels_lock;
static bool wanted;
static std::atomic<long> mma;
void count_kernels() { wanted = count_wished(); }
void count_mma() { mma.fetch_add(1, std::memory_order_relaxed); }
void check_launch(Grid& g) {
    if (!wanted && !options().count) return;
    std::lock_guard<std::mutex> lock(kernels_lock);
    Launches& k = kernels()[g.config.name];
    k.launches++;
    k.blocks += g.blocks;
    k.threads += g.blocks * (long)g.config.block.x * (long)g.config.block.y * (long)g.config.block.z;
    k.mma += mma.exchange(0);
}
void count_table(FILE* f) {
    if (kernels().empty()) return;
    size_t width = 8;
    for (auto& x : kernels()) width = std::max(width, x.first.size());
    fprintf(f, "%-*s %8s %10s %12s %10s\n", (int)width, "counters", "launches", "blocks", "threads", "mma");
    for (auto& x : kernels()) {
        const Launches& k = x.second;
        fprintf(f, "%-*s %8ld %10ld %12ld %10ld\n", (int)width, x.first.c_str(), k.launches, k.blocks, k.threads, k.mma);
    }
    fprintf(f, "(built with emucc --check it also counts bytes, sectors and bank conflicts)\n");
}
void check_exit() { // EMU_COUNT=1
    if (!options().count) return;
    FILE* f = count_open();
    count_table(f);
    if (f != stderr) fclose(f);
}
}
