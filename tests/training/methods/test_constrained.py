"""The constraint in the loop's terms: when anchors are visited, in which unit, what is logged, saved and charged."""

import math

import pytest
import torch

from lerobot_craft.core import Surgery
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import adapter_for
from lerobot_craft.policies.adapter import belongs_to
from lerobot_craft.training.methods.constrained import Constrained
from tests.anchor_fixtures import OLD_TASKS
from tests.training.anchor_contexts import OPEN_DATASET, make_context, old_dataset, resume, train_a_little

STEPS = 20
ANCHORED = {"retention_loss", "lambda", "epsilon", "conflict", "bounded", "dot", "cos", "retention_norm", "merged_norm"}
PER_TASK = {f"{key}/{task}" for key in ("lambda", "retention_loss") for task in OLD_TASKS}
HIDDEN = {"retention_mode": "hidden"}
EVERY_TOKEN = {"layers_to_save": "-2,-1", "per_token": True}


@pytest.fixture(scope="session")
def caches(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


@pytest.fixture
def context_of(teachers, anchor_data, opened_once, caches, monkeypatch):
    """Function to a context whose anchors are in a cache that the first to ask for it builds."""
    monkeypatch.setattr(OPEN_DATASET, opened_once)

    def made(policy_type="smolvla", *, cache=None, **craft):
        craft = {"retention_mode": "action", "retention_freq": 1, "anchor_batch_size": 9, **craft}
        name = cache or f"{policy_type}_{craft['retention_mode']}"
        craft.setdefault("anchor_cache_dir", caches / name)
        context = make_context(teachers(policy_type), anchor_data, old_dataset=old_dataset(anchor_data), **craft)
        context.train.steps = STEPS
        context.train.optimizer = context.teacher.config.get_optimizer_preset()
        return context

    return made


def started(context) -> Constrained:
    method = Constrained()
    method.start(context)
    return method


def task_loss(context):
    return 1e-3 * sum((parameter - 1).square().sum() for parameter in context.trained)


def take_step(method, move=True):
    """As the loop does, but that the weights stay: the metrics of the step."""
    method.backward(task_loss(method.context))
    metrics = method.metrics()
    for parameter in method.context.trained:
        parameter.grad = None
    if move:
        method.advance()
    return metrics


def test_an_anchor_step_measures_everything_and_the_others_the_task_alone(context_of):
    method = started(context_of(retention_freq=3))
    visited = []
    batch = method.anchors.batch
    method.anchors.batch = lambda *arguments: visited.append(arguments) or batch(*arguments)
    measured = [take_step(method) for _ in range(7)]
    between = {"mode", "task_norm"}
    anchored = between | ANCHORED | PER_TASK | {"retention_s"}
    expected = [anchored if step % 3 == 0 else between for step in range(1, 8)]
    assert [set(values) for values in measured] == expected
    assert visited == [(0, 9, 0, 1), (1, 9, 0, 1)], "anchor steps are counted on their own, from 0"
    assert {values["mode"] for values in measured} == {"action"}
    assert measured[2]["epsilon"] == method.context.config.epsilon(2, STEPS)
    assert all(type(values[key]) in (float, bool) for values in measured for key in values if key != "mode")


def test_gradients_are_compared_in_each_module_that_both_reach(context_of):
    method = started(context_of())
    # The student is the teacher yet: its drift has no gradient, and between a gradient and none there is no angle.
    assert not [key for key in take_step(method) if key.startswith("cos/")]
    train_a_little(method.context, scale=1.001)
    found = {key.removeprefix("cos/"): cos for key, cos in take_step(method).items() if key.startswith("cos/")}
    assert len(found) > 1
    assert set(found) <= set(method.modules)
    trained = [name for name, parameter in method.context.policy.named_parameters() if parameter.requires_grad]
    assert all(any(f"{module}." in name for name in trained) for module in method.modules)


def test_one_multiplier_in_all_has_no_tasks(context_of):
    method = started(context_of(lambda_per_task=False))
    values = take_step(method)
    assert set(values) == {"mode", "task_norm", "retention_s"} | ANCHORED


def test_the_drift_is_in_the_unit_of_its_own_task(context_of):
    found = {}
    for name, craft in {
        "absolute": {"epsilon_unit": "absolute"},
        "teacher": {"epsilon_unit": "teacher"},
        "in all": {"lambda_per_task": False},
        "absolute in all": {"epsilon_unit": "absolute", "lambda_per_task": False},
    }.items():
        method = started(context_of(anchor_batch_size=18, **craft))
        train_a_little(method.context, scale=1.001)
        found[name] = take_step(method)
    units = method.anchors.units(method._parts[0].loss_type)
    assert len(set(units)) == len(OLD_TASKS), "else nothing tells them apart"
    for task, unit in zip(OLD_TASKS, units, strict=True):
        key = f"retention_loss/{task}"
        assert found["teacher"][key] == pytest.approx(found["absolute"][key] / unit)
    together = found["absolute in all"]["retention_loss"]
    assert found["in all"]["retention_loss"] == pytest.approx(together / (sum(units) / 3))


def test_drift_over_several_layers_is_relative_and_its_unit_is_one(context_of):
    context = context_of("pi0_fast", cache="every_token", **HIDDEN, **EVERY_TOKEN)
    relative = started(context)
    assert relative._parts[0].layer_scales == relative.anchors.layer_scales("mse")
    assert relative._step.units == [1.0] * 3
    absolute = started(context_of("pi0_fast", cache="every_token", relative=False, **HIDDEN, **EVERY_TOKEN))
    assert absolute._parts[0].layer_scales is None
    assert absolute._step.units == absolute.anchors.units("mse") != [1.0] * 3


def test_multipliers_rise_for_what_is_over_its_budget(context_of):
    method = started(context_of(epsilon_start=0.0, epsilon_end=0.0, lambda_lr=0.5, retention_freq=2))
    train_a_little(method.context, scale=1.001)
    take_step(method)
    before = take_step(method)
    take_step(method)
    after = take_step(method)
    for task in OLD_TASKS:
        assert before[f"lambda/{task}"] == 1.0
        risen = 1.0 + 0.5 * 2 * before[f"retention_loss/{task}"]  # K = 2: one measurement stands for two steps
        assert after[f"lambda/{task}"] == pytest.approx(min(risen, 10.0))
    assert after["lambda"] == pytest.approx(sum(after[f"lambda/{task}"] for task in OLD_TASKS) / 3)


def test_the_norm_that_lerobot_logs_is_that_of_the_gradient_it_steps_with(context_of):
    method = started(context_of(task_max_norm=0.25, retention_max_norm=0.125))
    assert method._step.surgery == Surgery(task_max_norm=0.25, retention_max_norm=0.125, merged_max_norm=10.0)
    train_a_little(method.context, scale=1.001)
    method.backward(task_loss(method.context))
    norm = method.clip(method.context.policy.parameters(), 10.0).item()
    gradients = [p.grad for p in method.context.trained if p.grad is not None]
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)
    assert 0 < norm <= 0.375 + 1e-6 < method.metrics()["task_norm"]


@pytest.mark.parametrize(("bound", "is_bounded"), [(1e-9, True), (1e9, False)])
def test_a_step_says_whether_its_retention_gradient_was_at_the_bound(bound, is_bounded, context_of):
    method = started(context_of(retention_max_norm=bound))
    train_a_little(method.context, scale=1.001)
    assert take_step(method)["bounded"] is is_bounded


def test_the_retention_gradient_is_charged_as_large_as_it_was_found(context_of):
    method = started(context_of("pi0_fast", **HIDDEN))
    largest = sum(parameter.nbytes for parameter in method.context.trained)
    assert method.costs()[0] == ("retention gradient", largest)
    assert method.costs()[1:] == method.anchors.costs()
    take_step(method)
    held = method.costs()[0].bytes
    assert held == method._report.anchor.retention_bytes
    assert 0 < held < largest, "what follows the retained layer has no gradient"


def test_a_run_goes_on_with_its_multipliers_and_its_anchors(context_of):
    settings = {"dual_rule": "pi", "lambda_smoothing": 0.5, "retention_freq": 2, "epsilon_start": 0.0}
    whole = started(context_of(epsilon_end=0.0, **settings))
    train_a_little(whole.context, scale=1.001)
    for _ in range(3):
        take_step(whole)
    state = whole.state_dict()
    expected = [take_step(whole) for _ in range(3)]
    resumed = started(resume(whole.context))
    resumed.load_state_dict(state)
    found = [take_step(resumed) for _ in range(3)]
    for values in (*expected, *found):
        values.pop("retention_s", None)
    assert found == expected


def test_other_anchors_than_the_saved_runs_are_refused(context_of):
    state = started(context_of()).state_dict()
    other = started(context_of(cache="fewer", num_anchors=9))
    with pytest.raises(CraftError, match=r"not those that the saved run was trained with.*--craft.anchor_cache_dir"):
        other.load_state_dict(state)
    with pytest.raises(CraftError, match="not those that the saved run"):
        other.load_state_dict({})


@pytest.mark.parametrize("normalization", ["merge", "replace"])
def test_statistics_that_move_the_student_are_refused_before_anything_is_built(normalization, context_of, tmp_path):
    with pytest.raises(CraftError, match=f"--craft.normalization={normalization} .*use keep"):
        started(context_of(normalization=normalization, anchor_cache_dir=tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def is_frozen(context) -> bool:
    """Whether the readout was frozen, and nothing else."""
    before = {name for name, parameter in context.policy.named_parameters() if parameter.requires_grad}
    Constrained().freeze(context.policy, context.config, context.teacher.config)
    after = {name for name, parameter in context.policy.named_parameters() if parameter.requires_grad}
    readout = adapter_for(context.teacher.config).readout
    assert before - after in (set(), {name for name in before if belongs_to(name, readout)})
    return after != before


def test_hidden_states_of_every_token_freeze_the_readout_whether_flags_or_the_cache_say_so(context_of, caches):
    started(context_of("pi0_fast", cache="every_token", **HIDDEN, **EVERY_TOKEN))
    started(context_of("pi0_fast", **HIDDEN))
    every_token, pooled = caches / "every_token", caches / "pi0_fast_hidden"

    def frozen(**craft):
        return is_frozen(context_of("pi0_fast", **{**HIDDEN, **craft}))

    assert frozen(anchor_cache_dir=every_token)
    assert not frozen(anchor_cache_dir=pooled)
    assert frozen(anchor_cache_dir=None, per_token=True)
    assert frozen(anchor_cache_dir=caches / "to be built", per_token=True)
    assert not frozen(anchor_cache_dir=None)
    assert not frozen(anchor_cache_dir=every_token, freeze_readout=False)
    assert frozen(anchor_cache_dir=pooled, freeze_readout=True)
    assert not frozen(anchor_cache_dir=None, per_token=True, retention_mode="action")


def test_a_loss_is_chosen_where_none_is_named(context_of):
    assert started(context_of("pi0_fast"))._parts[0].loss_type == "kl"
    assert started(context_of())._parts[0].loss_type == "mse"
    assert started(context_of(loss_type="l1"))._parts[0].loss_type == "l1"


def test_at_its_first_step_the_student_is_the_teacher(context_of):
    method = started(context_of())
    assert method.start_report.reproduction.holds
    assert take_step(method)["retention_loss"] == pytest.approx(0, abs=1e-6)
    assert math.isfinite(take_step(method)["cos"])


def test_each_of_two_modes_has_its_own_multipliers_and_units(context_of):
    method = started(context_of("pi0_fast", retention_mode="hidden+action"))
    hidden, action = method._parts
    assert method._step.multipliers.groups == tuple(
        f"{mode}: {task}" for mode in ("hidden", "action") for task in OLD_TASKS
    )
    assert method._step.units == hidden.anchors.units("mse") + action.anchors.units("kl")
    (part,) = method._drift()
    drift = part.drift()
    of_hidden, of_action = drift.groups.chunk(2)
    assert of_hidden.unique().tolist() == [0, 1, 2]
    assert torch.equal(of_hidden + len(OLD_TASKS), of_action)  # the same anchors under both
    assert len(drift.per_sample) == len(drift.groups) == 18


def test_a_task_is_shown_under_the_mode_that_moved_most(context_of):
    method = started(context_of("pi0_fast", retention_mode="hidden+action"))
    train_a_little(method.context)
    metrics = take_step(method)
    by_mode = {mode: metrics[f"mode_loss/{mode}"] for mode in ("hidden", "action")}
    assert min(by_mode.values()) > 0
    assert metrics["retention_loss"] == pytest.approx(sum(by_mode.values()) / 2)
    worst = [metrics[f"retention_loss/{task}"] for task in OLD_TASKS]
    assert sum(worst) / len(worst) >= max(by_mode.values()) - 1e-6
    assert metrics["mode"] == "hidden+action"


def test_what_is_kept_out_is_kept_out_under_both_modes(context_of):
    method = started(context_of("pi0_fast", retention_mode="hidden+action"))
    method.anchors.hold_out(torch.arange(2, method.anchors.num_anchors))
    assert {len(part.anchors.batch(0, 2, 0, 1)) for part in method._parts} == {2}
    of_each = [sorted(part.anchors.batch(0, 2, 0, 1).instruction.tolist()) for part in method._parts]
    assert of_each[0] == of_each[1] == sorted(method.anchors.instructions[:2].tolist())


def test_caches_of_other_anchors_are_not_retained_together(context_of, caches):
    started(context_of("pi0_fast", retention_mode="hidden", cache="apart/hidden", num_anchors=12))
    started(context_of("pi0_fast", retention_mode="action", cache="apart/action", num_anchors=15))
    with pytest.raises(CraftError, match="hold different anchors"):
        started(context_of("pi0_fast", retention_mode="hidden+action", cache="apart"))
