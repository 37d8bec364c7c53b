"""What several cards would take: the all-reduces of a step on a modelled network, beside compute time from roofline.py.

The buckets are those of train_moe.cu: what it sends, in which order, and when backward has left each. How many all-reduces of
how many bytes there are is counted in the emulator (`count`), which has no clock; the model says how long they take:

    a ring of R ranks takes 2 (R - 1) hops: an all-reduce of n bytes lasts 2 (R - 1) (latency + n / R / bandwidth)

`bandwidth` is what a rank sends and receives at a time, `latency` what each hop costs besides. Standard library only.
"""

import os
import subprocess
from collections import namedtuple

import roofline

# GB/s, microseconds a hop. PCIe 4 x16 carries 32 GB/s each way; without direct access between cards (P2P) each hop goes to the
# host's memory and back, and all cards share the host: 6 to 12 GB/s remain
Network = namedtuple("Network", "name bandwidth latency_us")
NETWORKS = {
    "pcie4-host": Network("PCIe 4 x16 without P2P", 8.0, 20.0),
    "pcie4-p2p": Network("PCIe 4 x16 with P2P", 20.0, 10.0),
    "pcie5-p2p": Network("PCIe 5 x16 with P2P", 40.0, 10.0),
    "nvlink": Network("NVLink (H100, H200)", 300.0, 5.0),
}

Bucket = namedtuple("Bucket", "name numbers ready") # ready: the share of the backward pass after which it can be sent


def all_reduce_seconds(size, ranks, network):
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * (network.latency_us * 1e-6 + size / ranks / (network.bandwidth * 1e9))


def padded(n, multiple=8):
    return -(-n // multiple) * multiple


def buckets(s, lm_head_share=0.0):
    """What a microbatch whose gradients are averaged sends, in order: lm_head and the last norm, the layers from the last to the
    first, the embedding. lm_head_share: lm_head's part of the backward pass; the layers share the rest evenly."""
    table = padded(s.V) * s.C # train_moe.cu rounds rows up where vector loads need it
    result = [] if s.tied else [Bucket("lm_head", table + s.C, lm_head_share)]
    rest = 1 - lm_head_share
    result += [Bucket(f"layer {l}", roofline.layer_parameters(s, l), lm_head_share + rest * (s.L - l) / s.L) for l in reversed(range(s.L))]
    return result + [Bucket("embedding", table + (s.C if s.tied else 0), 1.0)]


class Step:
    """Seconds of one optimizer step of `ranks` cards, and where they went. compute: forward, backward of one microbatch on one
    of them, and the update. every: all-reduce after each microbatch, else after the last. overlap: while backward goes on."""

    def __init__(self, forward, backward, update, microbatches, bucket_list, ranks, network, every, overlap, number_bytes=2):
        self.compute = microbatches * (forward + backward) + update
        self.all_reduce = sum(all_reduce_seconds(number_bytes * b.numbers, ranks, network) for b in bucket_list)
        times = microbatches if every else 1
        self.exposed = times * (self.exposed_once(backward, bucket_list, ranks, network, number_bytes) if overlap else self.all_reduce)
        if ranks == 1:
            self.exposed = 0.0
        self.all_reduces, self.bytes = times * len(bucket_list), times * number_bytes * sum(b.numbers for b in bucket_list)
        self.seconds = self.compute + self.exposed

    @staticmethod
    def exposed_once(backward, bucket_list, ranks, network, number_bytes):
        """How long the cards wait after backward: buckets are sent one after the other, none before it is ready."""
        clock = 0.0
        for bucket in bucket_list:
            clock = max(clock, backward * bucket.ready) + all_reduce_seconds(number_bytes * bucket.numbers, ranks, network)
        return max(0.0, clock - backward)

    @property
    def waiting(self):
        """The share of the step that the cards do nothing but communicate."""
        return self.exposed / self.seconds


# ----------------------------------------------------------------------------
# a run on R cards: the tokens of a microbatch over all cards stay the same, as in the reference run

WAYS = { # name: (every, overlap)
    "naive": (True, False), "naive, overlapped": (True, True), "last": (False, False), "last, overlapped": (False, True),
}


def lm_head_share_of(s, B, T, card, mode):
    element, gradient = roofline.elements_of(card)
    ms = {True: 0.0, False: 0.0}
    for op in roofline.operations(s, B, T, element, gradient):
        if op.direction == "backward" or op.phase == "lm_head":
            ms[op.phase == "lm_head"] += roofline.possible_ms(op, card, mode)
    return ms[True] / (ms[True] + ms[False])


class Workload:
    """What one card does: from roofline.py, or scaled to a known rate of tokens (that of the reference run, say)."""

    def __init__(self, s, batch_size, T, card, grad_accum, mode="realistic", tokens_per_second=None):
        self.shape, self.batch_size, self.T, self.card, self.grad_accum = s, batch_size, T, card, grad_accum
        self.mode, self.tokens_per_second = mode, tokens_per_second
        self.lm_head_share = lm_head_share_of(s, batch_size, T, card, mode)

    def step(self, ranks, network, every, overlap, number_bytes=2):
        B = self.batch_size / ranks
        forward, backward = (ms / 1e3 for ms in roofline.microbatch_ms(self.shape, B, self.T, self.card, self.mode))
        update = roofline.update_ms(self.shape, self.card, self.mode) / 1e3
        if self.tokens_per_second: # the same shares of forward, backward and update, and one card does so many tokens a second
            one = Workload(self.shape, self.batch_size, self.T, self.card, self.grad_accum, self.mode).step(1, network, False, False)
            slower = self.tokens / self.tokens_per_second / one.seconds
            forward, backward, update = (slower * t for t in (forward, backward, update))
        return Step(forward, backward, update, self.grad_accum, buckets(self.shape, self.lm_head_share), ranks, network, every,
                    overlap, number_bytes)

    @property
    def tokens(self):
        return self.batch_size * self.T * self.grad_accum

    def hours(self, step):
        return roofline.hours(self.tokens / step.seconds)

    def speedup(self, ranks, network, every, overlap):
        return self.step(1, network, False, False).seconds / self.step(ranks, network, every, overlap).seconds


# ----------------------------------------------------------------------------
# the reference run: 500M parameters, T = 4096, 98,304 tokens a microbatch over all cards, 10 microbatches a step, four RTX PRO
# 6000 Max-Q on PCIe 4 without NVLink or P2P

REFERENCE_HOURS_ONE_CARD = 43.0
REFERENCE_RANKS = 4
TOLERANCE = 0.05 # a figure is reproduced if the model comes this near

# name: (value, text, what the model says of a bandwidth)
FIGURES = {
    "speedup": (2.6, "2.6x on four cards, naive", lambda w, n, overlap: w.speedup(REFERENCE_RANKS, n, True, overlap)),
    "waiting": (0.5, "half of the step in communication, naive", lambda w, n, overlap: w.step(REFERENCE_RANKS, n, True, overlap).waiting),
    "all_reduce": (0.08, "0.08 s an all-reduce", lambda w, n, overlap: w.step(REFERENCE_RANKS, n, False, False).all_reduce),
    "hours": (13.2, "13.2 h, all-reduce on the last of 10", lambda w, n, overlap: w.hours(w.step(REFERENCE_RANKS, n, False, overlap))),
}
BANDWIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 20, 22, 24, 32, 50)


def reproduces(figure, value):
    return abs(value / FIGURES[figure][0] - 1) <= TOLERANCE


def bandwidth_for(figure, workload, latency_us, overlap, low=0.05, high=2000.0):
    """The bandwidth at which the model gives the figure exactly; None: at no bandwidth."""
    target, _, value = FIGURES[figure]

    def above(bandwidth):
        return value(workload, Network("", bandwidth, latency_us), overlap) > target

    if above(low) == above(high):
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        if above(middle) == above(low):
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5


def figures_by_bandwidth(workload, latency_us, overlap):
    """[{bandwidth, and of each figure (value, whether it is the reference's)}]"""
    rows = []
    for bandwidth in BANDWIDTHS:
        row = {"bandwidth": bandwidth}
        for name, (_, _, value) in FIGURES.items():
            v = value(workload, Network("", bandwidth, latency_us), overlap)
            row[name] = {"value": v, "reproduced": reproduces(name, v)}
        rows.append(row)
    return rows


# ----------------------------------------------------------------------------
# counting in the emulator

def mpirun(ranks):
    root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]


def count(program, ranks, options, folder, timeout=300):
    """Runs two steps of the emulated trainer and returns the second's all-reduces of gradients: [(numbers, bytes of one)]. The
    first ones of a run are its self-test; a step ends with the sums of its losses, in fp64. RuntimeError says what went wrong."""
    log = os.path.join(folder, f"nccl_{ranks}.log")
    if os.path.exists(log):
        os.remove(log)
    command = [*mpirun(ranks), program, *options, "--steps", "2"]
    env = dict(os.environ, EMU_NCCL_LOG=os.path.abspath(log), EMU_DEVICES=str(ranks), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    try:
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(command)}: {error}")
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise RuntimeError(f"{' '.join(command)}: exit code {result.returncode}: {said[-1] if said else ''}")
    if not os.path.exists(log):
        raise RuntimeError(f"{program} has written no {log}: is it the emulated trainer, and built lately?")
    with open(log, encoding="ascii") as file:
        lines = [line.split() for line in file]
    return second_step([(name, int(numbers), int(size)) for name, numbers, size, _ in lines])


def second_step(collectives):
    """[(numbers, bytes of one)] of the second step in a log of collectives."""
    ends = [i for i, (_, _, size) in enumerate(collectives) if size == 8]
    if len(ends) != 2 or any(name != "ncclAllReduce" for name, _, _ in collectives):
        raise RuntimeError("the collectives in the log are not those of two steps")
    return [(numbers, size) for _, numbers, size in collectives[ends[0] + 1:ends[1]]]
