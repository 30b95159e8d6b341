#!/usr/bin/env bash
# Fine-tunes a policy on a new task and keeps what it could do. Without POLICY: a small random one, offline, 20 steps.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: POLICY=... DATASET=... OLD_DATASET=... [VARIABLE=...] bash scripts/train_craft.sh [flags of craft train]

  POLICY            checkpoint directory or Hub name of the policy that can do the old tasks
  DATASET           LeRobotDataset of the new task (repo_id); DATASET_ROOT: its directory, if it is on this machine only
  OLD_DATASET       datasets of the old tasks, separated by commas; OLD_DATASET_ROOT likewise
  OLD_INSTRUCTIONS  instructions of the old tasks: a file with one per line, or "open the drawer; close the drawer"
                    (instead of OLD_DATASET: no old frame is needed; with it: which of its tasks are kept)
  OUTPUT            where the run goes; default outputs/train_craft/<time>
  ANCHORS           where the anchors go, and are found again; default OUTPUT_anchors
  NUM_ANCHORS       default 2000, for pi0_fast 8000
  STEPS             default 20000
  BATCH_SIZE        new frames per step, and as many anchors; default 8

Without any of them it trains a small policy with random weights for 20 steps: that shows that it runs, nothing more.
USAGE
}
fail() { echo "train_craft: $1" >&2; usage >&2; exit 2; }
case ${1:-} in -h | --help) usage; exit 0 ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -d "$root/.venv/bin" ]; then PATH=$root/.venv/bin:$PATH; fi

if [ -z "${POLICY:-}" ]; then
  [ -z "${DATASET:-}${OLD_DATASET:-}${OLD_INSTRUCTIONS:-}" ] || fail "POLICY is missing"
  export HF_HUB_OFFLINE=1
  tiny=$root/outputs/tiny
  python -m lerobot_craft.tiny --output_dir="$tiny"
  POLICY=$tiny/teacher DATASET=local/new DATASET_ROOT=$tiny/new OLD_DATASET=local/old OLD_DATASET_ROOT=$tiny/old
  STEPS=${STEPS:-20} NUM_ANCHORS=${NUM_ANCHORS:-48} ANCHORS=${ANCHORS:-$root/outputs/tiny_anchors}
  set -- --num_workers=0 --log_freq=5 "$@"
fi
[ -n "${DATASET:-}" ] || fail "DATASET is missing"
[ -n "${OLD_DATASET:-}${OLD_INSTRUCTIONS:-}" ] || fail "OLD_DATASET or OLD_INSTRUCTIONS is missing: what shall be kept?"
command -v craft >/dev/null || { echo "train_craft: there is no command craft: run \`make setup\` in $root first" >&2; exit 1; }

OUTPUT=${OUTPUT:-$root/outputs/train_craft/$(date +%Y%m%d_%H%M%S)_$$}
ANCHORS=${ANCHORS:-${OUTPUT}_anchors}
BATCH_SIZE=${BATCH_SIZE:-8}

anchors=(--policy.path="$POLICY" --output_dir="$ANCHORS" --new_dataset.repo_id="$DATASET")
train=(--policy.path="$POLICY" --output_dir="$OUTPUT" --steps="${STEPS:-20000}" --batch_size="$BATCH_SIZE"
  --dataset.repo_id="$DATASET")
if [ -n "${DATASET_ROOT:-}" ]; then
  anchors+=(--new_dataset.root="$DATASET_ROOT")
  train+=(--dataset.root="$DATASET_ROOT")
fi
if [ -n "${NUM_ANCHORS:-}" ]; then anchors+=(--num_samples="$NUM_ANCHORS"); fi
if [ -n "${OLD_DATASET:-}" ]; then anchors+=(--dataset.repo_id="$OLD_DATASET"); fi
if [ -n "${OLD_DATASET_ROOT:-}" ]; then anchors+=(--dataset.root="$OLD_DATASET_ROOT"); fi
if [ -n "${OLD_INSTRUCTIONS:-}" ]; then anchors+=(--old_instructions="$OLD_INSTRUCTIONS"); fi

craft cache build "${anchors[@]}" # finished: it says so; interrupted: it goes on; made otherwise: it refuses

# Everything else is what held the old skills in the bench: docs/bench.md.
craft train "${train[@]}" --craft.enabled=true --craft.anchor_cache_dir="$ANCHORS" "$@"

echo "train_craft: done, $OUTPUT"
