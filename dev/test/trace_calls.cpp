// trace_calls.cpp: from where CUDA, cuBLAS and NCCL are called. The emulator asks emu::failing(function) in each of them (EMU_FAIL); linked
// with -Wl,--wrap=_ZN3emu7failingEPKc this file stands before it.
//   TRACE_CALLS=FILE    each new pair of function and call stack becomes a line of FILE (of FILE.RANK under mpirun): function, 0 or 1,
//                       return addresses. Calls made when the path of CALLS_AFTER exists are pairs of their own, marked 1.
//   FAIL_AT=ADDRESS     EMU_FAIL counts only calls that come from there, and that are made when the path of CALLS_AFTER exists: so that
//                       EMU_FAIL=cudaMalloc:1 is the first call of one place, whatever other threads and places have called before.

#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <mutex>
#include <set>
#include <string>

extern "C" bool __real__ZN3emu7failingEPKc(const char* function);

static FILE* trace_file() {
    static FILE* file = [] {
        const char *path = getenv("TRACE_CALLS"), *rank = getenv("OMPI_COMM_WORLD_RANK");
        return path ? fopen((std::string(path) + (rank ? std::string(".") + rank : "")).c_str(), "w") : (FILE*)nullptr;
    }();
    return file;
}

static bool late() { // false, too, where CALLS_AFTER names nothing
    static const char* path = getenv("CALLS_AFTER");
    return path && access(path, F_OK) == 0;
}

extern "C" bool __wrap__ZN3emu7failingEPKc(const char* function) {
    static const char* fail_at = getenv("FAIL_AT");
    FILE* file = trace_file();
    if (!file && !fail_at) { return __real__ZN3emu7failingEPKc(function); }
    if (fail_at && strncmp(getenv("EMU_FAIL"), function, strcspn(function, "_")) != 0) { return false; } // looking at the stack takes time
    void* stack[24];
    int depth = backtrace(stack, 24);
    if (fail_at) {
        static void* wanted = (void*)strtoull(fail_at, nullptr, 16);
        bool there = false;
        for (int i = 1; i < depth; i++) { there |= stack[i] == wanted; }
        return there && (!getenv("CALLS_AFTER") || late()) && __real__ZN3emu7failingEPKc(function);
    }
    std::string line = std::string(function) + (late() ? " 1" : " 0");
    for (int i = 1; i < depth; i++) {
        char address[32];
        snprintf(address, sizeof address, " %p", stack[i]);
        line += address;
    }
    static std::mutex one_at_a_time; // the loader's thread calls, too
    static auto* seen = new std::set<std::string>; // still there when the program ends
    std::lock_guard<std::mutex> lock(one_at_a_time);
    if (seen->insert(line).second) {
        fprintf(file, "%s\n", line.c_str());
        fflush(file);
    }
    return __real__ZN3emu7failingEPKc(function);
}
