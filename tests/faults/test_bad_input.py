"""What a person can get wrong: one sentence that says what to do, exit code 2, and nothing is left behind or lost."""

import re
import shutil
from pathlib import Path

import pytest

from lerobot_craft.training.checkpoints import claim_run_dir

OLD = "local/old"


@pytest.fixture
def constrained(train_flags, anchor_data, tmp_path):
    """Flags of a run that would work; changes are `name=value`, `craft__name=value`, None leaves a flag out."""

    def flags(policy_type="smolvla", **changes):
        settings = {
            "craft.enabled": "true",
            "craft.retention_mode": "action",
            "craft.old_dataset.repo_id": OLD,
            "craft.old_dataset.root": anchor_data / "old",
            "craft.num_anchors": 6,
            "craft.anchor_batch_size": 2,
            "craft.retention_freq": 1,
            **{name.replace("__", "."): value for name, value in changes.items() if name.startswith("craft__")},
        }
        rest = {name: value for name, value in changes.items() if not name.startswith("craft__")}
        own = [f"--{name}={value}" for name, value in settings.items() if value is not None]
        return [*train_flags(policy_type, tmp_path / "run", **rest), *own]

    return flags


# Changed flags -> what the sentence must say. None of these gets as far as the first step.
MISTAKES = {
    "K is zero": ({"craft__retention_freq": 0}, "--craft.retention_freq must be at least 1; got 0"),
    "no anchors in a batch": ({"craft__anchor_batch_size": -1}, "--craft.anchor_batch_size must be 0 or more"),
    "threshold is no cosine": ({"craft__conflict_threshold": 0.5}, "conflict_threshold is a cosine"),
    "unknown merge mode": ({"craft__projection_mode": "sum"}, "weighted, equal, task_priority; got 'sum'"),
    "unknown mode": ({"craft__retention_mode": "logits"}, "hidden, token_ce, action; got 'logits'"),
    "a mode that nobody registered": ({"craft__retention_mode": "attention_map"}, "docs/adding-a-retention-mode.md"),
    "unknown method": ({"craft__method": "magic"}, "craft, naive, er, l2sp, ewc, lwf, merge, freeze; got 'magic'"),
    "unknown loss": ({"craft__loss_type": "huber"}, "mse, cosine, l1, kl; got 'huber'"),
    "loss that does not fit": ({"craft__loss_type": "kl"}, "use mse, l1, cosine"),
    "negative budget": ({"craft__epsilon_start": -1}, "a budget is finite and not negative"),
    "budget is no number": ({"craft__epsilon_end": "nan"}, "a budget is finite and not negative"),
    "lambda beyond its maximum": ({"craft__initial_lambda": 11}, r"initial_lambda must lie in \[0.0, 10.0\]; got 11"),
    "log rule from zero": ({"craft__dual_rule": "log", "craft__lambda_min": 0}, "set lambda_min > 0"),
    "unknown schedule": ({"craft__epsilon_decay": "step"}, "linear, cosine, exponential; got 'step'"),
    "unknown unit": ({"craft__epsilon_unit": "metres"}, "teacher, absolute; got 'metres'"),
    "unknown statistics": ({"craft__normalization": "mix"}, "keep, merge, replace; got 'mix'"),
    "statistics that move the teacher": ({"craft__normalization": "replace"}, "would not be the teacher.*use keep"),
    "not a number": ({"craft__lambda_lr": "fast"}, "lambda_lr.*fast"),
    "unknown flag of craft": ({"craft__lambda": 1}, "unrecognized arguments: --craft.lambda=1"),
    "falls faster than it rises": ({"craft__lambda_fall_rate": 2}, r"lambda_fall_rate must lie in \[0, 1\]; got 2"),
    "smoothing that never moves": ({"craft__lambda_smoothing": 1}, "lambda_smoothing must lie in"),
    "unknown flag of lerobot": ({"stepz": 1}, "unrecognized arguments: --stepz=1"),
    "no steps": ({"steps": 0}, "--steps must be at least 1"),
    "empty batches": ({"batch_size": 0}, "--batch_size must be at least 1"),
    "no policy": (
        {"policy__path": None, "policy__type": "act", "policy__device": "cpu"},
        "name its checkpoint.*--policy.path",
    ),
    "no policy, but settings of one": ({"policy__path": None}, "name its checkpoint.*--policy.path"),
    "no such policy": ({"policy__path": "nobody/nothing"}, "There is no checkpoint directory nobody/nothing"),
    "no such dataset": (
        {"dataset__root": "/nowhere"},
        "the dataset local/new cannot be opened .there is no directory /nowhere",
    ),
    "no name of a dataset": ({"dataset__repo_id": None}, "--dataset.repo_id is missing"),
    "no such directory": (
        {"policy__path": "/nowhere/policy"},
        "There is no checkpoint directory /nowhere/policy. Give the output directory",
    ),
    "no such directory, without CRaFT": (
        {"policy__path": "/nowhere/policy", "craft__enabled": "false"},
        "There is no checkpoint directory /nowhere/policy. Give the output directory",
    ),
    "a dataset as policy": ({"policy__path": "."}, "has no config.json, so it is not a policy checkpoint"),
    "no anchors at all": (
        {"craft__old_dataset.repo_id": None, "craft__old_dataset.root": None},
        "craft cache build.*--craft.old_instructions|--craft.old_instructions.*craft cache build",
    ),
    "cache that is not there": (
        {"craft__old_dataset.repo_id": None, "craft__old_dataset.root": None, "craft__anchor_cache_dir": "/nowhere/c"},
        "/nowhere/c",
    ),
    "empty list of instructions": (
        {
            "craft__anchor_source": "cross",
            "craft__old_instructions": " ; ",
            "craft__old_dataset.repo_id": None,
            "craft__old_dataset.root": None,
        },
        "instruction",
    ),
    "online without data": (
        {"craft__teacher": "online", "craft__old_dataset.repo_id": None, "craft__old_dataset.root": None},
        "--craft.teacher=online reads its anchors from datasets",
    ),
    "replay without data": (
        {"craft__method": "er", "craft__old_dataset.repo_id": None, "craft__old_dataset.root": None},
        "--craft.old_dataset.repo_id",
    ),
    "freeze without a name": ({"craft__method": "freeze"}, "--craft.freeze"),
    "freeze what is not there": ({"craft__method": "freeze", "craft__freeze": "legs"}, "legs"),
    "shares beyond one": ({"craft__method": "merge", "craft__merge_alphas": "0.5,1.5"}, "merge_alphas.*1.5"),
    "tokens of a flow policy": ({"craft__retention_mode": "token_ce"}, "--craft.retention_mode=action"),
    "a layer that is not there": (
        {"craft__retention_mode": "hidden", "craft__hidden_layer": 99},
        "layer 99 does not exist",
    ),
    "two poolings": (
        {"craft__retention_mode": "hidden", "craft__per_token": "true", "craft__pooling": "cls_token"},
        "give one of the two",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(mistake, constrained, craft_train, capfd, tmp_path):
    changes, sentence = MISTAKES[mistake]
    assert craft_train(*constrained(**changes)) == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("craft: ")
    assert re.search(sentence, said), said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists(), (
        "a run that did not start leaves no directory: the same line can be tried again"
    )


def test_a_cache_of_another_kind_is_refused_with_the_command_that_builds_the_right_one(
    constrained, craft_train, build, capfd
):
    cache = build("smolvla", retention_mode="action")
    flags = constrained(
        craft__retention_mode="hidden",
        craft__anchor_cache_dir=cache,
        **{"craft__old_dataset.repo_id": None, "craft__old_dataset.root": None},
    )
    assert craft_train(*flags) == 2
    assert "craft cache build --retention_mode=hidden" in capfd.readouterr().err


def test_a_cache_of_another_teacher_is_refused(constrained, craft_train, build, capfd):
    cache = build("pi0", retention_mode="action")
    assert craft_train(*constrained(craft__anchor_cache_dir=cache)) == 2
    assert "was built by pi0 and this policy is smolvla" in capfd.readouterr().err


def test_a_dataset_without_the_policys_features_is_refused(constrained, craft_train, tmp_path, capfd):
    from lerobot_craft.tiny.make import make_local_dataset

    make_local_dataset(tmp_path / "other", ["go"], cameras=("front",), image_size=64, state_dim=3)
    assert craft_train(*constrained(dataset__root=tmp_path / "other")) == 2
    assert "observation.state" in capfd.readouterr().err


def test_an_output_directory_that_exists_is_named_with_the_way_on(constrained, craft_train, tmp_path, capfd):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert craft_train(*constrained()) == 2
    assert "give another" in capfd.readouterr().err
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_two_runs_into_one_directory(constrained, craft_train, tmp_path, capfd):
    assert craft_train(*constrained(steps=1)) == 0
    settings = tmp_path / "run/checkpoints/last/pretrained_model/train_config.json"
    with claim_run_dir(tmp_path / "run", resume=True):
        assert craft_train(f"--config_path={settings}", "--resume=true", "--steps=2") == 2
    assert "is in use by process" in capfd.readouterr().err
    assert craft_train(f"--config_path={settings}", "--resume=true", "--steps=2", "--seed=8") == 2
    assert "the run was begun with --seed=7 and cannot go on with --seed=8" in capfd.readouterr().err.splitlines()[-1]


def poison(root: Path, copy: Path, episode: int, frame: int, name: str = "action", value: float = float("nan")) -> Path:
    """The same dataset with NaN, or another value, in the actions or another feature of one frame."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.copytree(root, copy)
    (file,) = (copy / "data").rglob("*.parquet")
    table = pq.read_table(file)
    places = zip(table["episode_index"].to_pylist(), table["frame_index"].to_pylist(), strict=True)
    actions = [
        [value] * len(action) if place == (episode, frame) else action
        for place, action in zip(places, table[name].to_pylist(), strict=True)
    ]
    column = table.schema.get_field_index(name)
    table = table.set_column(column, table.schema.field(column), pa.array(actions, table.schema.field(column).type))
    pq.write_table(table, file)
    return copy


@pytest.mark.parametrize("method", ["craft", "naive", pytest.param("l2sp", marks=pytest.mark.slow)])
def test_what_overflows_stops_before_the_step_and_names_the_batch(
    method, constrained, craft_train, anchor_data, tmp_path, capfd
):
    # The first frame of an episode: no other frame's chunk of actions reaches back to it.
    poisoned = poison(anchor_data / "new", tmp_path / "poisoned", episode=1, frame=0, value=3e38)
    flags = constrained(dataset__root=poisoned, craft__method=method, steps=30, save_freq=1, batch_size=6)
    assert craft_train(*flags) == 2
    said = capfd.readouterr().err
    last = said.splitlines()[-1]
    assert "the task gradient is not finite" in last
    assert "episode 1 frame 0" in last
    last_good = max(path.name for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit())
    assert f"the last good checkpoint is {tmp_path / 'run/checkpoints' / last_good}" in last
    assert f"at step {int(last_good) + 1} " in last


@pytest.mark.parametrize("name", ["action", "observation.state"])
def test_a_value_that_is_no_number_is_refused_at_the_start_by_its_frame(
    name, constrained, craft_train, anchor_data, tmp_path, capfd
):
    poisoned = poison(anchor_data / "new", tmp_path / "poisoned", episode=1, frame=3, name=name)
    assert craft_train(*constrained(dataset__root=poisoned)) == 2
    *_, said = capfd.readouterr().err.splitlines()
    assert f"{name} of local/new is NaN or infinite in frame 3 of episode 1: " in said
    assert said.endswith("leave their episodes out with --dataset.episodes")
    assert craft_train(*constrained(dataset__root=poisoned, steps=1), "--dataset.episodes=[0, 2]") == 0


def test_a_dataset_that_was_never_recorded_into_says_so(constrained, craft_train, tmp_path, capfd):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    vector = {"dtype": "float32", "shape": (4,), "names": list("abcd")}
    features = {"observation.state": vector, "action": dict(vector)}
    LeRobotDataset.create("local/none", fps=10, features=features, root=tmp_path / "none").finalize()
    assert craft_train(*constrained(dataset__root=tmp_path / "none")) == 2
    assert "has no episode: it was created, and nothing was saved into it" in capfd.readouterr().err


def test_other_actions_without_craft_do_not_blame_the_checkpoint(constrained, craft_train, tmp_path, capfd):
    from lerobot_craft.tiny.make import make_local_dataset

    wide = make_local_dataset(tmp_path / "wide", ["wave"], 2, 6, ("observation.images.top",), 64, action_dim=14)
    assert craft_train(*constrained("act", dataset__root=wide, craft__enabled="false")) == 2
    *_, said = capfd.readouterr().err.splitlines()
    assert "do not fit the policy with the actions of local/new" in said
    assert "Use a dataset with the policy's actions" in said
