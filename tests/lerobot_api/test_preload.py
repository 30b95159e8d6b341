"""Samples in memory are those that lerobot reads, bit by bit, in the same order and with the same random draws."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.lerobot_api.preload import SamplesInMemory, bytes_needed, preloaded
from lerobot_craft.lerobot_api.train_parts import make_data, prepare
from lerobot_craft.lerobot_api.train_steps import restore_stream
from lerobot_craft.tiny.make import make_local_dataset

TASKS = ["open the drawer", "close the drawer"]
BATCH_SIZE = 4
LENGTHS = (5, 2, 7)  # of the odd dataset's episodes: one of them is shorter than any window


def act():
    from lerobot.policies.act.configuration_act import ACTConfig

    return ACTConfig(chunk_size=5, n_action_steps=5, device="cpu")


def smolvla():
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    return SmolVLAConfig(chunk_size=8, n_action_steps=8, device="cpu")


def diffusion():
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    return DiffusionConfig(n_obs_steps=2, horizon=8, n_action_steps=4, drop_n_last_frames=3, device="cpu")


# A window of actions | of one frame too, with its own axis | that begins before the frame, the last ones left out.
CONFIGS = {"act": act, "smolvla": smolvla, "diffusion": diffusion}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preload")
    cameras = ("observation.images.top", "observation.images.side")
    return {
        "images": make_local_dataset(folder / "images", TASKS, 2, cameras=cameras, image_size=16),
        "video": make_local_dataset(folder / "video", TASKS, 1, image_size=64, video=True),
        "odd": make_odd_dataset(folder / "odd"),
    }


def make_odd_dataset(root):
    """Of every kind of number that lerobot stores, beside a small camera."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        "observation.state": {"dtype": "float64", "shape": (3,), "names": None},
        "observation.environment_state": {"dtype": "int32", "shape": (2,), "names": None},
        "observation.touch": {"dtype": "float32", "shape": (2, 3), "names": None},
        "observation.images.small": {"dtype": "image", "shape": (8, 6, 3), "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "operator": {"dtype": "string", "shape": (1,), "names": None},
    }
    dataset = LeRobotDataset.create("local/odd", fps=10, features=features, root=root, use_videos=False)
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        for frame in range(length):
            dataset.add_frame(
                {
                    "observation.state": rng.normal(size=3),  # in float64: not what a float32 could hold
                    "observation.environment_state": rng.integers(100, size=2, dtype=np.int32),
                    "observation.touch": rng.normal(size=(2, 3)).astype(np.float32),
                    "observation.images.small": rng.integers(256, size=(8, 6, 3), dtype=np.uint8),
                    "action": rng.normal(size=1).astype(np.float32),
                    "next.done": np.array([frame == length - 1]),
                    "operator": f"operator {frame % 2}",
                    "task": TASKS[length % 2],
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return root


@pytest.fixture(scope="module")
def opened(roots):
    known = {}

    def dataset(kind, policy=None, episodes=None):
        key = kind, policy, episodes
        if key not in known:
            config = policy and CONFIGS[policy]()
            known[key] = open_dataset(f"local/{kind}", roots[kind], policy_config=config, episodes=episodes)
        return known[key]

    return dataset


@pytest.fixture(scope="module")
def accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def settings(policy="act", **changes):
    values = {
        "batch_size": BATCH_SIZE,
        "seed": 7,
        "num_workers": 0,
        "prefetch_factor": 2,
        "persistent_workers": True,
        "dataloader_multiprocessing_context": "fork",
        "max_eval_samples": 0,
        "dataset": SimpleNamespace(streaming=False, repo_id="local/images"),
        "policy": CONFIGS[policy](),
        "checkpoint_path": None,
    }
    return SimpleNamespace(**values | changes)


def made(cfg, dataset, accelerator, preload, step=0, held_out=None):
    """Data as a session has them, with the least that accelerate prepares beside them."""
    data = make_data(cfg, dataset, held_out, accelerator, step, preload=preload)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    prepare(accelerator, model, optimizer, scheduler, data)
    return data


def exact(value):
    """Everything about a value that can differ."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(value.shape), value.stride(), value.numpy().tobytes()


def seen_in_a_step(batches):
    """Names in their order, every value, and what a policy would draw."""
    return [(name, exact(value)) for name, value in next(batches).items()], torch.rand(()).item()


def seen(batches, steps):
    torch.manual_seed(3)
    return [seen_in_a_step(batches) for _ in range(steps)]


def lerobots(data):
    """The stream of batches that lerobot-train itself makes of a loader."""
    from lerobot.utils.utils import cycle

    return cycle(data.loader)


@pytest.mark.parametrize("policy", CONFIGS)
@pytest.mark.parametrize("kind", ["images", "video", "odd"])
def test_batches_are_the_stock_loaders_to_the_bit(kind, policy, opened, accelerator):
    dataset, cfg = opened(kind, policy), settings(policy)
    stock, ours = (made(cfg, dataset, accelerator, preload) for preload in (False, True))
    steps = 2 * len(stock.loader) + 1  # two epochs, each with a short batch at its end, and the beginning of a third
    assert seen(ours.batches(), steps) == seen(lerobots(stock), steps)


def test_chosen_episodes_are_read_as_lerobot_reads_them(opened, accelerator):
    dataset = opened("images", "diffusion", episodes=(1, 3))
    stock, ours = (made(settings("diffusion"), dataset, accelerator, preload) for preload in (False, True))
    assert seen(ours.batches(), 5) == seen(lerobots(stock), 5)


def save(directory, step):
    from lerobot.common.train_utils import save_training_step
    from lerobot.utils.random_utils import save_rng_state

    state = directory / str(step) / "training_state"
    state.mkdir(parents=True)
    save_training_step(step, state, num_processes=1, batch_size=BATCH_SIZE)
    save_rng_state(state)


WORKERS = {"none": {}, "two": {"num_workers": 2, "persistent_workers": False}, "two that persist": {"num_workers": 2}}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", WORKERS)
def test_a_resumed_run_goes_on_as_the_stock_one(workers, opened, accelerator, tmp_path):
    """In the middle of an epoch and where one begins; workers are not used, but random draws are as if they were."""
    dataset, cfg = opened("odd", "act"), settings(**WORKERS[workers])
    stock = made(cfg, dataset, accelerator, preload=False)
    per_epoch = len(stock.loader)
    torch.manual_seed(3)
    batches, whole, checkpoints = lerobots(stock), [], [1, per_epoch, per_epoch + 2]
    for step in range(2 * per_epoch + 2):
        if step in checkpoints:
            save(tmp_path, step)
        whole.append(seen_in_a_step(batches))
    assert seen(made(cfg, dataset, accelerator, preload=True).batches(), len(whole)) == whole
    for step in checkpoints:
        where = tmp_path / str(step)
        cfg_resumed = SimpleNamespace(**vars(cfg) | {"checkpoint_path": where})
        data = made(cfg_resumed, dataset, accelerator, preload=True, step=step)
        assert data.loader.num_workers == 0
        resumed = data.batches(lambda where=where: restore_stream(where, 0, 7, 0))
        assert seen(resumed, len(whole) - step) == whole[step:]


@pytest.mark.parametrize("samples", [0, 4])
def test_held_out_frames_are_in_memory_too(samples, opened, accelerator):
    dataset, cfg = opened("odd", "act"), settings(max_eval_samples=samples)
    stock, ours = (made(cfg, dataset, accelerator, preload, held_out=dataset) for preload in (False, True))
    inner = ours.held_out.dataset
    assert isinstance(inner.dataset if samples else inner, SamplesInMemory)

    def read(data):
        return [[(name, exact(value)) for name, value in batch.items()] for batch in data.held_out]

    assert read(ours) == read(stock)
    assert ours.dataset is dataset, "everyone else sees the dataset itself"


def test_a_single_sample_is_the_datasets(opened):
    dataset = opened("odd", "diffusion")
    samples = SamplesInMemory(dataset)
    assert len(samples) == len(dataset) == sum(LENGTHS)
    for row in range(len(dataset)):
        found, expected = samples[row], dataset[row]
        assert {name: exact(value) for name, value in found.items()} == {
            name: exact(value) for name, value in expected.items()
        }


@pytest.mark.parametrize("kind", ["images", "video"])
def test_reading_in_parts_loses_nothing(kind, opened, monkeypatch):
    dataset = opened(kind, "act")
    for name in ("_IMAGES_AT_ONCE", "_VIDEO_FRAMES_AT_ONCE"):
        monkeypatch.setattr(f"lerobot_craft.lerobot_api.preload.{name}", 5)
    samples, camera = SamplesInMemory(dataset), "observation.images.top"
    assert [exact(samples[row][camera]) for row in range(len(dataset))] == [
        exact(dataset[row][camera]) for row in range(len(dataset))
    ]


@pytest.mark.parametrize("kind", ["images", "video"])
def test_the_memory_that_is_needed_is_known_before(kind, opened):
    dataset = opened(kind, "act")
    assert bytes_needed(dataset) == SamplesInMemory(dataset).nbytes


def test_images_are_kept_in_bytes(opened):
    samples = SamplesInMemory(opened("images", "act"))
    assert samples[0]["observation.images.top"].dtype == torch.float32
    pixels = 2 * 3 * 16 * 16
    assert pixels * len(samples) < samples.nbytes < 2 * pixels * len(samples)


@pytest.mark.parametrize("copies", [1, 4])
def test_more_than_half_of_the_memory_is_refused(copies, opened, monkeypatch):
    dataset = opened("images", "act")
    held_out = Subset(dataset, [3])  # all of it is read
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(copies))
    needed = 2 * copies * bytes_needed(dataset)
    for available, enough in ((2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr("psutil.virtual_memory", lambda available=available: SimpleNamespace(available=available))
        if enough:
            preloaded(dataset, held_out)
        else:
            with pytest.raises(CraftError, match=r"more than half of .* leave it out, or .*--dataset\.episodes"):
                preloaded(dataset, held_out)


@pytest.mark.parametrize("key", ["observation.state", "action_is_pad", "task", "extra"])
def test_a_sample_that_differs_is_refused_by_its_name(key, opened, monkeypatch):
    dataset = opened("images", "act")
    read = type(dataset.reader).get_item

    def changed(reader, row):
        item = read(reader, row)
        value = item.get(key, torch.zeros(1))
        return item | {key: f"{value}!" if isinstance(value, str) else value.double()}

    monkeypatch.setattr(type(dataset.reader), "get_item", changed)
    with pytest.raises(CraftError, match=f"would not give what lerobot reads for {key} of local/images"):
        preloaded(dataset)


def test_a_last_bit_is_a_difference(opened, monkeypatch):
    dataset = opened("images", "act")
    read = type(dataset.reader).get_item

    def nudged(reader, row):
        item = read(reader, row)
        return item | {"action": item["action"].nextafter(torch.tensor(9.0))}

    monkeypatch.setattr(type(dataset.reader), "get_item", nudged)
    with pytest.raises(CraftError, match="for action of"):
        preloaded(dataset)


@pytest.mark.parametrize("has", ["language columns", "depth cameras"])
def test_what_is_not_kept_is_refused(has):
    meta = SimpleNamespace(has_language_columns=has == "language columns", depth_keys=["depth"])
    with pytest.raises(CraftError, match=f"the dataset local/a has {has}, which --craft.preload cannot keep"):
        preloaded(SimpleNamespace(repo_id="local/a", image_transforms=None, meta=meta))
