// The checker's entry points in a program built without --check: nothing is watched.
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
void check_launch(Grid&) {}
void count_mma() {}
void check_settle() {}
void check_op_touch(const void*, size_t, bool) {}
void check_op_copy(void*, const void*, size_t) {}
void check_host_pending(Op*, const void*, size_t) {}
void check_exit() {}
}
