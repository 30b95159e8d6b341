"""What reaches the log, metrics.jsonl and lambda_history.csv of which step."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.lerobot_api import train_steps
from lerobot_craft.training.action_drift import ActionDrift
from lerobot_craft.training.config import DocumentsConfig
from lerobot_craft.training.journal import (
    HISTORY_FILE,
    METRICS_FILE,
    RUN_FILE,
    AnchorsHeld,
    read_history,
    read_metrics,
    read_run_file,
)
from lerobot_craft.training.methods.method import Context, Method
from lerobot_craft.training.recorder import Recorder
from lerobot_craft.training.session import Origin, Session

TASKS = ("open the drawer", "press it")
ORIGIN = Origin("/policies/base", dict.fromkeys(("weights", "stats", "tokenizers", "processors"), "0" * 64))
FREQUENCY = 2  # anchors at steps 2, 4, 6, ...


class Counted(Method):
    """Measures at step s, with anchors at every second: a drift of s."""

    name = "craft"
    has_multipliers = True
    old_anchors = SimpleNamespace(
        tasks=TASKS, num_anchors=4, directory=None, source="both", stored_bytes=123, retained=Action()
    )

    def __init__(self, spoiled=()):
        self.step = 0
        self.spoiled = dict(spoiled)

    def metrics(self):
        self.step += 1
        values = {"mode": "action", "task_norm": 100.0 + self.step}
        if self.step % FREQUENCY == 0:
            values |= {"retention_loss": float(self.step), "lambda": 1.0, "epsilon": 0.5, "conflict": True, "cos": -0.5}
            values |= {f"lambda/{task}": 1.0 for task in TASKS} | {"retention_s": 0.25, "bounded": True}
        return values | {name: value for name, value in self.spoiled.items() if name in values}


class Drifting:
    """A probe whose drift is the number of times that it was asked."""

    held_out = False
    measured_on = "measured on 2 real frames kept out of training"

    tasks = TASKS

    def __init__(self, *, spoiled=None):
        self.asked = 0
        self.spoiled = spoiled

    def measure(self, policy):
        self.asked += 1
        mean = float(self.asked) if self.spoiled is None else self.spoiled
        return ActionDrift({TASKS[0]: torch.tensor([mean]), TASKS[1]: torch.tensor([0.5, 0.5])}, verified=True)


@pytest.fixture(scope="module")
def accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@pytest.fixture
def run(accelerator, tmp_path, caplog):
    """Function that takes steps as the loop does, with losses 1, 2, 3, ..., and returns the recorder, still open."""
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.policies.act.configuration_act import ACTConfig

    caplog.set_level(logging.INFO, "lerobot_craft")
    recorders = []

    def record(steps, *, log_freq=1, method=None, probe=None, resume_step=0, **craft):
        config = DocumentsConfig(**{"enabled": True, "log_craft_metrics_freq": 0, **craft})
        settings = {"output_dir": tmp_path, "steps": steps, "log_freq": log_freq, "batch_size": 2}
        cfg = TrainPipelineConfig(DatasetConfig("local/new"), policy=ACTConfig(device="cpu"), **settings)
        cfg.optimizer = cfg.policy.get_optimizer_preset()
        method = method or Counted()
        method.context = Context(config, cfg, None, None, "", None, accelerator)
        cfg.resume = resume_step > 0
        dataset = SimpleNamespace(num_frames=12, num_episodes=2)
        data = SimpleNamespace(dataset=dataset)
        policy = torch.nn.Linear(1, 1)
        parts = (cfg, config, accelerator, method, policy, None, None, (None, None), data, None)
        session = Session(*parts, ORIGIN if config.enabled else None, step=0, command="craft train --steps=6")
        session.step = resume_step
        recorder = Recorder(session, probe)
        recorders.append(recorder)
        tracker = train_steps.make_tracker(cfg.batch_size, dataset, accelerator, 0)
        bar = tqdm(total=steps, disable=True)
        for step in range(resume_step + 1, steps + 1):
            tracker.loss, tracker.grad_norm, tracker.lr = float(step), 1.0, 1e-4
            tracker.update_s, tracker.dataloading_s = 0.5, 0.1
            session.step = step
            recorder.after_step(session, tracker, bar)
        recorder.session = session
        return recorder

    yield record
    for recorder in recorders:
        recorder.close()


def test_a_line_has_the_latest_anchor_step_since_the_line_before(run, tmp_path):
    run(6, log_freq=3)
    first, second = read_metrics(tmp_path)
    assert (first["step"], first["retention_loss"], first["task_norm"]) == (3, 2.0, 102.0)
    assert (second["step"], second["retention_loss"], second["task_norm"]) == (6, 6.0, 106.0)
    assert (first["loss"], second["loss"]) == (2.0, 5.0), "lerobot's meters are means over the window"
    assert (first["method"], first["mode"], first["conflict"]) == ("craft", "action", True)


def test_a_window_without_anchors_has_none_of_their_values(run, tmp_path):
    run(5)
    found = {values["step"]: values for values in read_metrics(tmp_path)}
    assert [step for step, values in found.items() if "retention_loss" in values] == [2, 4]
    assert found[3]["task_norm"] == 103.0
    assert not found[3].keys() & {"lambda", "epsilon", "cos", "conflict", "retention_s", f"lambda/{TASKS[0]}"}


def test_the_history_has_every_anchor_step_at_its_own(run, tmp_path):
    run(6, log_freq=5)
    assert [(row["step"], row["retention_loss"]) for row in read_history(tmp_path)] == [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert [values["step"] for values in read_metrics(tmp_path)] == [5, 6], "the last step is always logged"


def test_the_drift_of_the_actions_reaches_both_files(run, tmp_path):
    probe = Drifting()
    run(5, probe=probe, log_craft_metrics_freq=4, log_freq=2)
    logged = {values["step"]: values for values in read_metrics(tmp_path)}
    assert list(logged) == [2, 4, 5]
    assert "action_drift" not in logged[2]
    for values in (logged[4], {row["step"]: row for row in read_history(tmp_path)}[4]):
        assert values["action_drift"] == 0.75
        assert values[f"action_drift/{TASKS[1]}"] == 0.5
    assert logged[5]["action_drift"] == 1.25, "the last step is measured, with or without anchors"
    assert probe.asked == 2


def test_a_drift_between_anchors_joins_the_values_of_the_anchors(run, tmp_path):
    run(5, probe=Drifting(), log_craft_metrics_freq=3, log_freq=0)
    third, fifth = read_metrics(tmp_path)
    assert (third["step"], third["retention_loss"], third["task_norm"], third["action_drift"]) == (3, 2.0, 102.0, 0.75)
    assert (fifth["step"], fifth["retention_loss"], fifth["action_drift"]) == (5, 4.0, 1.25)
    assert fifth["verified"] is True


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out_with_a_warning(value, run, tmp_path, caplog):
    run(2, method=Counted({"cos": value}), probe=Drifting(spoiled=value), log_craft_metrics_freq=2)
    assert f"not finite at step 2: cos, action_drift, action_drift/{TASKS[0]}" in caplog.text
    *_, logged = read_metrics(tmp_path)
    (row,) = read_history(tmp_path)
    for values in (logged, row):
        assert values["retention_loss"] == 2.0
        assert values[f"action_drift/{TASKS[1]}"] == 0.5
        assert not values.keys() & {"cos", "action_drift", f"action_drift/{TASKS[0]}"}


def test_a_meter_that_is_not_finite_is_left_out_too(run, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(Counted, "metrics", lambda _: {"mode": "action"})
    monkeypatch.setattr("lerobot_craft.training.recorder._METERS", ("loss", "lr"))
    recorder = run(1)
    tracker = SimpleNamespace(to_dict=lambda: {"loss": math.inf, "lr": 0.5})
    recorder.session.step = 2
    recorder._log(recorder.session, tracker, tqdm(disable=True), detailed=False)
    assert "not finite at step 2: loss" in caplog.text
    assert list(read_metrics(tmp_path))[-1] == {"step": 2, "lr": 0.5, "method": "craft"}


@pytest.mark.parametrize("why", ["switched off", "no multipliers"])
def test_without_a_history_there_is_no_file_of_it(why, run, tmp_path, monkeypatch):
    if why == "no multipliers":
        monkeypatch.setattr(Counted, "has_multipliers", False)
    run(2, save_lambda_history=why == "no multipliers")
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]
    assert list(read_metrics(tmp_path))[-1]["retention_loss"] == 2.0


def test_one_multiplier_in_all_has_no_columns_of_tasks(run, tmp_path):
    run(2, lambda_per_task=False)
    head = (tmp_path / HISTORY_FILE).read_text().splitlines()[0]
    assert "lambda" in head
    assert "/" not in head


def test_without_craft_nothing_is_written_and_lerobots_line_is_logged(run, tmp_path, caplog):
    recorder = run(4, enabled=False, log_freq=2, log_craft_metrics_freq=1, method=Method(), probe=None)
    assert list(tmp_path.iterdir()) == []
    recorder.announce(recorder.session)
    recorder.conclude(recorder.session)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("lerobot_craft")]
    assert len(lines) == 2
    assert all("loss:" in line and "grdn:" in line for line in lines)


@pytest.mark.parametrize("enabled", [True, False])
def test_evaluations_leave_the_random_state_alone_only_under_craft(enabled, run):
    recorder = run(1, enabled=enabled)
    before = torch.get_rng_state()
    with recorder.undisturbed():
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before) == enabled


def test_tasks_have_lines_of_their_own_where_the_step_is_detailed(run, caplog):
    run(4, log_craft_metrics_freq=2, probe=Drifting())
    said = [record.getMessage() for record in caplog.records]
    steps = [line for line in said if line.startswith("Step ")]
    assert [line.split(" | ")[0] for line in steps] == ["Step 1/4", "Step 2/4", "Step 3/4", "Step 4/4"]
    assert sum(TASKS[0] in line for line in said) == 2


def test_the_run_says_what_it_is_before_its_first_step_and_what_it_took_at_its_end(run, tmp_path):
    recorder = run(6)
    recorder.announce(recorder.session)
    begun = read_run_file(tmp_path)
    assert (begun.method, begun.mode, begun.policy, begun.dataset) == ("craft", "action", "act", "local/new")
    assert (begun.steps, begun.end_step, begun.took) == (6, None, None)
    assert (begun.teacher, begun.tasks, begun.command) == ("/policies/base", list(TASKS), "craft train --steps=6")
    assert begun.anchors == AnchorsHeld("both", 4, 123)
    recorder.conclude(recorder.session)
    ended = read_run_file(tmp_path)
    assert (ended.end_step, ended.created) == (6, begun.created)
    assert (ended.took.steps, ended.took.anchor_steps, ended.took.extra_s) == (6, 3, 0.75)
    assert ended.took.process_bytes > 0


def test_the_card_has_the_drift_of_every_anchor_step_up_to_now(run):
    recorder = run(6, log_freq=6, probe=Drifting())
    card = recorder.card(recorder.session)
    assert "| all old tasks | 0.750 | 4.000 | over budget |" in card, "the mean of 2, 4 and 6"
    assert "after 6 of 6 steps" in card


@pytest.mark.parametrize("keeps", [True, False])
def test_a_resumed_run_remembers_the_drift_before_it(keeps, run, tmp_path):
    probe = Drifting()
    run(4, log_freq=4, probe=probe, log_craft_metrics_freq=4, save_lambda_history=keeps).close()
    method = Counted()
    method.step = 4
    recorder = run(6, log_freq=4, probe=probe, method=method, resume_step=4, save_lambda_history=keeps)
    whole, first, _ = recorder._outcomes
    # The drifts 2, 4 and 6; without a history only what was logged of the former part, which is that of step 4.
    assert (whole.drift, whole.visits) == ((4.0, 3) if keeps else (5.0, 2))
    assert (whole.action_drift, first.action_drift, first.verified) == (1.25, 2.0, True)


def test_without_craft_there_is_no_record(run, tmp_path):
    recorder = run(1, enabled=False, method=Method())
    recorder.announce(recorder.session)
    recorder.conclude(recorder.session)
    assert not (tmp_path / RUN_FILE).exists()


def test_the_end_says_what_was_retained_from_every_anchor_step(run, caplog):
    recorder = run(6, log_freq=6, probe=Drifting())
    recorder.conclude(recorder.session)
    said = caplog.text
    assert "End of training: method craft, step 6" in said
    assert "4.000" in said, "the mean of the drifts 2, 4 and 6, of which only the last was logged"
    assert "this process wrote none" in said


def test_the_end_names_the_bound_that_kept_multipliers_from_holding_the_budget(run, caplog):
    recorder = run(4, retention_max_norm=0.5)
    recorder.conclude(recorder.session)
    assert "In 100% of the anchor steps the weighted retention gradient was at its bound, 0.5:" in caplog.text
    assert "--craft.retention_max_norm=1.5 " in caplog.text
