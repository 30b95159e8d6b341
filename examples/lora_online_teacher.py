"""LoRA, with the policy itself as its teacher: no cache of anchors, no second copy of the weights.

A LoRA adapter leaves the weights of the policy as they are, so the policy before fine-tuning is the policy with its
adapter switched off. `--craft.teacher=online` asks it at every step what it would have done under the old instruction.
The faucet of two_tasks.py, fine-tuned by LoRA: plainly, and with CRaFT. Each `craft` line that runs is printed.
"""

import argparse
import shlex
import sys
from pathlib import Path

from lerobot_craft.bench.base_policies import make_start, policy_named
from lerobot_craft.bench.metaworld.recording import record
from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.cli import main as craft
from lerobot_craft.evaluation.matrix import Evaluation, read_evaluation

OLD, NEW = "faucet-open", "faucet-close"
SEED = 0
# Demonstrations of each task, steps of the first training, steps of fine-tuning, anchors, episodes of evaluation.
SMALL, FULL = (2, 2, 2, 24, 1), (25, 600, 250, 1000, 20)
LORA = (
    "--peft.method_type=LORA",
    "--peft.r=16",
    "--peft.target_modules=.*(text_model|lm_expert).*_proj",
    "--peft.full_training_modules=[]",
)


def main(arguments: list[str] | None = None) -> Evaluation:
    """Run all of it; the evaluation has a row for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="every stage with hardly any work; no number means much")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/lora_online_teacher"), help="must not exist")
    options = parser.parse_args(arguments)
    out: Path = options.output_dir
    demonstrations, base_steps, steps, anchors, episodes = SMALL if options.small else FULL

    old = record(out / "old", [OLD], demonstrations, seed=SEED)
    new = record(out / "new", [NEW], demonstrations, seed=SEED + 1)
    make_start(policy_named("smolvla"), out / "start", old, [find_task(task).instruction for task in (OLD, NEW)], SEED)
    train(out / "start", old, out / "base", base_steps, 1.5e-3, "--craft.method=naive")

    base = out / "base" / "checkpoints" / "last" / "pretrained_model"
    train(base, new, out / "plain", steps, 2e-3, "--craft.method=naive", *LORA)
    keep = [
        "--craft.teacher=online",
        f"--craft.old_instructions={find_task(OLD).instruction}",
        f"--craft.num_anchors={anchors}",
    ]
    train(base, new, out / "craft", steps, 2e-3, *keep, *LORA)

    run(
        "eval",
        f"before={out / 'base'}",
        f"LoRA={out / 'plain'}",
        f"LoRA with CRaFT={out / 'craft'}",
        "--env.type=craft_metaworld",
        f"--env.task={OLD},{NEW}",
        f"--eval.n_episodes={episodes}",
        *(["--env.episode_length=10"] if options.small else []),
        f"--output_dir={out / 'eval'}",
    )
    adapter = out / "craft" / "checkpoints" / "last" / "pretrained_model" / "adapter_model.safetensors"
    sizes = [file.stat().st_size / 1e6 for file in (adapter, base / "model.safetensors")]
    print("\nThe adapter that was trained: {:.1f} MB, beside {:.1f} MB of the policy.".format(*sizes))
    return read_evaluation(out / "eval" / "evaluation.json")


def train(policy: Path, data: Path, output_dir: Path, steps: int, learning_rate: float, *flags: str) -> None:
    """`craft train` from a checkpoint on a dataset of this machine."""
    run(
        "train",
        f"--policy.path={policy}",
        f"--policy.optimizer_lr={learning_rate}",
        f"--dataset.repo_id=craft/{data.name}",
        f"--dataset.root={data}",
        f"--output_dir={output_dir}",
        f"--steps={steps}",
        f"--log_freq={max(1, steps // 5)}",
        "--batch_size=64",
        f"--seed={SEED}",
        "--craft.enabled=true",
        "--craft.preload=true",
        *flags,
    )


def run(*words: str) -> None:
    """`craft WORDS` in this process, because importing lerobot again for each line would take longer than some do."""
    print(f"\n$ craft {shlex.join(words)}", flush=True)
    if craft(words) != 0:
        sys.exit(f"`craft {words[0]}` failed")


if __name__ == "__main__":
    main()
