#!/bin/sh
# The main job (`make demo`): makes the text, trains the demo model about two minutes on two cores, and says how far from perfect it is.
# DATA and OUT say where; the default is data/stories and out/demo.
set -eu
cd "$(dirname "$0")/.."
DATA=${DATA:-data/stories} OUT=${OUT:-out/demo}
[ -f "$DATA/manifest.json" ] || python3 prepro/stories.py --out "$DATA"
mkdir -p "$OUT"

./train_moe_cpu --model demo --train-data "$DATA/train_*.bin" --val-data "$DATA/val_*.bin" --out "$OUT" --metrics "$OUT/metrics.jsonl" \
    --batch-size 16 --seq-len 256 --doc-mask --steps 540 --lr 4e-3 --warmup-steps 30 --val-every 90 --val-steps 10 --sample-every 90
last="$OUT/step_00000540"

echo
echo "Ten stories, sampled from $last:"
echo
./train_moe_cpu --init "$last" --seq-len 256 --generate 2200 --seed 1

./train_moe_cpu --init "$last" --seq-len 256 --generate 6600 --seed 2 >"$OUT/samples.txt"
./train_moe_cpu --init "$last" --batch-size 16 --seq-len 256 --doc-mask --val-data "$DATA/val_*.bin" --eval >"$OUT/eval.txt"
echo
python3 prepro/stories.py --parse "$OUT/samples.txt" --drop-cut --quiet --min-share 0 --sentences 100
echo "validation loss $(sed -n 's/^validation loss \([0-9.]*\).*/\1/p' "$OUT/eval.txt"), floor $(python3 prepro/stories.py --floor "$DATA") nats/token"
cat <<END

What next?
  python3 dev/bench/plot.py ...        pictures of the run, from $OUT/metrics.jsonl (dev/bench/README.md)
  ./train_moe_cpu --init $last --generate 200 --prompt 'A bear called '
  python3 prepro/text.py --out data/mine FILES...   your own text; the README trains on it
  $last opens in Python with transformers' AutoModelForCausalLM.from_pretrained
END
