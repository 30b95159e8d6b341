"""Memories of the small old dataset, one for each policy type, made once."""

import pytest

from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.memory.collect import from_dataset


@pytest.fixture(scope="session")
def old_dataset(anchor_data, teachers):
    """Function from a policy type to the old dataset as that policy reads it."""
    opened = {}

    def of(policy_type):
        if policy_type not in opened:
            config = teachers(policy_type).config
            opened[policy_type] = open_dataset("local/old", anchor_data / "old", policy_config=config)
        return opened[policy_type]

    return of


@pytest.fixture(scope="session")
def memories(old_dataset, teachers):
    """Function from a policy type to a memory of the old dataset: at most 5 frames of each of its 3 tasks."""
    made = {}

    def memory(policy_type, frames_per_task=5, **changes):
        key = policy_type, frames_per_task, *sorted(changes.items())
        if key not in made:
            settings = {"kind": "demonstrations", "seed": 0, **changes}
            made[key] = from_dataset(
                old_dataset(policy_type),
                teachers(policy_type).config,
                frames_per_task=frames_per_task,
                **settings,
            )
        return made[key]

    return memory
