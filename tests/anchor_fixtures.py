"""Two real datasets (what the teacher knows, what it shall learn) and a real teacher of each type."""

from pathlib import Path

import numpy as np
import pytest

from lerobot_craft.tiny.make import make_local_dataset

OLD_TASKS = ["open the drawer", "close the drawer with care", "press it"]
NEW_TASKS = ["push the blue cube to the left"]
POLICIES = ("pi0_fast", "pi0", "pi05", "smolvla", "act", "diffusion")


@pytest.fixture(scope="session")
def anchor_data(tmp_path_factory) -> Path:
    """Directory with the datasets `old` and `new`."""
    root = tmp_path_factory.mktemp("anchor_data")
    make_local_dataset(root / "old", OLD_TASKS, image_size=64)
    make_local_dataset(root / "new", NEW_TASKS, image_size=64, seed=1)
    return root


@pytest.fixture(scope="session")
def checkpoints(anchor_data, tmp_path_factory):
    """Function from a policy type to a checkpoint directory of it, made once."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.utils.feature_utils import dataset_to_policy_features

    from lerobot_craft.tiny.make import make_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    dataset = LeRobotDataset("local/old", root=anchor_data / "old")
    features = dataset_to_policy_features(dataset.meta.features)
    actions = np.stack([dataset.hf_dataset[i]["action"] for i in range(len(dataset))])
    chunks = np.lib.stride_tricks.sliding_window_view(actions, 8, axis=0).transpose(0, 2, 1).copy()
    made: dict[str, Path] = {}

    def checkpoint(policy_type: str) -> Path:
        if policy_type not in made:
            made[policy_type] = make_checkpoint(
                policy_type,
                root / policy_type,
                input_features={name: f for name, f in features.items() if name != "action"},
                output_features={"action": features["action"]},
                dataset_stats=dataset.meta.stats,
                instructions=[*OLD_TASKS, *NEW_TASKS],
                action_chunks=chunks,
            )
        return made[policy_type]

    return checkpoint


@pytest.fixture(scope="session")
def teachers(checkpoints):
    """Function from a policy type and settings to a loaded, checked teacher."""
    from lerobot_craft.anchors.teacher import load_teacher

    loaded = {}

    def teacher(policy_type: str, *settings: str):
        key = policy_type, settings
        if key not in loaded:
            loaded[key] = load_teacher(checkpoints(policy_type), settings)
        return loaded[key]

    return teacher


@pytest.fixture(scope="session")
def opened_once():
    """`open_dataset` that remembers: opening takes longer than everything else in these tests."""
    from lerobot_craft.lerobot_api.datasets import open_dataset

    known = {}

    def opened(repo_id, root=None, revision=None, *, policy_config=None, episodes=None, named="dataset"):
        key = repo_id, str(root), policy_config and policy_config.type
        if key not in known:
            known[key] = open_dataset(
                repo_id, root, revision, policy_config=policy_config, episodes=episodes, named=named
            )
        return known[key]

    return opened


@pytest.fixture
def build(anchor_data, teachers, tmp_path, opened_once, monkeypatch):
    """Function that builds a cache from flags, as `craft cache build` does, and returns its directory."""
    monkeypatch.setattr("lerobot_craft.anchors.build.open_dataset", opened_once)
    from lerobot_craft.anchors.build import Ranks, build_cache, is_finished, prepare
    from lerobot_craft.anchors.recipe import DatasetFlags, DocumentsBuild

    def built(policy_type: str, output: str = "cache", policy: tuple[str, ...] = (), **flags) -> Path:
        flags.setdefault("old_dataset", DatasetFlags("local/old", str(anchor_data / "old")))
        flags.setdefault("new_dataset", DatasetFlags("local/new", str(anchor_data / "new")))
        settings = {"num_anchors": 18, "batch_size": 5, "shard_size": 8, **flags}
        config = DocumentsBuild(output_dir=tmp_path / output, **settings)
        job = prepare(config, teachers(policy_type, *policy))
        if not is_finished(job, config.output_dir):
            build_cache(job, config.output_dir, ranks=Ranks())
        return config.output_dir

    return built
