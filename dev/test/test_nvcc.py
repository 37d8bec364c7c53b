"""NVIDIA's compiler takes train_moe.cu, each lesson of dev/cuda and dev/bench/peaks.cu for each architecture without a word, and the
hot kernels keep to registers. No GPU needed: nvcc is that of the toolkit, or of the wheels that `make test-deps` brings. Of each
kernel: registers, spills, shared memory. The lessons and peaks.cu take three minutes of one core. `test_nvcc.py NAME` runs the tests
whose name contains NAME."""

import glob
import re
import shlex

from harness import *

ARCHITECTURES = ("80", "90", "120")
HOT = r"attention_(flash_)?(forward|backward)|experts|grouped_matmul|cross_entropy"  # these must not spill
BUILD = os.path.join(ROOT, "build", "test", "nvcc")


def nvcc():
    wheels = sorted(glob.glob(os.path.join(ROOT, "build", "cuda-wheels", "**", "bin", "nvcc"), recursive=True))
    found = [p for p in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", *wheels) if p and os.path.exists(p)]
    check(found, "nvcc was not found: install the CUDA Toolkit, or run `make test-deps`")
    return found[0]


def compile(source, *options, architectures=ARCHITECTURES):
    """Compiles a file for all architectures at once; returns what nvcc said, which must hold no warning."""
    os.makedirs(BUILD, exist_ok=True)
    wheels = sorted(glob.glob(os.path.join(ROOT, "build", "cuda-wheels", "nvidia", "*", "include")))
    include = [f"-I{ROOT}", *(x for d in wheels for x in ("-isystem", d))]
    mpi = shlex.split(run(["mpicxx", "--showme:compile"]).out) if shutil.which("mpicxx") else ["-DNO_MPI=1"]
    arch = [x for a in architectures for x in ("-gencode", f"arch=compute_{a},code=sm_{a}")]
    out = os.path.join(BUILD, os.path.basename(source) + "".join(re.sub(r"\W", "_", o) for o in options) + ".o")
    r = run([nvcc(), "-std=c++17", "-O3", *arch, "--threads", 2, *include, *mpi, "-DOMPI_SKIP_MPICXX", "-Xcompiler", "-Wall,-Wextra,-fopenmp",
             "-Xptxas", "-v", *options, "-c", source, "-o", out], timeout=1200)
    warnings = [line for line in (r.out + r.err).splitlines() if "warning" in line.lower()]
    check(not warnings, f"{source} {' '.join(options)}: {len(warnings)} warnings: " + "; ".join(warnings[:5]))
    return r.out + r.err


def kernels_in(text):
    """(architecture, kernel) -> registers, bytes spilled, bytes of static shared memory; from ptxas -v."""
    found, now = {}, None
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'", line):
            now = (match.group(2), match.group(1))
            found[now] = {"registers": 0, "spilled": 0, "shared": 0}
        elif now and (match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            found[now]["spilled"] = int(match.group(1)) + int(match.group(2))
        elif now and (match := re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", line)):
            found[now].update(registers=int(match.group(1)), shared=int(match.group(2) or 0))
    return found


def plain(mangled):
    return subprocess.run(["c++filt", "-p", mangled], capture_output=True, text=True).stdout.strip() or mangled


def check_registers(found, source):
    """P11: a block of any size that the kernel may be launched with finds registers: __launch_bounds__ sees to it, else 64 are enough."""
    text = read(os.path.join(ROOT, source)).decode()
    bounded = set(re.findall(r"__launch_bounds__\([^)]*\)+\s*(\w+)\(", text))
    check(len(bounded) > 10, f"{source}: only {len(bounded)} kernels with __launch_bounds__")
    many = [f"{plain(k)} on sm_{a}: {v['registers']}" for (a, k), v in found.items()
            if v["registers"] > 64 and not any(b in k for b in bounded)]
    check(not many, f"{source}: kernels without __launch_bounds__ that need more than 64 registers: " + "; ".join(many))


def check_kernels(text, name):
    found = kernels_in(text)
    for arch in ARCHITECTURES:
        check(any(a == arch for a, _ in found), f"{name}: not one kernel for sm_{arch}")
    spilling = [f"{plain(k)} on sm_{a}: {v['spilled']} bytes" for (a, k), v in found.items() if v["spilled"] and re.search(HOT, k)]
    check(not spilling, f"{len(spilling)} hot kernels spill: " + "; ".join(spilling[:5]))
    large = [f"{plain(k)} on sm_{a}: {v['shared']}" for (a, k), v in found.items() if v["shared"] > 48 << 10]
    check(not large, "more than 48 KiB of static shared memory: " + "; ".join(large))
    return found


@test
def train_moe_compiles_for_every_architecture_and_its_hot_kernels_do_not_spill():
    found = check_kernels(compile("train_moe.cu"), "train_moe.cu")
    check_registers(found, "train_moe.cu")
    for arch in ARCHITECTURES:
        most = max((v["registers"], plain(k)) for (a, k), v in found.items() if a == arch)
        print(f"     sm_{arch}: {sum(a == arch for a, _ in found)} kernels, at most {most[0]} registers ({most[1].split('<')[0]})")


@test
def train_moe_compiles_for_one_gpu_without_mpi_and_nccl():  # P8
    compile("train_moe.cu", "-DNO_MPI=1", "-DNO_NCCL=1", architectures=("90",))
    source = write(folder("alone.cu"), '#include "llmc/multi_gpu.h"\nMultiGpu gpus;\n')  # where it matters, that without one of them
    for without in ("-DNO_MPI=1", "-DNO_NCCL=1"):
        compile(source, without, architectures=("90",))


@test
def an_architecture_that_nvcc_does_not_know_is_left_to_ptx():  # P7
    text = run(["make", "--no-print-directory", "found-gpu", "GPU_ARCH=sm_90 sm_999"], code=None).out
    check("does not know sm_999" in text and "sm_90 and PTX" in text, text)


@test
def test_moe_compiles():
    compile("test_moe.cu", architectures=("90",))


@test
def a_warning_is_a_failure():
    planted = os.path.join(BUILD, "planted.cu")
    os.makedirs(BUILD, exist_ok=True)
    for text in ("__global__ void k(int* x) { int unused = 1; *x = 1; }\n", "void f(int unused) {}\n"):  # nvcc's own, the host compiler's
        with open(planted, "w") as f:
            f.write(text)
        try:
            compile(planted, architectures=("90",))
        except Failure as e:
            check("unused" in str(e), str(e))
        else:
            raise Failure(f"nothing was said about {text}")


SOURCES = sorted(glob.glob(os.path.join(ROOT, "dev", "cuda", "*.cu"))) + [os.path.join(ROOT, "dev", "bench", "peaks.cu")]
for source in SOURCES:
    def claim(source=source):
        check_kernels(compile(source), os.path.relpath(source, ROOT))
    claim.__name__ = f"{os.path.basename(source)[:-3]}_compiles_without_a_warning_and_its_hot_kernels_do_not_spill"
    test(claim)


main()
