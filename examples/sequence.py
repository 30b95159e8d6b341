"""Three tasks, one after the other: each fine-tuning starts where the last one ended and keeps all that came before.

A small SmolVLA learns to open a faucet, then to close it, then to press a handle. After each task the anchors are made
anew: the teacher is now the policy that has just learned, and the old instructions are one more. The success matrix
has a row for each stage; NBT says how much of a skill is lost later (lower is better), AUC how good it is from its own
stage on (docs/bench.md). Once plainly, once with CRaFT and 20 old frames. Each `craft` line that runs is printed.
"""

import argparse
import shlex
import sys
from pathlib import Path

from lerobot_craft.bench.base_policies import make_start, policy_named
from lerobot_craft.bench.metaworld.recording import record
from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.cli import main as craft
from lerobot_craft.evaluation.matrix import Evaluation, matrix_table, read_evaluation, sequence_scores

TASKS = ("faucet-open", "faucet-close", "side-handle-press")
OLD_FRAMES = 20  # of each earlier task
SEED = 0
# Demonstrations of each task, steps of the first training, steps of fine-tuning, anchors, episodes of evaluation.
SMALL, FULL = (2, 2, 2, 48, 1), (25, 800, 300, 800, 20)


def main(arguments: list[str] | None = None) -> dict[str, Evaluation]:
    """Run all of it; an evaluation for each method, with a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="every stage with hardly any work; no number means much")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/sequence"), help="must not exist yet")
    options = parser.parse_args(arguments)
    out: Path = options.output_dir
    demonstrations, base_steps, steps, anchors, episodes = SMALL if options.small else FULL

    data = {task: record(out / task, [task], demonstrations, seed) for seed, task in enumerate(TASKS, SEED)}
    instructions = [find_task(task).instruction for task in TASKS]
    make_start(policy_named("smolvla"), out / "start", data[TASKS[0]], instructions, SEED)
    train(out / "start", data[TASKS[0]], out / "base", base_steps, 1.5e-3, "--craft.method=naive")

    found = {}
    for method in ("plain", "craft"):
        stages = [out / "base"]
        for number, task in enumerate(TASKS[1:], start=1):
            stage = out / method / f"{number}_{task}"
            last = stages[-1] / "checkpoints" / "last" / "pretrained_model"
            known = [data[earlier] for earlier in TASKS[:number]]
            keep = [
                f"--craft.old_dataset.repo_id={','.join(f'craft/{place.name}' for place in known)}",
                f"--craft.old_dataset.root={','.join(map(str, known))}",
                f"--craft.old_frames={OLD_FRAMES * number}",
                f"--craft.num_anchors={anchors}",
                f"--craft.anchor_cache_dir={out / 'anchors' / task}",
            ]
            train(last, data[task], stage, steps, 5e-4, *(keep if method == "craft" else ["--craft.method=naive"]))
            stages.append(stage)
        run(
            "eval",
            *(f"after {task}={stage}" for task, stage in zip(TASKS, stages, strict=True)),
            "--env.type=craft_metaworld",
            f"--env.task={','.join(TASKS)}",
            f"--eval.n_episodes={episodes}",
            *(["--env.episode_length=10"] if options.small else []),
            f"--learned={','.join(TASKS[1:])}",
            f"--output_dir={out / method / 'eval'}",
        )
        found[method] = read_evaluation(out / method / "eval" / "evaluation.json")

    for method, evaluation in found.items():
        print(f"\n{method}\n{matrix_table(evaluation)}")
    print("\n| | NBT (lost later) | AUC |\n|---|---|---|")
    for method, evaluation in found.items():
        scores = dict(sequence_scores(evaluation))
        nbt, auc = scores["NBT, all tasks"], scores["AUC, all tasks"]
        print(f"| {method} | {nbt.value:.2f} ± {nbt.error:.2f} | {auc.value:.2f} ± {auc.error:.2f} |")
    return found


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
        "--batch_size=32",
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
