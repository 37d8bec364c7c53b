#!/usr/bin/env python3
"""How far from the fp32 numbers of a golden folder (../goldens/README.md) is Hugging Face's own model in bf16, and how far is
a trainer in bf16? Both are told the experts of each token, for rounding alone makes some choose others. Prints, of each
folder, both distances in shares of the limits in compare_golden.py, and with several folders their median. Exit code 1 if
the trainer is further off than FURTHER times Hugging Face's, in the logits or in all gradients together. Single tensors
and the loss are printed only: which of two roundings is luckier there is chance.

    python3 dev/test/hf/compare_bf16.py --trainer ./train_moe dev/test/goldens/*/
    python3 dev/test/hf/compare_bf16.py --trainer ./train_moe_cpu --options "--precision bf16" FOLDER...

Folders of your own are made by make_goldens.py. Needs torch, transformers 5, safetensors and numpy."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from compare_golden import Table, compare_dump
from make_goldens import attention_mask, build, published

FURTHER = 1.5  # of 46 folders the worst of train_moe (emulated) were 1.2 in the logits and 1.3 in the gradients


def told_experts(golden, l):
    return torch.from_numpy(golden[f"router.layers.{l}.topk_index"]).long()


def hugging_face(folder, golden):
    """Loss, logits and gradients, named as in a trainer's dump, of their model with weights and activations in bf16."""
    weights = published(Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32))
    model = build(Qwen3MoeConfig.from_pretrained(folder), weights).bfloat16()
    config, counts, probs, rows = model.config, 0, 0, 0

    def tell(gate, l):
        def choose(module, inputs, outputs):
            nonlocal counts, probs, rows
            logits, experts = outputs[0], told_experts(golden, l)
            p = torch.softmax(logits.float(), -1)
            weights = p.gather(1, experts)
            weights = weights / weights.sum(-1, keepdim=True) if module.norm_topk_prob else weights
            counts = counts + torch.bincount(experts.flatten(), minlength=module.num_experts)
            probs, rows = probs + p.sum(0), rows + len(p)
            return logits, weights.to(logits.dtype), experts
        gate.register_forward_hook(choose)

    for l, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            tell(layer.mlp.gate, l)
    tokens, targets = (torch.from_numpy(golden[n]).long() for n in ("tokens", "targets"))
    mask = attention_mask(golden, model.dtype)
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, output_router_logits=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    if config.output_router_logits and rows > 0:  # the balance loss, of the experts it was told
        loss = loss + config.router_aux_loss_coef * config.num_experts * (counts / rows * probs / rows).sum()
    loss.backward()
    gradients = published(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    return {"loss": loss.detach().numpy(), "logits": logits.detach().numpy(),
            **{"grad." + n: t.float().numpy() for n, t in gradients.items()}}


def trainers(command, folder, golden):
    """The same of the trainer."""
    with tempfile.TemporaryDirectory() as tmp:
        dump = os.path.join(tmp, "dump.safetensors")
        documents = ["--doc-mask"] if "doc_ids" in golden else []
        r = subprocess.run([*command, "--init", folder, "--batch", os.path.join(folder, "golden.safetensors"), *documents,
                            "--force-routing", "--dump", dump], capture_output=True, text=True)
        if r.returncode != 0:
            sys.exit(f"compare_bf16.py: {folder}: exit code {r.returncode}: {r.stderr.strip()}")
        return load_file(dump)


def shares(dump, golden, scalars):
    """Of loss, logits, all gradients together, the worst gradient: the distance over its limit. And the worst one's name."""
    table = Table()
    compare_dump(table, dump, golden, scalars, bf16=True)
    lost = [quantity for quantity, _, limit, _ in table.rows if quantity.startswith("grad.") and limit == 0]
    if lost:
        sys.exit(f"compare_bf16.py: {', '.join(lost)}: missing, of another shape, or one too many")
    rows = {quantity: (measured / limit, note) for quantity, measured, limit, note in table.rows if limit > 0}
    found = [rows[q] for q in ("loss", "logits", "gradients, all together", "gradients, worst tensor")]
    return [share for share, _ in found], found[-1][1]


def main():
    a = argparse.ArgumentParser(description="a trainer's bf16 beside Hugging Face's")
    a.add_argument("folders", nargs="+", metavar="FOLDER", help="golden folders")
    a.add_argument("--trainer", required=True)
    a.add_argument("--options", default="", help="for the trainer")
    a = a.parse_args()
    torch.set_num_threads(1)  # the sums have one order
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    command = [os.path.abspath(a.trainer), *a.options.split()]
    folders = [f for f in a.folders if os.path.exists(os.path.join(f, "golden.json"))]
    if not folders:
        sys.exit("compare_bf16.py: none of these folders has a golden.json")
    ratios, failed = [], 0
    print("shares of the limits: loss, logits, all gradients together, the worst one\n"
          f"{'':<16} {'Hugging Face in bf16':<28} {os.path.basename(a.trainer)}")
    for folder in folders:
        golden = load_file(os.path.join(folder, "golden.safetensors"))
        with open(os.path.join(folder, "golden.json")) as f:
            scalars = json.load(f)
        (theirs, _), (ours, name) = (shares(d, golden, scalars) for d in (hugging_face(folder, golden), trainers(command, folder, golden)))
        ratios.append([y / x if x else float(not y <= 0) for x, y in zip(theirs, ours)])
        bad = not all(r <= FURTHER for r in ratios[-1][1:3])  # true for NaN, too
        failed += bad
        row = "".join(f"{x:7.2f}" for x in theirs) + "   " + "".join(f"{x:7.2f}" for x in ours)
        print(f"{'FAIL' if bad else 'ok  '} {os.path.basename(folder.rstrip('/')):<14}{row}  {name}", flush=True)
    if len(ratios) > 1:
        print("the trainer's distance over Hugging Face's, median: "
              + ", ".join(f"{what} {m:.2f}" for what, m in zip(("loss", "logits", "gradients", "worst"), np.median(ratios, 0))))
    print(f"{len(folders) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
