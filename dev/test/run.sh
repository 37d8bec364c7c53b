#!/usr/bin/env bash
# run.sh [--long] [NAME]: builds and runs the tests (all, or those whose file name contains NAME); the last line is "N passed, N failed".
# Called by `make test`, which says in CC, PYTHON, OPENMP, GEMM_FLAGS, GEMM_LIBS, TEXT_FLAGS and TEXT_LIBS what it found. Every C test runs under AddressSanitizer
# and UBSan. Tests of whole programs run with train_moe_cpu; some of them again with its sanitized build, and with the GPU trainer, emulated.
set -u
cd "$(dirname "$0")/../.."
long="" limit=1500
[ "${1:-}" = --long ] && { long=1 limit=7200; shift; } # room for the lessons at their real sizes
only="${1:-}"
CC="${CC:-cc}" PYTHON="${PYTHON:-python3}"
mkdir -p build/test
sanitize="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
flags="-std=c11 -Wall -Wextra -Werror -I. -fno-math-errno ${OPENMP:-} ${GEMM_FLAGS:-} ${TEXT_FLAGS:-}"
libs="${GEMM_LIBS:-} -lcjson ${TEXT_LIBS:-} -lm -lpthread"
export LONG="$long"
export OMP_WAIT_POLICY=passive # tests share the machine: threads that wait sleep
passed=0 failed=0 names=()

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
    timeout $limit "$@" 2>&1 | tee "build/test/$name.log"
    [ "${PIPESTATUS[0]}" -le 1 ] || echo "FAIL $name ended with exit code ${PIPESTATUS[0]}" | tee -a "build/test/$name.log"
    count "build/test/$name.log" "$name"
    echo "    ($((SECONDS - begin)) s)"
}
together() { # together NAME COMMAND...: the same, two at a time, each shown when it has ended; `collect` waits for the last
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
    names+=("$1")
    ( name=$1 begin=$SECONDS
      shift
      run_it "$@" >"build/test/$name.log" 2>&1
      code=$?
      [ $code -le 1 ] || echo "FAIL $name ended with exit code $code" >>"build/test/$name.log"
      { echo "--- $name"; cat "build/test/$name.log"; echo "    ($((SECONDS - begin)) s)"; } >"build/test/$name.shown"
      cat "build/test/$name.shown" ) &
}
collect() { # counts what ran `together`
    wait
    for name in "${names[@]}"; do count "build/test/$name.log" "$name"; done
    names=()
}
run_it() { if [ "$1" = c_test ]; then "$@"; else timeout $limit "$@"; fi; } # timeout does not know functions
c_test() { # c_test FILE PROGRAM: builds a test with the sanitizers and runs it
    $CC $sanitize $flags "$1" -o "$2" $libs || { echo "FAIL $1 does not compile"; echo "0 passed, 1 failed"; return 1; }
    timeout $limit "$2"
}
build_failed() { echo "FAIL $1 does not compile"; failed=$((failed + 1)); }

echo "building with the sanitizers"
$CC $sanitize $flags train_moe_cpu.c -o build/train_moe_cpu_asan $libs || build_failed train_moe_cpu_asan
for file in dev/test/test_*.c; do
    name=$(basename "$file" .c)
    [[ "$name" == *"$only"* ]] || continue
    together "$name" c_test "$file" "build/test/$name"
done
sanitized=" test_goldens test_program_resume test_program_bad_input test_program_evaluation "
gpu=" test_gpu_trainer test_kernels test_nvcc " # in a place of their own, below
for file in dev/test/test_*.py; do
    name=$(basename "$file" .py)
    [[ "$name" == *"$only"* && "$gpu" != *" $name "* ]] || continue
    together "$name" "$PYTHON" "$file"
    if [[ "$sanitized" == *" $name "* ]]; then TRAINER=build/train_moe_cpu_asan together "${name}_sanitized" "$PYTHON" "$file"; fi
done
collect
if [[ emulator == *"$only"* ]]; then report emulator dev/emu/test/run.sh; fi

# ----------------------------------------------------------------------------
# the GPU trainer, emulated: programs are built once for each mode, by whoever needs them first (emulate.py)
wanted() { [[ "$1" == *"$only"* ]]; }
emulate() { "$PYTHON" dev/test/emulate.py "$@" >/dev/null; }
if [ -f train_moe.cu ]; then
    if wanted test_nvcc; then report test_nvcc "$PYTHON" dev/test/test_nvcc.py; fi
    if wanted test_moe; then
        emulate fast test_moe.cu || build_failed test_moe
        together test_moe env EMU_LAZY_STREAM=1 build/test/test_moe # what it uploads must have arrived
    fi
    for name in test_goldens test_program_resume test_program_training test_program_bad_input test_program_evaluation; do
        if wanted "${name}_gpu"; then
            emulate fast
            TRAINER=build/test/train_moe_emu together "${name}_gpu" "$PYTHON" "dev/test/$name.py"
        fi
    done
    collect
    for name in test_gpu_trainer test_kernels; do
        if wanted $name; then report $name "$PYTHON" "dev/test/$name.py"; fi
    done
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
