import pytest
import torch

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.memory.collect import from_dataset, plain_name
from lerobot_craft.memory.dataset import MemoryDataset
from lerobot_craft.tiny.make import make_local_dataset
from tests.anchor_fixtures import OLD_TASKS
from tests.faults.test_bad_input import poison


@pytest.mark.parametrize("policy_type", ["pi0_fast", "smolvla", "act", "diffusion"])
def test_frames_are_the_datasets_own_to_the_bit(memories, old_dataset, teachers, policy_type):
    memory, dataset = memories(policy_type), old_dataset(policy_type)
    remembered = MemoryDataset(memory, teachers(policy_type).config)
    assert len(remembered) == 15
    for row, frame in enumerate(memory.dense("frame").tolist()):
        expected, found = dataset[frame], remembered[row]
        assert found["task"] == expected["task"]
        assert torch.equal(found["action"], expected["action"])
        assert torch.equal(found["action_is_pad"], expected["action_is_pad"])
        assert torch.equal(found["observation.state"], expected["observation.state"])
        pictures = (expected["observation.images.top"] * 255).round().to(torch.uint8)
        assert torch.equal(found["observation.images.top"], pictures)


def test_frames_are_spread_over_tasks_and_episodes(memories):
    memory = memories("smolvla")
    assert memory.instructions == tuple(OLD_TASKS)
    assert memory.counts() == [5, 5, 5]
    for instruction in OLD_TASKS:
        assert len(memory.dense("episode")[memory.rows_of(instruction)].unique()) == 3


def test_a_short_task_gives_all_it_has(memories):
    memory = memories("smolvla", frames_per_task=1000, only=(OLD_TASKS[2],))
    assert memory.instructions == (OLD_TASKS[2],)
    assert 30 <= len(memory) <= 40


def test_two_cameras(tmp_path):
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.utils.feature_utils import dataset_to_policy_features

    cameras = ("observation.images.top", "observation.images.wrist")
    make_local_dataset(tmp_path / "two", ["press it"], 2, 6, cameras=cameras)
    features = dataset_to_policy_features(open_dataset("local/two", tmp_path / "two").meta.features)
    inputs = {name: feature for name, feature in features.items() if name != "action"}
    config = ACTConfig(
        input_features=inputs, output_features={"action": features["action"]}, chunk_size=4, n_action_steps=4
    )
    dataset = open_dataset("local/two", tmp_path / "two", policy_config=config)
    memory = from_dataset(dataset, config, kind="demonstrations", frames_per_task=4, seed=0)
    assert memory.num_pictures == 8
    remembered = MemoryDataset(memory, config)
    for row, frame in enumerate(memory.dense("frame").tolist()):
        for camera in cameras:
            expected = (dataset[frame][camera] * 255).round().to(torch.uint8)
            assert torch.equal(remembered[row][camera], expected)


def test_frames_of_chosen_episodes_have_their_number_in_the_whole_dataset(anchor_data, teachers):
    config = teachers("act").config
    dataset = open_dataset("local/old", anchor_data / "old", policy_config=config, episodes=[4])
    memory = from_dataset(dataset, config, kind="rollouts", frames_per_task=3, seed=0)
    whole = open_dataset("local/old", anchor_data / "old", policy_config=config)
    for row, frame in enumerate(memory.dense("frame").tolist()):
        assert torch.equal(whole[frame]["action"], memory.dense("action")[row])
    assert memory.dense("episode").unique().tolist() == [4]


def test_success_is_read_where_the_dataset_has_it(tmp_path, teachers):
    root = write_recording(tmp_path / "recorded")
    config = teachers("act").config
    dataset = open_dataset("local/recorded", root, policy_config=config)
    memory = from_dataset(dataset, config, kind="rollouts", frames_per_task=100, seed=0)
    by_episode = dict(zip(memory.dense("episode").tolist(), memory.dense("success").tolist(), strict=True))
    assert by_episode == {0: 1, 1: 0}
    reached = from_dataset(dataset, config, kind="rollouts", frames_per_task=100, seed=0, successful_only=True)
    assert reached.dense("episode").unique().tolist() == [0]


def test_success_is_unknown_elsewhere(memories):
    assert memories("smolvla").dense("success").unique().tolist() == [-1]


def test_another_robot_is_refused(tmp_path, teachers):
    make_local_dataset(tmp_path / "other", ["press it"], 1, 6, state_dim=7, image_size=64)
    config = teachers("act").config
    dataset = open_dataset("local/other", tmp_path / "other", policy_config=config)
    with pytest.raises(CraftError, match="another robot"):
        from_dataset(dataset, config, kind="demonstrations", frames_per_task=4, seed=0)


def test_a_missing_camera_is_refused(tmp_path, teachers):
    make_local_dataset(tmp_path / "other", ["press it"], 1, 6, cameras=("observation.images.side",), image_size=64)
    config = teachers("act").config
    dataset = open_dataset("local/other", tmp_path / "other", policy_config=config)
    with pytest.raises(CraftError, match=r"has no observation\.images\.top"):
        from_dataset(dataset, config, kind="demonstrations", frames_per_task=4, seed=0)
    memory = from_dataset(
        dataset,
        config,
        kind="demonstrations",
        frames_per_task=4,
        seed=0,
        rename_map={"observation.images.side": "observation.images.top"},
    )
    assert "observation.images.top" in memory.input_features


def test_a_directory_is_no_name():
    assert plain_name("/home/me/secret/data") == "data"
    assert plain_name("lab/data") == "lab/data"


def write_recording(root):
    """A dataset as `lerobot-eval --eval.recording=true` writes it: `next.success` at the frame that reached it."""
    import numpy as np
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        "observation.images.top": {"dtype": "image", "shape": (64, 64, 3), "names": ["height", "width", "channels"]},
        "observation.state": {"dtype": "float32", "shape": (4,), "names": None},
        "action": {"dtype": "float32", "shape": (4,), "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    dataset = LeRobotDataset.create(f"local/{root.name}", fps=10, features=features, root=root, use_videos=False)
    for succeeds in (True, False):
        for frame in range(6):
            last = frame == 5
            dataset.add_frame(
                {
                    "observation.images.top": np.zeros((64, 64, 3), np.uint8),
                    "observation.state": np.full(4, frame, np.float32),
                    "action": np.full(4, frame, np.float32),
                    "next.reward": np.zeros(1, np.float32),
                    "next.success": np.array([succeeds and last]),
                    "next.done": np.array([last]),
                    "task": "press it",
                }
            )
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    return root


@pytest.mark.parametrize("name", ["action", "observation.state"])
def test_a_value_that_is_no_number_is_not_remembered(name, anchor_data, teachers, tmp_path):
    poisoned = poison(anchor_data / "old", tmp_path / "poisoned", episode=1, frame=3, name=name)
    config = teachers("smolvla").config
    dataset = open_dataset("local/old", poisoned, policy_config=config)
    with pytest.raises(CraftError, match=f"{name} of local/old is NaN or infinite in frame 3 of episode 1: "):
        from_dataset(dataset, config, kind="demonstrations", frames_per_task=4, seed=0)
