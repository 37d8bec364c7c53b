#!/usr/bin/env python3
"""Do the folders that moe.c writes open in Hugging Face's code, and mean the same there? And the other way round?
`make test-hf`: needs torch, transformers, safetensors and numpy, and a built ./train_moe_cpu.

    python3 dev/test/hf/test_hf.py                        trains small models and checks what they wrote
    python3 dev/test/hf/test_hf.py --trainer ./train_moe  the same with another trainer
    python3 dev/test/hf/test_hf.py FOLDER...              only checks folders that you already have
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
GOLDENS = os.path.join(ROOT, "dev", "test", "goldens")
V5 = int(transformers.__version__.split(".")[0]) >= 5
LOGITS = 2e-5  # largest difference over largest logit, fp32 (goldens/README.md)
STORY = "Once upon a time there was a small gray cat. It liked to sit on the warm wall and look at the sea.\n"


class Lab:
    """A temporary folder, and the trainer run in it."""

    def __init__(self, trainer, tmp):
        self.trainer, self.tmp, self.count = trainer, tmp, 0

    def path(self, *names):
        return os.path.join(self.tmp, *names)

    def run(self, *args):
        r = subprocess.run([self.trainer, *map(str, args)], capture_output=True)
        said = r.stderr.decode(errors="replace").strip()
        assert r.returncode == 0, f"{' '.join(map(str, args))}: exit {r.returncode}: {said}"
        return r.stdout.decode(errors="replace")

    def random_batch(self, vocab, B=2, T=33):
        self.count += 1
        rng = np.random.default_rng(self.count)
        stream = rng.integers(0, vocab, (B, T + 1)).astype(np.int32)
        path = self.path(f"batch{self.count}.safetensors")
        save_file({"tokens": stream[:, :-1].copy(), "targets": stream[:, 1:].copy()}, path)
        return path

    def trained_on_text(self):
        """A folder with weights and tokenizer, from a few steps of the tiny model on text; made once."""
        out = self.path("text_run")
        if not os.path.isdir(out):
            with open(self.path("story.txt"), "w") as f:
                f.write((STORY * 4 + "<|endoftext|>") * 20)
            self.run("--model", "tiny", "--train-data", self.path("story.txt"), "--tokenize", "inline", "--out", out,
                     "--batch-size", 2, "--seq-len", 64, "--steps", 12, "--lr", 0.003, "--warmup-steps", 2)
        return os.path.join(out, "step_00000012")


def open_folder(folder):
    """The model in fp32 with nothing missing, left over or of another shape."""
    options = {"dtype": torch.float32, "output_loading_info": True}
    if V5:  # their default, grouped_mm, runs only where each row is a multiple of 16 bytes
        options["experts_implementation"] = "eager"
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info.get(what), f"{folder}: {what}: {info[what]}"
    return model.eval()


def hf_logits(model, batch):
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(load_file(batch)["tokens"]).long()).logits.numpy()


def distance(a, b):
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    return float(np.abs(a - b).max() / np.abs(b).max())


def same_logits(lab, folder):
    """Their logits of random tokens against ours: (distance, their model)."""
    model = open_folder(folder)
    batch, dump = lab.random_batch(model.config.vocab_size), lab.path("dump.safetensors")
    lab.run("--init", folder, "--batch", batch, "--dump", dump)
    d = distance(load_file(dump)["logits"], hf_logits(model, batch))
    assert d <= LOGITS, f"{folder}: logits differ by {d:.1e}, allowed {LOGITS:.0e}"
    return d, model


# ----------------------------------------------------------------------------------------------------------------------
# the claims

def trained_folder_opens_with_no_key_missing(lab):
    model = open_folder(lab.trained_on_text())
    assert model.config.vocab_size == 257 and type(model).__name__ == "Qwen3MoeForCausalLM"
    return f"{sum(p.numel() for p in model.parameters())} parameters"


def trained_folder_gives_our_logits(lab):
    return f"{same_logits(lab, lab.trained_on_text())[0]:.1e}"


def tokenizer_gives_our_bytes(lab):
    t = AutoTokenizer.from_pretrained(lab.trained_on_text())
    for text in ("Hello, world!", " two  spaces\n\n\tand lines ", "größe 雪 🙂", "".join(map(chr, range(1, 256)))):
        ids = t(text, add_special_tokens=False)["input_ids"]
        assert ids == list(text.encode()), f"{text!r} became {ids}"
        assert t.decode(ids) == text, f"{text!r} came back as {t.decode(ids)!r}"
    assert t.convert_tokens_to_ids("<|endoftext|>") == 256 and t.eos_token_id == 256
    assert t("a<|endoftext|>b")["input_ids"][-3:] == [97, 256, 98]
    return f"{len(t)} tokens"


def greedy_generation_is_ours(lab):
    folder = lab.trained_on_text()
    model, t = open_folder(folder), AutoTokenizer.from_pretrained(folder)
    start = [t.eos_token_id] + list(b"Once upon")  # the end-of-text token opens a document
    ids = model.generate(torch.tensor([start]), max_new_tokens=24, do_sample=False, pad_token_id=256)[0].tolist()
    text = t.decode([i for i in ids if i != 256])
    ours = lab.run("--init", folder, "--generate", 24, "--prompt", "Once upon", "--temperature", 0)
    assert text in ours, f"theirs {text!r}, ours {ours!r}"
    return repr(text)


def pipeline_needs_nothing_but_the_path(lab):
    generate = transformers.pipeline("text-generation", model=lab.trained_on_text())
    text = generate("Once", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert text.startswith("Once")
    return repr(text)


def every_kind_of_model_goes_out_and_back(lab):
    """golden folder -> our trainer -> a step -> our folder -> transformers: same logits, same config."""
    worst = 0.0
    for name in ("mha_top2", "tied", "aux", "odd", "mixed", "docs", "wide"):
        folder, out = os.path.join(GOLDENS, name), lab.path(f"{name}_out")
        lab.run("--init", folder, "--batch", os.path.join(folder, "golden.safetensors"), "--steps", 1, "--out", out)
        d, model = same_logits(lab, os.path.join(out, "step_00000001"))
        worst = max(worst, d)
        if not V5:  # 4.x does not read the golden's own config.json: it knows no num_local_experts, no rope_parameters
            continue
        was, now = (transformers.AutoConfig.from_pretrained(x).to_dict() for x in (folder, model.name_or_path))
        for key in ("transformers_version", "_name_or_path", "architectures"):
            was.pop(key, None), now.pop(key, None)
        changed = {k: (was.get(k), now.get(k)) for k in set(was) | set(now) if was.get(k) != now.get(k)}
        changed.pop("use_cache", None)
        assert not changed, f"{name}: config.json changed: {changed}"
    return f"{worst:.1e}"


def what_transformers_saves_again_we_read(lab):
    """our folder -> transformers -> save_pretrained, per expert, fused, in shards -> our trainer: same logits."""
    model, worst = open_folder(lab.trained_on_text()), 0.0
    batch, dump = lab.random_batch(257), lab.path("dump.safetensors")
    for form, options in (("plain", {}), ("fused", {"save_original_format": False}),
                          ("shards", {"max_shard_size": "99KB"})):
        if form == "fused" and not V5:
            continue
        model.save_pretrained(lab.path(form), **options)
        lab.run("--init", lab.path(form), "--batch", batch, "--dump", dump)
        worst = max(worst, distance(load_file(dump)["logits"], hf_logits(model, batch)))
    assert worst <= LOGITS, f"logits differ by {worst:.1e}"
    return f"{worst:.1e}"


def storage_forms_give_the_logits_beside_them(lab):
    golden, worst = load_file(os.path.join(GOLDENS, "formats", "golden.safetensors")), 0.0
    for form in ("per_expert", "fused", "sharded", "bf16", "fp16", "hub_spelling"):
        dump = lab.path("dump.safetensors")
        lab.run("--init", os.path.join(GOLDENS, "formats", form), "--batch",
                os.path.join(GOLDENS, "formats", "golden.safetensors"), "--dump", dump)
        want = golden[f"logits.{form}" if f"logits.{form}" in golden else "logits"]
        d = distance(load_file(dump)["logits"], want)
        assert d <= LOGITS, f"{form}: logits differ by {d:.1e}"
        worst = max(worst, d)
    return f"{worst:.1e}"


def choices_are_answered_as_by_a_transformers_script(lab):
    """--eval-choices against the obvious loop: one choice at a time, the sum of its tokens' log probabilities."""
    folder, path, numbers = lab.trained_on_text(), lab.path("choices.jsonl"), lab.path("choices_metrics.jsonl")
    script = os.path.join(ROOT, "prepro", "hellaswag.py")
    source = os.path.join(ROOT, "dev", "test", "choices", "stories.jsonl")
    subprocess.run([sys.executable, "-B", script, "--tokenizer", folder, "--out", path, source], check=True, capture_output=True)
    said = lab.run("--init", folder, "--eval-choices", path, "--seq-len", 256, "--batch-size", 3, "--metrics", numbers)
    model, tokenizer = open_folder(folder), AutoTokenizer.from_pretrained(folder)
    with open(source) as f, open(numbers) as g:
        questions, ours = [json.loads(line) for line in f], [json.loads(line) for line in g]
    right, worst = np.zeros(3), 0.0
    for q, our in zip(questions, ours):
        context, nats, per = tokenizer("<|endoftext|>" + q["ctx"])["input_ids"], [], []
        for ending in q["endings"]:
            choice = tokenizer(" " + ending, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([context + choice])).logits[0].double()
            log_p = torch.log_softmax(logits[len(context) - 1:-1], -1)[range(len(choice)), choice]
            nats.append(-float(log_p.sum()))
            per.append((1, len(choice), len(" " + ending)))
        worst = max(worst, *(abs(a - b) / a for a, b in zip(nats, our["nats"])))
        right += [np.argmin(np.array(nats) / np.array(per)[:, how]) == q["label"] for how in range(3)]
    assert len(ours) == len(questions) and worst <= LOGITS, f"{len(ours)} answers, they differ by {worst:.1e}"
    want = "accuracy {:.2f}% by likelihood, {:.2f}% per token, {:.2f}% per byte".format(*(100 * right / len(questions)))
    assert want in said, f"theirs {want!r}, ours {said!r}"
    return f"{worst:.1e}, {want}"


def given_folder_opens_and_gives_our_logits(lab, folder):
    d, model = same_logits(lab, folder)
    ids = model.generate(torch.tensor([[1]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert ids.shape[1] >= 2
    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        AutoTokenizer.from_pretrained(folder)
    return f"{folder}: {d:.1e}"


TESTS = [trained_folder_opens_with_no_key_missing, trained_folder_gives_our_logits, tokenizer_gives_our_bytes,
         greedy_generation_is_ours, pipeline_needs_nothing_but_the_path, every_kind_of_model_goes_out_and_back,
         what_transformers_saves_again_we_read, storage_forms_give_the_logits_beside_them,
         choices_are_answered_as_by_a_transformers_script]


def main():
    a = argparse.ArgumentParser(description="moe.c's folders in Hugging Face's code")
    a.add_argument("folders", nargs="*", help="check only these model folders")
    a.add_argument("--trainer", default=os.path.join(ROOT, "train_moe_cpu"))
    a = a.parse_args()
    if not os.path.exists(a.trainer):
        sys.exit(f"test_hf.py: no {a.trainer}: run `make train_moe_cpu` first, or give --trainer")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tests = [(given_folder_opens_and_gives_our_logits, f) for f in a.folders] or [(t,) for t in TESTS]
    failed = 0
    with tempfile.TemporaryDirectory() as tmp:
        lab = Lab(os.path.abspath(a.trainer), tmp)
        for test, *args in tests:
            try:
                print(f"ok   {test.__name__}  {test(lab, *args) or ''}".rstrip(), flush=True)
            except Exception as e:  # one broken claim must not hide the others
                failed += 1
                print(f"FAIL {test.__name__}: {type(e).__name__}: {e}", flush=True)
    print(f"{len(tests) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
