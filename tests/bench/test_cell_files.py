import dataclasses
import json

import pytest

from lerobot_craft import __version__
from lerobot_craft.bench import cell_files
from lerobot_craft.bench.cell_files import CellBusyError, CellResult, begin, claimed, finish, outdated, result_of
from lerobot_craft.bench.cell_plan import plan_runs, trial_of
from lerobot_craft.bench.compared_methods import METHODS
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import Drift

RESULT = CellResult(1.5, successes={"reach-red": [True, False]}, drift=Drift(0.1, None, {"reach-red": 0.1}, {}))


def _with_default(init, **default):
    def changed(self, *args, **given):
        init(self, *args, **default | given)

    return changed


@pytest.fixture
def run(bench_settings):
    (found,) = plan_runs(bench_settings(methods=("craft",)))
    return found


@pytest.fixture
def finished(run):
    begin(run)
    finish(run, RESULT)
    return run


def test_a_result_comes_back_as_it_was(finished):
    assert result_of(finished) == RESULT
    assert RESULT.rates == {"reach-red": 0.5}


def test_a_cell_without_result_has_to_be_run(run):
    assert result_of(run) is None
    begin(run)
    assert result_of(run) is None


def test_what_an_interrupted_run_left_is_cleared(run):
    begin(run)
    (run.directory / "train").mkdir()
    begin(run)
    assert [path.name for path in run.directory.iterdir()] == [cell_files.CELL_FILE]


def test_a_changed_default_of_craft_train_makes_a_result_outdated(finished, monkeypatch):
    now = cell_files.settings_of(finished)
    monkeypatch.setattr(cell_files, "settings_of", lambda cell: now | {"lambda_max": 20.0})
    assert result_of(finished) is None
    assert outdated(finished) == "since its result was made, `craft train` has another default of lambda_max"
    begin(finished)
    (aside,) = finished.directory.parent.glob("*.outdated-1")
    assert (aside / cell_files.RESULT_FILE).is_file()


@pytest.mark.parametrize("kind", ["demos", "base"])
def test_demonstrations_and_base_policies_outlive_versions(run, kind, monkeypatch):
    cell = next(cell for cell in run.chain() if cell.kind == kind)
    begin(cell)
    finish(cell, RESULT)
    monkeypatch.setattr(cell_files, "__version__", "9.8.7")
    assert result_of(cell) == RESULT


def test_what_demonstrations_come_out_as_may_be_revised(run, monkeypatch, bench_settings):
    before = {cell.kind: cell.digest for cell in run.chain()}
    monkeypatch.setattr("lerobot_craft.bench.cells.REVISION", 99)
    (again,) = plan_runs(bench_settings(methods=("craft",)))
    assert not {cell.digest for cell in again.chain()} & set(before.values())


@pytest.mark.parametrize("kind", ["run", "trial"])
def test_a_result_counts_for_the_version_that_made_it(run, kind, monkeypatch):
    cell = run if kind == "run" else trial_of(run)
    begin(cell)
    finish(cell, RESULT)
    assert outdated(cell) is None
    monkeypatch.setattr(cell_files, "__version__", "9.8.7")
    assert result_of(cell) is None
    assert outdated(cell) == f"its result was made by version {__version__}, and this is 9.8.7"
    begin(cell)
    finish(cell, RESULT)
    assert result_of(cell) == RESULT
    assert len(list(cell.directory.parent.glob("*.outdated-1"))) == 1


def test_what_is_not_finished_is_not_outdated(run, monkeypatch):
    assert outdated(run) is None
    begin(run)
    monkeypatch.setattr(cell_files, "__version__", "9.8.7")
    assert outdated(run) is None


def test_what_is_left_out_are_settings_that_exist():
    from lerobot_craft.training.config import CraftConfig

    assert {field.name for field in dataclasses.fields(CraftConfig)} >= cell_files._OF_THE_CONSTRAINT


def test_what_a_method_does_not_read_leaves_its_result_as_it_is(run, monkeypatch):
    from lerobot_craft.training.config import CraftConfig

    plain = dataclasses.replace(run, method=METHODS["naive"])
    for cell in (run, plain):
        begin(cell)
        finish(cell, RESULT)
    monkeypatch.setattr(CraftConfig, "__init__", _with_default(CraftConfig.__init__, lambda_lr=0.5))
    assert result_of(run) is None
    assert result_of(plain) == RESULT


def test_a_setting_that_did_not_exist_then_is_no_difference(finished, monkeypatch):
    now = cell_files.settings_of(finished)
    monkeypatch.setattr(cell_files, "settings_of", lambda cell: now | {"invented_since": 1})
    assert result_of(finished) == RESULT


def test_a_setting_that_does_not_exist_any_more_is_no_difference(finished, monkeypatch):
    now = cell_files.settings_of(finished)
    now.pop("lambda_max")
    monkeypatch.setattr(cell_files, "settings_of", lambda cell: now)
    assert result_of(finished) == RESULT


def test_the_settings_are_those_of_the_flags(run):
    settings = cell_files.settings_of(run)
    assert (settings["retention_mode"], settings["initial_lambda"], settings["lambda_max"]) == ("action", 3.0, 10.0)


def test_the_settings_of_a_method_of_the_documents_are_theirs(run):
    hidden = dataclasses.replace(run, method=METHODS["hidden_documents"], frames=20)
    settings = cell_files.settings_of(hidden)
    assert (settings["retention_mode"], settings["anchor_source"], settings["lambda_min"]) == ("hidden", "dataset", 0.0)


def test_a_damaged_result_is_named(finished):
    path = finished.directory / cell_files.RESULT_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"invented": 1}))
    with pytest.raises(CraftError, match=r"is damaged \(invented: unknown field\): remove it"):
        result_of(finished)


def test_a_cell_is_held_by_one_at_a_time(run):
    with claimed(run, wait=False), pytest.raises(CellBusyError), claimed(run, wait=False):
        pass
    with claimed(run, wait=False):
        pass
