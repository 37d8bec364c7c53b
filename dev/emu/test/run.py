#!/usr/bin/env python3
"""The emulator's tests. `run.py [WORD]` runs those whose name contains WORD. Programs are built into build/emu/test."""
import collections
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import threading
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
EMU = os.path.dirname(HERE)
ROOT = os.path.dirname(os.path.dirname(EMU))
BUILD = os.path.join(os.environ.get("EMU_BUILD", os.path.join(ROOT, "build", "emu")), "test")
sys.path.insert(0, EMU)
sys.dont_write_bytecode = True
from translate import translate, TranslateError  # noqa: E402

QUIET = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=0"}


class Failed(Exception):
    pass


def need(condition, text):
    if not condition:
        raise Failed(text)


def run(command, env=None, limit=120):
    r = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit, env={**os.environ,
            **QUIET, **(env or {})})
    return r.returncode, r.stdout + r.stderr


BUILT = collections.defaultdict(threading.Lock)        # program -> held while it is built
DONE = set()


def build(name, mode, cc="g++"):
    """The path of a test program, which is built by the first test that asks for it."""
    os.makedirs(BUILD, exist_ok=True)
    out = os.path.join(BUILD, "%s-%s-%s" % (name, mode, cc))
    with BUILT[out]:
        if out not in DONE:
            code, text = run([sys.executable, os.path.join(EMU, "emucc"), "--" + mode, "--cc", cc, "-I" + ROOT,
                    "-o", out, os.path.join(HERE, name + ".cu")], limit=280)
            need(code == 0, "emucc: " + text[-2000:])
            DONE.add(out)
    return out


def clean(command, env=None):
    """Runs a program that must succeed in silence on standard error."""
    code, text = run(command, env)
    need(code == 0 and "emu:" not in text and "runtime error" not in text, "exit code %d: %s" % (code, text[-600:]))
    return text


# ---------------------------------------------------------------- planted faults
def fault_lines(name, case):
    with open(os.path.join(HERE, name + ".cu")) as f:
        return [i + 1 for i, line in enumerate(f) if re.search(r"// bad:.*\b%s\b" % case, line)]


def fault_case(program, name, case, kind):
    clean([program, case, "good"])
    code, text = run([program, case, "bad"])
    need(code == 1, "the fault was not reported: exit code %d %s" % (code, text[-300:]))
    if kind == "-":                                    # seen by its result only
        return
    reports = [line for line in text.splitlines() if re.match(r"emu: \S+: " + kind, line)]
    need(reports, "no report of kind '%s': %s" % (kind, text[:500]))
    lines = fault_lines(name, case)
    need(not lines or any(re.search(r"\b%s\.cu:(%s)\b" % (name, "|".join(map(str, lines))), r) for r in reports),
         "line %s is not named: %s" % (lines, reports[0]))


def fault_tests(name, cc):
    program = build(name, "check", cc)
    return [("%s %s (%s)" % (name, c, cc), lambda c=c, k=k: fault_case(program, name, c, k))
            for c, k in (line.split(" ") if " " in line else (line, "") for line in run([program])[1].splitlines())]


# ---------------------------------------------------------------- the translator
def rewrite(text):
    out = translate(text)
    need(out.count("\n") == text.count("\n"), "lines were added or lost: %r" % out)
    return re.sub(r"\s+", " ", out)


def translator_launches():
    need('Launch("k<2,(3>2)>", g, b)' in rewrite("k<2, (3>2)><<<g, b>>>(x);"), "nested template arguments")
    need("[emu_k = (table[i])]" in rewrite("table[i]<<<1, 2>>>();"), "an element of a table")
    need("ns::k<T> (emu_a...)" in rewrite("ns::k<T>\n<<<1,\n 2>>>\n(a,\n b);"), "over several lines")
    need("[emu_k = (kern_)]" in rewrite("kern_<<<1, 2>>>();"), "a member or variable")
    need("[=](auto" in rewrite("__emu_global__ void k(int i); void f() { k<<<1, 2>>>(3); }"),
            "a kernel, perhaps a template")
    need("[=] (int i)" in rewrite("k<<<1, 2>>>([=] __emu_device__ (int i) { });"), "a lambda as an argument")
    need("nullptr" in rewrite("k<<<1, 2>>>(__null);"), "NULL as an argument")
    need("[emu_k = (p->k)]" in rewrite("p->k<<<1, 1>>>(1);"), "a member pointer")
    need('"<<<1>>>("' in rewrite('f("<<<1>>>(");'), "inside a string")
    need('R"(k<<<1,1>>>())"' in rewrite('auto s = R"(k<<<1,1>>>())";'), "inside a raw string")
    plain = "int x = 1'000'000; char c = '<'; a <<= 2; b << c;"
    need(rewrite(plain) == plain, "digits and characters")


def translator_declarations():
    need("typedef float emu_t_a [4][5];" in rewrite("{ __emu_shared__ float a[4][5]; }"), "an array")
    need("(float *)" not in rewrite("{ __emu_shared__ float a[4], b; }")
            and "emu_t_b" in rewrite("{ __emu_shared__ float a[4], b; }"), "two declarators")
    need("dynamic_smem((size_t)(16))" in rewrite("{ extern __emu_shared__ __attribute__((aligned(16))) char s[]; }"),
            "alignment")
    marked = '{ extern __emu_shared__ \n# 7 "f.cu" 3\n char\n# 7 "f.cu"\n s[]; }'
    need(translate(marked).endswith('\n# 7 "f.cu"\n }'), "line marks of macros")
    need('section("emu_device")' in rewrite("__emu_device__ int x = 3;")
            and "section" not in rewrite("__emu_device__ int f(int x = 3) { return x; }"), "variable or function")
    need('section("emu_managed")' in rewrite("__emu_managed__ __emu_device__ int x;"), "two qualifiers")
    need("section" not in rewrite("__emu_constant__ const float x[2] = {1, 2};"), "a const object")
    need("section" in rewrite("__emu_device__ const float* x;"), "a pointer to const")
    need("section" in rewrite("__emu_constant__ struct P p;")
            and "section" in rewrite("__emu_device__ struct { int i; } s;"),
            "a struct named or defined in front")
    need("static ::emu::SharedVar" in rewrite("namespace n { __emu_shared__ int a; int f() { return a; } }")
            and "&a" not in rewrite("namespace n { __emu_shared__ int a; }"), "shared memory in a namespace")
    need("section" not in rewrite("template <class T> __emu_device__ inline T f() { return T{}; }"),
            "a template function")
    bounded = rewrite("__emu_global__ void __emu_launch_bounds__(N / 2, 3) k(int n) { }")
    need("Kernel emu_kernel = {(int)(N / 2)}" in bounded, "launch bounds")
    need("Kernel emu_kernel = {(int)(64)}" in rewrite("__emu_launch_bounds__(64) __emu_global__ void k() { }"),
            "launch bounds in front")
    need("emu_kernel" not in rewrite("__emu_global__ void k(int n);"), "a declaration")


def translator_errors():
    try:
        translate('# 1 "f.cu"\nint x;\nk<<<1, 2>>>(a\n')
        raise Failed("an unfinished launch passed")
    except TranslateError as e:
        need("f.cu:" in str(e), "no place in %s" % e)


# ---------------------------------------------------------------- values
def intrinsics(mode, cc, **env):
    clean([build("intrinsics", mode, cc)], env)


def groups(mode, cc, **env):
    clean([build("groups", mode, cc)], env)


def language(mode, cc):
    text = clean([build("language", mode, cc)])
    need("hello from a kernel" in text, "printf in a kernel: " + text)


def textbook(mode, cc, **env):
    clean([build("textbook", mode, cc)], env)


def api(name, code=0, text="", **env):
    c, out = run([build("api", "fast"), name], env)
    need(c == code and text in out, "exit code %d: %s" % (c, out[-400:]))
    return out


def host_threads():
    clean([build("api", "asan"), "host_threads"], {"ASAN_OPTIONS": "detect_leaks=1"})


def orders():
    need(api("order", EMU_WORKERS="1").strip() == "0 1 2 3 100 101 102 103", "forward")
    need(api("order", EMU_WORKERS="1", EMU_ORDER="reverse").strip() == "103 102 101 100 3 2 1 0", "reverse")
    seen = {api("order", EMU_WORKERS="1", EMU_ORDER="random:%d" % s) for s in (1, 1, 2, 3)}
    need(len(seen) == 3, "random orders depend on the seed only: %s" % seen)


# ---------------------------------------------------------------- EMU_FAIL reaches every function
TEXT_ONLY = re.compile(r"(Name|String|ncclGetLastError)$")         # these return text and cannot fail


def every_call_can_fail():
    """Each function of the runtime, cuBLAS and NCCL that the emulator defines is called with nothing but zeros, and
    must fail before it looks at them."""
    base = os.path.join(BUILD, "every_call")
    os.makedirs(BUILD, exist_ok=True)
    with open(base + ".cu", "w") as f:
        f.write("#include <cublasLt.h>\n#include <cublas_v2.h>\n#include <nccl.h>\n"
                "__attribute__((weak)) int main() { return 0; }\n")
    link = [sys.executable, os.path.join(EMU, "emucc"), "-o", base, base + ".cu"]
    code, text = run(link)
    need(code == 0, text)
    symbols = [line.split()[-1] for line in run(["nm", "--defined-only", base])[1].splitlines() if " T " in line]
    names = [n for n in symbols if re.match(r"(cuda|cublas|nccl)[A-Z]", n) and not TEXT_ONLY.search(n)]
    need(len(names) > 120, "only %d functions were found" % len(names))
    with open(base + ".c", "w") as f:                  # in C, a function declared without its parameters takes any
        f.write("#include <stdio.h>\n%s\nint main(void) {\n    long z = 0, forgot = 0;\n"
                % "\n".join("int %s();" % n for n in names))
        for n in names:
            f.write('    puts("%s"); fflush(stdout); if (!%s(%s)) { forgot = 1; puts("%s did not fail"); }\n'
                    % (n, n, ", ".join("z" * 24), n))
        f.write("    return forgot;\n}\n")
    code, text = run(["gcc", "-std=c11", "-w", "-c", base + ".c", "-o", base + ".o"])
    need(code == 0, text)
    code, text = run(link + [base + ".o"])
    need(code == 0, text)
    code, text = run([base], {"EMU_FAIL": ",".join(n + ":1" for n in names)})
    need(code == 0, "exit code %d: %s" % (code, re.findall(".* did not fail", text) or text[-300:]))
    quiet = [n for n in names if "EMU_FAIL: call 1 of %s fails" % n not in text]
    need(not quiet, "EMU_FAIL does not reach " + " ".join(quiet))


def templates_can_fail():
    with open(os.path.join(EMU, "emu_host.h")) as f:
        names = set(re.findall(r"(?:cudaError_t|\n)\s*(cuda[A-Z]\w*)\(", f.read()))
    need(len(names) > 10, "only %d templates were found" % len(names))
    text = api("fail_templates", EMU_FAIL=",".join(n + ":1" for n in sorted(names)) + ",cudaLaunchKernel:2")
    quiet = [n for n in names if "EMU_FAIL: call 1 of %s fails" % n not in text]
    need(not quiet, "EMU_FAIL does not reach " + " ".join(quiet))


def wish_too_late():
    api("memory_limit", text="EMU_FAIL=cudaMalloc:9: there were only", EMU_MEM="0.001", EMU_FAIL="cudaMalloc:9")


def blas_mistake(name, kind):
    code, text = run([build("blas", "check"), name])
    need(code == 1 and re.search(r"emu: blas\.cu:\d+: " + kind, text), "exit code %d: %s" % (code, text[-400:]))


def mpi(ranks, *args, **env):
    if not shutil.which("mpirun"):
        raise Failed("mpirun is not installed (apt-get install libopenmpi-dev openmpi-bin)")
    return run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), build("collectives", "check")]
            + list(args), env)


def collectives(ranks, **env):
    code, text = mpi(ranks, **env)
    need(code == 0 and "collectives ok" in text, text[-600:])


def wrong_collective():
    code, text = mpi(2, "wrong_order")
    need(code != 0 and "runs ncclAllReduce of 8 elements" in text and "async error: invalid usage" in text, text[-600:])


def abort():
    code, text = mpi(2, "abort")
    need(code == 0 and text.count("aborted") == 2, text[-600:])


def missing_rank():
    code, text = mpi(2, "missing_rank", EMU_NCCL_TIMEOUT="2")
    need(code != 0 and "other ranks did not come" in text, text[-600:])


def counters():
    code, text = run([os.path.join(EMU, "emucount"), build("counters", "check")])
    need(code == 0, text)
    need(re.search(r"transpose<0>(.|\n)*shared load .*32\.00 wavefronts, least  1\.00 <--\n\ntranspose<1>", text),
            "bank conflicts of the plain tile: " + text)
    need(re.search(r"strided(.|\n)*global load .*32\.00 sectors, least  4\.00 <--", text), "sectors of a strided load")
    need(re.search(r"vectors(.|\n)*global load +16 bytes.*16\.00 sectors, least 16\.00 \n", text),
            "a float4 is one access")
    need("by_pointer<1>: 1 launch\n" in text and "by_pointer<2>: 1 launch\n" in text and "vectors: 2 launches" in text,
            "a kernel launched through a variable has its own name: " + text)


def nvcc_compiles_ptx(arch):
    wheels = os.path.join(ROOT, "build", "cuda-wheels")
    found = [os.path.join(folder, "nvcc") for folder, _, files in os.walk(wheels) if "nvcc" in files]
    nvcc = shutil.which("nvcc") or next(iter(found), None) or "/usr/local/cuda/bin/nvcc"
    need(os.path.exists(nvcc), "nvcc was not found (install the toolkit, or run `make deps`)")
    os.makedirs(BUILD, exist_ok=True)
    code, text = run([nvcc, "-std=c++17", "-arch=" + arch, "-I" + ROOT, "-cubin",
                      "-o", os.path.join(BUILD, "ptx-%s.cubin" % arch), os.path.join(HERE, "ptx.cu")])
    need(code == 0, text[-500:])


def bad_usage():
    code, text = run([os.path.join(EMU, "emucc"), "-o", "x", "none.cu"])
    need(code == 1 and text.count("\n") == 1 and "none.cu: no such file" in text, text)


TESTS = [
    ("translator: launches", translator_launches),
    ("translator: declarations", translator_declarations),
    ("translator: errors name the line", translator_errors),
    ("emucc: a missing file is one clear line", bad_usage),
    ("intrinsics (g++)", lambda: intrinsics("fast", "g++")),
    ("intrinsics (clang++)", lambda: intrinsics("fast", "clang++")),
    ("intrinsics (checker)", lambda: intrinsics("check", "g++")),
    ("intrinsics (sanitizers)", lambda: intrinsics("asan", "g++")),
    ("intrinsics on sm_80", lambda: intrinsics("fast", "g++", EMU_SM="80")),
    ("intrinsics on sm_120, 4 devices", lambda: intrinsics("fast", "g++", EMU_SM="120", EMU_DEVICES="4")),
    ("textbook kernels (g++)", lambda: textbook("fast", "g++")),
    ("textbook kernels (clang++)", lambda: textbook("fast", "clang++")),
    ("textbook kernels (checker)", lambda: textbook("check", "g++")),
    ("textbook kernels (sanitizers)", lambda: textbook("asan", "g++")),
    ("textbook kernels, reverse", lambda: textbook("fast", "g++", EMU_ORDER="reverse")),
    ("textbook kernels, random", lambda: textbook("fast", "g++", EMU_ORDER="random:5")),
    ("textbook kernels, reverse (checker)", lambda: textbook("check", "g++", EMU_ORDER="reverse")),
    ("textbook kernels, lazy streams", lambda: textbook("fast", "g++", EMU_LAZY_STREAM="1")),
    ("CUDA C++ of published kernels (checker)", lambda: language("check", "g++")),
    ("CUDA C++ of published kernels (clang++)", lambda: language("fast", "clang++")),
    ("cooperative groups (checker)", lambda: groups("check", "g++")),
    ("cooperative groups, random (checker)", lambda: groups("check", "g++", EMU_ORDER="random:3")),
    ("cooperative groups, random (clang++)", lambda: groups("fast", "clang++", EMU_ORDER="random:4")),
    ("EMU_ORDER", orders),
    ("EMU_FAIL", lambda: api("fail_on_request", EMU_FAIL="cudaMalloc:2,cudaMemcpy:1,cudaStreamCreate:1")),
    ("EMU_FAIL reaches every function", every_call_can_fail),
    ("EMU_FAIL reaches every template", templates_can_fail),
    ("EMU_FAIL: a call that never came", wish_too_late),
    ("EMU_MEM", lambda: api("memory_limit", EMU_MEM="0.001")),
    ("EMU_LAZY_STREAM", lambda: api("lazy_streams", EMU_LAZY_STREAM="1")),
    ("a full queue", lambda: api("full_queue", EMU_LAZY_STREAM="1")),
    ("copies between hosts", lambda: api("copies_between_hosts", EMU_LAZY_STREAM="1")),
    ("EMU_LAZY_STREAM=random", lambda: [api("random_streams", EMU_LAZY_STREAM="random:%d" % seed) for seed in range(5)]),
    ("graphs", lambda: api("graphs")),
    ("events", lambda: api("elapsed")),
    ("two-dimensional copies", lambda: api("copies_2d")),
    ("registered memory", lambda: api("copies_2d_async", EMU_LAZY_STREAM="1")),
    ("NVTX", lambda: api("ranges")),
    ("function attributes", lambda: api("attributes")),
    ("cudaLaunchKernel", lambda: api("launch_array")),
    ("cudaLaunchKernelEx", lambda: api("launch_config")),
    ("cudaLaunchKernelEx: a cluster", lambda: api("launch_cluster", 1, "clusters of blocks are not emulated")),
    ("memory pools", lambda: api("pools")),
    ("host threads leak nothing (sanitizers)", host_threads),
    ("watchdog names kernel and line", lambda: api("watchdog", 1, "watchdog", EMU_WATCHDOG="1")),
    ("stack overflow is named", lambda: api("stack_overflow", 1, "stack overflow")),
    ("__trap is named", lambda: api("trap", 1, "api.cu")),
    ("cuBLAS values", lambda: clean([build("blas", "check")])),
    ("cuBLAS values (fast)", lambda: clean([build("blas", "fast")])),
    ("cuBLAS: leading dimension", lambda: blas_mistake("ld", "cuBLAS")),
    ("cuBLAS: null pointer", lambda: blas_mistake("null", "cuBLAS")),
    ("cuBLAS: bounds", lambda: blas_mistake("bounds", "cuBLAS")),
    ("cuBLAS: C read uninitialised", lambda: blas_mistake("beta_uninitialised", "uninitialised")),
    ("cuBLAS: wrong stream", lambda: blas_mistake("stream", "missing stream order")),
    ("cuBLASLt: size of an attribute", lambda: blas_mistake("lt_size", "cuBLAS")),
    ("cuBLASLt: null attribute", lambda: blas_mistake("lt_null", "cuBLAS")),
    ("cuBLASLt: shapes", lambda: blas_mistake("lt_shape", "cuBLAS")),
    ("NCCL, 1 rank", lambda: collectives(1)),
    ("NCCL, 2 ranks", lambda: collectives(2)),
    ("NCCL, 3 ranks as a ring", lambda: collectives(3, EMU_NCCL="ring")),
    ("NCCL: another sequence of collectives", wrong_collective),
    ("NCCL: abort", abort),
    ("NCCL: a rank that does not come", missing_rank),
    ("memory counters", counters),
    ("llmc/ptx.cuh compiles for sm_80", lambda: nvcc_compiles_ptx("sm_80")),
    ("llmc/ptx.cuh compiles for sm_90", lambda: nvcc_compiles_ptx("sm_90")),
    ("llmc/ptx.cuh compiles for sm_120", lambda: nvcc_compiles_ptx("sm_120")),
]


def one(test):
    name, function = test
    try:
        function()
        return "ok   " + name, True
    except Failed as e:
        return "FAIL %s: %s" % (name, e), False
    except Exception:
        return "FAIL %s: %s" % (name, traceback.format_exc()), False


def main():
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    good = bad = 0
    # what most tests share is built first, so that both workers are busy
    shared = [("intrinsics", "fast"), ("intrinsics", "check"), ("textbook", "fast"), ("textbook", "check"),
              ("api", "fast"), ("blas", "check"), ("collectives", "check"), ("counters", "check"), ("groups", "check")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        tests = [t for t in TESTS if word in t[0]]
        if not word:
            list(pool.map(lambda b: one(("build", lambda: build(*b))), shared))
        for name in ("faults_shared", "faults_global", "faults_host", "faults_warp"):
            if not tests or not word or word in name:
                tests += [t for t in fault_tests(name, "g++") if word in t[0]]
        for line, ok in pool.map(one, tests):
            print(line, flush=True)
            good, bad = good + ok, bad + (not ok)
    print("%d passed, %d failed" % (good, bad))
    return 1 if bad or not good else 0


sys.exit(main())
