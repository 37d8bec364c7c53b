#!/bin/sh
# deps.sh [test]: installs what building (and testing) needs and this machine lacks: with apt where that can be done, else it says what
# to do. Nothing is installed that is there already; a second run changes nothing.
set -u
missing="" wanted=""
try() { # try PACKAGE 'C program' FLAGS: the package is missing if the program does not compile
    printf "$2" | "${CC:-cc}" -x c - -o /dev/null $3 2>/dev/null || missing="$missing $1"
}
have() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }

have "${CC:-cc}" gcc
have make make
if [ "$(uname -s)" = Linux ]; then
    try libc6-dev '#include <stdio.h>\nint main(void) { return 0; }\n' ''
    try libcjson-dev '#include <cjson/cJSON.h>\nint main(void) { return cJSON_Parse == 0; }\n' -lcjson
    try libpcre2-dev '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\nint main(void) { return pcre2_compile == 0; }\n' -lpcre2-8
    try libutf8proc-dev '#include <utf8proc.h>\nint main(void) { return utf8proc_reencode == 0; }\n' -lutf8proc
    try libdnnl-dev '#include <oneapi/dnnl/dnnl.h>\nint main(void) { return dnnl_sgemm == 0; }\n' -ldnnl
fi
# MPI starts the GPU trainer's ranks; CUDA itself comes as NVIDIA's toolkit, or with make deps-cuda, as does NCCL
if command -v nvcc >/dev/null 2>&1 || [ -x /usr/local/cuda/bin/nvcc ]; then have mpicxx "libopenmpi-dev openmpi-bin"; fi
if [ "${1:-}" = test ]; then # Python for the test programs; a C++ compiler, BLAS and MPI for the emulator's
    if ! python3 -c 'import venv, ensurepip' 2>/dev/null; then missing="$missing python3-venv"; fi
    have g++ g++
    have clang++ clang
    printf '#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n' | clang -x c - -o /dev/null -fopenmp 2>/dev/null ||
        missing="$missing libomp-dev"
    # clang's fuzzer (test_fuzz.py): Debian has its runtime apart
    printf '#include <stddef.h>\nint LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) { return data == NULL && size > 0; }\n' |
        clang -x c - -o /dev/null -fsanitize=fuzzer,address,undefined 2>/dev/null || missing="$missing libclang-rt-dev"
    have gdb gdb
    [ -d /usr/share/games/fortunes ] || missing="$missing fortunes" # real text
    have mpicxx "libopenmpi-dev openmpi-bin"
    try libopenblas-openmp-dev '#include <cblas.h>\nint main(void) { return cblas_sgemm == 0; }\n' -lopenblas
    # opens the pages that dev/bench draws; where there is no such package (Ubuntu) those tests say that they did not run
    for browser in chromium-headless-shell chromium chromium-browser google-chrome; do command -v $browser >/dev/null 2>&1 && break; done ||
        wanted=chromium-headless-shell
fi
if [ "$(uname -s)" = Darwin ]; then
    [ -n "$missing" ] && echo "missing:$missing"
    echo "on macOS: xcode-select --install; brew install cjson libomp pcre2 utf8proc   (matrix products: Apple's Accelerate)"
    exit 0
fi
known() { apt-cache show "$1" >/dev/null 2>&1; }
can_install() { [ "$(id -u)" = 0 ] || command -v sudo >/dev/null 2>&1; }
if [ -z "$missing" ] && [ -n "$wanted" ] && can_install && known "$wanted"; then missing=" $wanted"; fi
[ -z "$missing" ] && exit 0

by_hand="needed:$missing. By hand: apt-get install$missing (Debian, Ubuntu); elsewhere the packages of cJSON and oneDNN"
if ! command -v apt-get >/dev/null 2>&1; then echo "$by_hand"; exit 1; fi
root=""
if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null 2>&1; then root=sudo; else echo "$by_hand (no root and no sudo here)"; exit 1; fi
fi
echo "installing with apt:$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { $root apt-get update -qq && { [ -z "$wanted" ] || ! known "$wanted" || missing="$missing $wanted"; } &&
    $root apt-get install -y -qq --no-install-recommends $missing; } >"$log" 2>&1; then
    tail -n 5 "$log"
    rm -f "$log"
    echo "apt failed; $by_hand"
    exit 1
fi
rm -f "$log"
