"""Where the examples are, and what they leave behind, read back."""

import json
from pathlib import Path

from safetensors.torch import load_file

from lerobot_craft.anchors.manifest import Manifest

EXAMPLES = Path(__file__).parents[2] / "examples"
LAST = "checkpoints/last/pretrained_model"


def frames_by_dataset(cache):
    """How many anchors of a cache show a frame of which dataset."""
    return {dataset.repo_id: len(dataset.frames) for dataset in Manifest.load(cache).datasets if dataset.frames}


def instructions(cache):
    """Of the anchors of a cache, with how many of each."""
    manifest = Manifest.load(cache)
    return dict(zip(manifest.instructions, manifest.counts, strict=True))


def craft_config(training):
    return json.loads((training / LAST / "craft_config.json").read_text())


def started_from(training):
    """The checkpoint that a training began with."""
    return json.loads((training / LAST / "train_config.json").read_text())["policy"]["pretrained_path"]


def weights(training, file="model.safetensors"):
    return load_file(training / LAST / file)


def differ(one, other):
    assert one.keys() == other.keys()
    return any(not one[name].equal(other[name]) for name in one)
