"""Runs of `craft train` that find a memory, hold it, measure on it and hand it on."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.memory.format import read_memory, write_memory
from lerobot_craft.training.action_drift import UNVERIFIED
from tests.anchor_fixtures import NEW_TASKS, OLD_TASKS
from tests.training.anchor_contexts import LORA


@pytest.fixture
def remembering(checkpoints, memories, tmp_path):
    """Function from a policy type to a copy of its checkpoint that has a memory of the old dataset."""

    def of(policy_type, **settings):
        directory = tmp_path / f"{policy_type}_with_memory"
        shutil.copytree(checkpoints(policy_type), directory)
        write_memory(memories(policy_type, **settings), directory / MEMORY_FOLDER)
        return directory

    return of


SMALL = {"craft.enabled": "true", "craft.num_anchors": 40, "craft.num_draws": 1, "craft.remember": 4}


def flags_of(train_flags, policy_type, output_dir, **changes):
    settings = {**SMALL, **{name.replace("__", "."): value for name, value in changes.items()}}
    return train_flags(policy_type, output_dir, **{name.replace(".", "__"): value for name, value in settings.items()})


def pretrained(output_dir):
    return output_dir / "checkpoints" / "last" / "pretrained_model"


def digest(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(directory).iterdir())}


def test_the_memory_is_found_held_measured_and_handed_on(craft_train, train_flags, remembering, tmp_path, capsys):
    start, run = remembering("smolvla"), tmp_path / "run"
    assert craft_train(*flags_of(train_flags, "smolvla", run, policy__path=start, save_freq=2)) == 0
    said = capsys.readouterr().err
    assert "Memory: 12 old frames to hold, 3 more are kept out of training to measure on" in said
    assert "measured on 3 real frames kept out of training" in said
    record = json.loads((run / "run.json").read_text())
    assert record["measured_on"] == "measured on 3 real frames kept out of training"
    assert record["anchors"]["source"] == "both"
    assert record["tasks"] == OLD_TASKS
    memory = read_memory(pretrained(run) / MEMORY_FOLDER)
    assert memory.instructions == (*OLD_TASKS, *NEW_TASKS)
    assert memory.counts() == [5, 5, 5, 4]
    assert [source.kind for source in memory.sources] == ["demonstrations", "training"]
    card = (pretrained(run) / "README.md").read_text()
    assert "measured on 3 real frames kept out of training" in card
    assert "15 frames (15 pictures) of local/old, demonstrations" in card
    assert str(tmp_path) not in (pretrained(run) / MEMORY_FOLDER / "manifest.json").read_text()
    first, last = (run / "checkpoints" / name / "pretrained_model" / MEMORY_FOLDER for name in ("000002", "000003"))
    assert digest(first) == digest(last)


def test_frames_that_are_kept_out_are_in_no_anchor(craft_train, train_flags, remembering, tmp_path):
    from lerobot_craft.anchors.store import AnchorStore
    from lerobot_craft.memory.collect import kept_out

    start, run, cache = remembering("smolvla"), tmp_path / "run", tmp_path / "cache"
    flags = flags_of(train_flags, "smolvla", run, policy__path=start, craft__anchor_cache_dir=cache)
    assert craft_train(*flags) == 0
    memory = read_memory(start / MEMORY_FOLDER)
    apart = kept_out(memory)
    states = memory.dense("input.observation.state")
    store = AnchorStore.open(cache)
    columns = store.take(torch.arange(len(store)))
    held = columns["input.observation.state"][~columns["cross"]]
    assert len(held) == 12
    assert torch.equal(held.flatten(1).unique(dim=0), states[~apart].flatten(1).unique(dim=0))
    assert columns["cross"].sum() == 28


def test_nothing_is_kept_out_where_nothing_is_measured(craft_train, train_flags, remembering, tmp_path, capsys):
    start, run = remembering("act"), tmp_path / "run"
    flags = flags_of(
        train_flags, "act", run, policy__path=start, craft__probe_anchors=0, craft__num_anchors=None, craft__remember=0
    )
    assert craft_train(*flags) == 0
    assert "Memory: 15 old frames to hold, none is kept out" in capsys.readouterr().err
    record = json.loads((run / "run.json").read_text())
    assert (record["anchors"]["source"], record["anchors"]["number"]) == ("dataset", 15)
    # No frame of the new task, and the memory that was there goes along unchanged.
    assert digest(pretrained(run) / MEMORY_FOLDER) == digest(start / MEMORY_FOLDER)


def test_plain_fine_tuning_is_measured_on_the_memory_too(craft_train, train_flags, remembering, tmp_path):
    start, run = remembering("act"), tmp_path / "run"
    flags = flags_of(train_flags, "act", run, policy__path=start, craft__method="naive", craft__num_anchors=None)
    assert craft_train(*flags) == 0
    record = json.loads((run / "run.json").read_text())
    assert record["measured_on"] == "measured on 3 real frames kept out of training"
    assert record["anchors"] is None


def test_without_old_frames_the_drift_is_called_unverified(craft_train, train_flags, tmp_path, capsys):
    instructions = "; ".join(OLD_TASKS)
    flags = flags_of(train_flags, "smolvla", tmp_path / "run", craft__old_instructions=instructions, craft__remember=0)
    assert craft_train(*flags) == 0
    assert UNVERIFIED in capsys.readouterr().err
    assert not (pretrained(tmp_path / "run") / MEMORY_FOLDER).exists()


def test_frames_of_a_dataset_that_is_trained_on_are_not_called_kept_out(
    craft_train, train_flags, remembering, anchor_data, tmp_path
):
    start, run = remembering("smolvla"), tmp_path / "run"
    old = {"craft__old_dataset__repo_id": "local/old", "craft__old_dataset__root": anchor_data / "old"}
    assert craft_train(*flags_of(train_flags, "smolvla", run, policy__path=start, **old)) == 0
    assert json.loads((run / "run.json").read_text())["measured_on"] == UNVERIFIED


def test_off_is_as_if_there_were_none(craft_train, train_flags, remembering, tmp_path, capsys):
    start, run = remembering("smolvla"), tmp_path / "run"
    assert craft_train(*flags_of(train_flags, "smolvla", run, policy__path=start, craft__memory="off")) == 2
    said = capsys.readouterr().err
    assert "craft remember" in said
    assert "--craft.old_dataset.repo_id" in said
    assert "--craft.old_instructions" in said


def test_a_path_that_holds_no_memory_is_refused(craft_train, train_flags, tmp_path, capsys):
    flags = flags_of(train_flags, "smolvla", tmp_path / "run", craft__memory=tmp_path)
    assert craft_train(*flags) == 2
    assert "there is no memory" in capsys.readouterr().err


def test_a_given_list_restricts_and_extends(craft_train, train_flags, remembering, tmp_path, capsys):
    start, run = remembering("smolvla"), tmp_path / "run"
    given = f"{OLD_TASKS[0].upper()}.; press that"
    assert craft_train(*flags_of(train_flags, "smolvla", run, policy__path=start, craft__old_instructions=given)) == 0
    assert json.loads((run / "run.json").read_text())["tasks"] == [OLD_TASKS[0], "press that"]
    said = capsys.readouterr().err
    assert "'press that', which the memory has no frame of" in said
    assert "did you mean 'press it'?" in said


def test_the_new_task_in_the_memory_is_not_held(craft_train, train_flags, remembering, anchor_data, tmp_path, capsys):
    start, run = remembering("smolvla"), tmp_path / "run"
    flags = flags_of(
        train_flags,
        "smolvla",
        run,
        policy__path=start,
        dataset__repo_id="local/old",
        dataset__root=anchor_data / "old",
    )
    assert craft_train(*flags) == 2  # all old tasks are in the new data, so nothing is left to keep
    assert "also has the new task, 'open the drawer'" in capsys.readouterr().err


def test_a_damaged_memory_stops_before_training(craft_train, train_flags, remembering, tmp_path, capsys):
    start = remembering("smolvla")
    shard = start / MEMORY_FOLDER / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert craft_train(*flags_of(train_flags, "smolvla", tmp_path / "run", policy__path=start)) == 2
    assert "it is damaged" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_is_the_same_to_the_bit(craft_train, train_flags, remembering, tmp_path):
    from safetensors.torch import load_file

    start, whole, broken = remembering("smolvla"), tmp_path / "whole", tmp_path / "broken"
    assert craft_train(*flags_of(train_flags, "smolvla", whole, policy__path=start, steps=4, save_freq=2)) == 0
    assert craft_train(*flags_of(train_flags, "smolvla", broken, policy__path=start, steps=4, save_freq=2)) == 0
    shutil.rmtree(broken / "checkpoints" / "000004")
    shutil.rmtree(start)  # the checkpoint that fine-tuning started from is gone: the run has its own copy
    shutil.rmtree(broken / MEMORY_FOLDER)  # and takes what checkpoints carry from the checkpoint
    config = broken / "checkpoints" / "000002" / "pretrained_model" / "train_config.json"
    assert craft_train(f"--config_path={config}", "--resume=true") == 0
    first, second = (load_file(pretrained(run) / "model.safetensors") for run in (whole, broken))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert digest(pretrained(whole) / MEMORY_FOLDER) == digest(pretrained(broken) / MEMORY_FOLDER)


def test_three_fine_tunings_of_which_only_the_first_needs_old_data(craft_train, train_flags, anchor_data, tmp_path):
    """What the third one holds has frames of the tasks that the first one was given."""
    from lerobot_craft.tiny.make import make_local_dataset

    make_local_dataset(tmp_path / "third", ["wave"], 2, 8, image_size=64, seed=3)
    make_local_dataset(tmp_path / "fourth", ["turn around"], 2, 8, image_size=64, seed=4)
    old = {"craft__old_dataset__repo_id": "local/old", "craft__old_dataset__root": anchor_data / "old"}
    common = {"craft__remember": 6, "craft__num_anchors": None, "craft__probe_anchors": 4, "steps": 2}
    runs = [tmp_path / name for name in ("one", "two", "three")]
    assert craft_train(*flags_of(train_flags, "act", runs[0], **common, **old)) == 0
    for number, data in ((1, "third"), (2, "fourth")):
        flags = flags_of(
            train_flags,
            "act",
            runs[number],
            **common,
            policy__path=pretrained(runs[number - 1]),
            dataset__repo_id=f"local/{data}",
            dataset__root=tmp_path / data,
        )
        assert craft_train(*flags) == 0
    record = json.loads((runs[2] / "run.json").read_text())
    assert record["tasks"] == [*OLD_TASKS, *NEW_TASKS, "wave"]
    assert record["anchors"]["source"] == "dataset"
    assert record["measured_on"].startswith("measured on ")
    memory = read_memory(pretrained(runs[2]) / MEMORY_FOLDER)
    assert memory.instructions == (*OLD_TASKS, *NEW_TASKS, "wave", "turn around")
    assert memory.counts() == [6] * 6
    assert [source.kind for source in memory.sources] == ["demonstrations", "training", "training", "training"]


def test_a_lora_adapter_has_the_memory_beside_it_and_an_online_teacher_holds_it(
    craft_train, train_flags, remembering, tmp_path
):
    start, run = remembering("smolvla"), tmp_path / "run"
    flags = flags_of(
        train_flags,
        "smolvla",
        run,
        policy__path=start,
        craft__teacher="online",
        peft__method_type="LORA",
        peft__r=4,
        peft__target_modules=LORA,
        steps=2,
    )
    assert craft_train(*flags) == 0
    assert (pretrained(run) / "adapter_model.safetensors").exists()
    assert read_memory(pretrained(run) / MEMORY_FOLDER).counts() == [5, 5, 5, 4]
    record = json.loads((run / "run.json").read_text())
    assert record["anchors"]["source"] == "both"
    assert record["measured_on"] == "measured on 3 real frames kept out of training"


def test_stock_lerobot_train_does_not_notice_a_memory(lerobot_train, train_flags, checkpoints, remembering, tmp_path):
    for name, start in (("without", checkpoints("act")), ("with", remembering("act"))):
        lerobot_train(*train_flags("act", tmp_path / name, policy__path=start, steps=2))
    weights = [(pretrained(tmp_path / name) / "model.safetensors").read_bytes() for name in ("without", "with")]
    assert weights[0] == weights[1]
