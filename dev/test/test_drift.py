"""check_drift.py finds what has drifted, names it, and is silent about what has not; then the real files."""

import re

from check_drift import tokens_of
from harness import *

CHECK = os.path.join(ROOT, "dev", "test", "check_drift.py")

HELPERS = """
enum { ROWS = 64, COLUMNS = 8 }; // per block
typedef struct { size_t B, T; int NH; } Shape;
__device__ inline float twice(float x) { return 2 * x; }
template <int N> struct Tile {
    float data[N];
    __device__ float first() const { return twice(data[0]); }
};
"""
SCALE1 = """
__global__ void scale_kernel1(float* out, const float* inp, size_t n) {
    for (size_t i = 0; i < n; i++) { out[i] = twice(inp[i]); }
}
"""
SCALE2 = """
template <typename T, int N>
__global__ void __launch_bounds__(128, 2) scale_kernel2(T* out, const T* inp, size_t n, Shape s) {
    __shared__ float partial[ROWS];
    #pragma unroll
    for (size_t i = 0; i < n; i++) { out[i] = twice(inp[i]); }
    __syncthreads(); // all have read
}
"""
LAUNCHER = "\nvoid scale(float* out, cudaStream_t stream) { scale_kernel2<float, 8><<<1, 128, 0, stream>>>(out, out, 1, s); }\n"
NAIVE = """
__global__ void softmax_kernel1(float* x) { x[0] = twice(x[0]); }
void softmax_rows(float* x) { softmax_kernel1<<<1, 1>>>(x); }
void attention_naive_forward(float* x) { softmax_rows(x); }
void attention_naive_backward(float* x) { softmax_rows(x); }
void experts_loop_forward(float* x) { scale(x, 0); }
void experts_loop_backward(float* x) { scale(x, 0); }
void adamw_simple(float* x) { scale(x, 0); }
"""
SOFTMAX = """// winner: 2
#include "common.h"
__global__ void softmax_kernel1(float* x) { x[0] = twice(x[0]); }
__global__ void softmax_kernel2(float* x) { x[0] = 1; }
"""
SOFTMAX2 = "__global__ void softmax_kernel2(float* x) { x[0] = 1; }\nvoid softmax(float* x) { softmax_kernel2<<<1, 1>>>(x); }\n"
TRAINER = "#include <stdio.h>\n" + HELPERS + SCALE2 + LAUNCHER + NAIVE + SOFTMAX2 + "int main() { scale(0, 0); softmax(0); }\n"
LESSONS = {"common.h": HELPERS, "scale.cu": "// scale.cu\n// winner: 2\n#include \"common.h\"\n" + SCALE1 + SCALE2, "softmax.cu": SOFTMAX}


def drift(trainer=TRAINER, code=1, **lessons):
    write(folder("train_moe.cu"), trainer)
    for name, text in {**LESSONS, **{k.replace("_", "."): v for k, v in lessons.items()}}.items():
        write(folder("dev/cuda/" + name), text)
    return run([sys.executable, CHECK, "--root", folder()], code=code).out


def changed(text, old, new):
    check(text.count(old) == 1, f"{old!r} stands there {text.count(old)} times")
    return text.replace(old, new)


def expect(out, *parts):
    for part in parts:
        check(part in out, f"{part!r} is not in {out!r}")


@test
def files_in_step_pass():
    expect(drift(code=0), "3 kernels, 5 device functions and structs: 0 faults")


@test
def comments_and_white_space_do_not_count():
    trainer = changed(TRAINER, "    __syncthreads(); // all have read\n", "\n\n  __syncthreads( )  /* why\n not */ ;")
    expect(drift(trainer, code=0), "0 faults")


@test
def a_changed_token_is_found_and_named():
    out = drift(changed(TRAINER, "scale_kernel2(T* out, const T* inp, size_t n", "scale_kernel2(T* out, const T* inp, int n"))
    expect(out, "train_moe.cu:12: scale_kernel2 has `* inp , int n , Shape`, dev/cuda/scale.cu:10 has `* inp , size_t n , Shape`",
           "1 faults")


@test
def any_single_token_of_a_kernel_matters():
    texts = [t.text for t in tokens_of(SCALE2)]
    for i in range(texts.index("scale_kernel2") + 1, len(texts)):
        if texts[i] not in "(){}[]":
            text = " ".join(t if j != i else t + " more" for j, t in enumerate(texts)).replace("__pragma__(unroll)", "\n#pragma unroll\n")
            expect(drift(TRAINER.replace(SCALE2, text)), "scale_kernel2 has", "more", "1 faults")
    for old, new in (("128, 2", "128, 3"), ("#pragma unroll\n", ""), ("#pragma unroll", "#pragma unroll 2"), ("typename T, int N", "int N, typename T"),
                     ("    __syncthreads();", ""), ("i < n", "i <= n"), ("i++", "++i")):
        expect(drift(TRAINER.replace(SCALE2, changed(SCALE2, old, new))), "scale_kernel2 has", "1 faults")


@test
def a_missing_kernel_is_found():
    out = drift(TRAINER + "__global__ void extra_kernel1(int* x) { *x = 1; }\nvoid extra(int* x) { extra_kernel1<<<1, 1>>>(x); }\n")
    expect(out, "extra_kernel1 stands in no file of dev/cuda", "1 faults")


@test
def device_functions_structs_and_constants_count():
    expect(drift(changed(TRAINER, "return 2 * x;", "return x + x;")), "twice has `) { return x + x ;`", "1 faults")
    expect(drift(changed(TRAINER, "twice(data[0])", "data[0]")), "Tile has", "1 faults")
    expect(drift(changed(TRAINER, "ROWS = 64", "ROWS = 32")), "ROWS has `32`, dev/cuda/common.h:2 has `64`", "1 faults")
    expect(drift(changed(TRAINER, "int NH; } Shape", "int NH, NKV; } Shape")), "Shape has", "1 faults")
    expect(drift(changed(TRAINER, "COLUMNS = 8", "COLUMNS = 9"), code=0), "0 faults")  # no kernel uses it


@test
def a_kernel_of_another_number_is_not_the_winner():
    out = drift(scale_cu=changed(LESSONS["scale.cu"], "// winner: 2", "// winner: 1"))
    expect(out, "dev/cuda/scale.cu: the trainer does not launch the winner, scale_kernel1", "scale_kernel2 is not what dev/cuda calls the winner")


@test
def a_helper_kernel_may_be_older_than_the_winner():
    helper = "__global__ void count_kernel1(int* x) { *x = 1; }\n"
    trainer = TRAINER + helper + "void count(int* x) { count_kernel1<<<1, 1>>>(x); }\n"
    expect(drift(trainer, code=0, scale_cu=LESSONS["scale.cu"] + helper), "0 faults")
    newer = helper.replace("kernel1", "kernel2")
    expect(drift(trainer, scale_cu=LESSONS["scale.cu"] + helper + newer), "count_kernel1 is not what dev/cuda calls the winner", "count_kernel2")


@test
def a_file_must_name_its_winner():
    expect(drift(scale_cu=changed(LESSONS["scale.cu"], "// winner: 2\n", "")), "dev/cuda/scale.cu: has 0 lines `// winner: N`")
    expect(drift(scale_cu=changed(LESSONS["scale.cu"], "// winner: 2", "// winner: 3")), "winner 3 is no kernel in it")


@test
def a_library_call_may_be_the_winner():
    text = "// winner: 2 (gemm)\n#include \"common.h\"\n__global__ void matmul_kernel1(float* x) { x[0] = 1; }\n"
    expect(drift(matmul_cu=text), "dev/cuda/matmul.cu: winner 2 is no kernel in it")
    trainer = TRAINER + "void gemm(float* x) { cublas(x); }\nvoid matmul(float* x) { gemm(x); }\n"
    expect(drift(trainer, code=0, matmul_cu=text), "0 faults")
    expect(drift(trainer.replace("gemm(x); }", "}"), matmul_cu=text), "the trainer does not call the winner 2, gemm")
    header = {"matmul_cu": text.replace("gemm", "matmul.h"), "matmul_h": "void gemm(float* x) { cublas(x); }\n"}
    expect(drift(trainer, code=0, **header), "0 faults")
    expect(drift(trainer.replace("cublas(x)", "cublas(0)"), **header), "gemm has")


@test
def words_and_other_winners_are_for_readers():
    text = changed(LESSONS["scale.cu"], "// winner: 2\n", "// winner: 1 (the rest), 2 (scale, which was 3 and 4 before)\n")
    expect(drift(code=0, scale_cu=text), "0 faults")


@test
def a_rung_outside_its_launcher_is_found():
    out = drift(changed(TRAINER, "void softmax_rows(float* x)", "void other(float* x) { softmax_rows(x); }\nvoid softmax_rows(float* x)"))
    expect(out, "softmax_kernel1 is not what dev/cuda calls the winner")
    expect(drift(TRAINER.replace("adamw_simple", "adamw_slow")), "lists adamw_simple, which the trainer does not have")


@test
def a_kernel_that_nobody_launches_is_found():
    expect(drift(changed(TRAINER, "void softmax(float* x) { softmax_kernel2<<<1, 1>>>(x); }\n", "")), "softmax_kernel2 is launched nowhere")


@test
def train_moe_and_dev_cuda_are_in_step():
    r = run([sys.executable, CHECK], code=None)
    check(r.code == 0, r.out.strip())


def table(marker):
    """(file, kernel) of each row of a table of dev/cuda/README.md."""
    text = read(os.path.join(ROOT, "dev", "cuda", "README.md")).decode()
    inside = re.search(r"(?s)<!-- %s -->(.*?)<!-- end -->" % marker, text).group(1)
    return set(re.findall(r"(?m)^\| \[\w+\]\((\w+\.cu)\) \| `(\w+)", inside))


def kernels_of(text):
    return set(re.findall(r"(?s)__global__[^;{]*?(\w+_kernel\d+)\(", text))


@test
def each_table_of_dev_cuda_has_the_kernels_that_there_are():  # else: make bench
    lessons = os.path.join(ROOT, "dev", "cuda")
    text = {name: read(os.path.join(lessons, name)).decode() for name in os.listdir(lessons) if name.endswith((".cu", ".h"))}
    own = {(name, kernel) for name, t in text.items() for kernel in kernels_of(t)}
    # a lesson also has the kernels of the headers that it includes
    defined = {(name, kernel) for name, t in text.items() if name.endswith(".cu")
               for file in (name, *re.findall(r'#include "(\w+\.h)"', t)) for at, kernel in own if at == file}
    trained = kernels_of(read(os.path.join(ROOT, "train_moe.cu")).decode())
    for marker, wanted in (("registers", defined), ("counters", {(n, k) for n, k in own & defined if k in trained})):
        rows = table(marker)
        check(rows <= defined, f"{marker}: rows for kernels that are no more: {sorted(rows - defined)}")
        check(wanted <= rows, f"{marker}: kernels without a row: {sorted(wanted - rows)}")
        kept = {kernel for _, kernel in defined & own if marker == "registers"} | (trained if marker == "counters" else set())
        without = {kernel for _, kernel in defined if kernel in kept} - {kernel for _, kernel in rows}
        check(not without, f"{marker}: kernels of headers without a row anywhere: {sorted(without)}")


main()
