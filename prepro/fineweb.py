#!/usr/bin/env python3
"""FineWeb-Edu (web pages chosen for what can be learned from them) -> token shards for smol-500m.

    python3 prepro/fineweb.py --out data/fineweb                                10 billion tokens, 40 GB
    python3 prepro/fineweb.py --out data/fineweb --max-tokens 1000000000        a tenth of them
    python3 prepro/fineweb.py --out data/fineweb --dataset HuggingFaceFW/fineweb     all kinds of pages
    python3 prepro/fineweb.py --out data/fineweb --tokenizer data/qwen sample/10BT/*.parquet     from files

It is text.py with other defaults: the sample-10BT of HuggingFaceFW/fineweb-edu, Qwen's tokenizer, one page of 2,000 for
validation. All options of text.py work; an interrupted run goes on. Streaming reads one connection's worth, tens of MB/s
at best: who has the disk downloads the Parquet files first (hf download HuggingFaceFW/fineweb-edu --repo-type dataset
--include 'sample/10BT/*') and names them.
"""

from shards import run_main
from text import build_parser, convert

DATASET, CONFIG, TOKENIZER, VAL_FRACTION = "HuggingFaceFW/fineweb-edu", "sample-10BT", "Qwen/Qwen3-0.6B", 0.0005


def main():
    args = build_parser(__doc__).parse_args()
    if args.dataset is None and not args.files:
        args.dataset = DATASET
    if args.dataset is not None and args.dataset.startswith("HuggingFaceFW/") and args.dataset_config is None:
        args.dataset_config = CONFIG
    if args.tokenizer is None and args.train_bpe is None:
        args.tokenizer = TOKENIZER
    if args.val_fraction is None and not args.val_split and not args.val_files:
        args.val_fraction = VAL_FRACTION
    return convert(args)


if __name__ == "__main__":
    run_main(main)
