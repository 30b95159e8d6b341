r"""What separates right words from paraphrases in what a policy does? The numbers of decision 0032.

    for s in demo reach; do for c in 0 1 2; do craft bench --scenario=$s --methods=craft --anchors=0 --seeds=0 \
        --old_episodes=25 --new_episodes=20 --base_steps=700 --output_dir=outputs/wording-$s --cell=$c; done; done
    python benchmarks/wording.py outputs/wording-demo outputs/wording-reach

takes outputs of `craft bench` with the cells 0 to 2: two datasets and a base policy. Every base policy acts in frames
of the new task, as `craft train` lets it before training, and in old frames, to see what a paraphrase really changes.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lerobot_craft.tiny  # noqa: F401  registers the small policies
from dated import RESULTS, dated, write
from lerobot_craft.anchors.teacher import load_teacher
from lerobot_craft.evaluation.acting import actions_under, spread_of_actions, take_frames
from lerobot_craft.evaluation.listening import apart
from lerobot_craft.lerobot_api.datasets import instructions, open_dataset
from lerobot_craft.training.start_checks import FRAMES, NONSENSE, heard_margin

LAST = "train/checkpoints/last/pretrained_model"
OLD_FRAMES, BATCH = 64, 32
# Of each task: a word replaced, an order changed, other words.
PARAPHRASES = {
    "rotate the faucet counter clockwise": (
        "turn the faucet counter clockwise",
        "open the faucet",
        "rotate the tap to the left",
    ),
    "press the handle down": ("push the handle down", "press down on the handle", "lower the lever"),
    "press the button from the top": ("push the button from the top", "press the button from above", "hit the button"),
    "reach for the red target": ("reach for the red goal", "move to the red target", "go to the red dot"),
    "push the puck to the red target": (
        "push the puck to the red goal",
        "slide the puck to the red target",
        "move the disc to the red spot",
    ),
    "slide the plate into the goal": (
        "push the plate into the goal",
        "slide the plate in the goal",
        "put the dish into the net",
    ),
    "press the side handle down": ("push the side handle down", "press down on the side handle", "lower the lever"),
    "press the button behind the wall": (
        "push the button behind the wall",
        "press the button past the wall",
        "hit the hidden switch",
    ),
}
OTHERWISE = 0.4  # standard deviations from what the right words do
OTHER_NONSENSE = "seven loud windows of tea"


def measure(base: Path, old_data: Path, new_data: Path) -> list[dict[str, Any]]:
    """One row for each wording: how far it is from nonsense, and what it must exceed, listed or not."""
    teacher = load_teacher(base, ("--device=cpu",))
    old, new = (open_dataset("craft/data", d, policy_config=teacher.config) for d in (old_data, new_data))
    right = instructions(old.meta)
    reworded = [(text, right.index(task)) for task in right for text in PARAPHRASES[task]]
    words = [*right, *(text for text, _ in reworded), OTHER_NONSENSE, *NONSENSE]
    measured = []
    for dataset, count in ((new, FRAMES), (old, OLD_FRAMES)):
        frames = take_frames(teacher, dataset, count, BATCH, 0)
        actions, again = (actions_under(teacher, frames, words, noise) for noise in (0, 1))
        measured.append(apart(actions, again, spread_of_actions(teacher, actions)))
    (distance, variation), (in_old, _) = measured
    kinds = ["right"] * len(right) + ["paraphrase"] * len(reworded) + ["nonsense"]
    meant = [*range(len(right)), *(task for _, task in reworded), None]
    rows = []
    for i, (kind, task) in enumerate(zip(kinds, meant, strict=True)):
        from_nonsense, needed = heard_margin(i, distance, variation, listed=False)
        chance = heard_margin(i, distance, variation, listed=True)[1]
        rows.append(
            {
                "kind": kind,
                "words": words[i],
                "from_nonsense": from_nonsense,
                "needed": needed,
                "needed_if_listed": chance,
                "from_right_in_old_frames": None if task is None else float(in_old[i, task]),
            }
        )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Per kind of wording, how many are named."""
    otherwise = [row for row in rows if row["kind"] == "paraphrase" and row["from_right_in_old_frames"] > OTHERWISE]
    groups = {kind: [row for row in rows if row["kind"] == kind] for kind in ("right", "paraphrase", "nonsense")}
    groups["paraphrase that acts otherwise in old frames"] = otherwise
    lines = []
    for name, of in groups.items():
        named, by_chance = (sum(r["from_nonsense"] <= r[k] for r in of) for k in ("needed", "needed_if_listed"))
        lines.append(f"  {name}: {named} of {len(of)} named as unlisted words, {by_chance} as listed ones")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every base policy, print the counts, keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", type=Path, nargs="+", help="outputs of craft bench")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    policies = {}
    for bench in options.bench:
        (old_data,), (new_data,) = (list(bench.glob(f"cells/demos-*/{name}")) for name in ("old", "new-*"))
        for base in sorted(bench.glob("cells/base-*")):
            name = base.name.removeprefix("base-").rpartition("-")[0]
            policies[name] = measure(base / LAST, old_data, new_data)
            print("\n".join([name, *summary(policies[name])]))
    write(dated("wording", frames=FRAMES, nonsense=NONSENSE, policies=policies), options.output_dir)


if __name__ == "__main__":
    main()
