#!/bin/sh
# The main job (`make demo`): makes the text, trains the demo model about two minutes on two cores, and says how far from perfect it is.
# DATA and OUT say where; the default is data/stories and out/demo.
set -eu
cd "$(dirname "$0")/.."
DATA=${DATA:-data/stories} OUT=${OUT:-out/demo} STEPS=3200
if [ -d "$OUT" ]; then
    echo "$OUT is there already, and nothing saved is overwritten: remove it, or OUT=out/again make demo"
    echo "(if it was interrupted: ./train_moe_cpu --resume --out $OUT --metrics $OUT/metrics.jsonl goes on)"
    exit 1
fi
[ -f "$DATA/manifest.json" ] || python3 prepro/stories.py --out "$DATA"
mkdir -p "$OUT"

./train_moe_cpu --model demo --train-data "$DATA/train_*.bin" --val-data "$DATA/val_*.bin" --doc-mask --out "$OUT" \
    --metrics "$OUT/metrics.jsonl" --batch-size 1 --seq-len 1024 --steps $STEPS --lr 4e-3 --beta2 0.99 --log-every 100 --val-every 400 --val-steps 20 \
    --sample-every 400
last=$(printf '%s/step_%08d' "$OUT" $STEPS)

echo
echo "Stories sampled from $last at temperature 0.8:"
echo
./train_moe_cpu --init "$last" --seq-len 1024 --generate 1100 --temperature 0.8 --seed 1

./train_moe_cpu --init "$last" --seq-len 1024 --generate 8000 --temperature 0.8 --seed 2 >"$OUT/samples.txt"
./train_moe_cpu --init "$last" --batch-size 1 --seq-len 1024 --doc-mask --val-data "$DATA/val_*.bin" --eval >"$OUT/eval.txt"
loss=$(sed -n 's/^validation loss \([0-9.]*\).*/\1/p' "$OUT/eval.txt")
floor=$(python3 prepro/stories.py --floor "$DATA" | sed -n 's/^floor \([0-9.]*\).*/\1/p')
echo
python3 prepro/stories.py --parse "$OUT/samples.txt" --drop-cut --quiet --min-share 0 --sentences 100
echo "validation loss $loss, floor $floor nats/token"
cat <<END

What next?
  build/venv/bin/python dev/bench/plot.py $OUT/metrics.jsonl --floor $floor   pictures (after make build/venv/bin/python)
  ./train_moe_cpu --init $last --generate 200 --prompt 'A bear called '
  python3 prepro/text.py --out data/mine FILES...   your own text; the README trains on it
  $last opens in Python with transformers' AutoModelForCausalLM.from_pretrained
END
