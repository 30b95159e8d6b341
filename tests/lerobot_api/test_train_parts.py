"""The parts of lerobot-train: a resumed stream of data is the uninterrupted one, and choices are lerobot's own."""

import dataclasses
import random
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.train_parts import Data, _capped, make_accelerator, make_data, make_datasets, prepare
from lerobot_craft.lerobot_api.train_steps import restore_stream

BATCH_SIZE = 4
EPISODES = [(0, 7), (7, 12), (12, 18)]
PER_EPOCH = 5  # steps: 18 frames in batches of 4, the last of them short
STEPS = 13
# In the middle of an epoch, at its end, and both again once an epoch has passed.
CHECKPOINTS = [2, 5, 8, 10]


class Frames(torch.utils.data.Dataset):
    """Frames that are their own index, with what the sampler asks of a dataset."""

    def __init__(self):
        first, last = zip(*EPISODES, strict=True)
        episodes = {"dataset_from_index": first, "dataset_to_index": last}
        self.meta = SimpleNamespace(episodes=episodes, has_language_columns=False)
        self.episodes = self.absolute_to_relative_idx = None

    def __len__(self):
        return EPISODES[-1][1]

    def __getitem__(self, index):
        return {"index": index}


def settings(checkpoint=None, **changes):
    return SimpleNamespace(
        **{
            "batch_size": BATCH_SIZE,
            "seed": 7,
            "num_workers": 0,
            "prefetch_factor": 2,
            "persistent_workers": False,
            # A worker that is forked starts at once; spawn would import torch again.
            "dataloader_multiprocessing_context": "fork",
            "dataset": SimpleNamespace(streaming=False, repo_id="local/frames"),
            "policy": SimpleNamespace(),
            "checkpoint_path": checkpoint,
        }
        | changes
    )


@pytest.fixture(scope="module")
def accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def opened(cfg, accelerator, step=0) -> Data:
    """As a session opens it, with the least that accelerate prepares beside it."""
    data = make_data(cfg, Frames(), None, accelerator, step)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    prepare(accelerator, model, optimizer, scheduler, data)
    return data


def seen_in_a_step(batches):
    """The frames of a step, and what a policy would draw in it."""
    frames = next(batches)["index"].tolist()
    # From the generators that lerobot saves: policies and their augmentations draw from these.
    return frames, torch.rand(()).item(), np.random.random(), random.random()  # noqa: NPY002, S311


def save(directory, step, batch_size=BATCH_SIZE):
    from lerobot.common.train_utils import save_training_step
    from lerobot.utils.random_utils import save_rng_state

    state = directory / f"{step}" / "training_state"
    state.mkdir(parents=True)
    save_training_step(step, state, num_processes=1, batch_size=batch_size)
    save_rng_state(state)


WORKERS = {
    "none": {},
    "two": {"num_workers": 2},
    "two that persist": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", WORKERS)
def test_a_resumed_stream_is_the_uninterrupted_one_and_so_is_the_noise(workers, accelerator, tmp_path):
    cfg = settings(**WORKERS[workers])
    batches = opened(cfg, accelerator).batches()
    whole = []
    for step in range(STEPS):
        if step in CHECKPOINTS:
            save(tmp_path, step)
        whole.append(seen_in_a_step(batches))
    for epoch in range(2):
        frames = [frame for batch, *_ in whole[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH] for frame in batch]
        assert sorted(frames) == list(range(18)), "an epoch has every frame once"
    assert whole[0][0] != whole[PER_EPOCH][0], "and another order than the one before"
    for step in CHECKPOINTS:
        torch.manual_seed(step)  # whatever happened before the first step
        checkpoint = tmp_path / str(step)
        data = opened(changed(cfg, checkpoint_path=checkpoint), accelerator, step)
        assert (data.epoch, data.mid_epoch) == (step // PER_EPOCH, step % PER_EPOCH > 0)
        assert data.loader.iteration == data.epoch
        resumed = data.batches(lambda where=checkpoint: restore_stream(where, 0, 7, 0))
        assert [seen_in_a_step(resumed) for _ in range(step, STEPS)] == whole[step:]


def changed(cfg, **changes):
    return SimpleNamespace(**vars(cfg) | changes)


def test_a_run_that_begins_leaves_the_random_state_to_the_loader(accelerator):
    torch.manual_seed(3)
    ours = seen_in_a_step(opened(settings(), accelerator).batches())[1]
    from lerobot.utils.utils import cycle

    torch.manual_seed(3)
    lerobots = seen_in_a_step(cycle(opened(settings(), accelerator).loader))[1]
    assert ours == lerobots


def test_other_batches_than_the_checkpoints_go_on_at_the_same_place_with_a_warning(accelerator, tmp_path, caplog):
    save(tmp_path, 3, batch_size=2)
    data = make_data(settings(tmp_path / "3"), Frames(), None, accelerator, 3)
    assert "batches of 2, this run has 1 and 4" in caplog.text
    assert data.loader.sampler.state_dict() == {"epoch": 0, "start_index": 6}


def test_an_old_checkpoint_that_does_not_say_its_batches_has_this_runs(accelerator, tmp_path, caplog):
    save(tmp_path, 3, batch_size=None)
    data = make_data(settings(tmp_path / "3"), Frames(), None, accelerator, 3)
    assert data.loader.sampler.state_dict() == {"epoch": 0, "start_index": 12}
    assert not caplog.records


def test_a_dataset_with_episodes_too_short_for_the_policy_is_refused(accelerator):
    cfg = settings(policy=SimpleNamespace(drop_n_last_frames=9))
    with pytest.raises(CraftError, match="local/frames has no frame to train on"):
        make_data(cfg, Frames(), None, accelerator, 0)


@pytest.mark.parametrize(
    ("samples", "chosen"),
    [(0, None), (4, [0, 2, 1, 4]), (5, [0, 2, 1, 4]), (1, [0, 1]), (99, [0, 2, 3, 1, 4])],
)
def test_held_out_frames_are_capped_evenly_over_the_tasks(samples, chosen):
    from datasets import Dataset

    held_out = SimpleNamespace(hf_dataset=Dataset.from_dict({"task_index": [3, 8, 3, 3, 8]}))
    found = _capped(held_out, samples)
    if chosen is None:
        assert found is held_out
    else:
        assert isinstance(found, Subset)
        assert found.indices == chosen


def test_held_out_frames_come_in_order_and_are_all_there(accelerator):
    data = make_data(settings(max_eval_samples=0), Frames(), Frames(), accelerator, 0)
    assert [frame for batch in data.held_out for frame in batch["index"].tolist()] == list(range(18))


def test_streamed_data_has_no_sampler(accelerator):
    cfg = settings(dataset=SimpleNamespace(streaming=True))
    data = make_data(cfg, Frames(), None, accelerator, 8)
    assert not hasattr(data.loader.sampler, "state_dict")
    assert (data.epoch, data.mid_epoch) == (0, False)


class Caught(Exception):  # noqa: N818  it is not an error
    def __init__(self, **arguments):
        self.arguments = arguments


def caught(function, *arguments):
    with pytest.raises(Caught) as call:
        function(*arguments)
    return call.value.arguments


POLICIES = [
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "float32"},
    {"dtype": None, "use_amp": True},
    {"dtype": "float32", "use_amp": True},
    {"dtype": "bfloat16", "device": "cuda"},
    {"use_amp": True},
    {"use_amp": True, "device": "cuda"},
    {"use_amp": False},
    {},
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("launched", [None, "bf16"])
def test_accelerate_is_asked_for_what_lerobot_train_asks_for(policy, launched, monkeypatch):
    from lerobot.scripts import lerobot_train

    def catch(**arguments):
        raise Caught(**arguments)

    if launched is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    monkeypatch.setattr("accelerate.Accelerator", catch)
    config = SimpleNamespace(**{"device": "cpu", **policy})
    job = SimpleNamespace(is_remote=False)
    cfg = SimpleNamespace(policy=config, trainable_config=config, job=job, validate=lambda: None)
    ours, lerobots = caught(make_accelerator, cfg), caught(lerobot_train.train.__wrapped__, cfg)
    for asked in (ours, lerobots):
        asked["kwargs_handlers"] = [dataclasses.asdict(handler) for handler in asked["kwargs_handlers"]]
    assert ours == lerobots


def test_several_processes_wait_longer_for_each_other_than_in_lerobot_train(monkeypatch):
    def catch(**arguments):
        raise Caught(**arguments)

    monkeypatch.setattr("accelerate.Accelerator", catch)
    cfg = SimpleNamespace(policy=SimpleNamespace(device="cpu"))
    alone = caught(make_accelerator, cfg)
    monkeypatch.setenv("WORLD_SIZE", "2")
    several = caught(make_accelerator, cfg)
    ddp, waiting = several.pop("kwargs_handlers")
    assert alone.pop("kwargs_handlers") == [ddp]
    assert several == alone
    assert waiting.to_kwargs() == {"timeout": timedelta(hours=2)}


def test_a_dataset_that_is_not_there_is_one_sentence(accelerator, teachers, tmp_path):
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig

    data = DatasetConfig("local/nothing", root=str(tmp_path / "nothing"))
    cfg = TrainPipelineConfig(dataset=data, policy=teachers("act").config)
    with pytest.raises(CraftError, match=r"the dataset local/nothing cannot be opened .*--dataset.root") as refusal:
        make_datasets(cfg, accelerator)
    assert "\n" not in str(refusal.value)
