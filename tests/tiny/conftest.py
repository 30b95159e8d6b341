import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when transformers is imported

import pytest

VLAS = ("pi0_fast", "pi0", "pi05", "smolvla")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Checkpoint directory of a policy type, made once; tests only read it."""
    from lerobot_craft.tiny.make import make_checkpoint
    from tests.tiny import robot

    made = {}

    def of(policy_type):
        if policy_type not in made:
            made[policy_type] = make_checkpoint(
                policy_type,
                tmp_path_factory.mktemp("checkpoints") / policy_type,
                input_features=robot.INPUTS,
                output_features=robot.OUTPUTS,
                dataset_stats=robot.stats(),
                instructions=robot.INSTRUCTIONS,
                action_chunks=robot.chunks(),
            )
        return made[policy_type]

    return of
