"""What the tests of the GPU trainer share: the program, several ranks of it, and from where it calls CUDA.
With TRAINER=train_moe they run that program on the GPUs that are there, without what only an emulator can do."""

import os
import re
import shutil
import subprocess
import tempfile

from emulate import at_once, emulated, TRACE

os.environ.setdefault("TRAINER", emulated())
from program import *

EMULATED = "_emu" in os.path.basename(PROGRAM)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["NO_PROGRESS"] = "1"  # mpirun gives rank 0 a terminal
MPIRUN = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "--bind-to", "none"]


def emu_test(function):
    """Marks a test that needs the emulator."""
    return test(function) if EMULATED else function


def ranks(count, command, devices=None, **options):
    """Runs `count` ranks on as many emulated GPUs; see harness.run."""
    env = {"EMU_DEVICES": str(devices or count), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return run(command if count == 1 else [*MPIRUN, "-np", count, *command], env=env, **options)


def said(result):
    """What the trainer itself said on stderr, without mpirun's and the emulator's remarks."""
    return [line for line in result.err.splitlines() if line.startswith("train_moe")]


def addr2line(program, addresses):
    """address -> places in the source, from the innermost inlined function outwards."""
    r = subprocess.run(["addr2line", "-a", "-i", "-e", program, *addresses], capture_output=True, text=True, check=True)
    places = {}
    for line in r.stdout.splitlines():
        if line.startswith("0x"):
            current = places.setdefault(int(line, 16), [])
        else:
            current.append(line.split(" ")[0])
    return places


def call_sites(program, traces, when=("0", "1")):
    """(function, file:line) of each place in our sources that calls CUDA, cuBLAS or NCCL -> its return address, whether it called when
    CALLS_AFTER's path was there (from an address that did so, if one did). `when`: only calls before it was there, "0", or after."""
    lines = [line.split() for path in traces for line in read(path).decode().splitlines()]
    lines = [line for line in lines if line[1] in when]
    addresses = sorted({hex(int(a, 16) - 1) for line in lines for a in line[2:] if int(a, 16) < 1 << 32})  # ours: linked without PIE
    places, sites = addr2line(program, addresses), {}
    for function, late, *stack in lines:
        frames = [(p, a) for a in stack for p in places.get(int(a, 16) - 1, [])]
        frames = [(os.path.relpath(p.rsplit(":", 1)[0], ROOT) + ":" + p.rsplit(":", 1)[1], a) for p, a in frames if p.startswith(ROOT + "/")]
        ours = [(p, a) for p, a in frames if not p.startswith(("dev/emu/", "build/")) and "ptx.cuh" not in p and TRACE not in p]
        if ours and (late == "1" or (function, ours[0][0]) not in sites):
            sites[function, ours[0][0]] = (ours[0][1], late == "1")
    return sites
