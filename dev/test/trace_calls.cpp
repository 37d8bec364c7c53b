// trace_calls.cpp: writes down from where CUDA, cuBLAS and NCCL are called. The emulator asks emu::failing(function) in each of them
// (EMU_FAIL); linked with -Wl,--wrap=_ZN3emu7failingEPKc this file stands before it. With TRACE_CALLS=FILE each new pair of function
// and call stack becomes a line of FILE (of FILE.RANK under mpirun): function, how many such calls there were, return addresses.

#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <map>
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

extern "C" bool __wrap__ZN3emu7failingEPKc(const char* function) {
    if (FILE* file = trace_file()) {
        static std::mutex one_at_a_time; // the loader's thread calls, too
        static auto* calls = new std::map<std::string, long>; // still there when the program ends
        static auto* seen = new std::set<std::string>;
        void* stack[24];
        std::string line = function, place;
        int depth = backtrace(stack, 24);
        for (int i = 1; i < depth; i++) {
            char address[32];
            snprintf(address, sizeof address, " %p", stack[i]);
            place += address;
        }
        std::lock_guard<std::mutex> lock(one_at_a_time);
        long number = ++(*calls)[function];
        if (seen->insert(line + place).second) {
            fprintf(file, "%s %ld%s\n", function, number, place.c_str());
            fflush(file);
        }
    }
    return __real__ZN3emu7failingEPKc(function);
}
