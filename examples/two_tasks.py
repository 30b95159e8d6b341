"""Two tasks in one scene: fine-tune a small SmolVLA on the second, with a few frames of the first to keep it.

Scripted experts in Meta-World turn a faucet one way and the other, recorded as LeRobotDatasets. A small SmolVLA learns
to open it. Then it is fine-tuned to close it: plainly, and with CRaFT, which is given 20 frames of the old data. Both
tasks start alike; only the instruction tells them apart. Each `craft` line that runs is printed, to be copied.
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
OLD_FRAMES = 20
SEED = 0
# Demonstrations of each task, steps of the first training, steps of fine-tuning, anchors, episodes of evaluation.
SMALL, FULL = (2, 2, 2, 24, 1), (25, 600, 250, 1000, 20)


def main(arguments: list[str] | None = None) -> Evaluation:
    """Run all of it; the evaluation has a row for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="every stage with hardly any work; no number means much")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/two_tasks"), help="must not exist yet")
    options = parser.parse_args(arguments)
    out: Path = options.output_dir
    demonstrations, base_steps, steps, anchors, episodes = SMALL if options.small else FULL

    old = record(out / "old", [OLD], demonstrations, seed=SEED)
    new = record(out / "new", [NEW], demonstrations, seed=SEED + 1)

    # A SmolVLA of 0.4 million parameters, with weights that are random yet.
    make_start(policy_named("smolvla"), out / "start", old, [find_task(task).instruction for task in (OLD, NEW)], SEED)
    train(out / "start", old, out / "base", base_steps, 1.5e-3, "--craft.method=naive")

    base = out / "base" / "checkpoints" / "last" / "pretrained_model"
    train(base, new, out / "plain", steps, 5e-4, "--craft.method=naive")
    keep = [
        "--craft.old_dataset.repo_id=craft/old",
        f"--craft.old_dataset.root={old}",
        f"--craft.old_frames={OLD_FRAMES}",
        f"--craft.num_anchors={anchors}",  # the others: frames of the new task under the old instruction
        f"--craft.anchor_cache_dir={out / 'anchors'}",
    ]
    train(base, new, out / "craft", steps, 5e-4, *keep)

    # The table at the end: success of each policy on each task, from the same start states.
    run(
        "eval",
        f"before={out / 'base'}",
        f"plain={out / 'plain'}",
        f"CRaFT={out / 'craft'}",
        "--env.type=craft_metaworld",
        f"--env.task={OLD},{NEW}",
        f"--eval.n_episodes={episodes}",
        *(["--env.episode_length=10"] if options.small else []),
        f"--output_dir={out / 'eval'}",
    )
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
        "--craft.memory=off",  # here it is said what is known of the old tasks; docs/memory.md has the shorter way
        *flags,
    )


def run(*words: str) -> None:
    """`craft WORDS` in this process, because importing lerobot again for each line would take longer than some do."""
    print(f"\n$ craft {shlex.join(words)}", flush=True)
    if craft(words) != 0:
        sys.exit(f"`craft {words[0]}` failed")


if __name__ == "__main__":
    main()
