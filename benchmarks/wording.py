"""What separates right words from paraphrases in what a policy does? The numbers of decision 0032.

    craft bench --scenario=demo --methods=craft --anchors=0 --seeds=0 --old_episodes=25 --new_episodes=20 \\
        --base_steps=700 --output_dir=outputs/wording-demo --cell=2
    python benchmarks/wording.py BASE_CHECKPOINT OLD_DATASET NEW_DATASET

The cells 0 to 2 of a bench are the two datasets and the base policy; `--list-cells` names them.
"""

import argparse
import json
from pathlib import Path

import lerobot_craft.tiny  # noqa: F401  registers its policies
from lerobot_craft.evaluation.acting import actions_under, spread_of_actions, take_frames
from lerobot_craft.evaluation.listening import apart
from lerobot_craft.lerobot_api.datasets import instructions, open_dataset
from lerobot_craft.teacher.load import load_teacher
from lerobot_craft.training.anchoring.wording import FRAMES, NONSENSE, heard_margin

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("base", "old", "new"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    teacher = load_teacher(options.base)
    old, new = (open_dataset("craft/data", d, policy_config=teacher.config) for d in (options.old, options.new))
    right = instructions(old.meta)
    reworded = [(text, task) for task in right for text in PARAPHRASES[task]]
    words = [*right, *(text for text, _ in reworded), OTHER_NONSENSE, *NONSENSE]
    rows = []
    # In new frames, as before training; and in old ones, to see what a paraphrase really changes.
    measured = {}
    for name, dataset, count in (("new", new, FRAMES), ("old", old, 64)):
        frames = take_frames(teacher, dataset, count, 32, 0)
        actions, again = (actions_under(teacher, frames, words, noise) for noise in (0, 1))
        measured[name] = apart(actions, again, spread_of_actions(teacher, actions))
    (distance, variation), (on_old, _) = measured["new"], measured["old"]
    kinds = ["right"] * len(right) + ["paraphrase"] * len(reworded) + ["nonsense"]
    meant = [None] * len(right) + [right.index(task) for _, task in reworded] + [None]
    for i, (text, kind) in enumerate(zip(words, kinds, strict=False)):
        from_nonsense, needed = heard_margin(i, distance, variation)
        rows.append(
            {
                "kind": kind,
                "words": text,
                "from_nonsense": round(from_nonsense, 3),
                "needed": round(needed, 3),
                "by_chance": round(float(max(variation[i], *variation[-2:])), 3),
                "between_nonsense": round(float(distance[-2, -1]), 3),
                "from_right_in_old_frames": None if meant[i] is None else round(float(on_old[i, meant[i]]), 3),
            }
        )
        print(json.dumps(rows[-1]))
    groups = {
        "right": [row for row in rows if row["kind"] == "right"],
        "paraphrase": [row for row in rows if row["kind"] == "paraphrase"],
        "paraphrase that acts otherwise in old frames": [
            row for row in rows if (row["from_right_in_old_frames"] or 0.0) > OTHERWISE
        ],
        "nonsense": [row for row in rows if row["kind"] == "nonsense"],
    }
    for name, of in groups.items():
        named = sum(row["from_nonsense"] <= row["needed"] for row in of)
        chance = sum(row["from_nonsense"] <= row["by_chance"] for row in of)
        ratios = sorted(round(row["from_nonsense"] / row["between_nonsense"], 1) for row in of)
        print(f"{name}: {named} of {len(of)} named ({chance} by chance alone); ratios {ratios}")


if __name__ == "__main__":
    main()
