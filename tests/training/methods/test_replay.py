"""Old frames in the new batch: which, in which order, in which form, and what cannot be joined."""

from types import SimpleNamespace

import pytest
import torch

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.training.methods import demonstrations, replay
from lerobot_craft.training.methods.demonstrations import old_demonstrations
from lerobot_craft.training.methods.replay import Replay
from tests.anchor_fixtures import NEW_TASKS, OLD_TASKS

CAMERA = "observation.images.top"
FRAMES = 12


def started(context):
    method = Replay()
    method.start(context)
    return method


@pytest.fixture
def make(policy_context):
    return lambda **craft: policy_context(**{"method": "er", "replay_frames": FRAMES, **craft})


@pytest.fixture
def new_batch(opened_once, anchor_data, teachers):
    """Function to a batch of the new dataset as lerobot's data loader gives it: images are floats there."""

    def batch(size=4):
        dataset = opened_once("local/new", anchor_data / "new", policy_config=teachers("smolvla").config)
        (raw,) = read_batches([dataset], [(0, range(size))])
        return {**raw, CAMERA: raw[CAMERA].float() / 255.0}

    return batch


def test_old_frames_follow_the_new_ones_unchanged(make, new_batch):
    context, new = make(replay_ratio=0.75), new_batch()
    joined = started(context).extend(new, step=0)
    frames = old_demonstrations(context, FRAMES)
    by_number = {int(b["index"][0]): b for b in frames.batches(1)}
    assert len(joined["task"]) == 4 + 3
    assert joined["task"][:4] == NEW_TASKS * 4
    assert set(joined["task"][4:]) <= set(OLD_TASKS)
    for key, value in joined.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value[:4], new[key]), key
    for row in range(4, 7):
        old = by_number[int(joined["index"][row])]
        assert joined["task"][row] == old["task"][0]
        assert torch.equal(joined["action"][row], old["action"][0])
        assert torch.equal(joined["action_is_pad"][row], old["action_is_pad"][0])
        assert torch.equal(joined[CAMERA][row], old[CAMERA][0].float() / 255.0)


def test_the_policy_trains_on_the_joint_batch(make, new_batch):
    context = make()
    joined = started(context).extend(new_batch(), step=0)
    batch = policy_batch(joined, [CAMERA], context.teacher.preprocessor)
    loss, _ = context.policy.forward(batch)
    loss.backward()
    assert len(batch["action"]) == 8
    assert loss.isfinite()


def test_videos_stay_uint8(make, new_batch):
    new = new_batch()
    new[CAMERA] = (new[CAMERA] * 255).round().to(torch.uint8)
    joined = started(make()).extend(new, step=0)
    assert joined[CAMERA].dtype == torch.uint8
    assert torch.equal(joined[CAMERA][:4], new[CAMERA])


def test_a_step_draws_the_same_frames_again_and_a_pass_draws_each_once(make, new_batch):
    method, new = started(make()), new_batch()
    drawn = [method.extend(new, step)["index"][4:].tolist() for step in range(FRAMES // 4)]
    kept = old_demonstrations(method.context, FRAMES).rows.tolist()
    assert sorted(index for indices in drawn for index in indices) == sorted(kept)
    assert started(make()).extend(new, 1)["index"][4:].tolist() == drawn[1]


def test_ranks_draw_different_frames(make, new_batch):
    method, new, drawn = started(make()), new_batch(), []
    for rank in range(2):
        method.context = _on_rank(method.context, rank)
        drawn.append(set(method.extend(new, 0)["index"][4:].tolist()))
    assert len(drawn[0]) == len(drawn[1]) == 4
    assert not drawn[0] & drawn[1]


def test_a_short_last_batch_gets_its_share(make, new_batch):
    joined = started(make()).extend(new_batch(size=2), step=0)
    assert len(joined["task"]) == 4


def test_columns_of_one_dataset_only_are_left_out(make, new_batch):
    new = {**new_batch(), "next.reward": torch.zeros(4)}
    joined = started(make()).extend(new, step=0)
    assert "next.reward" not in joined
    assert {CAMERA, "observation.state", "action", "action_is_pad", "task"} <= set(joined)


def test_images_of_another_size_are_refused(make, another_dataset):
    another_dataset("small", image_size=32)
    with pytest.raises(CraftError, match=r"observation\.images\.top has the shape \(32, 32, 3\) in the old dataset"):
        started(make(old="small"))


def test_a_camera_of_the_policy_that_only_the_old_dataset_has_is_refused(make, another_dataset):
    another_dataset("unseeing", cameras=("observation.images.side",))
    with pytest.raises(
        CraftError, match=r"the policy reads observation\.images\.top, which the old dataset local/old has"
    ):
        started(make(new="unseeing"))


def test_without_old_frames_the_flag_is_named(make):
    with pytest.raises(CraftError, match=r"--craft\.method=er .* --craft\.old_dataset\.repo_id"):
        started(make(old=None))


def test_a_ratio_that_adds_nothing_is_refused(make):
    with pytest.raises(
        CraftError, match=r"--craft\.replay_ratio=0\.1 adds no frame to a batch of 4: give at least 0\.25"
    ):
        started(make(replay_ratio=0.1))


def test_sample_weights_are_refused(make):
    with pytest.raises(CraftError, match="use one of the two"):
        started(make(train={"sample_weighting": object()}))


def test_asking_for_more_frames_than_there_are_takes_all(make, caplog):
    method = started(make(replay_frames=10_000))
    assert "10000 were asked for" in caplog.text
    assert len(method._buffer["task"]) == len(old_demonstrations(method.context, 10_000))


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_in_memory_the_buffer_is_the_same_and_most_frames_are_read_at_once(share, make, monkeypatch):
    everything = len(old_demonstrations(make(), 10_000))
    frames = int(share * everything)
    read_frame_by_frame = started(make(replay_frames=frames))._buffer
    kept, preloaded = [], demonstrations.preloaded

    def counted(dataset, **options):
        kept.append(dataset)
        return preloaded(dataset, **options)

    monkeypatch.setattr(demonstrations, "preloaded", counted)
    buffer = started(make(replay_frames=frames, preload=True))._buffer
    assert buffer.keys() == read_frame_by_frame.keys()
    for key, value in read_frame_by_frame.items():
        same = torch.equal(value, buffer[key]) if isinstance(value, torch.Tensor) else value == buffer[key]
        assert same, key
    assert bool(kept) == (share > 0.5)


def test_old_data_that_do_not_fit_in_memory_are_refused_with_what_helps(make, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1))
    with pytest.raises(CraftError, match=r"leave it out, or replay fewer frames \(--craft\.replay_frames\)$"):
        started(make(replay_frames=10_000, preload=True))


def test_reading_is_shown_where_a_bar_is_welcome(make, monkeypatch, capsys):
    monkeypatch.setattr("lerobot_craft.training.methods.replay._BAR_AFTER_S", 0.0)
    started(make())
    assert "old frames: 100%" in capsys.readouterr().err
    monkeypatch.setattr("lerobot_craft.training.methods.replay.bar_is_welcome", lambda: False)
    started(make())
    assert "old frames" not in capsys.readouterr().err


@pytest.mark.parametrize("is_main", [True, False])
def test_reading_is_shown_by_one_rank(is_main):
    context = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=is_main))
    assert replay._shows_bar(context) is is_main


def test_the_buffer_is_accounted_for(make):
    method = started(make())
    (cost,) = method.costs()
    assert cost.what == "12 old frames"
    assert cost.bytes >= FRAMES * 64 * 64 * 3
    assert cost.bytes == sum(t.numel() * t.element_size() for t in method._buffer.values() if hasattr(t, "numel"))


def test_a_resumed_run_must_have_the_same_frames(make):
    state = started(make()).state_dict()
    started(make(resumed=True)).load_state_dict(state)
    with pytest.raises(CraftError, match="not those that this run was started with"):
        started(make(resumed=True, replay_frames=FRAMES + 1)).load_state_dict(state)


class _Rank:
    num_processes = 2

    def __init__(self, rank):
        self.process_index = rank


def _on_rank(context, rank):
    return type(context)(*(_Rank(rank) if name == "accelerator" else getattr(context, name) for name in vars(context)))
