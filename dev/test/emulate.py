"""Builds .cu files for the emulator, each once for each mode, by whoever needs it first; runs two things at once.

    python3 dev/test/emulate.py fast|check|asan [FILE.cu]      builds train_moe.cu, or FILE.cu, where that is due; prints the program's path
"""

import concurrent.futures
import fcntl
import glob
import hashlib
import os
import subprocess
import sys

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TRACE = "dev/test/trace_calls.cpp"


def sources(file):
    """What a change of means building anew."""
    ours = "train_moe_cpu.c" if file.startswith("dev/") else "train_moe*.c*"
    patterns = (file, ours, "llmc/*", "dev/cuda/*.h", "dev/emu/*.*", "dev/emu/emucc", "dev/emu/include/**", TRACE, "dev/test/emulate.py")
    return sorted(p for pattern in patterns for p in glob.glob(os.path.join(ROOT, pattern), recursive=True) if os.path.isfile(p))


def emulated(mode="fast", file="train_moe.cu"):
    """The path of a .cu file's program for the emulator, built under a lock where it is not the newest."""
    name = os.path.splitext(os.path.basename(file))[0]
    name = "train_moe_emu" if name == "train_moe" else name
    out = os.path.join(ROOT, "build", "test", name + ("" if mode == "fast" else "_" + mode))
    os.makedirs(os.path.dirname(out), exist_ok=True)
    traced = mode == "fast" and file == "train_moe.cu"
    command = [os.path.join(ROOT, "dev", "emu", "emucc"), "--" + mode, "-I" + ROOT, "-o", out, os.path.join(ROOT, file), "-lcjson"]
    command += [os.path.join(ROOT, TRACE), "-Wl,--wrap=_ZN3emu7failingEPKc"] if traced else []
    with open(out + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = hashlib.sha256(" ".join(command).encode())
        for path in sources(file):
            with open(path, "rb") as f:
                now.update(path.encode() + f.read())
        try:
            with open(out + ".stamp") as f:
                fresh = f.read() == now.hexdigest() and os.path.exists(out)
        except OSError:
            fresh = False
        if not fresh:
            if os.path.exists(out):
                os.remove(out)  # nobody shall test an old program where the new one does not build
            r = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
            if r.returncode != 0 or "warning" in r.stderr:
                raise RuntimeError(f"{file} does not build with emucc --{mode}: {r.stderr[-2000:]}")
            with open(out + ".stamp", "w") as f:
                f.write(now.hexdigest())
    return out


def at_once(*jobs, most=2):
    """Runs functions without arguments, `most` at a time, and returns what they return, in order. The first failure is raised."""
    with concurrent.futures.ThreadPoolExecutor(most) as pool:
        return [f.result() for f in [pool.submit(job) for job in jobs]]


if __name__ == "__main__":
    try:
        print(emulated(*sys.argv[1:3]))
    except RuntimeError as e:
        sys.exit(f"FAIL {e}")
