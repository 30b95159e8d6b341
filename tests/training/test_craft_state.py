"""What CRaFT keeps in a checkpoint comes back exactly or is refused, and so do the files beside it."""

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.training.checkpoints import (
    CRAFT_STATE,
    check_files,
    check_settings,
    load_craft_state,
    save_craft_state,
)
from tests.training.killed_saves import save

STATE = {"step": 20, "lambda": {'open, "the" drawer': 0.1 + 0.2, "ε": 1e-300}, "history": [1, 2.5, None, True, "x"]}
KEPT = ("pretrained_model/model.safetensors", "training_state/optimizer_state.safetensors", "training_state/rng.json")


@pytest.fixture
def run(tmp_path):
    """A run with one checkpoint, at step 10."""
    save(tmp_path / "run", "000010", "early")
    return tmp_path / "run"


@pytest.fixture
def checkpoint(run):
    """A second one, at step 20, with weights, states, settings and a card."""
    save(run, "000020", "new")
    directory = run / "checkpoints" / "000020"
    memory = "pretrained_model/craft_memory/manifest.json"
    (directory / memory).parent.mkdir()
    for name in (*KEPT, "pretrained_model/config.json", "pretrained_model/README.md", memory):
        (directory / name).write_text(f"this is {name}")
    save_craft_state(directory, STATE)
    return directory


def test_the_state_comes_back_exactly(run):
    save_craft_state(run, STATE)
    assert load_craft_state(run) == STATE


def test_a_flipped_byte_never_gives_another_state(run):
    save_craft_state(run, STATE)
    path = run / CRAFT_STATE
    data = path.read_bytes()
    refused = 0
    for place in range(len(data)):
        for mask in (1, 2, 16, 128, 255):
            flipped = bytearray(data)
            flipped[place] ^= mask
            path.write_bytes(flipped)
            try:
                assert load_craft_state(run) == STATE  # white space
            except CraftError:
                refused += 1
    assert refused > 4 * len(data)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"schema": 2, "sha256": "", "state": []}'])
def test_a_damaged_state_is_refused_by_name(run, damage):
    save_craft_state(run, STATE)
    (run / CRAFT_STATE).write_bytes(damage)
    with pytest.raises(CraftError, match=r"craft_state\.json is damaged .*: resume from another checkpoint"):
        load_craft_state(run)


def test_a_state_of_another_version_is_refused(run):
    save_craft_state(run, STATE)
    path = run / CRAFT_STATE
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 3'))
    with pytest.raises(CraftError, match="has schema 3, and this version of craft reads 2"):
        load_craft_state(run)


def test_a_checkpoint_of_lerobot_train_has_no_state_to_resume(run):
    with pytest.raises(CraftError, match=r"not saved by `craft train`.*--policy\.path=.*000010/pretrained_model"):
        load_craft_state(run / "checkpoints" / "000010")


def test_a_state_that_json_cannot_keep_is_refused_when_it_is_saved(run):
    with pytest.raises(ValueError, match="finite"):
        save_craft_state(run, {"lambda": float("nan")})


def test_an_untouched_checkpoint_is_good(checkpoint):
    check_files(checkpoint)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "swapped"])
def test_a_file_that_is_not_the_saved_one_is_refused_by_name(checkpoint, name, damage):
    file = checkpoint / name
    data = file.read_bytes()
    match damage:
        case "missing":
            file.unlink()
        case "cut":
            file.write_bytes(data[:-1])
        case "flipped":
            file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "swapped":
            file.write_bytes((checkpoint / KEPT[KEPT.index(name) - 1]).read_bytes())
    with pytest.raises(CraftError, match=f"{name} is .*go on from another one with\ncraft train .*/000010/"):
        check_files(checkpoint)


@pytest.mark.parametrize("check", [check_settings, check_files])
def test_an_edited_setting_is_refused_by_name(checkpoint, check):
    (checkpoint / "pretrained_model" / "config.json").write_text("edited")
    with pytest.raises(CraftError, match=r"config\.json is not what was saved.* takes changes as flags: copy the"):
        check(checkpoint)


@pytest.mark.parametrize("name", ["README.md", "craft_memory/manifest.json"])
def test_card_and_memory_may_change(checkpoint, name):
    (checkpoint / "pretrained_model" / name).write_text("changed by craft eval or craft remember")
    check_files(checkpoint)


def test_a_partial_copy_is_refused_by_name(checkpoint):
    (checkpoint / "pretrained_model" / "config.json").unlink()
    with pytest.raises(CraftError, match=r"pretrained_model/config\.json is missing: copy the checkpoint again"):
        check_files(checkpoint)


def test_a_card_may_be_removed(checkpoint):
    (checkpoint / "pretrained_model" / "README.md").unlink()
    check_files(checkpoint)


def test_without_another_checkpoint_the_remedy_is_a_copy(checkpoint, tmp_path):
    alone = tmp_path / "copied" / "checkpoints" / "000020"
    alone.parent.mkdir(parents=True)
    checkpoint.rename(alone)
    (alone / KEPT[0]).unlink()
    with pytest.raises(CraftError, match="is missing: copy the checkpoint again, or start the run anew"):
        check_files(alone)
