#!/usr/bin/env bash
# gpu_check.sh: everything that is worth knowing on a GPU for the first time, in one command and under eight minutes: builds
# for the GPU that is here, tests, checks each kernel, measures, trains 20 steps of smol-500m, and ends with one table. It
# needs nvcc, make, C and C++ compilers and one GPU; no network, no MPI, no Python. With several GPUs and MPI it also trains and
# averages gradients on all of them, with cuDNN it times that library's attention.
#
#   dev/bench/gpu_check.sh              on a machine with a GPU
#   dev/bench/gpu_check.sh --carry      beforehand, on a machine that has cJSON: copies it to build/cjson, to be carried
#                                       along with the repository to a machine that has not
#   dev/bench/gpu_check.sh --emulator   the same steps with small models in dev/emu: tries this script where there is no GPU
#
# Logs, and the table as table.md, are in build/gpu_check, or in $OUT if that is set. MINUTES=8 is the time it may take; what comes
# too late is cut off or left out, and named. KERNELS="rmsnorm router" checks these files of dev/cuda only. Exit code 0: nothing failed,
# nothing was left out.
set -u
cd "$(dirname "$0")/../.."
logs=${OUT:-build/gpu_check}
if ! command -v nvidia-smi >/dev/null 2>&1; then nvidia-smi() { return 1; }; fi
deadline=$((SECONDS + ${MINUTES:-8} * 60))
emulator="" failed=0 left_out=0
# what the Makefile calls, too; nvcc needs a C++ compiler
needs="awk cat cc cut dirname g++ grep head ln ls make mkdir nproc rm sed sleep sort tail tee timeout tr uname uniq wc xargs"
mkdir -p "$logs" build

if [ "${1:-}" = --carry ]; then
    header=$(echo '#include <cjson/cJSON.h>' | cc -E -x c - 2>/dev/null |
        sed -n 's/^# [0-9]* "\(.*cjson\/cJSON\.h\)".*/\1/p' | head -n 1)
    library=$(cc -print-file-name=libcjson.a)
    [ -f "$library" ] || library=$(cc -print-file-name=libcjson.so)
    if [ ! -f "$header" ] || [ ! -f "$library" ]; then echo "cJSON is not installed here either (make deps)"; exit 1; fi
    mkdir -p build/cjson/cjson
    cp "$header" build/cjson/cjson/
    cp -L "$library" "build/cjson/$(basename "$library")"
    # the name that a program linked with the .so looks for when it starts
    case "$library" in *.so) cp -L "$library" build/cjson/libcjson.so.1 ;; esac
    echo "build/cjson: $(basename "$library") and cJSON.h, to be copied along with the repository"
    exit 0
fi
[ "${1:-}" = --emulator ] && emulator=yes

say() { printf '%s\n' "$*" | tee -a "$logs/summary.txt"; }
rm -f "$logs"/*.log "$logs"/*.jsonl "$logs/table.md" # of an earlier run
: >"$logs/summary.txt"

step() { # step NAME SECONDS COMMAND...: runs it with a time limit, its output in a log; says how it went
    local name=$1 limit=$2 begin=$SECONDS left=$((deadline - SECONDS)) code
    shift 2
    if [ "$left" -lt 5 ]; then
        say "- $name: left out, the time is over"
        left_out=$((left_out + 1))
        return 1
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    timeout -k 5 "$limit" "$@" >"$logs/$name.log" 2>&1
    code=$?
    if [ "$code" = 0 ]; then
        say "✓ $name ($((SECONDS - begin)) s)"
        return 0
    fi
    failed=$((failed + 1))
    if [ "$code" = 124 ] || [ "$code" = 137 ]; then say "✗ $name: cut off after $limit s; what it had measured by then is in the table, the rest of its output in $logs/$name.log"
    else
        say "✗ $name: exit code $code, see $logs/$name.log"
        grep -E 'FAIL|error' "$logs/$name.log" | head -n 3 | cut -c1-300 | sed 's/^/    /' | tee -a "$logs/summary.txt"
    fi
    return 1
}

# The table, from the logs: one row a measured thing. A rate is compared with the best that this GPU did above when it did one thing
# (copying, or one large matrix product); "-": not measured, or nothing to compare with.
table() {
    local peak_copy peak_gemm
    peak_copy=$(peak copy) peak_gemm=$(peak gemm)
    {
        echo "what|ms|rate|unit|% peak|% step"
        sed -n 's/^peak \(.*\): \([0-9.]*\) \([GT].*\)$/\1|\2|\3/p' "$logs/peaks.log" 2>/dev/null |
            awk -F'|' -v gemm="$peak_gemm" '{ best = $3 == "GB/s" ? $2 : gemm
                printf "peak: %s|-|%.1f|%s|%s|-\n", $1, $2, $3, (best > 0 ? sprintf("%.1f", 100 * $2 / best) : "-") }'
        training "$logs/metrics.jsonl" training 1
        sed -n '/^profile/,/^  step /s/^  \([a-z_]*\)  *\([0-9.][0-9.]*\)  *\([0-9.]*\)%.*/phase: \1|\2|-|-|-|\3/p' "$logs/train.log" 2>/dev/null |
            grep -v '^phase: step|'
        training "$logs/metrics_all.jsonl" "training on $cards cards" "$cards"
        for k in $kernels attention_forward_cudnn attention_backward_cudnn; do sed -n '/^bench /p; /^library /p' "$logs/$k.log" 2>/dev/null; done | awk '{
            what = $0; sub(": [0-9.]+ ms.*", "", what); sub("^bench ", "", what)
            rest = $0; sub(".*: ", "", rest); ms = rest; sub(" ms.*", "", ms)
            n = split(rest, part, ", "); rate = unit = share = "-"
            for (i = 2; i <= n; i++) { # of two rates the one that is nearer to its peak
                split(part[i], word, " ")
                s = word[3] == "=" ? word[4] : "-"
                if (rate == "-" || s + 0 > share + 0) { rate = word[1]; unit = word[2]; share = s }
            }
            gsub("[|]", "/", what)
            print what "|" ms "|" rate "|" unit "|" share "|-" }'
    } | awk -F'|' '{
            row[NR] = $0
            if (length($1) > width) width = length($1) }
        END {
            line = sprintf("%" width "s", "")
            gsub(" ", "-", line)
            for (i = 1; i <= NR; i++) {
                split(row[i], x, "|")
                printf "| %-" width "s | %9s | %9s | %-7s | %6s | %6s |\n", x[1], x[2], x[3], x[4], x[5], x[6]
                if (i == 1) { print "| " line " | --------: | --------: | ------- | -----: | -----: |" }
            } }' >"$logs/table.md"
}
peak() { sed -n "s/^peak $1: \([0-9.]*\).*/\1/p" "$logs/peaks.log" 2>/dev/null; }
training() { # training METRICS NAME CARDS: rows of a run of smol-500m, 1.582 GFLOP a token at T = 4096
    [ -s "$1" ] || return 0
    awk -v name="$2" -v what="B = $B, $accum microbatches, T = $T" -v cards="$3" -v peak="$peak_gemm" -v flops="$([ -z "$emulator" ] && echo 1.582e9)" '
        function number(name,   rest) {
            rest = $0
            if (!sub(".*\"" name "\":", "", rest)) return 0
            sub("[,}].*", "", rest)
            return rest + 0
        }
        function percent(x) { return x > 0 ? sprintf("%.1f", 100 * x) : "-" }
        { n++; if (n <= 2) next # the first steps choose algorithms
          kept++; rate += number("tokens_per_s"); ms += number("step_ms"); loss = number("loss"); mfu += number("mfu") }
        END { if (!kept) exit
              rate /= kept
              printf "%s: %s|%.1f|%.0f|tok/s|%s|100.0\n", name, what, ms / kept, rate,
                  (flops > 0 && peak > 0 ? percent(rate * flops / peak / 1e12 / cards) : "-")
              printf "%s: of the nominal peak|-|%s|%%|-|-\n", name, percent(mfu / kept)
              printf "%s: 10B tokens|-|%.1f|hours|-|-\n", name, 1e10 / rate / 3600
              printf "%s: loss at the end|-|%.3f|nats|-|-\n", name, loss }' "$1"
}

finish() {
    if [ -s "$logs/peaks.log" ]; then
        table
        say ""
        tee -a "$logs/summary.txt" <"$logs/table.md"
    fi
    say ""
    if [ "$failed" = 0 ] && [ "$left_out" = 0 ]; then say "gpu_check: all is well ($SECONDS s)"; exit 0; fi
    say "gpu_check: $failed failed, $left_out left out ($SECONDS s)"
    exit 1
}

# ----------------------------------------------------------------------------
say "machine"
say "  $(uname -sr), $(nproc) cores, $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)"
nvcc=$(ls ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} 2>/dev/null || command -v nvcc || ls /usr/local/cuda/bin/nvcc build/cuda-wheels/nvidia/cu*/bin/nvcc 2>/dev/null | head -n 1)
query=name,compute_cap,memory.total,driver_version,power.limit,clocks.max.sm
gpus=$(nvidia-smi --query-gpu=$query --format=csv,noheader 2>/dev/null)
say "  nvcc: $([ -n "$nvcc" ] && "$nvcc" --version | sed -n 's/.*release \(.*\)/\1/p' || echo none)"
say "  GPU: ${gpus:-none}"
command -v git >/dev/null 2>&1 && git log -1 --format='  commit %h of %cd' --date=short 2>/dev/null | tee -a "$logs/summary.txt"
for tool in $needs; do
    if ! command -v "$tool" >/dev/null 2>&1; then
        say "✗ stops here: this script needs $tool, which is not here"
        failed=1
        finish
    fi
done
if [ -z "$emulator" ] && [ -z "$nvcc" ]; then
    say "✗ stops here: there is no nvcc (CUDA Toolkit, or make deps-cuda); --emulator tries this script without a GPU"
    failed=1
    finish
fi

# ----------------------------------------------------------------------------
say ""
say "build"
if [ -n "$emulator" ]; then trainer=./train_moe_emu test=build/test_moe_emu; else trainer=./train_moe test=build/test_moe; fi
kernels=${KERNELS:-$(ls dev/cuda/*.cu | sed 's:.*/\(.*\)\.cu:\1:')}
[ -n "$emulator" ] && kernels=${KERNELS:-rmsnorm nccl_all_reduce}
jobs=$(nproc)
[ "$jobs" -gt 8 ] && jobs=8 # nvcc takes 1-2 GB for each
make_all() { make -j "$1" ${GPU_ARCH:+GPU_ARCH="$GPU_ARCH"} "${@:2}"; }
export -f make_all
if ! step build_trainer 240 bash -c "make_all $jobs ${trainer#./} $test build/make_shard build/peaks"; then
    tail -n 20 "$logs/build_trainer.log"
    finish
fi
if grep -qE '(✗|-) (NCCL|MPI)' "$logs/build_trainer.log"; then # what `make found-gpu` says; a program of one GPU needs neither
    kernels=$(printf '%s\n' $kernels | grep -vx nccl_all_reduce)
    say "- nccl_all_reduce: there is no NCCL or no MPI here"
fi
if [ -z "$emulator" ] && [ -z "$gpus" ]; then
    say "✗ stops here: the programs are built, but nvidia-smi finds no GPU to run them on; --emulator goes on without one"
    failed=$((failed + 1))
    finish
fi
# the kernels compile in the background, beside the tests; the benchmarks come after them
timeout -k 5 $((deadline - SECONDS > 5 ? deadline - SECONDS : 5)) xargs make -k -j "$jobs" ${GPU_ARCH:+GPU_ARCH="$GPU_ARCH"} \
    >"$logs/build_kernels.log" 2>&1 < <(for k in $kernels; do echo "build/dev/$k"; done) &
building=$!
# attention with cuDNN beside it, where cuDNN is: in a build folder of its own, so that nothing else depends on it
cudnn=""
mkdir -p build/cudnn
for carried in cuda-wheels cudnn-wheels cjson; do
    if [ -e "build/$carried" ] && [ ! -e "build/cudnn/$carried" ]; then ln -s "../$carried" "build/cudnn/$carried"; fi
done
make_cudnn() { make BUILD=build/cudnn USE_CUDNN=1 ${GPU_ARCH:+GPU_ARCH="$GPU_ARCH"} "$@" >>"$logs/cudnn.log" 2>&1; }
if [ -z "$emulator" ] && make_cudnn found-gpu; then
    make_cudnn -j 2 build/cudnn/dev/attention_forward build/cudnn/dev/attention_backward &
    cudnn=$!
else
    say "- cuDNN: not here"
fi
logging=""
trap 'kill $building $cudnn $logging 2>/dev/null' EXIT
# Timing is best with nothing else running, but training must not be left out because compiling takes long.
compiled() { # compiled SECONDS: waits for the kernels, as long as there is so much time left
    while kill -0 "$building" 2>/dev/null && [ $((deadline - SECONDS)) -gt "$1" ]; do sleep 1; done
    ! kill -0 "$building" 2>/dev/null
}

# clocks, power and temperature twice a second, for as long as this script runs
if [ -z "$emulator" ]; then
    nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,utilization.gpu -lms 500 \
        --format=csv,noheader,nounits >"$logs/clocks.csv" 2>/dev/null &
    logging=$!
fi
clocks() { # clocks FROM: over the lines of clocks.csv after line FROM, where the GPU was busy
    [ -f "$logs/clocks.csv" ] || return 0
    awk -F', *' -v from="$1" 'NR > from && $5 > 50 { n++; mhz += $2; watt += $3; if ($4 > hot) hot = $4 }
        END { if (n) printf "  meanwhile %.0f MHz, %.0f W, up to %.0f C\n", mhz / n, watt / n, hot }' "$logs/clocks.csv"
}
now() { if [ -f "$logs/clocks.csv" ]; then wc -l <"$logs/clocks.csv"; else echo 0; fi; }

# ----------------------------------------------------------------------------
say ""
say "tests"
if [ -n "$emulator" ]; then model=tiny vocab=257 eot=256 T=64; else model=smol-500m vocab=151936 eot=151643 T=4096; fi
step make_shard 60 build/make_shard "$logs/train_0.bin" "$([ -n "$emulator" ] && echo 40000 || echo 20000000)" $vocab $eot
build/make_shard "$logs/tiny_0.bin" 40000 257 256
step test_moe 120 "$test" $([ -n "$emulator" ] && echo adamw)
tail -n 1 "$logs/test_moe.log" 2>/dev/null | sed 's/^/    /' | tee -a "$logs/summary.txt"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -n "$sanitizer" ] && [ -z "$emulator" ]; then
    for tool in memcheck racecheck; do
        # racecheck takes long over cuBLAS's kernels, and sees races in some that synchronise by other means than it knows;
        # ours are named ..._kernel1 to ..._kernel5, and few of its own like that. Before CUDA 12.3 it had no such option.
        only=""
        [ "$tool" = racecheck ] && "$sanitizer" --help 2>/dev/null | grep -q -e '--kernel-name' && only="--kernel-name kns=_kernel"
        step "sanitizer_$tool" 40 "$sanitizer" --tool $tool $only --error-exitcode 9 --target-processes all \
            $trainer --model tiny -b 2 -t 64 -n 1 -d "$logs/tiny_0.bin"
    done
else
    say "- compute-sanitizer: not here"
fi
compiled 270 || say "- the kernels are still compiling, beside the measurements below"

# ----------------------------------------------------------------------------
say ""
say "measurements"
mark=$(now)
step peaks 60 build/peaks $([ -n "$emulator" ] && echo 0.1 || echo 3)
clocks "$mark" | tee -a "$logs/summary.txt"

# the 20 steps come before the kernels: they are what matters most should the time run out
B=24 steps=20 accum=4
[ -n "$emulator" ] && B=2 steps=3 accum=2
if [ -z "$emulator" ]; then # nine tenths of the card are ours, the rest is cuBLAS's and the driver's
    free=$(sed -n 's/^cards: .*, \([0-9.]*\) GiB free$/\1/p' "$logs/peaks.log")
    if [ -z "$free" ]; then
        free=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits |
            awk 'NR == 1 && $1 + 0 > 0 { printf "%.2f", $1 / 1024 }') # "[N/A]" on a part of a card (MIG)
        say "- memory: peaks did not say how much is free, nvidia-smi says that the card has ${free:-an unknown number of} GiB"
    fi
    fits=$([ -z "$free" ] || $trainer --model $model -t $T --dry-run --memory "$(awk "BEGIN { print 0.9 * $free }")" |
        sed -n 's/.*largest batch.*--batch-size \([0-9]*\).*/\1/p')
    [ -z "$fits" ] && say "- batch size: not one sequence is known to fit into ${free:-an unknown number of} GiB; tries 1"
    [ "${fits:-0}" -lt "$B" ] && B=${fits:-1}
    [ "$B" -lt 16 ] && accum=2 # a small card is slow, too: 20 steps shall fit into the time
fi
mark=$(now)
step train 150 $trainer --model $model -t $T -b "$B" --grad-accum $accum -n $steps -d "$logs/train_*.bin" --profile \
    --metrics "$logs/metrics.jsonl"
clocks "$mark" | tee -a "$logs/summary.txt"
# as CUDA counts them, which heeds CUDA_VISIBLE_DEVICES; without peaks one
cards=$(sed -n 's/^cards: \([0-9]*\),.*/\1/p' "$logs/peaks.log")
mpirun=""
if [ "${cards:=1}" -gt 1 ]; then
    mpirun="mpirun --bind-to none -n $cards"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    if ! command -v mpirun >/dev/null 2>&1 || grep -qE '(✗|-) (NCCL|MPI)' "$logs/build_trainer.log"; then
        say "- $cards GPUs, but no MPI or no NCCL: only one is used"
        mpirun=""
    fi
fi
if [ -n "$mpirun" ]; then
    step train_all_gpus 90 $mpirun $trainer --model $model -t $T -b "$B" --grad-accum $accum -n 8 \
        -d "$logs/train_*.bin" --profile --metrics "$logs/metrics_all.jsonl"
fi

# ----------------------------------------------------------------------------
say ""
say "kernels: checks, and times at smol-500m's shapes"
compiled 20
if ! kill -0 "$building" 2>/dev/null && wait "$building"; then :; else
    say "✗ build_kernels: see $logs/build_kernels.log"
    failed=$((failed + 1))
fi
for k in $kernels; do
    if [ ! -x "build/dev/$k" ]; then
        say "✗ $k: not built, see $logs/build_kernels.log"
        failed=$((failed + 1))
        continue
    fi
    # all kernels meet the awkward shapes, the trainer's alone smol-500m's: `make bench` has time for the others
    large=$(sed -n 's/([^)]*)//g; s:^// winner\: *\([0-9, ]*\).*:\1:p' "dev/cuda/$k.cu" | tr -d ' ')
    ranks=""
    [ "$k" = nccl_all_reduce ] && ranks=$mpirun
    step "$k" 60 $ranks "build/dev/$k" ${large:+--large "$large"}
done
if [ -n "$cudnn" ] && kill -0 "$cudnn" 2>/dev/null; then
    say "- cuDNN: still compiling, left out"
elif [ -n "$cudnn" ] && ! wait "$cudnn"; then
    say "- cuDNN: it is here, but attention does not build with it, see $logs/cudnn.log"
elif [ -n "$cudnn" ]; then
    for k in attention_forward attention_backward; do step "${k}_cudnn" 60 "build/cudnn/dev/$k" --large 0; done
fi
finish
