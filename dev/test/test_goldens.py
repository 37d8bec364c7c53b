"""The trainer against every golden folder: logits, losses, routing, gradients, ten steps of AdamW, every way to store
weights. All numbers come from Hugging Face's code (goldens/README.md); needs numpy and safetensors, no torch."""

import glob
import os

import numpy as np
from safetensors.numpy import load_file

from compare_golden import compare
from harness import *

TRAINER = os.environ.get("TRAINER", "./train_moe_cpu")
GOLDENS = os.path.join(ROOT, "dev", "test", "goldens")
TEN_STEPS = ["--steps", 10, "--lr", 0.001, "--schedule", "constant", "--warmup-steps", 0, "--save-every", 1]


def options_for(golden):
    """--init, --batch, and --doc-mask where the folder has documents."""
    batch = os.path.join(golden, "golden.safetensors")
    return ["--init", golden, "--batch", batch] + (["--doc-mask"] if "doc_ids" in load_file(batch) else [])


def check_golden(name, *variant):
    golden = os.path.join(GOLDENS, name)
    dump, metrics, out = folder("dump.safetensors"), folder("steps.jsonl"), folder("out")
    os.makedirs(folder(), exist_ok=True)
    run([TRAINER, *options_for(golden), "--dump", dump, *variant])
    run([TRAINER, *options_for(golden), *TEN_STEPS, "--out", out, "--metrics", metrics, *variant])
    table = compare(golden, dump, metrics, out)
    check(len(table.rows) >= 16, f"only {len(table.rows)} quantities compared")
    check(not table.failed(), "; ".join(f"{q}: {m:.2e}, allowed {t:.0e} {note}" for q, m, t, note in table.failed()))


def claim(name, function):
    function.__name__ = name
    test(function)


names = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(os.path.join(GOLDENS, "*", "golden.json")))
for name in names:
    claim(f"{name}_is_what_hugging_face_computes", lambda name=name: check_golden(name))
for name in ("aux", "docs", "mixed", "odd"):
    claim(f"{name}_holds_on_the_plain_path", lambda name=name: check_golden(
        name, "--attention", "naive", "--experts", "loop", "--optimizer", "simple", "--loader", "inline"))


@test
def seven_goldens_are_here():
    check(len(names) == 7, f"{len(names)} folders with a golden.json in {GOLDENS}")


@test
def without_doc_mask_documents_see_each_other():
    golden = os.path.join(GOLDENS, "docs")
    run([TRAINER, *[o for o in options_for(golden) if o != "--doc-mask"], "--dump", folder("dump.safetensors")])
    failed = compare(golden, folder("dump.safetensors")).failed()
    check(any(q == "logits" and m > 1e-2 for q, m, _, _ in failed), "the same logits with and without documents")


def check_form(form):
    forms = os.path.join(GOLDENS, "formats")
    golden = load_file(os.path.join(forms, "golden.safetensors"))
    dump, batch = folder("dump.safetensors"), os.path.join(forms, "golden.safetensors")
    run([TRAINER, "--init", os.path.join(forms, form), "--batch", batch, "--dump", dump])
    got, want = load_file(dump)["logits"], golden[f"logits.{form}" if f"logits.{form}" in golden else "logits"]
    diff = np.abs(got - want).max() / np.abs(want).max()
    check(diff <= 2e-5, f"logits differ by {diff:.1e} of the largest, allowed 2e-5")


for form in ("per_expert", "fused", "sharded", "bf16", "fp16", "hub_spelling"):
    claim(f"weights_stored_as_{form}_are_read", lambda form=form: check_form(form))

main()
