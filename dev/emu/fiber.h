// Fibers: stacks of their own between which one operating-system thread switches by hand.
// Nothing here knows about CUDA; block.cpp runs every CUDA thread on a fiber.
#ifndef EMU_FIBER_H
#define EMU_FIBER_H
#include <stddef.h>

namespace emu {

struct Fiber {
    void* sp = nullptr;          // where the fiber's registers lie while it does not run
    char* stack = nullptr;       // lowest byte of its stack (for the main fiber: of the thread's own stack)
    size_t size = 0;
    void* fake = nullptr;        // AddressSanitizer's shadow frame
    Fiber* next = nullptr;       // in the pool of idle fibers
};

// Maps a stack of `size` bytes with a guard page below, and prepares the fiber to run `entry`, which must never return.
void fiber_create(Fiber* f, size_t size, void (*entry)());
// Forgets whatever the fiber was doing: the next switch to it begins `entry` anew.
void fiber_reset(Fiber* f, void (*entry)());
// Describes the thread's own stack (AddressSanitizer wants to know it).
void fiber_main(Fiber* f);
// Saves the running fiber and continues `to`. Returns when somebody switches back.
void fiber_switch(Fiber* from, Fiber* to);
// The first call in an entry function.
void fiber_entered();
// True if the address lies in some fiber's stack. (If it also faulted it is a guard page: the thread has used up its
// stack.)
bool fiber_in_stack(const void* address);

}
#endif
