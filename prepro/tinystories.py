#!/usr/bin/env python3
"""TinyStories (2 million stories in a small child's words) -> token shards.

    python3 prepro/tinystories.py --out data/tinystories                        from the hub, a BPE of 4096 tokens learned
    python3 prepro/tinystories.py --out data/tinystories --tokenizer bytes      or other tokens
    python3 prepro/tinystories.py --out data/tinystories TinyStoriesV2-GPT4-train.txt \\
        --val-files TinyStoriesV2-GPT4-valid.txt                                from files

It is text.py with other defaults: the dataset roneneldan/TinyStories, validation on its own validation split, and a
vocabulary learned from the stories, as a small model should not spend its parameters on words that they do not use.
All options of text.py work. Eldan and Li, TinyStories: How Small Can Language Models Be and Still Speak Coherent
English? (arXiv 2305.07759).
"""

from shards import run_main
from text import build_parser, convert

DATASET, BPE = "roneneldan/TinyStories", 4096


def main():
    args = build_parser(__doc__).parse_args()
    if args.dataset is None and not args.files:
        args.dataset = DATASET
        if args.val_split is None and args.val_fraction is None:
            args.val_split = "validation"
    if args.tokenizer is None and args.train_bpe is None:
        args.train_bpe = BPE
    return convert(args)


if __name__ == "__main__":
    run_main(main)
