"""`--dataset.episodes`: the new task is what these episodes show, even if the dataset holds old tasks too."""

import numpy as np
import pytest

from lerobot_craft.anchors.build import prepare
from lerobot_craft.anchors.recipe import BuildConfig, DatasetFlags
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import frame_table, instructions, open_dataset, open_instructions
from tests.anchor_fixtures import OLD_TASKS

LEARNED, *KEPT = OLD_TASKS


@pytest.fixture
def mixed(anchor_data):
    """A dataset with every task, and the episodes of the one that is learned."""
    dataset = open_dataset("local/old", anchor_data / "old")
    table = frame_table(dataset)
    task = instructions(dataset.meta).index(LEARNED)
    return DatasetFlags("local/old", str(anchor_data / "old")), np.unique(table.episode[table.task == task]).tolist()


def config(mixed, tmp_path):
    return BuildConfig(
        output_dir=tmp_path,
        new_dataset=mixed,
        old_instructions="\n".join(KEPT) + "\n",
        anchor_source="cross",
        num_anchors=20,
        walked_states=0.5,
    )


def test_anchors_are_made_in_the_chosen_episodes_alone(mixed, teachers, tmp_path):
    flags, episodes = mixed
    plan = prepare(config(flags, tmp_path), teachers("smolvla"), new_episodes=episodes).plan
    table = frame_table(open_dataset(flags.repo_id, flags.root))
    assert set(table.episode[plan.frame].tolist()) == set(episodes)
    assert plan.instructions == tuple(KEPT)


def test_without_them_the_old_tasks_of_the_dataset_count_as_new(mixed, teachers, tmp_path):
    with pytest.raises(CraftError, match="is also the new task's"):
        prepare(config(mixed[0], tmp_path), teachers("smolvla"))


def test_the_instructions_of_the_open_episodes(mixed):
    flags, episodes = mixed
    assert open_instructions(open_dataset(flags.repo_id, flags.root, episodes=episodes)) == [LEARNED]
    assert open_instructions(open_dataset(flags.repo_id, flags.root)) == OLD_TASKS
