"""Sections of trainings: traces, conflicts by module, costs, from the files that `craft train` writes."""

from dataclasses import replace

import pytest

from lerobot_craft.report.inputs import Inputs, read_training
from lerobot_craft.report.page import all_runs, render
from lerobot_craft.report.trainings import (
    conflicts,
    cosines,
    modules_of,
    seconds_per_step,
    thinned,
    traces,
    training_costs,
)
from tests.evaluation.test_matrix import made
from tests.report.html_checks import (
    assert_pictures_are_told,
    assert_self_contained,
    assert_well_formed,
    outline,
    sections,
)
from tests.report.made_training import MODULES, RECORD, TASKS, made_training

HOSTILE = '<script>alert("1")</script>'


@pytest.fixture
def kept(tmp_path):
    return read_training(made_training(tmp_path / "kept"))


@pytest.fixture
def lost(tmp_path):
    return read_training(made_training(tmp_path / "lost", drift=0.7))


def page_of(runs, evaluations=()):
    return render(Inputs(trainings=list(runs), evaluations=list(evaluations)), all_runs([]))


def test_a_page_of_trainings_alone_is_sound(kept, lost):
    page = page_of([kept, lost])
    assert_well_formed(page)
    assert_self_contained(page)
    assert_pictures_are_told(page)
    assert sections(page) == [
        "Drift, budget and multipliers",
        "Where the gradients conflict",
        "What it costs",
        "Commands",
    ]
    assert outline(page).count("svg") == 4, "two drawings for each run"
    assert "craft train --policy.path=base --craft.enabled=true" in outline(page).text
    assert "No rollouts here: a small drift is no proof." in outline(page).text


def test_trainings_and_evaluations_stand_on_one_page(kept):
    page = page_of([kept], [made()])
    assert_well_formed(page)
    assert sections(page)[:3] == ["Retention and plasticity", "Task by task", "Sequences of tasks"]
    assert "Checkpoints after b, c" in page
    assert "No rollouts here" not in page


def test_without_an_order_there_is_no_plane(kept):
    assert "Retention and plasticity" not in sections(page_of([kept], [made(learned=[])]))


def test_it_says_whether_the_budget_was_met_and_by_which_task_not(kept, lost):
    text = outline(page_of([kept, lost])).text
    assert "kept. Budget met: unverified." in text
    # 0.7 and 0.35 of three tasks are above 0.3.
    assert "lost. Budget met: no: 2 of 3 tasks are over it." in text
    assert text.count("over budget") == 2
    drifts = [row["retention_loss"] for row in lost.history][-10:]
    assert f"{sum(drifts) / 10:.3g} 0.3 no: 2 of 3" in text


def test_real_frames_kept_out_of_training_say_that_it_was_met(kept):
    ends = {"action_drift": 0.1, "action_drift_low": 0.05, "action_drift_high": 0.2}
    of_tasks = {f"{name}/{task}": value for task in TASKS for name, value in ends.items()}
    lines = [*kept.metrics[:-1], {**kept.metrics[-1], **ends, **of_tasks, "verified": True}]
    assert "Budget met: yes." in outline(traces([replace(kept, metrics=lines)])).text


def test_one_budget_for_all_is_judged_as_one(tmp_path):
    run = read_training(made_training(tmp_path / "run", tasks=TASKS[:1], drift=0.7))
    assert "Budget met: no." in outline(traces([run])).text
    assert "λ 1" in outline(traces([run])).text


def test_every_multiplier_has_a_line_that_ends_where_its_values_do(kept):
    drawn = [attributes["d"] for tag, attributes in outline(traces([kept])).tags if tag == "path"]
    assert len(drawn) == 2 * (len(TASKS) + 1) + 1, "each task and the mean, twice, and the budget"
    assert all(path.count("L") == len(kept.history) - 1 for path in drawn)


def test_a_long_run_is_thinned_to_means_and_says_so(tmp_path):
    run = read_training(made_training(tmp_path / "long", steps=1000, every=1))
    assert "Each point is the mean of 5 anchor steps." in outline(traces([run])).text
    assert thinned([(1, 2.0), (2, 4.0), (3, 9.0)], most=2) == [(1.5, 3.0), (3.0, 9.0)]
    assert thinned([]) == []


def test_a_run_that_kept_no_history_is_drawn_from_its_lines(tmp_path):
    run = read_training(made_training(tmp_path / "run", history=False))
    assert run.history == []
    assert run.tasks == TASKS
    assert "run. Budget met: unverified." in outline(traces([run])).text


def test_the_drift_of_the_actions_is_that_of_the_last_line_that_measured_it(kept):
    """Lines between two anchor steps measure it too, and the history has no row of theirs."""
    lines = [*kept.metrics[:-1], {**kept.metrics[-1], "action_drift": 0.125, f"action_drift/{TASKS[0]}": 0.5}]
    whole, first, *_ = replace(kept, metrics=lines).outcomes
    assert (whole.action_drift, first.action_drift) == (0.125, 0.5)
    assert whole.visits == 10


def test_a_method_that_holds_nothing_to_its_budget_is_not_said_to_meet_it(kept):
    lwf = replace(kept, metrics=[{**values, "method": "lwf"} for values in kept.metrics])
    text = outline(traces([lwf])).text
    assert "kept. Budget met: no budget." in text
    assert "budget mean" not in text


def test_plain_fine_tuning_has_a_cost_and_no_trace(kept):
    plain = replace(
        kept, history=[], modules=[], metrics=[{"step": 1, "update_s": 0.5, "method": "naive"}], record=None
    )
    assert traces([plain]) is None
    assert conflicts([plain]) is None
    assert sections(page_of([plain])) == ["What it costs"]
    assert "CRaFT" not in outline(page_of([plain])).text.replace("CRaFT: what", "")


def test_conflicts_are_counted_module_by_module(kept):
    assert modules_of(kept) == tuple(MODULES)
    assert len(cosines(kept, "lm_head")) == 20
    text = outline(conflicts([kept])).text
    assert "kept n = 20 anchor steps all parameters 50%" in text
    # Of 20 anchor steps every second, third and fourth.
    assert "vision_tower 50% -0.10 language_model.layers 30% -0.02 lm_head 25% +0.00" in text


def test_a_step_without_a_retention_gradient_is_counted_nowhere(kept):
    """At the first the student is the teacher: the whole has the cosine 0 there, and modules have none."""
    first, second = kept.history[:2]
    two = [{**first, "cos": 0.0}, {**second, "cos": -0.5}]
    modules = [{"step": 2, "cos/early": 0.9}, {"step": 4, "cos/lm_head": -0.5}]
    text = outline(conflicts([replace(kept, history=two, modules=modules)])).text
    assert "n = 1 anchor step all parameters 100% -0.50 early - lm_head 100% -0.50" in text
    assert conflicts([replace(kept, history=two[:1])]) is None


def test_a_module_that_is_not_always_reached_says_how_often(kept):
    modules = [{"step": row["step"]} if row["step"] > 20 else row for row in kept.modules]
    text = outline(conflicts([replace(kept, modules=modules)])).text
    assert "lm_head 20% +0.02 n = 10 anchor steps" in text
    assert text.count("n = 20 anchor steps") == 1


def test_the_threshold_is_the_runs_own(kept):
    strict = replace(kept, record=replace(kept.record, conflict_threshold=-0.4))
    assert "a cosine below -0.4" in outline(conflicts([strict])).text
    assert "vision_tower 0%" in outline(conflicts([strict])).text


def test_runs_with_the_same_modules_share_a_table(kept, lost, tmp_path):
    other = read_training(made_training(tmp_path / "other", modules=["trunk"]))
    assert outline(conflicts([kept, lost])).count("table") == 1
    assert outline(conflicts([kept, other])).count("table") == 2


def test_costs_are_those_of_the_record(kept):
    assert seconds_per_step(kept) == (0.25, 0.05)
    text = outline(training_costs([kept])).text
    assert "0.25 20% 2,000 (both) 12.3 MB 13.9 MB 1.5 GB -" in text


def test_a_run_without_a_record_has_the_time_of_its_lines(kept):
    bare = replace(kept, record=None)
    assert seconds_per_step(bare) == (0.25, None), "retention is logged at every second step only"
    assert "0.25 - - - - - -" in outline(training_costs([bare])).text


def test_a_run_that_goes_on_says_how_far_it_is(kept):
    running = replace(kept, record=replace(RECORD, steps=4000, end_step=None, took=None))
    assert "40 of 4,000" in outline(traces([running])).text


def test_instructions_and_names_are_text_and_never_markup(tmp_path):
    run = read_training(made_training(tmp_path / "run", tasks=[HOSTILE, "b"], modules=[HOSTILE]))
    page = page_of([replace(run, name=HOSTILE)])
    assert "<script" not in page
    assert_well_formed(page)
    assert HOSTILE in outline(page).text
