"""`python -m lerobot_craft.tiny`: a small teacher and two small datasets, offline, to try every command on."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.feature_utils import dataset_to_policy_features

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.make import POLICY_TYPES, make_checkpoint, make_local_dataset
from lerobot_craft.tiny.recipes import RECIPES

OLD_TASKS = ("open the drawer", "close the drawer with care", "press it")
NEW_TASKS = ("push the blue cube to the left",)
_IMAGE_SIZE = 64  # pixels
_CHUNK = 8  # actions


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is not there yet, say where it is, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lerobot_craft.tiny",
        description="Make a small teacher and two small datasets, offline, to try every command on. The teacher's "
        "weights are random: it shows that commands run, not that skills stay.",
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="gets teacher/, old/ and new/")
    parser.add_argument("--policy", choices=POLICY_TYPES, default="pi0_fast", help="type of the teacher")
    options = parser.parse_args(argv)
    try:
        make_all(options.output_dir.resolve(), options.policy)
    except CraftError as error:
        sys.stderr.write(f"craft: {error}\n")
        return 2
    return 0


def make_all(directory: Path, policy_type: str) -> None:
    """Make `teacher`, `old` and `new` in a directory; each is whole or not there, and what is there stays.

    Raises:
        CraftError: There is a teacher of another type.
    """
    teacher, old, new = directory / "teacher", directory / "old", directory / "new"
    if teacher.exists():
        _check_type(teacher, policy_type)
    _make_once(old, lambda root: make_local_dataset(root, OLD_TASKS, image_size=_IMAGE_SIZE))
    _make_once(new, lambda root: make_local_dataset(root, NEW_TASKS, image_size=_IMAGE_SIZE, seed=1))
    _make_once(teacher, lambda root: _make_teacher(policy_type, root, old, teacher))
    sys.stdout.write(
        f"teacher: {teacher} ({policy_type}, random weights)\n"
        f"old tasks: {old} ({'; '.join(OLD_TASKS)})\n"
        f"new task: {new} ({'; '.join(NEW_TASKS)})\n"
    )


def _check_type(teacher: Path, policy_type: str) -> None:
    config = teacher / "config.json"
    found = json.loads(config.read_text())["type"] if config.is_file() else "not a checkpoint"
    if found != RECIPES[policy_type][0]:
        raise CraftError(f"{teacher} is {found}, and --policy={policy_type} is asked for: give another --output_dir")


def _make_once(path: Path, make: Callable[[Path], object]) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".making-", dir=path.parent) as temporary:
        made = Path(temporary) / path.name
        make(made)
        made.rename(path)


def _make_teacher(policy_type: str, root: Path, old: Path, destination: Path) -> None:
    """A checkpoint at `root` that will work once it has been moved to `destination`."""
    dataset = LeRobotDataset("local/old", root=old)
    features = dataset_to_policy_features(dataset.meta.features)
    actions = np.stack([dataset.hf_dataset[i]["action"] for i in range(len(dataset))])  # [N, A]
    windows = np.lib.stride_tricks.sliding_window_view(actions, _CHUNK, axis=0)  # [N - H + 1, A, H]
    make_checkpoint(
        policy_type,
        root,
        input_features={name: feature for name, feature in features.items() if name != "action"},
        output_features={"action": features["action"]},
        dataset_stats=dataset.meta.stats,
        instructions=(*OLD_TASKS, *NEW_TASKS),
        action_chunks=windows.transpose(0, 2, 1).copy(),
    )
    # A checkpoint names its tokenizers by absolute path.
    for file in root.rglob("*.json"):
        file.write_text(file.read_text().replace(json.dumps(str(root))[1:-1], json.dumps(str(destination))[1:-1]))


if __name__ == "__main__":
    sys.exit(main())
