"""Whose batch is named when a gradient that all ranks share is not finite."""

import pytest
import torch

from lerobot_craft.training import loop
from lerobot_craft.training.loop import _batch_to_blame
from tests.distributed.ranks import join_ranks, run_on_ranks

NAN = float("nan")
RAW = [{"episode_index": torch.tensor([rank, rank]), "frame_index": torch.tensor([4, 5])} for rank in range(3)]


@pytest.fixture
def blame(monkeypatch):
    """Function from the losses of ranks to what each of them says."""

    def said(losses, raw=RAW):
        sent = []
        with monkeypatch.context() as patched:
            patched.setattr(loop, "gather_over_ranks", lambda row: (sent.append(row), torch.stack([row]))[1])
            for rank, loss in enumerate(losses):
                _batch_to_blame("local/new", raw[rank], torch.tensor(loss), 0)
            patched.setattr(loop, "gather_over_ranks", lambda row: torch.stack(sent[: len(losses)]))
            return [
                _batch_to_blame("local/new", raw[rank], torch.tensor(loss), rank) for rank, loss in enumerate(losses)
            ]

    return said


def test_all_name_the_rank_whose_loss_was_not_finite(blame):
    assert blame([1.0, NAN, 2.0]) == ["the batch of local/new on rank 1: episode 1 frame 4, episode 1 frame 5"] * 3


def test_several_of_them(blame):
    more = "the batch of local/new on rank 0: episode 0 frame 4, episode 0 frame 5, and those of 1 more of the 3 ranks"
    assert blame([float("inf"), 1.0, NAN]) == [more] * 3


def test_where_all_losses_are_finite_each_says_what_it_had(blame):
    start = "one of the batches of local/new on 2 ranks, whose losses are all finite (this is rank"
    assert blame([1.0, 2.0]) == [
        f"{start} {rank}: episode {rank} frame 4, episode {rank} frame 5)" for rank in range(2)
    ]


def test_a_process_alone_had_it(blame):
    assert blame([NAN]) == ["the batch of local/new: episode 0 frame 4, episode 0 frame 5"]


def test_the_first_frames_of_a_large_batch_and_none_of_one_that_does_not_say(blame):
    many = {"episode_index": torch.zeros(20), "frame_index": torch.arange(20)}
    (said,) = blame([NAN], [many])
    assert said.endswith("episode 0 frame 7 and 12 more")
    assert blame([NAN], [{"episode_index": [0]}]) == ["the batch of local/new"]


def blamed(rank, world):
    join_ranks(rank, world)
    said = _batch_to_blame("local/new", RAW[rank], torch.tensor(1.0 if rank else NAN), rank)
    assert said == "the batch of local/new on rank 0: episode 0 frame 4, episode 0 frame 5"


@pytest.mark.slow  # two processes that import lerobot
def test_real_ranks(tmp_path):
    run_on_ranks([blamed], 2, tmp_path)
