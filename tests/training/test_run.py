"""Whole runs of `craft train` on real, tiny policies: every kind of retention, every method, LoRA."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from lerobot_craft.anchors.teacher import load_teacher
from lerobot_craft.training.journal import read_history, read_metrics, read_modules, read_run_file
from tests.anchor_fixtures import OLD_TASKS

# What each policy must be trained with for this kind of retention to reach it.
SMOLVLA_WHOLE = {"policy__train_expert_only": "false", "policy__freeze_vision_encoder": "false"}
RETENTION = [
    ("pi0_fast", "hidden", {}),
    ("pi0_fast", "token_ce", {}),
    ("pi0_fast", "action", {}),
    ("smolvla", "hidden", SMOLVLA_WHOLE),
    ("smolvla", "action", {}),
    pytest.param("pi0", "hidden", {}, marks=pytest.mark.slow),
    ("pi0", "action", {}),
    ("pi05", "hidden", {}),
    pytest.param("pi05", "action", {}, marks=pytest.mark.slow),
    ("act", "action", {}),
    pytest.param("diffusion", "action", {}, marks=pytest.mark.slow),
]
LORA_TARGETS = r".*\.(q_proj|v_proj)"
METHODS = ["naive", "er", "l2sp", "ewc", "lwf", *(pytest.param(m, marks=pytest.mark.slow) for m in ("merge", "freeze"))]


@pytest.fixture
def craft_run(train_flags, craft_train, anchor_data, tmp_path):
    """Function that trains and returns the run's directory."""

    def run(policy_type, name="run", **changes):
        settings = {
            "craft.enabled": "true",
            "craft.old_dataset.repo_id": "local/old",
            "craft.old_dataset.root": anchor_data / "old",
            "craft.num_anchors": 12,
            "craft.anchor_batch_size": 6,
            "craft.retention_freq": 1,
            "craft.probe_anchors": 6,
            "craft.replay_frames": 6,
            "craft.ewc_samples": 3,
            "craft.log_craft_metrics_freq": 1,
            **{key.replace("__", "."): value for key, value in changes.items() if key.startswith("craft__")},
        }
        rest = {key: value for key, value in changes.items() if not key.startswith("craft__")}
        own = [f"--{key}={value}" for key, value in settings.items() if value is not None]
        assert craft_train(*train_flags(policy_type, tmp_path / name, **rest), *own) == 0
        return tmp_path / name

    return run


def policy_of(run: Path) -> Path:
    return run / "checkpoints" / "last" / "pretrained_model"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(("policy_type", "mode", "flags"), RETENTION, ids=lambda v: v if isinstance(v, str) else "")
def test_every_kind_of_retention_trains_and_logs(policy_type, mode, flags, craft_run, checkpoints):
    run = craft_run(policy_type, craft__retention_mode=mode, **flags)
    logged = list(read_metrics(run))
    assert [values["step"] for values in logged] == [1, 2, 3]
    for values in logged:
        assert values["mode"] == mode
        assert {"loss", "retention_loss", "lambda", "epsilon", "retention_s"} <= values.keys()
        assert {"merged_norm", "grad_norm"} <= values.keys()
        apart = {"conflict", "dot", "cos", "task_norm", "retention_norm"}
        added = mode == "action" and policy_type != "pi0_fast"  # one sum: its terms have no norms
        assert added or apart <= values.keys()
        assert all(math.isfinite(value) for value in values.values() if isinstance(value, float))
    first, *_, last = logged
    if mode != "token_ce":  # a cross-entropy is not 0 even for the teacher itself
        assert first["retention_loss"] == pytest.approx(0, abs=1e-6), "at step 0 the student is the teacher"
        assert last["retention_loss"] > first["retention_loss"]
    tasks = {key.removeprefix("lambda/") for key in logged[0] if key.startswith("lambda/")}
    assert tasks == set(OLD_TASKS)
    assert [row["step"] for row in read_history(run)] == [1, 2, 3]
    cosines = [value for key, value in list(read_modules(run))[-1].items() if key.startswith("cos/")]
    assert added or cosines, "at least one module is reached"
    assert all(-1 <= cos <= 1 for cos in cosines)
    record = read_run_file(run)
    assert (record.end_step, record.took.anchor_steps, record.anchors.number) == (3, 3, 12)
    card = ModelCard((policy_of(run) / "README.md").read_text())
    assert card.data.library_name == "lerobot"
    assert f"`{record.fingerprint}`" in card.content
    before, after = weights(checkpoints(policy_type)), weights(policy_of(run))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_checkpoint_is_a_teacher_for_the_next_task_with_the_kept_statistics(craft_run, checkpoints, teachers):
    run = craft_run("pi0_fast", craft__retention_mode="action", steps=2)
    trained = load_teacher(policy_of(run))  # weights compared with the file, tensor by tensor
    assert trained.fingerprint["stats"] == teachers("pi0_fast").fingerprint["stats"]
    assert trained.fingerprint["weights"] != teachers("pi0_fast").fingerprint["weights"]
    assert "craft" not in json.loads((policy_of(run) / "train_config.json").read_text())
    assert json.loads((policy_of(run) / "craft_config.json").read_text())["retention_mode"] == "action"


@pytest.mark.slow  # three runs; tests/training/test_normalization.py has the parts
def test_statistics_are_replaced_or_merged_where_asked(craft_run, teachers):
    kept = teachers("smolvla").fingerprint["stats"]
    found = {
        policy: load_teacher(
            policy_of(craft_run("smolvla", policy, craft__method="naive", craft__normalization=policy))
        )
        for policy in ("keep", "merge", "replace")
    }
    assert found["keep"].fingerprint["stats"] == kept
    assert len({teacher.fingerprint["stats"] for teacher in found.values()}) == 3


@pytest.mark.parametrize("method", METHODS)
def test_every_baseline_runs_in_the_same_loop(method, craft_run, capfd):
    changes = {"craft__freeze": "readout"} if method == "freeze" else {}
    run = craft_run("smolvla", craft__method=method, save_freq=2, **changes)
    logged = list(read_metrics(run))
    assert [(values["step"], values["method"]) for values in logged] == [(step, method) for step in (1, 2, 3)]
    # Users compare methods by the drift of the actions: on the old tasks, whatever a method has anchors of.
    assert all({f"action_drift/{task}" for task in OLD_TASKS} <= values.keys() for values in logged)
    said = capfd.readouterr().err
    assert all(f"'{task}'" in said for task in OLD_TASKS)
    assert f"method {method}" in said
    if method in ("er", "l2sp", "ewc", "lwf"):
        assert "Memory beyond plain fine-tuning" in said
    if method == "merge":
        assert {path.name for path in (run / "merged").iterdir()} >= {"alpha_0.20", "alpha_0.80", "sweep.json"}
        merged = run / "merged" / "alpha_0.40" / "pretrained_model"
        load_teacher(merged)
        assert "moved by 0.4 of the way to the fine-tuned ones" in (merged / "README.md").read_text()


def test_the_constraint_holds_the_actions_where_naive_fine_tuning_loses_them(craft_run):
    lr = {"policy__optimizer_lr": 1e-3, "policy__scheduler_warmup_steps": 0}
    drifts = {}
    for method in ("naive", "craft"):
        run = craft_run(
            "smolvla",
            method,
            steps=25,
            craft__method=method,
            craft__retention_mode="action",
            craft__initial_lambda=10,
            craft__lambda_min=10,
            craft__log_craft_metrics_freq=25,
            **lr,
        )
        *_, last = read_metrics(run)
        drifts[method] = last["action_drift"]
    assert drifts["craft"] < 0.7 * drifts["naive"]


@pytest.mark.parametrize("peft", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lora", "frozen_copy"])
def test_an_online_teacher_needs_no_cache(peft, craft_run):
    lora = {"peft__method_type": "LORA", "peft__r": 4, "peft__target_modules": LORA_TARGETS} if peft else {}
    lr = {"policy__optimizer_lr": 1e-2, "policy__scheduler_warmup_steps": 0}  # seen in three steps
    run = craft_run("pi0_fast", craft__teacher="online", craft__retention_mode="action", **lora, **lr)
    first, *_, last = read_metrics(run)
    assert first["retention_loss"] == pytest.approx(0, abs=1e-6)
    assert last["retention_loss"] > 0
    assert (policy_of(run) / "adapter_model.safetensors").exists() == peft


def test_lora_with_a_cache(craft_run):
    run = craft_run(
        "pi0_fast", craft__retention_mode="hidden", peft__method_type="LORA", peft__target_modules=LORA_TARGETS
    )
    first, *_, last = read_metrics(run)
    assert first["retention_loss"] == pytest.approx(0, abs=1e-6)
    assert last["retention_loss"] > 0
    # PEFT puts a card of blanks beside its adapter.
    assert "## Retention" in (policy_of(run) / "README.md").read_text()


@pytest.mark.slow  # two runs; the fingerprint below an adapter has a quick test of its own
def test_an_adapter_is_not_resumed_on_other_weights(craft_run, craft_train, checkpoints, tmp_path, capsys):
    teacher = shutil.copytree(checkpoints("pi0_fast"), tmp_path / "teacher")
    lora = {"peft__method_type": "LORA", "peft__r": 4, "peft__target_modules": LORA_TARGETS}
    run = craft_run("pi0_fast", policy__path=teacher, craft__teacher="online", save_freq=2, **lora)
    shutil.rmtree(run / "checkpoints" / "000003")
    config = run / "checkpoints" / "000002" / "pretrained_model" / "train_config.json"
    (teacher / "model.safetensors").rename(teacher / "moved")  # pi0_fast then has random weights, and no error
    assert craft_train(f"--config_path={config}", "--resume=true") == 2
    assert "below its adapter this run began with the weights of" in capsys.readouterr().err
    (teacher / "moved").rename(teacher / "model.safetensors")
    assert craft_train(f"--config_path={config}", "--resume=true") == 0


def test_cross_needs_nothing_but_the_old_instructions(craft_run):
    flags = {
        "craft__old_dataset.repo_id": None,
        "craft__old_dataset.root": None,
        "craft__anchor_source": "cross",
        "craft__old_instructions": ";".join(OLD_TASKS),
    }
    first, *_, last = read_metrics(craft_run("smolvla", craft__retention_mode="action", **flags))
    assert first["retention_loss"] == pytest.approx(0, abs=1e-6)
    assert {f"lambda/{task}" for task in OLD_TASKS} <= last.keys()


def test_per_token_hidden_states_freeze_the_readout(craft_run, checkpoints):
    flags = {"craft__per_token": "true", "craft__layers_to_save": "all,expert:all"}
    run = craft_run("pi0", **flags)
    first, *_, last = read_metrics(run)
    assert first["retention_loss"] == pytest.approx(0, abs=1e-6)
    assert last["retention_loss"] > 0
    before, after = weights(checkpoints("pi0")), weights(policy_of(run))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not [name for name in moved if "action_out_proj" in name]


@pytest.mark.slow  # a run; tests/training/methods has the parts
def test_one_multiplier_in_all_and_an_absolute_budget(craft_run):
    flags = {"craft__lambda_per_task": "false", "craft__epsilon_unit": "absolute", "craft__dual_rule": "log"}
    run = craft_run("smolvla", craft__initial_lambda=1, craft__lambda_min=0.1, **flags)
    last = list(read_metrics(run))[-1]
    assert not [key for key in last if key.startswith("lambda/")]
    assert last["lambda"] < 1, "a drift far below an absolute budget of 1 lets the multiplier fall"
