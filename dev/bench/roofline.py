#!/usr/bin/env python3
"""What a training step must do, and how long it must take: FLOPs, bytes and the possible time of each phase.

    python3 dev/bench/roofline.py                          smol-500m, B=8, T=4096 on the card of the reference run
    python3 dev/bench/roofline.py --card h200 -b 16        another card, another batch (--card list: all of them)
    python3 dev/bench/roofline.py --model demo --metrics out/demo/metrics.jsonl -b 1 -t 1024
                                                           this CPU, whose matrix product rate that run has measured
    python3 dev/bench/roofline.py --hours                  hours to 10B tokens on every card

An operation's possible time is the longer of FLOPs / matrix product rate and bytes / memory bandwidth. FLOPs are those that
are executed: attention's backward computes the scores again. Bytes are those of memory: a tensor that an operation reads or
writes counts once, weights once a pass, and nothing is found in a cache that another operation has left there. `sustained`
takes the rates that a card holds in long runs; `realistic` and `ambitious` take the share of them that such an operation
reaches in good kernels. Only Python's standard library; other programs here import it.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import namedtuple

# ----------------------------------------------------------------------------
# cards

# peak: dense bf16 TFLOP/s with fp32 accumulation as the data sheet says; sustained: what the power limit leaves of it in long
# matrix products. bandwidth: GB/s; usable: the share of it that a copy reaches. memory GB. link: GB/s that a rank sends in an
# all-reduce, without and with direct access between the cards. share: (realistic, ambitious) part of `sustained` that is
# reached by plain matrix products, lm_head, grouped experts, attention forward and backward; `memory`, of the bandwidth.
# Peaks and bandwidths are the makers'; sustained rates are published measurements of cuBLAS; links and shares are planning
# figures, between what published kernels reach and what has been seen at its best.
Card = namedtuple("Card", "name arch peak sustained bandwidth usable memory link share")

MEMORY_SHARE = (0.88, 0.96)


def share(matmul, head, experts, attention_forward, attention_backward):
    return {"matmul": matmul, "head": head, "experts": experts, "attention_forward": attention_forward,
            "attention_backward": attention_backward, "memory": MEMORY_SHARE}


CARDS = {
    # measured on the card: 427 TFLOP/s in registers alone, but long products settle at 1417 MHz in 300 W: 243 to 310, here 273
    "maxq": Card("RTX PRO 6000 Blackwell Max-Q 300 W", "sm_120", 438.9, 273.0, 1792, 0.90, 96, (12, 40),
                 share((.88, .95), (.90, .96), (.78, .92), (.70, .82), (.52, .66))),
    "pro6000": Card("RTX PRO 6000 Blackwell 600 W", "sm_120", 503.8, 400.0, 1792, 0.90, 96, (12, 40),
                    share((.85, .93), (.88, .95), (.75, .90), (.72, .85), (.50, .66))),
    "4090": Card("RTX 4090 450 W", "sm_89", 165.2, 165.2, 1008, 0.90, 24, (8, 20),
                 share((.90, .97), (.92, .98), (.80, .93), (.75, .88), (.55, .70))),
    # data sheets print 1979: with sparsity. mma.sync alone, without wgmma, stops at 63-65% of the peak
    "h100": Card("H100 SXM 700 W", "sm_90", 989.4, 760.0, 3350, 0.88, 80, (200, 360),
                 share((.80, .92), (.85, .95), (.55, .80), (.50, .60), (.40, .52))),
    "h200": Card("H200 SXM 700 W", "sm_90", 989.4, 760.0, 4800, 0.88, 141, (200, 360),
                 share((.80, .92), (.85, .95), (.55, .80), (.48, .58), (.40, .52))),
}


def cpu_card(gflops, bandwidth, name="this machine's CPU"):
    """A CPU whose peaks were measured: GFLOP/s of its matrix products (a run's gemm figure) and GB/s of its memory."""
    return Card(name, "cpu", gflops / 1e3, gflops / 1e3, bandwidth, 1.0, 0, (10, 10),
                share((.93, .98), (.93, .98), (.90, .96), (.70, .85), (.65, .80)))


def measured_gflops(rows, shape, T):
    """GFLOP/s of the matrix product that the trainer timed at its start, from the lines of a metrics.jsonl; None: not there.
    gemm_share = model FLOPs / step time / that rate."""
    rates = [model_flops_per_token(shape, T) * row["tokens_per_s"] / row["gemm_share"] / 1e9
             for row in rows if row.get("gemm_share") and row.get("tokens_per_s")]
    return statistics.median(rates) if rates else None


def measured_bandwidth(megabytes=256, threads=None, seconds=0.3):
    """GB/s that copies in this machine's memory reach, read and written bytes together, all cores at once (needs numpy).
    Ask for about the size of the tensors in question: those of a small model stay in the caches."""
    import threading
    import numpy
    threads = threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    size = max(1000, int(megabytes * 1e6) // threads // 16)
    repeats = max(1, int(64e6) // (16 * size * threads)) # so that starting a thread costs nothing beside its copies
    arrays = [(numpy.zeros(size), numpy.ones(size)) for _ in range(threads)]

    def copies(out, inp):
        for _ in range(repeats):
            numpy.copyto(out, inp)

    best, rounds, until = 0.0, 0, time.perf_counter() + seconds
    while rounds < 4 or time.perf_counter() < until: # the first round touches the memory
        workers = [threading.Thread(target=copies, args=pair) for pair in arrays]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, 16 * size * threads * repeats / (time.perf_counter() - begin) / 1e9)
        rounds += 1
    return best


# ----------------------------------------------------------------------------
# models: the letters of the trainers. dense: the layers that have one MLP of hidden size dense_F in place of experts.

Shape = namedtuple("Shape", "V C L NH NKV HD E K F tied dense dense_F", defaults=((), 0))

PRESETS = { # llmc/config.h
    "smol-500m": Shape(151936, 896, 12, 16, 16, 64, 16, 2, 512, False),
    "demo": Shape(257, 128, 4, 4, 4, 32, 8, 2, 128, False),
    "tiny": Shape(257, 64, 2, 4, 2, 16, 4, 2, 32, False),
}


def shape_of(model):
    """The shape of a preset, or of a config.json or its folder. ValueError says what is wrong."""
    if model in PRESETS:
        return PRESETS[model]
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    try:
        with open(path, encoding="utf-8") as file:
            return shape_of_config(json.load(file))
    except OSError as error:
        raise ValueError(f"no preset ({', '.join(PRESETS)}) and no file: {path}: {error.strerror}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no config.json of a Qwen3-MoE model: {error!r}")


def shape_of_config(c):
    """The shape of what a config.json holds."""
    heads, layers = c["num_attention_heads"], c["num_hidden_layers"]
    every, without = c.get("decoder_sparse_step"), c.get("mlp_only_layers") or ()
    every = 1 if every is None else every
    if every < 1 or any(not 0 <= l < layers for l in without):
        raise ValueError(f"decoder_sparse_step {every}, mlp_only_layers {list(without)}")
    dense = tuple(l for l in range(layers) if l in without or (l + 1) % every != 0)
    return Shape(c["vocab_size"], c["hidden_size"], layers, heads, c.get("num_key_value_heads") or heads,
                 c.get("head_dim") or c["hidden_size"] // heads, c["num_experts"], c["num_experts_per_tok"],
                 c["moe_intermediate_size"], bool(c.get("tie_word_embeddings", False)), dense, c["intermediate_size"] if dense else 0)


def moe_layers(s):
    return [l for l in range(s.L) if l not in s.dense]


def attention_parameters(s):
    """Of one layer's four matrices."""
    return s.C * (2 * s.NH + 2 * s.NKV) * s.HD


def layer_parameters(s, l):
    mlp = 3 * s.C * s.dense_F if l in s.dense else s.E * (s.C + 3 * s.C * s.F)
    return attention_parameters(s) + 2 * s.C + 2 * s.HD + mlp


def parameters(s):
    return s.V * s.C * (1 if s.tied else 2) + sum(layer_parameters(s, l) for l in range(s.L)) + s.C


def matmul_parameters(s):
    """Weights that the matrix products of one token meet."""
    mlps = len(moe_layers(s)) * (s.E * s.C + s.K * 3 * s.C * s.F) + len(s.dense) * 3 * s.C * s.dense_F
    return s.V * s.C + s.L * attention_parameters(s) + mlps


def model_flops_per_token(s, T):
    """What the trainers' mfu counts (llmc/profiler.h): no recomputation, the causal half of attention."""
    return 6 * matmul_parameters(s) + 6 * s.L * s.NH * s.HD * T


# ----------------------------------------------------------------------------
# a step's operations

# phase: the trainers' word; direction: forward or backward (update: once a step); layers: of which ones, (None,): of none, once;
# kind: which share of the card's rate it reaches; flops and bytes: of all layers together, in one microbatch.
Operation = namedtuple("Operation", "phase direction name layers kind flops bytes")


def operations(s, B, T, element=2, gradient=4, chunk=8192, keys=None):
    """The operations of one microbatch, in order. element, gradient: bytes of an activation or weight, and of a gradient's
    number (train_moe: 2 and 4, train_moe_cpu: 4 and 4). keys: how many keys a query sees on average; T / 2, the causal half,
    unless a document mask leaves fewer."""
    N, R = B * T, s.K * B * T # R rows after routing
    C, F, E, K, V, D = s.C, s.F, s.E, s.K, s.V, s.dense_F
    every, moe, dense, once = tuple(range(s.L)), tuple(moe_layers(s)), s.dense, (None,)
    A, KV = s.NH * s.HD, s.NKV * s.HD
    QKV, e, g = A + 2 * KV, element, gradient
    keys = T / 2 if keys is None else keys
    chunks = math.ceil(N / min(chunk, N))
    result = []

    def add(phase, direction, name, kind, flops, size, layers=every):
        if layers:
            result.append(Operation(phase, direction, name, layers, kind, flops * len(layers), size * len(layers)))

    def matmul(phase, direction, name, kind, m, k, n, weights=None, layers=every):
        # out[m,n] = in[m,k] times weights
        weights = k * n if weights is None else weights
        add(phase, direction, name, kind, 2 * m * k * n, e * (m * k + weights + m * n), layers)

    def matmul_weight(phase, name, kind, m, k, n, weights=None, layers=every):
        # d weights[n,k] += d out[m,n] ^T in[m,k]: the sums are read and written
        weights = k * n if weights is None else weights
        add(phase, "backward", name, kind, 2 * m * k * n, e * m * (k + n) + 2 * g * weights, layers)

    add("embedding", "forward", "embedding", "memory", 0, e * 2 * N * C, once)
    add("norms", "forward", "two RMSNorms, residual added", "memory", 0, e * 8 * N * C)
    matmul("qkv_o", "forward", "q, k, v", "matmul", N, C, QKV)
    add("norms", "forward", "norm of q and k, RoPE", "memory", 0, e * 2 * N * (A + KV))
    add("attention", "forward", "attention", "attention_forward", 4 * keys * N * A, e * N * (2 * A + 2 * KV) + 4 * N * s.NH)
    matmul("qkv_o", "forward", "o", "matmul", N, A, C)
    add("router", "forward", "router, softmax, top-k", "memory", 2 * N * C * E, e * N * C + 4 * N * (E + 2 * K), moe)
    add("permute", "forward", "rows sorted by expert", "memory", 0, 4 * 4 * R, moe)
    add("experts", "forward", "gate and up, SwiGLU", "experts", 2 * R * C * 2 * F, e * (R * C + E * C * 2 * F + R * 3 * F), moe)
    matmul("experts", "forward", "down", "experts", R, F, C, E * F * C, moe)
    add("permute", "forward", "weighted sum of each token's experts", "memory", 0, e * N * C * (K + 1), moe)
    matmul("experts", "forward", "dense layers: gate and up", "matmul", N, C, 2 * D, layers=dense)
    add("experts", "forward", "dense layers: SwiGLU", "memory", 0, e * N * 3 * D, dense)
    matmul("experts", "forward", "dense layers: down", "matmul", N, D, C, layers=dense)
    add("norms", "forward", "final RMSNorm", "memory", 0, e * 4 * N * C, once)
    # lm_head and loss, a chunk of rows at a time, backward at once
    add("lm_head", "forward", "logits", "head", 2 * N * C * V, e * (N * C + chunks * C * V + N * V), once)
    add("lm_head", "forward", "softmax, loss, its gradient in place", "memory", 0, e * 2 * N * V, once)
    add("lm_head", "backward", "d of its input", "head", 2 * N * C * V, e * (N * C + chunks * C * V + N * V), once)
    add("lm_head", "backward", "d of its weights", "head", 2 * N * C * V, e * (N * C + N * V) + 2 * g * C * V * chunks, once)
    add("norms", "backward", "final RMSNorm", "memory", 0, e * 3 * N * C, once)
    add("experts", "backward", "d of down's input, SwiGLU", "experts", 2 * R * C * F, e * (R * C + E * C * F + R * 5 * F), moe)
    matmul_weight("experts", "d of down's weights", "experts", R, F, C, E * F * C, moe)
    matmul("experts", "backward", "d of gate's and up's input", "experts", R, 2 * F, C, E * C * 2 * F, moe)
    matmul_weight("experts", "d of gate's and up's weights", "experts", R, C, 2 * F, E * C * 2 * F, moe)
    add("permute", "backward", "sum over each token's experts", "memory", 0, e * N * C * (K + 1), moe)
    add("router", "backward", "router", "memory", 4 * N * C * E, e * 2 * N * C + 8 * N * E, moe)
    matmul("experts", "backward", "dense layers: d of down's input", "matmul", N, C, D, layers=dense)
    matmul_weight("experts", "dense layers: d of down's weights", "matmul", N, D, C, layers=dense)
    add("experts", "backward", "dense layers: SwiGLU", "memory", 0, e * N * 5 * D, dense)
    matmul("experts", "backward", "dense layers: d of gate's and up's input", "matmul", N, 2 * D, C, layers=dense)
    matmul_weight("experts", "dense layers: d of gate's and up's weights", "matmul", N, C, 2 * D, layers=dense)
    add("norms", "backward", "two RMSNorms, residual", "memory", 0, e * 8 * N * C)
    matmul("qkv_o", "backward", "d of o's input", "matmul", N, C, A)
    matmul_weight("qkv_o", "d of o's weights", "matmul", N, A, C)
    add("attention", "backward", "attention", "attention_backward", 10 * keys * N * A, e * N * (5 * A + 4 * KV) + 8 * N * A)
    add("norms", "backward", "norm of q and k, RoPE", "memory", 0, e * 3 * N * (A + KV))
    matmul("qkv_o", "backward", "d of q's, k's, v's input", "matmul", N, QKV, C)
    matmul_weight("qkv_o", "d of q's, k's, v's weights", "matmul", N, C, QKV)
    add("embedding", "backward", "embedding", "memory", 0, e * N * C + 2 * g * min(N, V) * C, once)
    return result


def update_operations(s, element=2, gradient=4):
    """What follows once a step, whatever the number of microbatches. AdamW reads the gradient, and reads and writes weight,
    first and second moment in fp32; where weights are also kept in bf16 it writes those."""
    P = parameters(s)
    copies = element if element < 4 else 0
    return [Operation("grad_norm", "update", "norm of the gradients", (None,), "memory", 2 * P, gradient * P),
            Operation("optimizer", "update", "AdamW", (None,), "memory", 12 * P, (gradient + 24 + copies) * P)]


def possible_ms(operation, card, mode="sustained"):
    """mode: nominal (data sheet), sustained, realistic, ambitious."""
    peak = card.peak if mode == "nominal" else card.sustained
    bandwidth = card.bandwidth * (1.0 if mode == "nominal" else card.usable)
    column = {"realistic": 0, "ambitious": 1}.get(mode)
    compute_share = 1.0 if column is None or operation.kind == "memory" else card.share[operation.kind][column]
    memory_share = 1.0 if column is None else card.share["memory"][column]
    return max(operation.flops / (peak * 1e9 * compute_share), operation.bytes / (bandwidth * 1e6 * memory_share))


def bound(operation, card):
    """What the operation waits for: compute or memory."""
    return "compute" if operation.flops / (card.sustained * 1e9) > operation.bytes / (card.bandwidth * card.usable * 1e6) else "memory"


def elements_of(card):
    """Bytes of (an activation, a gradient) in the trainer that runs there."""
    return (4, 4) if card.arch == "cpu" else (2, 4)


def phases(s, B, T, card, grad_accum=1, mode="sustained", keys=None):
    """{phase: {flops, bytes, possible_ms, bound}} of one step, in the order of the trainers' phases. `bound` is that of the
    larger part of the time."""
    element, gradient = elements_of(card)
    result = {}
    for count, ops in ((grad_accum, operations(s, B, T, element, gradient, keys=keys)), (1, update_operations(s, element, gradient))):
        for op in ops:
            row = result.setdefault(op.phase, {"flops": 0.0, "bytes": 0.0, "possible_ms": 0.0, "compute": 0.0, "memory": 0.0})
            ms = count * possible_ms(op, card, mode)
            row["flops"] += count * op.flops
            row["bytes"] += count * op.bytes
            row["possible_ms"] += ms
            row[bound(op, card)] += ms
    for row in result.values():
        compute, memory = row.pop("compute"), row.pop("memory")
        row["bound"] = "compute" if compute > memory else "memory"
    return result


def microbatch_ms(s, B, T, card, mode="realistic", keys=None):
    """(forward, backward) of one microbatch. lm_head's forward counts as backward, where the trainers do it."""
    element, gradient = elements_of(card)
    ms = {"forward": 0.0, "backward": 0.0}
    for op in operations(s, B, T, element, gradient, keys=keys):
        ms["backward" if op.phase == "lm_head" else op.direction] += possible_ms(op, card, mode)
    return ms["forward"], ms["backward"]


def update_ms(s, card, mode="realistic"):
    return sum(possible_ms(op, card, mode) for op in update_operations(s, *elements_of(card)))


def hours(tokens_per_second, tokens=10e9):
    return tokens / tokens_per_second / 3600


# ----------------------------------------------------------------------------
# printing

def print_model(s, B, T, card):
    N = B * T
    print(f"{card.name}: {card.sustained:.4g} TFLOP/s sustained, {card.bandwidth * card.usable:.4g} GB/s")
    print(f"{parameters(s) / 1e6:.1f}M parameters, {matmul_parameters(s) / 1e6:.1f}M in a token's matrix products, "
          f"{model_flops_per_token(s, T) / 1e9:.4g} GFLOP a token; B = {B}, T = {T}\n")
    print(f"{'phase':<10} {'direction':<9} {'operation':<38} {'GFLOP':>9} {'MB':>9} {'possible ms':>12} {'share':>6}  bound by {'realistic ms':>13}")
    ops = operations(s, B, T, *elements_of(card))
    total = sum(possible_ms(op, card) for op in ops)
    for op in ops:
        ms = possible_ms(op, card)
        print(f"{op.phase:<10} {op.direction:<9} {op.name:<38} {op.flops / 1e9:9.3g} {op.bytes / 1e6:9.3g} {ms:12.3f} "
              f"{ms / total:6.1%}  {bound(op, card):<8} {possible_ms(op, card, 'realistic'):13.3f}")
    print(f"\n{'phase':<12} {'possible ms':>12} {'share':>6}")
    for phase, row in sorted(phases(s, B, T, card).items(), key=lambda item: -item[1]["possible_ms"]):
        print(f"{phase:<12} {row['possible_ms']:12.3f} {row['possible_ms'] / total:6.1%}")
    for mode in ("sustained", "ambitious", "realistic"):
        ms = sum(microbatch_ms(s, B, T, card, mode))
        print(f"{mode:<10} {ms:10.2f} ms a microbatch, {N / ms * 1e3:10.0f} tokens/s, and {update_ms(s, card, mode):.2f} ms a step for the update")


def print_hours(s, T, tokens_per_step):
    print(f"hours to 10B tokens, one card, steps of {tokens_per_step} tokens (B = 8; 4 on the RTX 4090)")
    print(f"{'card':<36} {'sustained':>10} {'ambitious':>10} {'realistic':>10}")
    for key, card in CARDS.items():
        B, cells = 4 if key == "4090" else 8, []
        for mode in ("sustained", "ambitious", "realistic"):
            ms = tokens_per_step / (B * T) * sum(microbatch_ms(s, B, T, card, mode)) + update_ms(s, card, mode)
            cells.append(hours(tokens_per_step / ms * 1e3))
        print(f"{card.name:<36} " + " ".join(f"{h:10.1f}" for h in cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smol-500m", help="smol-500m, demo, tiny, or a config.json [smol-500m]")
    parser.add_argument("--card", default="maxq", help=f"{', '.join(CARDS)}, or list [maxq]")
    parser.add_argument("--metrics", metavar="FILE", help="metrics.jsonl of train_moe_cpu: this machine's CPU in place of a card")
    parser.add_argument("-b", "--batch-size", type=int, default=8, metavar="B", help="sequences a microbatch [8]")
    parser.add_argument("-t", "--seq-len", type=int, default=4096, metavar="T", help="tokens a sequence [4096]")
    parser.add_argument("--hours", action="store_true", help="hours to 10B tokens on every card")
    args = parser.parse_args()
    if args.card == "list":
        for key, card in CARDS.items():
            print(f"{key:<8} {card.name:<36} {card.sustained:6.1f} of {card.peak:6.1f} TFLOP/s, {card.bandwidth} GB/s, {card.memory} GB")
        return
    try:
        shape = shape_of(args.model)
        if args.batch_size < 1 or args.seq_len < 1:
            raise ValueError("--batch-size and --seq-len must be at least 1")
        if args.card not in CARDS:
            raise ValueError(f"--card {args.card}: there are {', '.join(CARDS)}")
        card = CARDS[args.card]
        if args.metrics:
            with open(args.metrics, encoding="utf-8") as file:
                gflops = measured_gflops([json.loads(line) for line in file if line.endswith("}\n")], shape, args.seq_len)
            if gflops is None:
                raise ValueError(f"{args.metrics}: no step has a gemm_share")
            ops = operations(shape, args.batch_size, args.seq_len, 4, 4)
            card = cpu_card(gflops, measured_bandwidth(statistics.median(op.bytes / len(op.layers) for op in ops) / 1e6))
    except (OSError, ValueError) as error:
        print(f"roofline.py: error: {error}", file=sys.stderr)
        sys.exit(1)
    if args.hours:
        print_hours(shape, args.seq_len, 1 << 20)
    else:
        print_model(shape, args.batch_size, args.seq_len, card)


if __name__ == "__main__":
    main()
