#!/usr/bin/env python3
"""Builds every kernel file of dev/cuda and writes its numbers into the tables of dev/cuda/README.md.

    python3 dev/bench/bench_cuda.py                    all files
    python3 dev/bench/bench_cuda.py rmsnorm swiglu     those whose name contains one of the words; other rows stay as they are

With nvcc (a toolkit's, or that of `make test-deps`): registers, shared memory and spills of each kernel, for sm_80, sm_90 and sm_120.
With a GPU: checks and times; a file whose checks fail keeps its old times. Without one: what the emulator counts (dev/emu) of
the kernels that the trainer runs. Times that came from a GPU stay when there is none.

  --no-compile, --no-counters   leave a table out (as it is); compiling and counting take minutes on a small machine
"""
import argparse
import glob
import os
import re
import shlex
import shutil
import sys
import tempfile

from lessons import ROOT, Op, Readme, cpu_name, row, run

README = Readme("dev", "cuda", "README.md")
ARCHITECTURES = ("80", "90", "120")
WHERE_NVCC = ("/usr/local/cuda/bin/nvcc", os.path.join(ROOT, "build", "cuda-wheels", "nvidia", "*", "bin", "nvcc"))


def find_nvcc():
    found = [shutil.which("nvcc")] + [p for pattern in WHERE_NVCC for p in sorted(glob.glob(pattern))]
    return next((p for p in found if p and os.path.exists(p)), None)


def gpu_name():
    """The first GPU with its driver, or None."""
    if not shutil.which("nvidia-smi"):
        return None
    code, out, _ = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    return out.splitlines()[0].replace(", ", ", driver ") if code == 0 and out.strip() else None


def trainer_kernels():
    """Names of the kernels in train_moe.cu."""
    return set(re.findall(r"\b\w+_kernel\d+\b", open(os.path.join(ROOT, "train_moe.cu"), encoding="utf-8").read()))


# ---------------------------------------------------------------------------- registers, shared memory, spills

def short_name(symbol):
    """_Z23swiglu_forward_kernel2... -> swiglu_forward_kernel2, with its template arguments."""
    name = run(["c++filt", symbol])[1].strip() if shutil.which("c++filt") else symbol
    name = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    return re.sub(r"\((?:int|bool|unsigned int)\)", "", re.split(r"\((?!int\)|bool\)|unsigned int\))", name, maxsplit=1)[0])


def resources(nvcc, op):
    """kernel -> architecture -> (registers, bytes spilled, bytes of static shared memory)"""
    wheels = sorted(glob.glob(os.path.join(ROOT, "build", "cuda-wheels", "nvidia", "*", "include")))
    include = [x for d in wheels for x in ("-isystem", d)] if "cuda-wheels" in nvcc or "nccl.h" in open(op.path).read() else []
    mpi = shlex.split(run(["mpicxx", "--showme:compile"])[1]) if shutil.which("mpicxx") else []
    arch = [x for a in ARCHITECTURES for x in ("-gencode", "arch=compute_%s,code=sm_%s" % (a, a))]
    with tempfile.TemporaryDirectory() as folder:
        code, out, err = run([nvcc, "-std=c++17", "-O3", *arch, "-I.", *include, *mpi, "-DOMPI_SKIP_MPICXX", "-Xptxas", "-v", "-c",
                              op.path, "-o", os.path.join(folder, "op.o")])
    if code != 0:
        print("FAIL %s does not compile:\n%s" % (op.name, err), file=sys.stderr)
        return None
    found, kernel, arch_now = {}, None, None
    for line in (out + err).splitlines():
        entry = re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", line)
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        used = re.search(r"Used (\d+) registers", line)
        if entry:
            kernel, arch_now = short_name(entry.group(1)), entry.group(2)
            found.setdefault(kernel, {})[arch_now] = [0, 0, 0]
        elif spill and kernel:
            found[kernel][arch_now][1] = int(spill.group(1)) + int(spill.group(2))
        elif used and kernel:
            shared = re.search(r"(\d+) bytes smem", line)
            found[kernel][arch_now][0] = int(used.group(1))
            found[kernel][arch_now][2] = int(shared.group(1)) if shared else 0
    return found


def compile_all(ops):
    nvcc = find_nvcc()
    if nvcc is None:
        print("no nvcc: the table of registers stays as it is (install the CUDA Toolkit, or run make test-deps)")
        return True
    rows, ok = README.read_table("registers"), True
    for op in ops:
        print("compiling %s" % op.name, flush=True)
        found = resources(nvcc, op)
        ok = ok and found is not None
        if not found:
            continue
        rows[op.name] = []
        for kernel in sorted(found):
            per = [found[kernel].get(a, [0, 0, 0]) for a in ARCHITECTURES]
            spilled = [x[1] for x in per]
            rows[op.name].append(row(op.link, "`%s`" % kernel, *[x[0] for x in per],
                                     "/".join(map(str, spilled)) if any(spilled) else "0", max(x[2] for x in per)))
    version = re.search(r"release ([\d.]+)", run([nvcc, "--version"])[1]).group(1)
    README.write_table("registers", "nvcc %s; bytes a block of dynamic shared memory are chosen at the launch and not counted here." % version,
                ["file", "kernel", *["registers sm_" + a for a in ARCHITECTURES], "bytes spilled", "static shared bytes"], rows)
    return ok


# ---------------------------------------------------------------------------- times on a GPU

def time_all(ops, gpu):
    rows, ok = README.read_table("times"), True
    for op in ops:
        print("timing %s" % op.name, flush=True)
        code, out, err = run(["make", "-s", "build/dev/" + op.name])
        if code == 0:
            code, out, err = run([os.path.join("build", "dev", op.name)])
        if code != 0:
            print("FAIL %s: exit code %d\n%s%s" % (op.name, code, out[-2000:], err[-2000:]), file=sys.stderr)
            ok = False
            continue
        rows[op.name] = []
        for line in out.splitlines():
            match = re.match(r"(bench|library) (.*): ([\d.]+) ms(.*)", line)
            if not match:
                continue
            kind, what, ms, rest = match.groups()
            rate = re.search(r"([\d.]+) GB/s = ([\d.]+) % of (?:peer )?copy", rest)
            flops = re.search(r"([\d.]+) TFLOP/s = ([\d.]+) % of GEMM", rest)
            cells = [x for m in (rate, flops) for x in ((m.group(1), m.group(2) + " %") if m else ("", ""))]
            rows[op.name].append(row(op.link, what if kind == "bench" else "*%s*" % what, ms, *cells))
    code, out, _ = run(["nvcc", "--version"])
    version = re.search(r"release ([\d.]+)", out) if code == 0 else None
    note = "On %s%s; medians. Lines in italics are NVIDIA's library at the same work." % (
        gpu, ", nvcc " + version.group(1) if version else "")
    README.write_table("times", note, ["file", "what", "ms", "GB/s", "of copy", "TFLOP/s", "of GEMM"], rows)
    return ok


# ---------------------------------------------------------------------------- counters of the emulator

def counts_of(path):
    """kernel -> [launches, bytes read, of, bytes written, of, mma, global sectors, least, shared wavefronts, least]"""
    found = {}
    for line in open(path):
        x = line.rstrip("\n").split("\t")
        if x[0] == "kernel":
            _, name, launches, read, read_touched, written, write_touched, mma = x
            found[name] = [int(launches), int(read), float(read_touched), int(written), float(write_touched), int(mma), 0, 0, 0, 0]
        elif x[0] == "line" and x[1] in found:
            _, name, _, space, _, _, requests, _, got, least = x
            at = 8 if space == "shared" else 6
            found[name][at] += int(requests) * float(got)
            found[name][at + 1] += int(requests) * float(least)
    return found


def ratio(a, b):
    return "%.2f" % (a / b) if b else ""


def count_all(ops):
    rows, ok, ours = README.read_table("counters"), True, trainer_kernels()
    with tempfile.TemporaryDirectory() as folder:
        for op in ops:
            program = os.path.join(folder, op.name)
            print("counting %s" % op.name, flush=True)
            code, _, err = run(["dev/emu/emucc", "--check", "-I.", "-o", program, op.path, "-lcjson"])
            found = {}
            text = open(op.path, encoding="utf-8").read()
            launched = {name for name in re.findall(r"\b\w+_kernel\d+\b", text) if name in ours}
            todo = list(op.winners) if code == 0 else []
            while todo:
                kernel = todo.pop(0)
                counts = os.path.join(folder, "counts")
                code, out, err = run([program, str(kernel)], env={"EMU_COUNT": "1", "EMU_COUNT_OUT": counts})
                if code != 0 or not os.path.exists(counts):
                    err = out[-2000:] + err[-2000:]
                    break
                for name, c in counts_of(counts).items():
                    if re.sub(r"<.*", "", name) in ours:
                        found[name] = c if kernel in op.winners else found.get(name, c)
                os.unlink(counts)
                if not todo and kernel in op.winners:  # the trainer's older kernels (--optimizer simple ...), which no winner launches
                    missing = launched - {re.sub(r"<.*", "", name) for name in found}
                    todo = sorted({int(name.rsplit("kernel", 1)[1]) for name in missing} - set(op.winners))
            if code != 0:
                print("FAIL %s: exit code %d\n%s" % (op.name, code, err), file=sys.stderr)
                ok = False
            elif found:
                rows[op.name] = [row(op.link, "`%s`" % name, c[0], ratio(c[1], c[2]), ratio(c[3], c[4]),
                                     ratio(c[6], c[7]), ratio(c[8], c[9]), c[5] or "") for name, c in sorted(found.items())]
    README.write_table("counters", "dev/emu on %s, over all the small and awkward shapes of the checks." % cpu_name(),
                ["file", "kernel", "launches", "reads of bytes touched", "writes of bytes touched", "sectors of least",
                 "shared passes of least", "mma"], rows)
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="words in the names of the files wanted")
    parser.add_argument("--no-compile", action="store_true", help="leave the table of registers as it is")
    parser.add_argument("--no-counters", action="store_true", help="leave the emulator's counters as they are")
    args = parser.parse_args()
    every = [Op(p) for p in sorted(glob.glob(os.path.join(ROOT, "dev", "cuda", "*.cu")))]
    ops = [op for op in every if not args.name or any(word in op.name for word in args.name)]
    if not ops:
        sys.exit("bench_cuda.py: error: no file of dev/cuda has %s in its name" % " or ".join(args.name))
    README.write_files(every)
    gpu = gpu_name()
    ok = args.no_compile or compile_all(ops)
    if gpu:
        ok = time_all(ops, gpu) and ok
    elif not args.no_counters:
        ok = count_all(ops) and ok
    print("wrote the tables of dev/cuda/README.md (%s)" % (gpu or "no GPU: times stay as they are"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
