// Fibers by a hand-written swap of the callee-saved registers: 10 ns a switch where ucontext takes 240.
// On processors other than x86-64 ucontext is used: slower, but the same behaviour.
#include "fiber.h"
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef EMU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

const size_t GUARD = 4096, REGION = 128ull << 30;      // stacks of a process lie side by side in one reserved region
static char* region;
static size_t region_used = 16 << 20;                // a large frame on the first stack falls into the region, too
static pthread_mutex_t region_lock = PTHREAD_MUTEX_INITIALIZER;

#if defined(__x86_64__)
extern "C" void emu_swap(void** save, void* load);
asm(R"(
.text
.globl emu_swap
.type emu_swap,@function
emu_swap:
    .cfi_startproc
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .cfi_endproc
.size emu_swap,.-emu_swap
)");
static void prepare(Fiber* f, void (*entry)()) {
    uintptr_t top = ((uintptr_t)f->stack + f->size) & ~(uintptr_t)63;
    void** p = (void**)(top - 72);                   // at entry rsp is 8 mod 16, as after a call
    *p = nullptr;
    *--p = (void*)entry;
    for (int i = 0; i < 6; i++) *--p = nullptr;
    f->sp = p;
}
static inline void swap(Fiber* from, Fiber* to) { emu_swap(&from->sp, to->sp); }
#else
#include <ucontext.h>
static void prepare(Fiber* f, void (*entry)()) {
    ucontext_t* u = f->sp ? (ucontext_t*)f->sp : (ucontext_t*)calloc(1, sizeof(ucontext_t));
    getcontext(u);
    u->uc_stack.ss_sp = f->stack;
    u->uc_stack.ss_size = f->size;
    makecontext(u, entry, 0);
    f->sp = u;
}
static inline void swap(Fiber* from, Fiber* to) {
    if (!from->sp) from->sp = calloc(1, sizeof(ucontext_t));
    swapcontext((ucontext_t*)from->sp, (ucontext_t*)to->sp);
}
#endif

static char* map_stack(size_t size) {
    pthread_mutex_lock(&region_lock);
    if (!region) {
        void* p = mmap(nullptr, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        region = p == MAP_FAILED ? nullptr : (char*)p;
    }
    char* stack = region && region_used + GUARD + size <= REGION ? region + region_used + GUARD : nullptr;
    region_used += GUARD + size;
    pthread_mutex_unlock(&region_lock);
    if (!stack || mprotect(stack, size, PROT_READ | PROT_WRITE)) {
        fflush(stdout);
        fprintf(stderr, "emu: error: no memory for the stack of another CUDA thread: is there a limit (ulimit -v)?\n");
        _exit(1);
    }
    return stack;
}

void fiber_create(Fiber* f, size_t size, void (*entry)()) {
    f->size = (size + GUARD - 1) / GUARD * GUARD;
    f->stack = map_stack(f->size);
    prepare(f, entry);
}

void fiber_reset(Fiber* f, void (*entry)()) {
    ASAN_UNPOISON_MEMORY_REGION(f->stack, f->size);      // of the frames that will never return
    prepare(f, entry);
}

void fiber_main(Fiber* f) {
    pthread_attr_t a;
    pthread_getattr_np(pthread_self(), &a);
    void* bottom;
    pthread_attr_getstack(&a, &bottom, &f->size);
    pthread_attr_destroy(&a);
    f->stack = (char*)bottom;
}

void fiber_switch(Fiber* from, Fiber* to) {
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(&from->fake, to->stack, to->size);
#endif
    swap(from, to);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(from->fake, nullptr, nullptr);
#endif
}

void fiber_entered() {
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

bool fiber_in_stack(const void* address) {
    return region && (size_t)((char*)address - region) < region_used;
}

}
