import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lerobot_craft.core import (
    AnchorDrift,
    AnchorPart,
    Dual,
    Multipliers,
    NonFiniteGradientError,
    RetentionStep,
    Surgery,
    drift,
)
from lerobot_craft.errors import CraftError

NO_PROJECTION = Surgery(use_grad_projection=False)


class Policy(nn.Module):
    """Two layers that both losses reach, and a head for each that only one of them reaches."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.task_head = nn.Linear(8, 2)
        self.retention_head = nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)


@pytest.fixture
def policy():
    return Policy()


@pytest.fixture
def data():
    return {"x": torch.randn(6, 4), "y": torch.randn(6, 2), "anchor_x": torch.randn(6, 4), "target": torch.randn(6, 3)}


def task_loss(policy, data):
    return drift(policy.task_head(policy.trunk(data["x"])), data["y"])


def per_anchor_drift(policy, data):
    return drift(policy.retention_head(policy.trunk(data["anchor_x"])), data["target"], reduction="none")


def make_step(policy, dual=None, groups=("all",), lr=0.1, **settings):
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    return RetentionStep(policy.parameters(), optimizer, Multipliers(dual or Dual(), groups), **settings)


def take(step, policy, data):
    return step(lambda: task_loss(policy, data), lambda: per_anchor_drift(policy, data))


def sgd_reference(policy, loss, lr=0.1):
    """Parameters after one SGD step on `loss`, by plain autograd."""
    twin = copy.deepcopy(policy)
    loss(twin).backward()
    torch.optim.SGD([p for p in twin.parameters() if p.grad is not None], lr=lr).step()
    return list(twin.parameters())


def assert_same_parameters(policy, expected, **tolerance):
    for (name, p), q in zip(policy.named_parameters(), expected, strict=True):
        assert_close(p, q, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def test_without_projection_it_is_the_gradient_of_the_lagrangian(policy, data):
    expected = sgd_reference(policy, lambda p: task_loss(p, data) + 3.0 * per_anchor_drift(p, data).mean())
    take(make_step(policy, Dual(initial_lambda=3.0), surgery=NO_PROJECTION), policy, data)
    assert_same_parameters(policy, expected)


def test_bfloat16_weights_take_the_step_of_float32_ones(policy, data):
    small = copy.deepcopy(policy).to(torch.bfloat16)
    low = {name: x.to(torch.bfloat16) for name, x in data.items()}
    exact = take(make_step(policy), policy, data)
    report = take(make_step(small), small, low)
    assert report.anchor.retention_loss == pytest.approx(exact.anchor.retention_loss, rel=0.02)
    assert report.anchor.cos == pytest.approx(exact.anchor.cos, abs=0.02)
    assert report.merged_norm == pytest.approx(exact.merged_norm, rel=0.02)
    assert all(p.dtype == torch.bfloat16 for p in small.parameters())


def test_gradients_are_compared_within_named_parts(policy, data):
    names = [name.split(".")[0] for name, _ in policy.named_parameters()]
    step = make_step(policy, parts=names)
    task, retention = (
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(), policy.trunk.parameters())])
        for loss in (lambda: task_loss(policy, data), lambda: per_anchor_drift(policy, data).mean())
    )
    expected = torch.nn.functional.cosine_similarity(task, retention, dim=0).item()
    anchor = take(step, policy, data).anchor
    # The heads are reached by one of the losses only: there is no angle between a gradient and nothing.
    assert anchor.part_cosines == {"trunk": pytest.approx(expected, abs=1e-5)}
    assert anchor.cos != pytest.approx(expected, abs=1e-3), "the whole is not its largest part"


def test_parts_change_nothing_of_the_step(policy, data):
    other = copy.deepcopy(policy)
    for _ in range(3):
        take(make_step(policy, parts=["all"] * len(list(policy.parameters()))), policy, data)
        take(make_step(other), other, data)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True))


def test_a_name_for_each_parameter_is_needed(policy):
    with pytest.raises(ValueError, match="zip"):
        make_step(policy, parts=["trunk"])


def test_a_sum_is_the_merge_without_a_second_gradient(policy, data):
    """Bounds that never bind ask for both gradients apart; without them the second backward adds to the first."""
    twin = copy.deepcopy(policy)
    apart = Surgery(use_grad_projection=False, task_max_norm=1e6, retention_max_norm=1e6, merged_max_norm=0.3)
    added = Surgery(use_grad_projection=False, merged_max_norm=0.3)
    groups, dual = ("a", "b"), Dual(initial_lambda=2.0, lambda_lr=0.5)
    of_groups = torch.tensor([0, 0, 1, 1, 1, 1])
    steps = [
        make_step(model, dual, groups, surgery=surgery, retention_freq=2, epsilon=lambda step: 0.1)
        for model, surgery in ((policy, added), (twin, apart))
    ]
    for _ in range(6):
        found, expected = (
            step(
                lambda model=model: task_loss(model, data),
                lambda model=model: AnchorDrift(per_anchor_drift(model, data), of_groups),
            )
            for step, model in zip(steps, (policy, twin), strict=True)
        )
        assert_close(found.merged_norm, expected.merged_norm)
        assert_close(found.task_norm, expected.task_norm)
    assert_same_parameters(policy, list(twin.parameters()))
    assert found.anchor.retention_bytes == 0 < expected.anchor.retention_bytes
    assert found.anchor.cos is None is found.anchor.dot
    assert steps[0].multipliers.values == pytest.approx(steps[1].multipliers.values)


def test_multipliers_may_follow_anchors_that_no_step_visits(policy, data):
    step = make_step(
        policy, Dual(rule="ratio", lambda_min=0.1, lambda_lr=1.0, proportional_gain=0.0), follows_anchors=False
    )
    step.epsilon = lambda number: 0.5
    take(step, policy, data)
    assert step.multipliers.values == [1.0]
    step.measured([1.0])
    assert step.multipliers.values == pytest.approx([2.0])


def test_lambda_zero_without_projection_is_plain_training(policy, data):
    expected = sgd_reference(policy, lambda p: task_loss(p, data))
    take(make_step(policy, Dual(initial_lambda=0.0), surgery=NO_PROJECTION), policy, data)
    assert_same_parameters(policy, expected, rtol=0, atol=0)


def test_conflict_is_projected_away(policy, data):
    # The anchors ask for the exact opposite of the task, on the same inputs and the same head.
    def task():
        return policy.task_head(policy.trunk(data["x"])).mean()

    def opposite():
        return -0.5 * policy.task_head(policy.trunk(data["x"])).mean()

    before = copy.deepcopy(list(policy.parameters()))
    report = make_step(policy, Dual(initial_lambda=0.0))(task, opposite)
    assert report.anchor.conflict
    assert report.anchor.cos == pytest.approx(-1.0)
    assert_same_parameters(policy, before, rtol=0, atol=1e-6)


def test_the_first_order_promise_on_a_real_network(policy, data):
    before = per_anchor_drift(policy, data).mean().item()
    report = take(make_step(policy, Dual(initial_lambda=0.5), lr=1e-4), policy, data)
    after = per_anchor_drift(policy, data).mean().item()
    slope = report.anchor.task_weight * report.anchor.dot + (
        report.anchor.retention_weight * report.anchor.retention_norm**2
    )
    assert (after - before) / 1e-4 == pytest.approx(-slope, rel=0.05)


def test_task_backward_is_finished_before_anchors_are_touched(policy, data):
    events = []

    def task():
        events.append("task forward")
        return task_loss(policy, data)

    def anchors():
        events.append("anchor forward")
        assert all(p.grad is None for p in policy.parameters())
        return per_anchor_drift(policy, data)

    def backward(loss):
        loss.backward()
        events.append("task backward")

    make_step(policy, backward=backward)(task, anchors)
    assert events == ["task forward", "task backward", "anchor forward"]


def test_no_gradient_is_copied(policy, data):
    """The merged gradient lives in the task gradient's own memory, which under DDP is a view of its buckets."""
    seen = []

    def backward(loss):
        loss.backward()
        seen.extend(None if p.grad is None else p.grad.data_ptr() for p in policy.parameters())

    step = make_step(policy, Dual(initial_lambda=2.0), backward=backward)
    step.backward(lambda: task_loss(policy, data), lambda: per_anchor_drift(policy, data))
    merged = [None if p.grad is None else p.grad.data_ptr() for p in policy.parameters()]
    assert [m for m, t in zip(merged, seen, strict=True) if t is not None] == [t for t in seen if t is not None]
    assert sum(m is not None for m in merged) > sum(t is not None for t in seen)  # the anchors' own head


def test_k_step_visits_anchors_every_kth_step_and_counts_them_k_fold(policy, data):
    dual = Dual(initial_lambda=2.0, lambda_lr=0.01)
    step = make_step(policy, dual, surgery=NO_PROJECTION, retention_freq=3, epsilon=lambda _: 0.5)
    assert [take(step, policy, data).anchor for _ in range(2)] == [None, None]
    expected = sgd_reference(policy, lambda p: task_loss(p, data) + 3 * 2.0 * per_anchor_drift(p, data).mean())
    report = take(step, policy, data)
    assert_same_parameters(policy, expected)
    assert step.multipliers.values == pytest.approx([2.0 + 3 * 0.01 * (report.anchor.retention_loss - 0.5)])


def test_k_step_has_the_same_average_pull(policy, data):
    """With a small step size, 200 steps at K=5 end where 200 steps at K=1 end."""
    reference = copy.deepcopy(policy)
    for model, freq in ((policy, 5), (reference, 1)):
        step = make_step(model, Dual(initial_lambda=2.0), lr=1e-3, surgery=NO_PROJECTION, retention_freq=freq)
        for _ in range(200):
            take(step, model, data)
    moved = torch.cat([(p - q).flatten() for p, q in zip(policy.parameters(), reference.parameters(), strict=True)])
    assert moved.abs().max() < 2e-3  # without the compensation: 0.2


def test_groups_enter_as_the_mean_of_lambda_times_loss(policy, data):
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    step = make_step(policy, groups=("many", "few", "absent"), surgery=NO_PROJECTION)
    step.multipliers.values = [0.5, 3.0, 7.0]

    def lagrangian(p):
        d = per_anchor_drift(p, data)
        return task_loss(p, data) + (0.5 * d[:4].mean() + 3.0 * d[4:].mean()) / 2

    d = per_anchor_drift(policy, data).detach()
    expected = sgd_reference(policy, lagrangian)
    report = step(lambda: task_loss(policy, data), lambda: AnchorDrift(per_anchor_drift(policy, data), groups))
    assert_same_parameters(policy, expected)
    assert report.anchor.group_losses == (pytest.approx(d[:4].mean().item()), pytest.approx(d[4:].mean().item()), None)
    assert report.anchor.retention_loss == pytest.approx((d[:4].mean() + d[4:].mean()).item() / 2)
    assert step.multipliers.values[2] == 7.0
    assert step.multipliers.values[0] > 0.5


def test_equal_multipliers_of_equal_groups_are_one_multiplier(policy, data):
    one, per_group = copy.deepcopy(policy), policy
    groups = torch.tensor([0, 1, 2, 0, 1, 2])
    take(make_step(one, Dual(initial_lambda=2.0)), one, data)
    make_step(per_group, Dual(initial_lambda=2.0), groups=("a", "b", "c"))(
        lambda: task_loss(per_group, data), lambda: AnchorDrift(per_anchor_drift(per_group, data), groups)
    )
    assert_same_parameters(per_group, list(one.parameters()))


def test_groups_whose_multipliers_are_all_zero_still_project(policy, data):
    step = make_step(policy, Dual(initial_lambda=0.0), groups=("a", "b"))
    groups = torch.tensor([0, 1, 0, 1, 0, 1])
    report = step(lambda: task_loss(policy, data), lambda: AnchorDrift(per_anchor_drift(policy, data), groups))
    assert math.isfinite(report.merged_norm)
    assert report.anchor.retention_norm > 0


def test_lambda_moves_after_the_optimizer_by_the_measured_violation(policy, data):
    step = make_step(policy, Dual(lambda_lr=0.1), epsilon=lambda _: 0.25)
    loss = per_anchor_drift(policy, data).mean().item()
    report = take(step, policy, data)
    assert report.anchor.lambdas == (1.0,)
    assert report.anchor.epsilon == 0.25
    assert step.multipliers.values == pytest.approx([1.0 + 0.1 * (loss - 0.25)])


def test_units_scale_what_the_budget_sees_and_not_the_gradient(policy, data):
    groups = torch.tensor([0, 1, 0, 1, 0, 1])
    absolute, relative = copy.deepcopy(policy), policy
    reports = []
    for model, units in ((absolute, None), (relative, [0.5, 4.0])):
        step = make_step(model, Dual(lambda_lr=0.1), groups=("a", "b"), units=units, epsilon=lambda _: 0.25)
        reports.append(
            step(
                lambda model=model: task_loss(model, data),
                lambda model=model: AnchorDrift(per_anchor_drift(model, data), groups),
            )
        )
    assert_same_parameters(relative, list(absolute.parameters()), rtol=0, atol=0)
    a, b = reports[0].anchor.group_losses
    assert reports[1].anchor.group_losses == pytest.approx((a / 0.5, b / 4.0))
    assert step.multipliers.values == pytest.approx([1 + 0.1 * (a / 0.5 - 0.25), 1 + 0.1 * (b / 4.0 - 0.25)])


@pytest.mark.parametrize("units", [[1.0], [1.0, 0.0], [1.0, math.nan], [1.0, -1.0]])
def test_bad_units_are_named(policy, units):
    with pytest.raises(ValueError, match="2 positive units are needed"):
        make_step(policy, groups=("a", "b"), units=units)


@pytest.mark.parametrize("epsilon", [math.nan, math.inf, -0.1])
def test_a_budget_that_cannot_bind_is_refused(policy, data, epsilon):
    with pytest.raises(ValueError, match=r"budget must be finite and not negative; it is .* at step 0"):
        take(make_step(policy, epsilon=lambda _: epsilon), policy, data)


def test_nothing_to_train_and_broken_state_are_named(policy):
    with pytest.raises(CraftError, match="resume from another checkpoint"):
        make_step(policy).load_state_dict({"step": 3})
    with pytest.raises(CraftError, match="every parameter is frozen"):
        RetentionStep([policy.frozen], torch.optim.SGD(policy.parameters()), Multipliers(Dual()))


def test_the_budget_is_read_at_every_anchor_step(policy, data):
    step = make_step(policy, retention_freq=2, epsilon=lambda s: float(s))
    reports = [take(step, policy, data) for _ in range(4)]
    assert [None if r.anchor is None else r.anchor.epsilon for r in reports] == [None, 1.0, None, 3.0]


def test_plain_steps_are_bounded_like_clip_grad_norm(policy, data):
    twin = copy.deepcopy(policy)
    task_loss(twin, data).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    step = make_step(policy, surgery=Surgery(task_max_norm=0.1), retention_freq=2)
    report = step.backward(lambda: task_loss(policy, data), lambda: per_anchor_drift(policy, data))
    assert report.task_norm == pytest.approx(norm.item(), rel=1e-5)
    assert report.merged_norm == 0.1
    for p, q in zip(policy.parameters(), twin.parameters(), strict=True):
        assert_close(p.grad, q.grad)


def test_zero_drift_at_the_teacher_changes_nothing(policy, data):
    data["target"] = policy.retention_head(policy.trunk(data["anchor_x"])).detach()
    expected = sgd_reference(policy, lambda p: task_loss(p, data))
    report = take(make_step(policy, Dual(initial_lambda=10.0)), policy, data)
    assert (report.anchor.retention_loss, report.anchor.cos, report.anchor.conflict) == (0.0, 0.0, False)
    assert_same_parameters(policy, expected, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["task", "retention"])
@pytest.mark.parametrize("freq", [1, 2])
def test_nan_stops_the_step_and_nothing_is_lost(policy, data, where, freq):
    step = make_step(policy, retention_freq=freq)
    for _ in range(2 * freq if where == "task" else 2 * freq - 1):
        take(step, policy, data)
    before, state = copy.deepcopy(list(policy.parameters())), step.state_dict()
    data["y" if where == "task" else "target"][0, 0] = math.nan
    with pytest.raises(NonFiniteGradientError, match=f"the {where} gradient"):
        take(step, policy, data)
    assert_same_parameters(policy, before, rtol=0, atol=0)
    assert step.state_dict() == state
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("where", ["task", "retention"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_whose_slope_hides_nan_stops_the_step_too(policy, data, where, value):
    """|x| has a finite slope at NaN and at infinity."""
    step = make_step(policy)
    take(step, policy, data)
    before, state = copy.deepcopy(list(policy.parameters())), step.state_dict()
    data["y" if where == "task" else "target"][0, 0] = value

    def l1_task():
        return (policy.task_head(policy.trunk(data["x"])) - data["y"]).abs().mean()

    def l1_drift():
        return drift(policy.retention_head(policy.trunk(data["anchor_x"])), data["target"], "l1", reduction="none")

    with pytest.raises(NonFiniteGradientError, match=f"the {where} gradient"):
        step(l1_task, l1_drift)
    assert_same_parameters(policy, before, rtol=0, atol=0)
    assert step.state_dict() == state


def test_anchors_that_reach_nothing_trainable_are_refused(policy, data):
    step = make_step(policy)
    with pytest.raises(CraftError, match="no trainable parameter"):
        step(lambda: task_loss(policy, data), lambda: per_anchor_drift(policy, data).detach())
    assert all(p.grad is None for p in policy.parameters())


def test_resume_equals_the_uninterrupted_run(policy, data):
    resumed = copy.deepcopy(policy)
    dual = Dual(rule="pi", lambda_lr=0.05, smoothing=0.5)

    def run(model, steps, state=None):
        step = make_step(model, dual, retention_freq=3, epsilon=lambda s: 1 / (1 + s))
        if state is not None:
            step.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            take(step, model, data)
        return step.state_dict()

    straight = run(policy, 20)
    assert run(resumed, 13, run(resumed, 7)) == straight
    assert_same_parameters(resumed, list(policy.parameters()), rtol=0, atol=0)


def test_a_scalar_loss_is_a_batch_of_one(policy, data):
    other = copy.deepcopy(policy)
    take(make_step(other), other, data)
    make_step(policy)(lambda: task_loss(policy, data), lambda: per_anchor_drift(policy, data).mean())
    assert_same_parameters(policy, list(other.parameters()))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "each anchor must say its group"),
        (torch.tensor([0, 1]), "6 anchors need as many group indices"),
        (torch.tensor([0, 1, 2, 0, 1, 2]), r"must lie in 0..1; got \[0, 1, 2\]"),
    ],
)
def test_bad_groups_are_named(policy, data, groups, message):
    step = make_step(policy, groups=("a", "b"))
    with pytest.raises(ValueError, match=message):
        step(lambda: task_loss(policy, data), lambda: AnchorDrift(per_anchor_drift(policy, data), groups))


def test_empty_anchor_batch_and_bad_frequency_are_named(policy, data):
    with pytest.raises(CraftError, match="anchor batch is empty"):
        make_step(policy)(lambda: task_loss(policy, data), lambda: per_anchor_drift(policy, data)[:0])
    with pytest.raises(ValueError, match="retention_freq must be at least 1"):
        make_step(policy, retention_freq=0)


@pytest.mark.parametrize(
    "surgery",
    [
        Surgery(conflict_threshold=0.0),
        Surgery(task_max_norm=0.1, retention_max_norm=0.2, merged_max_norm=0.15),
        Surgery(use_grad_projection=False, task_max_norm=math.inf, retention_max_norm=math.inf),
    ],
    ids=["projection", "bounds", "sum"],
)
def test_parts_of_a_batch_take_the_step_of_the_whole(policy, data, surgery):
    """Three parts, of which no two have the same groups; a third of the task's gradient comes with each."""
    groups = torch.tensor([0, 0, 1, 0, 1, 2])
    settings = {"groups": ("a", "b", "c"), "surgery": surgery, "retention_freq": 2}
    twin = copy.deepcopy(policy)
    whole, parts = (make_step(p, Dual("pi", lambda_lr=0.5), epsilon=lambda _: 0.1, **settings) for p in (twin, policy))
    expected = [_in_parts(whole, twin, data, groups, 1) for _ in range(4)]
    found = [_in_parts(parts, policy, data, groups, 3) for _ in range(4)]
    assert_same_parameters(policy, list(twin.parameters()))
    assert any(report.anchor is not None for report in expected)
    assert parts.multipliers.values == pytest.approx(whole.multipliers.values)
    for report, other in zip(found, expected, strict=True):
        assert report.merged_norm == pytest.approx(other.merged_norm, rel=1e-5)
        assert (report.anchor is None) == (other.anchor is None)
        if report.anchor is not None:
            assert report.anchor.group_losses == pytest.approx(other.anchor.group_losses, rel=1e-5)
            assert (report.anchor.cos or 0.0) == pytest.approx(other.anchor.cos or 0.0, rel=1e-4)  # None in a sum
            assert report.anchor.conflict == other.anchor.conflict


def _in_parts(step, policy, data, groups, number):
    rows = [slice(first, None, number) for first in range(number)]

    def part(chosen):
        def found():
            return AnchorDrift(per_anchor_drift(policy, {n: v[chosen] for n, v in data.items()}), groups[chosen])

        return AnchorPart(groups[chosen], found)

    losses = [lambda c=c: task_loss(policy, {n: v[c] for n, v in data.items()}) / number for c in rows]
    for loss in losses[:-1]:
        loss().backward()
    return step(losses[-1], lambda: [part(chosen) for chosen in rows])


def test_a_part_with_other_groups_than_it_said_is_refused(policy, data):
    step = make_step(policy, groups=("a", "b"))
    said, found = torch.zeros(6, dtype=torch.long), torch.ones(6, dtype=torch.long)
    part = AnchorPart(said, lambda: AnchorDrift(per_anchor_drift(policy, data), found))
    with pytest.raises(ValueError, match="a part of the anchors has the groups"):
        step(lambda: task_loss(policy, data), lambda: [part])
    assert all(p.grad is None for p in policy.parameters())
