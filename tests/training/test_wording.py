"""Old instructions against lists, tokenizer and behaviour, before training."""

import json
import shutil

import numpy as np
import pytest
import torch

from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.cli.flags import spelled
from lerobot_craft.cli.train import flag_of
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.acting import take_frames
from lerobot_craft.memory.change import did_you_mean
from lerobot_craft.memory.format import write_memory
from lerobot_craft.training.checkpoints import CRAFT_CONFIG_FILE
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.journal import read_metrics
from lerobot_craft.training.start_checks import (
    check_wording,
    compare_with_lists,
    known_lists,
    read_by_tokenizer,
    unheard,
)
from tests.anchor_fixtures import OLD_TASKS

OPEN, CLOSE, PRESS = OLD_TASKS
LISTS = {"the memory": OLD_TASKS}
OWN = ("--craft.enabled=true", "--craft.num_anchors=6", "--craft.probe_anchors=0")


@pytest.mark.parametrize(
    ("given", "named", "notes"),
    [
        (f"{OPEN}; {PRESS}", [OPEN, PRESS], 0),
        (f"{OPEN.upper()}.;  Press  it!", [OPEN, PRESS], 2),
        (f"{OPEN}, {CLOSE}. , Press it", [OPEN, CLOSE, PRESS], 1),
        (f"{OPEN}; {OPEN}.", [OPEN], 1),
    ],
    ids=["as known", "case and dots", "commas", "twice"],
)
def test_what_is_meant_beyond_doubt_is_set_right(given, named, notes):
    found = compare_with_lists(given, LISTS)
    assert found.instructions == named
    assert len(found.notes) == notes
    assert found.doubts == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [("open the drawers", OPEN), ("pull out the drawer to open it", OPEN), ("shut the drawer with care", CLOSE)],
)
def test_what_is_in_no_list_is_doubted(given, meant):
    found = compare_with_lists(f"{given}; {PRESS}", LISTS)
    assert found.instructions == [given, PRESS]
    assert found.doubts == [f"{given!r} is in no list of the policy's tasks (the memory): did you mean {meant!r}?"]


def test_a_guess_needs_something_in_common():
    assert did_you_mean("wave", OLD_TASKS) == f"known are {'; '.join(map(repr, OLD_TASKS))}"
    assert did_you_mean("wipe", [f"task {n}" for n in range(30)]).endswith("and 18 more")


def test_commas_without_a_list_are_asked_about(tmp_path):
    (doubt,) = compare_with_lists("wave, then bow", {}).doubts
    assert "If these are 2, put ; between them" in doubt
    file = tmp_path / "old.txt"
    file.write_text("wave, then bow\nclap\n")
    assert compare_with_lists(str(file), {}).doubts == []
    assert compare_with_lists("wave, then bow; clap", {}).doubts == []


@pytest.fixture
def checkpoint(checkpoints, tmp_path):
    """A policy within a run's output directory, for records beside it."""
    directory = tmp_path / "run" / "checkpoints" / "000003" / "pretrained_model"
    shutil.copytree(checkpoints("smolvla"), directory)
    return directory


def test_every_list_is_found(checkpoint, anchor_data, memories):
    assert known_lists(CraftConfig(memory="off"), checkpoint) == {}
    (checkpoint / CRAFT_CONFIG_FILE).write_text(json.dumps({"old_instructions": "wave; bow"}))
    trained_on = {"repo_id": "local/old", "root": str(anchor_data / "old")}
    (checkpoint / "train_config.json").write_text(json.dumps({"dataset": trained_on}))
    write_memory(memories("smolvla"), checkpoint / MEMORY_FOLDER)
    config = CraftConfig()
    config.old_dataset.repo_id, config.old_dataset.root = "local/new", str(anchor_data / "new")
    assert known_lists(config, checkpoint) == {
        "the memory": OLD_TASKS,
        "--craft.old_dataset local/new": ["push the blue cube to the left"],
        "the checkpoint's own record": ["wave", "bow"],
        "the dataset local/old, which the policy was trained on": OLD_TASKS,
    }


def test_an_incomplete_old_dataset_is_refused_by_its_own_flag(checkpoint, anchor_data, tmp_path):
    root = shutil.copytree(anchor_data / "old", tmp_path / "old")
    (root / "meta" / "tasks.parquet").unlink()
    old = DatasetFlags("local/old", root=str(root))
    with (
        pytest.raises(CraftError, match=r"tasks\.parquet is missing, .* as --craft\.old_dataset\.root"),
        spelled(flag_of),
    ):
        known_lists(CraftConfig(old_dataset=old), checkpoint)


@pytest.mark.parametrize("content", ["{", '{"dataset": null}', '{"dataset": {}}'])
def test_a_damaged_list_is_left_out(content, checkpoint, caplog):
    (checkpoint / "train_config.json").write_text(content)
    assert known_lists(CraftConfig(), checkpoint) == {}
    assert "a list of the policy's tasks is left out" in caplog.text


def test_a_dataset_that_is_elsewhere_is_not_looked_for(checkpoint):
    for trained_on in ({"repo_id": "nobody/nothing", "root": None}, {"repo_id": "x/y", "root": "/nowhere"}):
        (checkpoint / "train_config.json").write_text(json.dumps({"dataset": trained_on}))
        assert known_lists(CraftConfig(), checkpoint) == {}


@pytest.mark.parametrize("policy_type", ["smolvla", "pi0_fast"])
def test_what_the_tokenizer_makes_of_it(policy_type, teachers, anchor_data, opened_once):
    teacher = teachers(policy_type)
    dataset = opened_once("local/new", anchor_data / "new", policy_config=teacher.config)
    frames = take_frames(teacher, dataset, 2, 2, 0)
    assert read_by_tokenizer(teacher, frames, OLD_TASKS) == []
    assert read_by_tokenizer(teacher, frames, ["open the cupboard"]) == [
        "'open the cupboard': the policy's tokenizer has no token for 'cupboard'"
    ]
    (doubt,) = read_by_tokenizer(teacher, frames, ["open the drawer " * 200])
    assert "more are cut off" in doubt


def test_what_the_policy_does_not_hear_is_named():
    # a: far from nonsense. b: near it. c: does what a does. Then two kinds of nonsense.
    place = np.array([[3.0, 0.0], [0.0, 0.3], [3.0, 0.1], [0.0, 0.0], [0.0, 0.4]])
    distance = np.linalg.norm(place[:, None] - place[None], axis=-1)
    variation = np.full(5, 0.2)
    about_b, about_c = unheard(["a", "b", "c"], distance, variation, set())
    assert about_b.startswith("'b': the policy does not react to these words")
    assert about_c.startswith("'c': the policy does what it does under 'a'")
    assert unheard(["a", "b", "c"], distance, variation, {"a", "c"}) == [about_b]  # both are tasks of a list
    assert len(unheard(["a", "b", "c"], distance, variation * 20, {"a", "b", "c"})) == 3  # all of it is chance


def test_less_is_asked_of_words_that_are_in_a_list():
    place = np.array([[0.5, 0.0], [0.0, 0.0], [0.0, 0.4]])
    distance = np.linalg.norm(place[:, None] - place[None], axis=-1)
    variation = np.full(3, 0.2)
    assert unheard(["a"], distance, variation, {"a"}) == []
    assert len(unheard(["a"], distance, variation, set())) == 1


@pytest.fixture
def knowing(checkpoints, anchor_data, tmp_path):
    """A policy that names the dataset it was trained on."""
    directory = tmp_path / "base"
    shutil.copytree(checkpoints("smolvla"), directory)
    trained_on = {"repo_id": "local/old", "root": str(anchor_data / "old")}
    (directory / "train_config.json").write_text(json.dumps({"dataset": trained_on}))
    return directory


def test_a_misworded_run_is_warned_and_strict_refuses(train_flags, craft_train, knowing, tmp_path, capfd):
    flags = train_flags("smolvla", tmp_path / "run", steps=1, policy__path=knowing)
    given = f"--craft.old_instructions=pull the drawer open; {PRESS.upper()}."
    assert craft_train(*flags, *OWN, given, "--craft.strict=true") == 2
    refused = capfd.readouterr().err
    assert "'pull the drawer open' is in no list of the policy's tasks (the dataset local/old" in refused
    assert f"did you mean {OPEN!r}?" in refused
    assert not (tmp_path / "run" / "checkpoints").exists()

    assert craft_train(*flags, *OWN, given) == 0
    said = capfd.readouterr().err
    assert "'pull the drawer open' is in no list of the policy's tasks (the dataset local/old" in said
    assert "the policy's tokenizer has no token for 'pull'" in said
    assert f"is read as {PRESS!r}" in said
    assert f"  {PRESS!r}\n" in said  # the banner
    saved = tmp_path / "run/checkpoints/last/pretrained_model" / CRAFT_CONFIG_FILE
    assert json.loads(saved.read_text())["old_instructions"] == f"pull the drawer open\n{PRESS}\n"


def test_a_policy_that_does_not_listen_is_named(train_flags, craft_train, knowing, tmp_path, capfd):
    """Its weights for words are zero: every instruction is nonsense to it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(knowing / "model.safetensors")
    for name in tensors:
        if "embed_tokens" in name:
            tensors[name] = tensors[name] * 0
    save_file(tensors, knowing / "model.safetensors", metadata={"format": "pt"})
    flags = train_flags("smolvla", tmp_path / "run", steps=1, policy__path=knowing)
    assert craft_train(*flags, *OWN, f"--craft.old_instructions={OPEN}", "--craft.strict=true") == 2
    assert f"{OPEN!r}: the policy does not react to these words" in capfd.readouterr().err


def test_looking_changes_no_step(train_flags, craft_train, knowing, tmp_path, monkeypatch):
    def losses(name):
        flags = train_flags("smolvla", tmp_path / name, policy__path=knowing)
        assert craft_train(*flags, *OWN, f"--craft.old_instructions={OPEN}") == 0
        return [values["loss"] for values in read_metrics(tmp_path / name)]

    def and_draws(*given):
        found = check_wording(*given)
        torch.rand(3)
        return found

    monkeypatch.setattr("lerobot_craft.training.session.check_wording", and_draws)
    looked = losses("looked")
    monkeypatch.setattr("lerobot_craft.training.session.check_wording", lambda cfg, craft, *rest: craft)
    assert losses("not") == looked
