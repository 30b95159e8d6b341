import json
import shutil

import numpy as np
import pytest
import torch

from lerobot_craft.cli import main
from lerobot_craft.memory.format import contents, read_memory
from lerobot_craft.tiny.make import make_local_dataset
from lerobot_craft.training.card_sections import CARD_FILE, memory_section
from tests.anchor_fixtures import OLD_TASKS
from tests.memory.test_collect import write_recording

FOLDER = "craft_memory"


@pytest.fixture
def checkpoint(checkpoints, tmp_path):
    """A copy of a checkpoint of ACT, without a memory."""
    return shutil.copytree(checkpoints("act"), tmp_path / "run" / "checkpoints" / "last" / "pretrained_model")


@pytest.fixture
def remember(checkpoint, capsys):
    """`craft remember` of that checkpoint: exit code, output, errors."""

    def run(*flags, place=checkpoint):
        code = main(["remember", str(place), *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def old(anchor_data):
    return "--dataset.repo_id=local/old", f"--dataset.root={anchor_data / 'old'}", "--frames_per_task=4"


def test_frames_of_a_dataset(remember, checkpoint, old):
    code, out, _ = remember(*old)
    assert code == 0
    assert "remembers 3 tasks: 12 frames, 12 pictures" in out
    assert "12 frames (12 pictures) of local/old, demonstrations" in out
    assert read_memory(checkpoint / FOLDER).instructions == tuple(OLD_TASKS)


def test_the_model_card_lists_what_the_memory_holds_after_every_change(remember, checkpoint, old):
    card = checkpoint / CARD_FILE
    card.write_text(f"mine\n\n{memory_section([])}\n\nalso mine\n")
    assert f"{card} lists the pictures now" in remember(*old)[1]
    assert card.read_text() == f"mine\n\n{memory_section(contents(read_memory(checkpoint / FOLDER)))}\n\nalso mine\n"
    assert "12 pictures" in card.read_text()
    remember(f"--forget={OLD_TASKS[0]}")
    assert "8 pictures" in card.read_text()
    for task in OLD_TASKS[1:]:
        remember(f"--forget={task}")
    assert card.read_text() == f"mine\n\n{memory_section([])}\n\nalso mine\n"


def test_a_card_of_somebody_else_is_left_as_it_is(remember, checkpoint, old):
    (card := checkpoint / CARD_FILE).write_text("mine")
    assert "is not a card of craft train and was left as it is" in remember(*old)[1]
    assert card.read_text() == "mine"


def test_every_name_of_a_checkpoint_will_do(remember, checkpoint, old):
    for place in (checkpoint, checkpoint.parent, checkpoint.parents[2]):
        assert remember(*old, place=place)[0] == 0


def test_list_verify_and_forget(remember, checkpoint, old):
    remember(*old)
    assert "remembers 3 tasks" in remember("--list")[1]
    assert "all 12 pictures can be decoded" in remember("--verify")[1]
    code, out, _ = remember(f"--forget={OLD_TASKS[0]}")
    assert code == 0
    assert "remembers 2 tasks: 8 frames" in out
    code, _, err = remember("--forget=pres it")
    assert code == 2
    assert f"did you mean {OLD_TASKS[2]!r}?" in err
    remember(f"--forget={OLD_TASKS[1]}")
    assert "remembers nothing any more" in remember(f"--forget={OLD_TASKS[2]}")[1]
    assert not (checkpoint / FOLDER).exists()
    assert [path.name for path in checkpoint.iterdir() if path.name.startswith(".")] == []


def test_what_was_forgotten_is_gone_from_the_file(remember, checkpoint, old):
    remember(*old)
    remember(f"--forget={OLD_TASKS[0]}")
    assert OLD_TASKS[0] not in (checkpoint / FOLDER / "manifest.json").read_text()


def test_recordings_of_lerobot_eval(remember, checkpoint, tmp_path):
    root = tmp_path / "recorded"
    for name in ("env_0", "env_1"):
        write_recording(root / name)
    code, out, _ = remember(f"--dataset.root={root}", "--successful_only")
    assert code == 0
    assert "local/recorded_env_0, the policy's own rollouts" in out
    memory = read_memory(checkpoint / FOLDER)
    assert memory.dense("success").unique().tolist() == [1]
    assert len(memory.sources) == 2


def test_a_full_memory_says_so(remember, old):
    code, _, err = remember(*old, "--max_bytes=10")
    assert code == 2
    assert "one frame of each of the 3 tasks takes" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "say what to remember"),
        (("--dataset.repo_id=x/y", "--env.type=pusht"), "one of the two at a time"),
        (("--list",), "has no memory: make one with `craft remember"),
        (("--list", "--verify"), "give one at a time"),
        (("--frames_per_task=0", "--dataset.repo_id=x/y"), "must be at least 1"),
        (("--dataset.root=/nowhere",), "There is no LeRobotDataset in /nowhere"),
        (("--frames=3",), "unrecognized arguments: --frames=3"),
        (("--seed",), "--seed needs a value"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(remember, flags, message):
    code, _, err = remember(*flags)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_another_robot_leaves_the_memory_as_it_was(remember, checkpoint, old, tmp_path):
    remember(*old)
    before = (checkpoint / FOLDER / "manifest.json").read_bytes()
    make_local_dataset(tmp_path / "other", ["press it"], 1, 6, state_dim=7, image_size=64)
    code, _, err = remember(f"--dataset.root={tmp_path / 'other'}")
    assert code == 2
    assert "another robot" in err
    assert (checkpoint / FOLDER / "manifest.json").read_bytes() == before


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    assert main(["remember", str(tmp_path), "--list"]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    assert main(["remember", "--list"]) == 2
    assert "say which checkpoint" in capsys.readouterr().err


def test_stock_lerobot_reads_the_checkpoint_as_before(remember, checkpoint, old):
    from lerobot.policies.act.modeling_act import ACTPolicy

    before = ACTPolicy.from_pretrained(checkpoint).state_dict()
    remember(*old)
    after = ACTPolicy.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def reaching(tmp_path):
    """A policy that goes to the red target whatever its weights say: its statistics are that narrow."""
    from lerobot.envs import env_to_policy_features

    from lerobot_craft.bench.metaworld.configuration import CraftMetaWorldConfig
    from lerobot_craft.bench.metaworld.tasks import find_task
    from lerobot_craft.tiny.make import make_checkpoint

    features = env_to_policy_features(CraftMetaWorldConfig(view="seen"))
    heading, width = np.array([-0.6, 0.6, -0.15, 0.0], np.float32), 0.01
    size = features["observation.state"].shape[0]
    stats = {"action": (heading, width), "observation.state": (np.zeros(size, np.float32), 1.0)}
    return make_checkpoint(
        "smolvla",
        tmp_path / "policy",
        output_features={"action": features.pop("action")},
        input_features=features,
        dataset_stats={
            name: {"mean": mean, "std": np.full_like(mean, std), "min": mean - std, "max": mean + std}
            for name, (mean, std) in stats.items()
        },
        instructions=[find_task(name).instruction for name in ("reach-red", "reach-blue")],
        action_chunks=heading + width * np.random.default_rng(0).uniform(-1, 1, (20, 10, 4)),
    )


def test_own_rollouts_in_a_simulator(reaching, capsys):
    """Both tasks are played, failed episodes are kept, and frames are what the simulator shows."""
    from lerobot_craft.bench.metaworld.environment import MetaWorldEnv
    from lerobot_craft.lerobot_api.pretrained import load_policy_config
    from lerobot_craft.memory.dataset import MemoryDataset

    flags = (
        "--env.type=craft_metaworld",
        "--env.view=seen",
        "--env.task=reach-red,reach-blue",
        "--env.episode_length=40",
    )
    assert main(["remember", str(reaching), *flags, "--episodes=2", "--frames_per_task=60", "--seed=5"]) == 0
    out = capsys.readouterr().out
    assert "reach-red: 2 of 2 rollouts succeeded" in out
    assert "reach-blue: 0 of 2 rollouts succeeded" in out
    memory = read_memory(reaching / FOLDER)
    assert [source.kind for source in memory.sources] == ["rollouts"]
    assert sorted(memory.dense("success").unique().tolist()) == [0, 1]
    dataset = MemoryDataset(memory, load_policy_config(reaching, ("--device=cpu",)))
    rows = [row for row in range(len(memory)) if int(memory.dense("position")[row]) == 0]
    assert rows
    for row in rows:
        task = "reach-red" if int(dataset.table.task[row]) == 0 else "reach-blue"
        env = MetaWorldEnv(task, "seen")
        seen, _ = env.reset(seed=5 + int(memory.dense("episode")[row]) % 2)
        frame = dataset[row]
        np.testing.assert_allclose(frame["observation.state"].flatten(), seen["agent_pos"], rtol=1e-6)
        picture = frame["observation.images.top"].squeeze(0).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(picture, seen["pixels"]["top"])
        for action in frame["action"][~frame["action_is_pad"]]:
            seen, *_ = env.step(action.numpy())
    manifest = json.loads((reaching / FOLDER / "manifest.json").read_text())
    assert manifest["datasets"][0]["repo_id"] == "rollouts/craft_metaworld"


def test_rollouts_of_which_none_succeeded(reaching, capsys):
    flags = ("--env.type=craft_metaworld", "--env.view=seen", "--env.task=reach-blue", "--env.episode_length=5")
    assert main(["remember", str(reaching), *flags, "--episodes=1", "--successful_only"]) == 2
    assert "none of the 1 rollouts succeeded" in capsys.readouterr().err
