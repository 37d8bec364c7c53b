#include "internal.h"
namespace emu {
bool counting = false;
void count_access(const void*, const Thread*, uintptr_t, size_t, bool, bool) {}
void count_launch_begin(Grid&) {}
void count_launch_end(Grid&) {}
void count_mma() {}
}
