"""The demo's recipe as commands for the user's own policy."""

import dataclasses
import shlex
from typing import NamedTuple

from lerobot_craft.bench.method import Flags, Known, as_argv
from lerobot_craft.bench.methods import method_named

POLICY, NEW_DATA, OLD_DATA = "YOUR/POLICY", "YOUR/NEW_TASK", "YOUR/OLD_TASKS"
INSTRUCTIONS = "FIRST OLD INSTRUCTION; SECOND OLD INSTRUCTION"
_METHOD = "craft"
_CRAFT = "craft."
_OUTPUT_DIR = "outputs/new_task"
_OLD_FRAMES = 100
_STEPS, _BATCH = 20_000, 32
# For the bench only: it measures drift afterward, keeps anchors with its cells and small datasets in memory.
_OF_THE_BENCH = ("craft.probe_anchors", "craft.log_craft_metrics_freq", "craft.anchor_cache_dir", "craft.preload")
_WIDTH = 110


class Advice(NamedTuple):
    """A command as words, and its purpose."""

    purpose: str
    words: list[str]

    def __str__(self) -> str:
        """The command as typed, over several lines."""
        lines = [""]
        for word in map(shlex.quote, self.words):
            if lines[-1] and len(lines[-1]) + len(word) > _WIDTH:
                lines.append("   ")
            lines[-1] += f" {word}" if lines[-1] else word
        return f"# {self.purpose}\n{' \\\n'.join(lines)}"


def own_policy_commands() -> list[Advice]:
    """Three commands; the reader replaces the words in capitals."""
    checkpoint = f"{_OUTPUT_DIR}/checkpoints/last/pretrained_model"
    ask = as_argv(
        {"policy.path": checkpoint, "env.type": "YOUR_ENV", "env.task": "ONE_OLD_TASK", "eval.n_episodes": 20}
    )
    return [
        Advice("learn the new task, and keep the old ones by their instructions alone", _train(0)),
        Advice(f"or, where you still have old data, with {_OLD_FRAMES} frames of it", _train(_OLD_FRAMES)),
        Advice(f"ask for an old task afterwards, and with --policy.path={POLICY} before", ["lerobot-eval", *ask]),
    ]


def _train(old_frames: int) -> list[str]:
    flags: Flags = {
        "policy.path": POLICY,
        "policy.push_to_hub": "false",  # otherwise lerobot asks for a repository name
        "dataset.repo_id": NEW_DATA,
        "output_dir": _OUTPUT_DIR,
        "steps": _STEPS,
        "batch_size": _BATCH,
        **_recipe(old_frames),
    }
    return ["craft", "train", *as_argv(flags)]


def _recipe(old_frames: int) -> Flags:
    """The method's flags without the defaults of `craft train`."""
    from lerobot_craft.training.config import CraftConfig

    known = Known(old_frames, False, OLD_DATA, "", INSTRUCTIONS, hidden_layers="", anchors="")
    asked = method_named(_METHOD).train_flags(known, None)
    defaults = {field.name: field.default for field in dataclasses.fields(CraftConfig)}
    return {
        name: value
        for name, value in asked.items()
        if value != "" and name not in _OF_THE_BENCH and defaults.get(name.removeprefix(_CRAFT)) != value
    }
