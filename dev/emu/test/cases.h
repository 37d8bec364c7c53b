// Planted faults: every case is one kernel or host sequence that is right when `bad` is false and has exactly one fault
// when it is true. The line that must be named carries the comment `bad: NAME`; run.py compiles, runs and compares.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <cuda_runtime.h>

struct Case { const char *name, *kind; void (*run)(bool bad); };

template <class T> T* device(size_t n) {               // poisoned
    T* p;
    if (cudaMalloc((void**)&p, n * sizeof(T)) != cudaSuccess) exit(3);
    return p;
}
template <class T> T* zeros(size_t n) {
    T* p = device<T>(n);
    cudaMemset(p, 0, n * sizeof(T));
    return p;
}
template <class T> T* upload(const std::vector<T>& v) {
    T* p = device<T>(v.size());
    cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice);
    return p;
}
template <class T> std::vector<T> ramp(size_t n) {
    std::vector<T> v(n);
    for (size_t i = 0; i < n; i++) v[i] = (T)(i + 1);
    return v;
}
template <class T> std::vector<T> download(const T* p, size_t n) {
    std::vector<T> v(n);
    cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost);
    return v;
}

static int run_cases(const Case* cases, int count, int argc, char** argv) {
    if (argc < 2) {
        for (int i = 0; i < count; i++) printf("%s %s\n", cases[i].name, cases[i].kind);
        return 0;
    }
    for (int i = 0; i < count; i++) {
        if (strcmp(argv[1], cases[i].name)) continue;
        cases[i].run(argc > 2 && !strcmp(argv[2], "bad"));
        cudaDeviceSynchronize();
        return 0;
    }
    printf("no such case\n");
    return 2;
}
#define CASES_MAIN(table)                                                                                              \
    int main(int argc, char** argv) { return run_cases(table, (int)(sizeof table / sizeof *table), argc, argv); }
