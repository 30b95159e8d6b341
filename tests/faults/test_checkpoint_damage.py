"""A run never goes on from a checkpoint whose weights or states are not those that were saved."""

import random
import shutil
from pathlib import Path

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.training.output.craft_state import CRAFT_STATE, check_files
from tests.faults.runs import digests, resume_flags, saved_steps

STATE = ("pretrained_model/*.safetensors", "training_state/*")


@pytest.fixture
def run(run_flags, craft_train, tmp_path):
    """A run of a policy that lerobot would go on with at random weights, without an error."""
    assert craft_train(*run_flags("pi0", tmp_path / "run", steps=2, save_freq=1, batch_size=2)) == 0
    return tmp_path / "run"


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def swap(path: Path, rng: random.Random) -> None:
    other = rng.choice([file for file in path.parent.iterdir() if file != path and file.is_file()])
    path.write_bytes(other.read_bytes())


@pytest.mark.timeout(300)
def test_damage_to_a_checkpoint_is_refused_and_costs_nothing(run, craft_train, tmp_path, capfd, tally):
    last = run / "checkpoints" / "000002"
    files = sorted(file.relative_to(last) for pattern in STATE for file in last.glob(pattern))
    assert CRAFT_STATE in files
    assert len(files) >= 5
    for number in range(200):
        rng = random.Random(number)  # noqa: S311  # the same each time
        copy = shutil.copytree(last, tmp_path / "damaged" / "checkpoints" / "000002")
        damage = (flip, flip, truncate, remove, swap)[number % 5]
        damage(copy / rng.choice(files), rng)
        with pytest.raises(CraftError, match=str(copy)):
            check_files(copy)
        shutil.rmtree(copy)
        tally.add("damage to a checkpoint", "refused")

    before = digests(run)
    truncate(last / "pretrained_model" / "model.safetensors", random.Random(0))  # noqa: S311
    damaged = digests(run)
    assert craft_train(*resume_flags(run), "--steps=3") == 2
    *_, said, way_on = capfd.readouterr().err.splitlines()
    assert "last/pretrained_model/model.safetensors is not what was saved" in said
    assert "000001/pretrained_model/train_config.json" in way_on
    assert digests(run) == damaged != before, "nothing was written"
    assert saved_steps(run) == [1, 2]
