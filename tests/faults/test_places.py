"""Places that cannot be written to: one sentence, exit code 2, and nothing of an earlier run is lost."""

import shutil
import subprocess

import pytest

from lerobot_craft.cli import main
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import write_results
from lerobot_craft.evaluation.summary import collect
from tests.evaluation.made_results import METHODS, made_runs
from tests.faults.runs import digests

READ_ONLY = "read-only"


def can_mount():
    probe = ["unshare", "--map-root-user", "--mount", "true"]
    return shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0


@pytest.fixture
def read_only_runs(warm_process, tmp_path):
    """Function that runs `craft` where a directory is mounted read-only, for it alone."""
    if not can_mount():
        pytest.skip("this machine lets nobody mount")

    def run(argv, directory):
        log = tmp_path / "log"
        prepare = ("tests.faults.injected:mount_read_only", str(directory))
        return warm_process.run(argv, log, prepare=prepare), log.read_text()

    return run


def sentence(code, said):
    """The one that a refusal ends with."""
    assert code == 2, said[-2000:]
    assert "Traceback" not in said
    return said[said.rindex("craft: ") :]


@pytest.mark.slow  # three runs
@pytest.mark.timeout(600)
def test_a_read_only_place_is_named_and_an_earlier_run_survives(
    run_flags, warm_process, read_only_runs, tmp_path, tally
):
    home = tmp_path / "home"
    first = run_flags("smolvla", home / "run", steps=2, save_freq=2)
    assert warm_process.run(["train", *first], tmp_path / "log_whole") == 0
    before = digests(home / "run")
    said = sentence(*read_only_runs(["train", *run_flags("smolvla", home / "other", steps=2)], home))
    assert READ_ONLY in said
    assert str(home / "other") in said
    settings = home / "run/checkpoints/last/pretrained_model/train_config.json"
    said = sentence(*read_only_runs(["train", f"--config_path={settings}", "--resume=true", "--steps=4"], home))
    assert READ_ONLY in said
    assert digests(home / "run") == before
    tally.add("read-only output directory", "refused, nothing lost", 2)


def test_an_output_directory_that_is_a_file_is_left_alone(train_flags, craft_train, tmp_path, capfd, tally):
    file = tmp_path / "thesis.tex"
    file.write_text("precious")
    for place in (file, file / "below"):
        assert craft_train(*train_flags("smolvla", place)) == 2
        *_, said = capfd.readouterr().err.splitlines()
        assert said.startswith("craft: ")
        assert str(file) in said
        assert "file" in said
        tally.add("output directory that is, or is below, a file", "refused, nothing lost")
    assert file.read_text() == "precious"


def test_a_cache_is_not_built_into_a_file(build, tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CraftError, match="file"):
        build("act", output="file", retention_mode="action")
    with pytest.raises(CraftError, match="file"):
        build("act", output="file/below", retention_mode="action")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("place", ["file/report.html", "."])
def test_a_report_has_no_place_in_a_file_or_over_a_directory(place, tmp_path, capsys):
    runs = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:2], scenes=["window"])
    write_results(tmp_path / "results.json", collect(runs, command="craft bench", settings={}))
    (tmp_path / "file").write_text("precious")
    assert main(["report", str(tmp_path / "results.json"), f"--output={tmp_path / place}"]) == 2
    assert capsys.readouterr().err.startswith("craft: ")
    assert (tmp_path / "file").read_text() == "precious"
