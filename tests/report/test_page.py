from dataclasses import replace

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import Drift, Filmstrip, write_results
from lerobot_craft.evaluation.summary import collect
from lerobot_craft.report.inputs import Inputs, Source, load_inputs
from lerobot_craft.report.page import all_runs, render, render_evaluation, render_listening
from tests.evaluation.made_results import METHODS, made_media, made_runs, made_sequences, with_episodes
from tests.evaluation.test_listening import BEFORE, BLUE, RED, acting, heard
from tests.evaluation.test_matrix import made
from tests.report.html_checks import (
    assert_cards_stay_tables,
    assert_pictures_are_told,
    assert_self_contained,
    assert_well_formed,
    outline,
    sections,
)

HOSTILE = '<script>alert("1")</script> & </style> \'"'
ALL_SECTIONS = [
    "What is kept, what is learnt",
    "Against replay with as many old frames",
    "The same prompt, before and after",
    "Retention and plasticity",
    "Task by task",
    "Sequences of tasks",
    "Does drift foretell forgetting?",
    "What it costs",
    "How it was measured",
    "Commands",
]


def page_of(*sources):
    return render(Inputs(list(sources)), all_runs(sources))


def load_sources(paths):
    return load_inputs(paths).sources


def results_of(runs):
    return collect(runs, command="craft bench", settings={"episodes": 20})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("results")
    runs = [*made_runs(seeds=(0, 1), policies=("smolvla",)), *made_sequences()]
    results = collect(runs, command="craft bench --seeds=0,1", settings={"episodes": 20}, media=made_media(directory))
    write_results(directory / "results.json", results)
    return directory


@pytest.fixture(scope="module")
def page(directory):
    return page_of(*load_sources([directory / "results.json"]))


def assert_sound(page):
    assert_well_formed(page)
    assert_self_contained(page)
    assert_pictures_are_told(page)
    assert_cards_stay_tables(page)


def test_a_full_page_is_sound_and_has_every_section(page):
    assert_sound(page)
    assert sections(page) == ALL_SECTIONS
    assert outline(page).count("img") == 3


def test_the_numbers_are_those_of_the_results(page, directory):
    results = all_runs(load_sources([directory / "results.json"]))
    text = outline(page).text
    for row in results.summary:
        assert f"{row.old_mean.value:.2f}" in text
        assert f"{row.old_mean.low:.2f} to {row.old_mean.high:.2f}" in text
    assert f"n\u00a0=\u00a0{results.correlations['smolvla'].action_per_run.n}" in page


def test_it_says_how_it_was_measured(page):
    text = outline(page).text
    assert "n = 20 episodes per task and run" in text
    assert "The settings in brackets of L2-SP, LwF were chosen on faucet." in text
    assert "Kept for the final table: window, drawer, push, five tasks." in text
    assert "Careful" not in text
    assert "craft bench --seeds=0,1" in text
    assert "craft train --policy.path=base --seed=0 --craft.method=craft" in text


def test_single_episodes_blindfolds_and_tiers_are_shown():
    made = made_runs(seeds=(0, 1), policies=("smolvla",), methods=METHODS[:2], scenes=["window", "push"])
    tiers = {"naive": {"tier": "nothing"}, "er": {"tier": "rollouts", "rollouts": 3}}
    runs = [
        replace(run, **tiers[run.method], view="seen", blind=dict.fromkeys(run.base, 0.05))
        for run in with_episodes(made)
    ]
    page = page_of(Source(results_of(runs), []))
    assert_sound(page)
    text = outline(page).text
    assert "smolvla, object only in the picture: scenarios kept for the final table" in text
    assert "n = 20 starts x 2 seeds per task, each seed with its own; 95 % intervals resample" in text
    assert "Every seed drew its own start states. The bootstrap draws start states too" in text
    assert "3 rollouts per task" in text
    for column in (
        "elsewhere",
        "old tasks, blindfolded",
        "kept of before",
        "worst single task",
        "new task against plain",
    ):
        assert f'data-label="{column}"' in page


def test_all_old_tasks_may_share_the_scene():
    runs = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:1], scenes=["window"])
    page = page_of(Source(results_of([replace(run, same_scene=run.old_tasks) for run in runs]), []))
    assert page.count("<small>same scene</small>") == 5
    assert "<small>old</small>" not in page
    assert 'data-label="elsewhere"' not in page


def test_a_setting_chosen_on_a_final_scenario_is_owned_up_to():
    runs = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[-2:])
    leaked = [replace(r, knob=replace(r.knob, swept_on=["window"])) if r.knob else r for r in runs]
    assert "Careful: window also served for choosing a setting" in page_of(Source(results_of(leaked), []))


def test_whatever_a_label_says_the_page_stays_sound():
    runs = [
        replace(
            run,
            label=HOSTILE,
            policy=HOSTILE,
            scenario=HOSTILE,
            command=HOSTILE,
            new_task=HOSTILE,
            same_scene=[],
            base={HOSTILE: 0.0, "<i>": 1.0},
            after={HOSTILE: 1.0, "<i>": 0.5},
        )
        for run in made_runs(seeds=(0,), policies=("p",), methods=METHODS[:1], scenes=["window"])
    ]
    results = replace(results_of(runs), craft_version=HOSTILE, created=HOSTILE, settings={HOSTILE: HOSTILE})
    page = page_of(Source(results, []))
    assert_sound(page)
    assert "<i>" not in page
    assert "alert" in outline(page).text


def test_parts_without_data_are_left_out():
    runs = [
        replace(run, drift=Drift(None, None))
        for run in made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:1], scenes=["faucet"])
    ]
    page = page_of(Source(results_of(runs), []))
    assert_sound(page)
    assert sections(page) == [
        name for name in ALL_SECTIONS if not name.startswith(("Against", "The same prompt", "Sequences", "Does drift"))
    ]
    assert "No setting was swept" in page


def test_sequences_alone_make_a_page():
    page = page_of(Source(results_of(made_sequences()), []))
    assert_sound(page)
    assert "Sequences of tasks" in sections(page)
    assert "What is kept, what is learnt" not in sections(page)


def test_two_files_become_one_page_and_a_run_in_both_is_refused():
    first, second = (
        results_of(made_runs(seeds=(seed,), policies=("smolvla",), methods=METHODS[:2])) for seed in (0, 1)
    )
    assert "3 scenarios (window, drawer, push), 2 seeds, 6 base policies, 6 runs per row" in page_of(
        Source(first, []), Source(second, [])
    )
    with pytest.raises(CraftError, match="is there twice"):
        page_of(Source(first, []), Source(first, []))


def test_results_without_a_run_are_refused(tmp_path):
    write_results(tmp_path / "results.json", results_of([]))
    with pytest.raises(CraftError, match="no finished run"):
        load_sources([tmp_path / "results.json"])


def sources_with(directory, strip):
    runs = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:1], scenes=["window"])
    results = collect(runs, command="", settings={}, media=[strip])
    write_results(directory / "results.json", results)
    return load_sources([directory / "results.json"])


def test_a_picture_that_is_gone_is_left_out(tmp_path):
    made_media(tmp_path)
    (source,) = sources_with(tmp_path, Filmstrip("open", "before.png", "gone.png", None))
    assert [list(strip.pictures) for strip in source.strips] == [["before"]]
    (source,) = sources_with(tmp_path, Filmstrip("open", "gone.png", None, None))
    assert source.strips == []


def test_a_picture_from_elsewhere_is_refused(tmp_path):
    made_media(tmp_path)
    (tmp_path / "inside").mkdir()
    with pytest.raises(CraftError, match="is not below"):
        sources_with(tmp_path / "inside", Filmstrip("open", "../before.png", None, None))
    (tmp_path / "inside" / "link.png").symlink_to(tmp_path / "before.png")
    with pytest.raises(CraftError, match="is not below"):
        sources_with(tmp_path / "inside", Filmstrip("open", "link.png", None, None))


def test_a_picture_that_is_no_png_is_refused(tmp_path):
    (tmp_path / "before.png").write_text("secret")
    with pytest.raises(CraftError, match="is no PNG"):
        sources_with(tmp_path, Filmstrip("open", "before.png", None, None))


def test_the_page_of_an_evaluation_shows_rates_with_intervals_and_scores():
    page = render_evaluation(made())
    assert_well_formed(page)
    assert_self_contained(page)
    assert sections(page) == ["Success", "As a sequence of tasks", "Checkpoints", "Command"]
    text = outline(page).text
    assert "n = 4 episodes per task" in text
    assert "0.75 0.30 to 0.95" in text
    assert "learned one after the other: b, c" in text


def test_checkpoints_without_an_order_have_no_scores():
    assert sections(render_evaluation(made(learned=[]))) == ["Success", "Checkpoints", "Command"]


def test_names_of_checkpoints_are_text_and_never_markup():
    row = made().rows[0]
    page = render_evaluation(made(rows=[type(row)(HOSTILE, HOSTILE, "x", row.successes)], learned=[], command=HOSTILE))
    assert "<script" not in page
    assert "alert" in outline(page).text


def test_the_page_of_listening_shows_what_is_left_of_each_difference():
    page = render_listening(heard(BEFORE, acting((-1, 0), (-1, 0), (0, 1))))
    assert_sound(page)
    assert sections(page) == ["Does it still listen?", "How far instructions are told apart", "Command"]
    text = outline(page).text
    assert f"After fine-tuning, {RED!r} does what {BLUE!r} does" in text
    assert f"{BLUE} learned" in text
    assert "0.00 0.00 to 0.00" in text, "of the difference between red and blue nothing is left"
    assert "had it been kept" in text
