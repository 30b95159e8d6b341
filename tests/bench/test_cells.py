import subprocess
import sys
from dataclasses import replace

import pytest

from lerobot_craft.bench.cell_plan import plan_cells, plan_runs
from lerobot_craft.bench.cells import Base, Demos, Run, Trial
from lerobot_craft.bench.compared_methods import METHODS
from lerobot_craft.errors import CraftError
from tests.warm_process import environment


def kinds(settings):
    return [(cell.kind, cell.name) for cell in plan_cells(settings)]


def test_each_cell_comes_once_and_after_what_it_needs(bench_settings):
    cells = plan_cells(bench_settings(seeds=(0, 1), anchors=(0, 20), methods=("naive", "er", "craft")))
    assert len({cell.digest for cell in cells}) == len(cells)
    seen = set()
    for cell in cells:
        assert all(needed.digest in seen for needed in cell.needs), cell.name
        seen.add(cell.digest)


def test_a_method_runs_at_the_numbers_of_old_frames_that_make_a_difference(bench_settings):
    names = [name for kind, name in kinds(bench_settings(methods=("naive", "er", "craft"), anchors=(0, 20)))]
    assert names == [
        "reach",
        "reach-reach-blue",
        "reach-smolvla-seed0",
        "reach-smolvla-naive-seed0",
        "reach-smolvla-er-20frames-seed0",
        "reach-smolvla-craft-0frames-seed0",
        "reach-smolvla-craft-20frames-seed0",
        "reach-smolvla-seed0",  # its trial
    ]


def test_own_rollouts_take_the_place_of_old_frames(bench_settings):
    settings = bench_settings(methods=("naive", "er", "craft"), anchors=(0,), rollouts=(1, 3), view="seen")
    runs = {run.name: run for run in plan_runs(settings)}
    assert list(runs) == [
        "reach-smolvla-naive-seed0",
        "reach-smolvla-er-1rollouts-seed0",
        "reach-smolvla-er-3rollouts-seed0",
        "reach-smolvla-craft-0frames-seed0",
        "reach-smolvla-craft-1rollouts-seed0",
        "reach-smolvla-craft-3rollouts-seed0",
    ]
    three = runs["reach-smolvla-craft-3rollouts-seed0"]
    assert three.known.root == str(three.rollouts.data)
    assert three.known.rollouts
    digests = [run.digest for run in runs.values()]
    assert len(set(digests)) == len(digests)
    order = [cell.kind for cell in plan_cells(settings)]
    assert order == ["demos", "demos", "base", "rollouts", "rollouts", *["run"] * 6, "trial"]


def test_rollouts_are_refused_for_a_sequence(bench_settings, two_stages):
    with pytest.raises(CraftError, match="--rollouts are of the base policy"):
        plan_cells(bench_settings(scenarios=(two_stages,), rollouts=(3,)))


def test_every_seed_has_start_states_of_its_own(bench_settings):
    trials = [cell for cell in plan_cells(bench_settings(seeds=(0, 1))) if isinstance(cell, Trial)]
    starts = [set(range((e := cell.inputs["evaluation"])["seed"], e["seed"] + e["episodes"])) for cell in trials]
    assert len(starts) == 2
    assert not starts[0] & starts[1]


def test_a_longer_method_has_more_steps_and_a_schedule_to_match(bench_settings):
    runs = {run.method.name: run for run in plan_runs(bench_settings(methods=("er", "er_long"), anchors=(20,)))}
    for name in ("steps", "policy.scheduler_decay_steps"):
        assert runs["er_long"].flags[name] == 2 * runs["er"].flags[name]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"episodes": 3}, "demos base"),
        ({"base_steps": 7}, "demos"),
        ({"view": "seen"}, ""),
        ({"steps": 7}, "demos base trial"),
        ({"learning_rate": 7e-4}, "demos base trial"),
        ({"old_episodes": 7}, "demos"),
        ({"new_episodes": 7}, "demos base trial"),
        ({"methods": ("craft", "naive")}, "demos base run trial"),
    ],
)
def test_a_changed_input_makes_other_cells(bench_settings, change, same):
    before = {cell.digest: cell.kind for cell in plan_cells(bench_settings())}
    after = {cell.digest: cell.kind for cell in plan_cells(bench_settings(**change))}
    assert {before[digest] for digest in before.keys() & after.keys()} == set(same.split())


def test_policies_share_demonstrations_unless_one_needs_more(bench_settings):
    two = bench_settings(scenarios=("reach",), policies=("smolvla", "pi0_fast"), old_episodes=None, new_episodes=None)
    demos = [cell for cell in plan_cells(two) if isinstance(cell, Demos)]
    assert sorted(cell.episodes for cell in demos) == [30, 50, 100, 200]
    asked = [cell for cell in plan_cells(replace(two, old_episodes=7, new_episodes=3)) if isinstance(cell, Demos)]
    assert sorted(cell.episodes for cell in asked) == [3, 7]


def test_scenarios_of_one_trunk_share_demonstrations_and_base_and_no_run(bench_settings):
    cells = plan_cells(bench_settings(scenarios=("trio-drawer", "trio-window", "trio-door"), methods=("naive",)))
    assert [cell.kind for cell in cells] == [*["demos"] * 4, "base", "run", "run", "run", "trial"]
    demos, *new, base = cells[:5]
    *runs, trial = cells[5:]
    assert [run.demos.digest for run in runs] == [cell.digest for cell in new]
    assert base.name == "trio-smolvla-seed0"
    assert base.tasks[5:] == ("drawer-close", "window-open", "door-unlock")
    assert [run.tasks[5:] for run in runs] == [("drawer-close",), ("window-open",), ("door-unlock",)]
    assert {run.start for run in runs} == {base.checkpoint}
    alone = plan_cells(bench_settings(scenarios=("trio-window",), methods=("naive",)))
    assert [cell.digest for cell in alone] == [cell.digest for cell in (demos, new[1], base, runs[1], trial)]


def test_another_place_does_not_change_a_cell(bench_settings, tmp_path):
    settings = bench_settings()
    moved = replace(settings, output_dir=tmp_path / "elsewhere")
    assert [cell.digest for cell in plan_cells(settings)] == [cell.digest for cell in plan_cells(moved)]


def test_a_sweep_shares_the_cell_of_a_knobs_own_value(bench_settings):
    table = {run.directory for run in plan_runs(bench_settings(methods=("l2sp",)))}
    swept = [run.directory for run in plan_runs(bench_settings(methods=("l2sp",), sweep=True))]
    assert len(swept) == len(set(swept)) == 4
    assert table < set(swept)


def test_two_methods_that_come_down_to_the_same_share_a_cell_and_are_both_listed(bench_settings, monkeypatch):
    monkeypatch.setitem(METHODS, "plain", replace(METHODS["naive"], name="plain"))
    settings = bench_settings(methods=("naive", "plain"))
    assert [run.method.name for run in plan_runs(settings)] == ["naive", "plain"]
    assert [cell.kind for cell in plan_cells(settings)] == ["demos", "demos", "base", "run", "trial"]


def test_a_variant_is_a_cell_of_its_own(bench_settings):
    settings = bench_settings(methods=("naive", "naive --save_freq=7"))
    plain, variant = plan_runs(settings)
    assert (plain.method.name, variant.method.name) == ("naive", "naive+save_freq=7")
    assert plain.digest != variant.digest
    assert variant.inputs["flags"]["save_freq"] == "7"


def test_stages_of_a_sequence_start_where_the_one_before_ended(bench_settings, two_stages):
    settings = bench_settings(scenarios=(two_stages,), methods=("er",), anchors=(5,))
    cells = plan_cells(settings)
    assert [type(cell) for cell in cells] == [Demos, Demos, Demos, Base, Run, Run, Trial]
    first, second = cells[4:6]
    assert (first.start, second.start) == (cells[3].checkpoint, first.checkpoint)
    assert second.known_tasks == ("reach-red", "button-topdown")
    assert second.known.frames == 10  # five of each task
    assert second.known.root.count(",") == 1
    assert [run.digest for run in plan_runs(settings)] == [second.digest]


def test_a_policy_without_instructions_is_refused_where_they_matter(bench_settings):
    with pytest.raises(CraftError, match=r"act reads no instruction.*without such a pair \(apart\)"):
        plan_cells(bench_settings(policies=("act",)))


def test_a_policy_without_instructions_keeps_old_tasks_by_old_frames_alone(bench_settings):
    apart = bench_settings(policies=("act",), scenarios=("apart",), anchors=(0, 20), methods=tuple(METHODS))
    runs = {run.method.name: run for run in plan_runs(apart)}
    assert [run.frames for run in plan_runs(apart) if run.method.name == "craft"] == [20]
    assert not {"cross", "token_ce", "lora"} & set(runs)
    flags = runs["craft"].method.train_flags(runs["craft"].known, None)
    assert flags["craft.num_anchors"] == 20
    assert not {"craft.old_instructions", "craft.old_frames"} & set(flags)
    # What names the cell is what is run, but for places.
    assert set(flags) <= set(runs["craft"].inputs["flags"])
    assert "craft.old_instructions" not in runs["craft"].inputs["flags"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"scenarios": ("windw",)}, "no scenario 'windw'"),
        ({"methods": ("crft",)}, "--methods: crft"),
        ({"policies": ("pi9",)}, "--policy=pi9"),
        ({"methods": ("er",)}, "nothing is left to run"),  # replay without old frames
    ],
)
def test_what_is_not_known_is_named(bench_settings, change, complaint):
    with pytest.raises(CraftError, match=complaint):
        plan_cells(bench_settings(**change))


_PLAYS_FIRST = """
from types import SimpleNamespace
from lerobot.configs.policies import PreTrainedConfig
from lerobot_craft.bench import cell_run
from lerobot_craft.lerobot_api import rollouts

def load_player(checkpoint, env):
    assert "pi0_fast_tiny" in PreTrainedConfig.get_known_choices()
    return SimpleNamespace(policy=SimpleNamespace(peft_config=None))

rollouts.load_player = load_player
cell_run._player(SimpleNamespace(tasks=["reach-red"], settings=SimpleNamespace(env=str)), "checkpoint")
"""


@pytest.mark.slow
def test_a_worker_that_plays_before_it_trains_knows_the_small_policies():
    done = subprocess.run([sys.executable, "-c", _PLAYS_FIRST], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
