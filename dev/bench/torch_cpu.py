"""PyTorch's side of compare_cpu.py: steps of Hugging Face's Qwen3MoeForCausalLM on a CPU, as fast as PyTorch makes them.

    python3 dev/bench/torch_cpu.py M bf16-autocast 5     # one step to warm up, then 5; prints each step's milliseconds in a line

`as-it-comes` is what a reader of the documentation writes; the others have sdpa, experts as grouped products and the fused AdamW.
The names of the ways end in -compile where torch.compile comes on top. Same work as train_moe_cpu's step: forward, cross-entropy
in fp32, backward, AdamW with decay; no gradient norm and no clipping, which train_moe_cpu does do. Needs torch and transformers."""

import contextlib
import sys
import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

SIZES = {  # as in bench_cpu.c
    "S": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, num_experts=8,
              moe_intermediate_size=256, vocab_size=4096, B=4, T=256),
    "M": dict(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, num_experts=16,
              moe_intermediate_size=512, vocab_size=16384, B=4, T=512),
    "SEED1": dict(hidden_size=896, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=16, num_experts=16,
                  moe_intermediate_size=512, vocab_size=151936, B=1, T=512),
}


def build(size, way):
    """(model, optimizer, B, T)"""
    sizes = dict(SIZES[size])
    B, T = sizes.pop("B"), sizes.pop("T")
    config = Qwen3MoeConfig(**sizes, head_dim=64, num_experts_per_tok=2, norm_topk_prob=True, intermediate_size=1024, tie_word_embeddings=False,
                            router_aux_loss_coef=0.0, output_router_logits=False, use_cache=False, pad_token_id=None)
    torch.manual_seed(1)
    if way == "as-it-comes":
        model = Qwen3MoeForCausalLM(config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1), B, T
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa")
    model.set_experts_implementation("grouped_mm")
    if way.startswith("bf16-weights"):
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return model, optimizer, B, T


def main():
    size, way, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    logging.set_verbosity_error()
    model, optimizer, B, T = build(size, way)
    model.train()
    forward = torch.compile(model) if way.endswith("-compile") else model
    autocast = way.startswith("bf16-autocast")
    tokens = torch.randint(0, SIZES[size]["vocab_size"], (B, T + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    for step in range(-1, steps):
        begin = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            logits = forward(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"{(time.perf_counter() - begin) * 1e3:.3f}", flush=True)
        if not torch.isfinite(loss):
            sys.exit("torch_cpu.py: the loss is not finite")


main()
