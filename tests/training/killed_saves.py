"""Saves that are killed before each of their filesystem operations: run it as a module with `DIR WAY`.

A program of its own because it forks, which a process with threads should not. For every place of the kill it prints
one JSON object: what was found under `checkpoints/` then, and after `clear_leftovers`, itself killed at every place.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from lerobot_craft.io import files
from lerobot_craft.training.checkpoints import clear_leftovers, last_checkpoint, point_last_at, whole_or_not_at_all

FILES = (
    "pretrained_model/train_config.json",
    "pretrained_model/model.safetensors",
    "training_state/training_step.json",
)
OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "ctypes.dlsym", "half written"}
# With "exchange" and "rename" the step was saved before and `last` is on it; with "fresh" it was not.
WAYS = ("fresh", "exchange", "rename")


def write(directory, text):
    for name in FILES:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(text[:1])
            file.flush()
            sys.audit("half written")
            file.write(text[1:])


def save(run, step, text):
    checkpoint_dir = run / "checkpoints" / step
    with whole_or_not_at_all(checkpoint_dir) as directory:
        write(directory, text)
    point_last_at(checkpoint_dir)


def killed_before(operation, action):
    """Does `action` in a process that is killed right before its n-th operation (from 0); says whether it was."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status) and status:
            raise SystemExit(f"the save failed by itself: {status}")
        return os.WIFSIGNALED(status)
    remaining = operation

    def count(event, _):
        nonlocal remaining
        if event in OPERATIONS:
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining -= 1

    sys.addaudithook(count)
    action()
    os._exit(0)


def content(directory):
    """The text that all files of a checkpoint hold, or "torn"."""
    texts = {(directory / name).read_text() if (directory / name).is_file() else "torn" for name in FILES}
    return texts.pop() if len(texts) == 1 else "torn"


def found(run):
    """What each name under `checkpoints/` holds."""
    return {path.name: content(path) for path in sorted((run / "checkpoints").iterdir())}


def main(scratch, way):
    if way == "rename":
        files._exchange = lambda first, second: False
    begun = scratch / "begun"
    save(begun, "000010", "early")
    if way != "fresh":
        save(begun, "000020", "old")
    run, again = scratch / "run", scratch / "again"
    killed, operation = True, 0
    while killed:
        shutil.copytree(begun, run, symlinks=True)
        killed = killed_before(operation, lambda: save(run, "000020", "new"))
        line = {"killed": killed, "then": found(run), "cleared": []}
        clearing, place = True, 0
        while clearing:
            shutil.copytree(run, again, symlinks=True)
            clearing = killed_before(place, lambda: clear_leftovers(again))
            clear_leftovers(again)
            line["cleared"].append(found(again) | {"newest": content(last_checkpoint(again))})
            shutil.rmtree(again)
            place += 1
        print(json.dumps(line))
        shutil.rmtree(run)
        operation += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
