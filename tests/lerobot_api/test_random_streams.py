"""Each rank draws numbers of its own, and a resumed run goes on drawing where it stopped."""

import random

import numpy as np
import torch

from lerobot_craft.lerobot_api.train_steps import gather_streams, restore_stream, save_streams, start_stream


def draws():
    """From each generator that policies, samplers and augmentations draw from."""
    return torch.rand(3).tolist(), np.random.random(3).tolist(), random.random()  # noqa: NPY002, S311


def drawn_by(seed, rank, step=0):
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    start_stream(seed, rank, step)
    return draws()


def test_ranks_differ_and_the_main_one_draws_as_lerobots_does():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    of_lerobot = draws()
    assert drawn_by(7, 0) == of_lerobot
    others = [drawn_by(*arguments) for arguments in [(7, 1), (7, 2), (8, 1), (7, 1, 5)]]
    assert drawn_by(7, 1) == others[0]
    for kind in range(3):
        assert len({str(each[kind]) for each in [of_lerobot, *others]}) == 5
    assert drawn_by(None, 1) == drawn_by(0, 1)


def test_a_stream_goes_on_from_a_checkpoint(process_as_it_was, tmp_path):
    from lerobot.utils.random_utils import save_rng_state

    (tmp_path / "training_state").mkdir()
    start_stream(7, 1)
    (other,) = gather_streams()
    expected_of_other = draws()
    torch.manual_seed(3)
    save_rng_state(tmp_path / "training_state")
    expected_of_main = draws()
    save_streams(tmp_path, [{}, other])
    assert [path.name for path in sorted((tmp_path / "training_state").iterdir())] == [
        "rng_state.safetensors",
        "rng_state_rank_1.safetensors",
    ]
    restore_stream(tmp_path, 1, 7, 4)
    assert draws() == expected_of_other
    restore_stream(tmp_path, 0, 7, 4)
    assert draws() == expected_of_main


def test_a_rank_that_the_checkpoint_did_not_have_begins_its_own(tmp_path):
    restore_stream(tmp_path, 5, 7, 4)
    assert draws() == drawn_by(7, 5, 4)
