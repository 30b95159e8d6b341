#!/usr/bin/env bash
# Three training steps with pooled hidden-state anchors, offline and on the CPU: shows that every part runs, nothing more.
# It makes what it needs (a small pi0_fast with random weights, two small datasets, the cache) and keeps it in $OUT.
#
#   bash scripts/train_craft_hidden_dryrun.sh            # OUT=DIR puts everything elsewhere
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OUT=${OUT:-$root/outputs/dryrun}
if [ -d "$root/.venv/bin" ]; then PATH=$root/.venv/bin:$PATH; fi
command -v craft >/dev/null || { echo "dry run: there is no command craft: run \`make setup\` in $root first" >&2; exit 1; }
export HF_HUB_OFFLINE=1

tiny=$OUT/tiny
cache=$OUT/anchor_hidden_cache
run=$OUT/run_$(date +%Y%m%d_%H%M%S)_$$ # a new one each time: nothing is overwritten

if ! [ -d "$tiny/teacher" ] || ! [ -d "$tiny/old" ] || ! [ -d "$tiny/new" ]; then
  python -m lerobot_craft.tiny --output_dir="$tiny"
fi

if ! [ -f "$cache/manifest.json" ]; then # written last: an interrupted build goes on
  craft cache build \
    --dataset.repo_id=local/old --dataset.root="$tiny/old" --policy.path="$tiny/teacher" \
    --output_dir="$cache" --num_samples=100 --hidden_layer=-2 --pooling=mean_image_tokens
fi

craft train \
  --dataset.repo_id=local/new --dataset.root="$tiny/new" --policy.path="$tiny/teacher" --output_dir="$run" \
  --steps=3 --batch_size=2 --eval_freq=0 --log_freq=1 --save_checkpoint=false --num_workers=0 --wandb.enable=false \
  craft.enabled=true craft.retention_mode=hidden craft.anchor_cache_dir="$cache" \
  craft.anchor_batch_size=2 craft.retention_freq=1 "$@"

echo "dry run: done, metrics are in $run/metrics.jsonl"
