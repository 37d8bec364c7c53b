#!/usr/bin/env bash
# run.sh [--long] [NAME]: builds and runs the tests (all, or those whose file name contains NAME); the last line is "N passed, N failed".
# Called by `make test`, which says in CC, PYTHON, OPENMP, GEMM_FLAGS and GEMM_LIBS what it found. Every C test runs under AddressSanitizer
# and UBSan; the programs' bad-input tests run once with the normal build and once with a sanitized one.
set -u
cd "$(dirname "$0")/../.."
long=""
[ "${1:-}" = --long ] && { long=1; shift; }
only="${1:-}"
CC="${CC:-cc}" PYTHON="${PYTHON:-python3}"
mkdir -p build/test
sanitize="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
flags="-std=c11 -Wall -Wextra -Werror -I. -fno-math-errno ${OPENMP:-} ${GEMM_FLAGS:-}"
libs="${GEMM_LIBS:-} -lcjson -lm -lpthread"
export LONG="$long"
export OMP_WAIT_POLICY=passive # tests share the machine: threads that wait sleep
passed=0 failed=0

count() { # count LOG: adds up what a test program printed on its last line
    last=$(tail -n 1 "$1")
    if [[ "$last" =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
    else
        echo "FAIL $2: it did not end with its sum: $last"
        failed=$((failed + 1))
    fi
}
report() { # report NAME COMMAND...: runs one test program, shows it, counts it
    local name=$1 begin=$SECONDS
    shift
    echo "--- $name"
    timeout 1500 "$@" 2>&1 | tee "build/test/$name.log"
    [ "${PIPESTATUS[0]}" -le 1 ] || echo "FAIL $name ended with exit code ${PIPESTATUS[0]}" | tee -a "build/test/$name.log"
    count "build/test/$name.log" "$name"
    echo "    ($((SECONDS - begin)) s)"
}
build_failed() { echo "FAIL $1 does not compile"; failed=$((failed + 1)); }

echo "building with the sanitizers"
$CC $sanitize $flags train_moe_cpu.c -o build/train_moe_cpu_asan $libs || build_failed train_moe_cpu_asan
for file in dev/test/test_*.c; do
    name=$(basename "$file" .c)
    [[ "$name" == *"$only"* ]] || continue
    if $CC $sanitize $flags "$file" -o "build/test/$name" $libs; then report "$name" "build/test/$name"; else build_failed "$name"; fi
done
for file in dev/test/test_*.py; do
    name=$(basename "$file" .py)
    [[ "$name" == *"$only"* ]] || continue
    report "$name" "$PYTHON" "$file"
    if grep -q TRAINER "$file"; then TRAINER=build/train_moe_cpu_asan report "${name}_sanitized" "$PYTHON" "$file"; fi
done
if [[ emulator == *"$only"* ]]; then report emulator dev/emu/test/run.sh; fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
