"""The whole bench, as small as it can be: two tasks, a few steps, one episode."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from lerobot_craft.cli.bench import run
from lerobot_craft.evaluation.results import read_results

# The promise: a miniature bench, end to end, within two minutes on two cores. Alone on them it takes a quarter of one.
pytestmark = pytest.mark.timeout(120)
SMALL = [
    "--scenario=reach",
    "--methods=naive,craft",
    "--anchors=0",
    "--seeds=0",
    "--episodes=1",
    "--old_episodes=2",
    "--new_episodes=2",
    "--base_steps=3",
    "--steps=2",
    "--batch_size=4",
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Directory of a bench that was interrupted in its last run and then went on; and how often it trained."""
    from lerobot_craft.cli import train

    directory = tmp_path_factory.mktemp("bench")
    trained = []
    real = train.run

    def interrupted_at_third(argv):
        trained.append(argv)
        if len(trained) == 3:
            raise KeyboardInterrupt
        return real(argv)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run", interrupted_at_third)
        arguments = [*SMALL, f"--output_dir={directory}", "--jobs=1"]
        with pytest.raises(KeyboardInterrupt):
            run(arguments)
        assert not (directory / "results.json").exists()
        assert run(arguments) == 0
    return directory, trained


def test_an_interruption_loses_only_the_unfinished_cell(bench):
    _, trained = bench
    outputs = [next(flag for flag in argv if flag.startswith("--output_dir")) for argv in trained]
    assert len(outputs) == 4  # base, plain, CRaFT interrupted, CRaFT again
    assert outputs[2] == outputs[3]
    assert len(set(outputs)) == 3


def test_results_and_report_are_written(bench):
    directory, _ = bench
    results = read_results(directory / "results.json")
    assert [run.method for run in results.runs] == ["naive", "craft"]
    for found in results.runs:
        assert set(found.base) == set(found.after) == {"reach-red", "reach-blue"}
        assert found.same_scene == ["reach-red"]
        assert found.command.startswith("craft train --policy.path=")
        assert found.drift.action > 0
        assert found.drift.hidden > 0
        assert found.train_seconds > 0
    plain, craft = results.runs
    assert (plain.step_overhead, plain.lambda_final) == (None, None)
    assert craft.lambda_final >= 3.0
    assert craft.anchors.cached_bytes > 0
    assert "CRaFT" in (directory / "report.html").read_text()


def test_nothing_is_run_twice(bench, monkeypatch, capsys):
    directory, _ = bench
    monkeypatch.setattr("lerobot_craft.cli.train.run", None)  # calling it would be an error
    cells = {path: path.stat().st_mtime_ns for path in directory.glob("cells/*/result.json")}
    assert len(cells) == 6
    assert run([*SMALL, f"--output_dir={directory}", "--jobs=1"]) == 0
    assert {path: path.stat().st_mtime_ns for path in cells} == cells
    assert "| plain fine-tuning |" in capsys.readouterr().out


def test_one_cell_is_one_command(bench, monkeypatch, capsys):
    directory, _ = bench
    monkeypatch.setattr("lerobot_craft.cli.train.run", None)
    assert run([*SMALL, f"--output_dir={directory}", "--cell=4"]) == 0
    assert capsys.readouterr().out.startswith("run reach-smolvla-craft-0frames-seed0: old ")


def test_what_a_cell_prints_is_in_its_log(bench):
    directory, _ = bench
    (log,) = directory.glob("cells/run-*-craft-*/log.txt")
    text = log.read_text()
    assert text.startswith("craft train --policy.path=")
    assert "End of training" in text


def test_a_cell_that_fails_is_reported_with_its_log(bench, monkeypatch, capsys):
    directory, _ = bench

    def fail(argv):
        raise RuntimeError("no such luck")

    monkeypatch.setattr("lerobot_craft.cli.train.run", fail)
    arguments = [*SMALL, f"--output_dir={directory}", "--jobs=1", "--methods=naive,l2sp"]
    assert run(arguments) == 1
    (log,) = directory.glob("cells/run-*-l2sp-*/log.txt")
    assert f"RuntimeError: no such luck (log: {log})" in capsys.readouterr().err
    assert "Traceback" in log.read_text()
    assert [found.method for found in read_results(directory / "results.json").runs] == ["naive"]


def test_a_policy_that_sees_plays_for_itself_is_blindfolded_and_filmed(tmp_path):
    arguments = [flag for flag in SMALL if not flag.startswith(("--methods", "--anchors"))]
    arguments += ["--view=seen", "--methods=craft", "--anchors=", "--rollouts=1", "--film", "--jobs=1"]
    arguments += [f"--bases={tmp_path / 'bases'}"]
    assert run([*arguments, f"--output_dir={tmp_path / 'one'}"]) == 0
    results = read_results(tmp_path / "one" / "results.json")
    (found,) = results.runs
    assert (found.view, found.tier, found.rollouts) == ("seen", "rollouts", 1)
    assert set(found.blind) == set(found.base) == set(found.after_episodes)
    assert (found.anchors.source, found.anchors.frames > 0) == ("both", True)
    assert all((tmp_path / "one" / strip.craft).is_file() for strip in results.media)
    assert "as the policy saw it" in results.media[0].caption
    # The base policy is there as a file: elsewhere it is not trained again, and is the same one.
    assert len(list((tmp_path / "bases").glob("*.safetensors"))) == 1
    assert run([*arguments, f"--output_dir={tmp_path / 'two'}"]) == 0
    (again,) = read_results(tmp_path / "two" / "results.json").runs
    assert (again.base_episodes, again.blind) == (found.base_episodes, found.blind)
    weights = [next((tmp_path / name).glob("cells/base-*/train/**/model.safetensors")) for name in ("one", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not list((tmp_path / "two").glob("cells/base-*/train/metrics.jsonl"))


@pytest.mark.slow  # a second bench: demonstrations, base and three runs
@pytest.mark.timeout(400)
def test_a_policy_without_instructions_runs_from_end_to_end(tmp_path):
    arguments = [flag for flag in SMALL if not flag.startswith(("--scenario", "--methods", "--anchors"))]
    arguments += ["--policy=act", "--scenario=apart", "--methods=naive,er,craft", "--anchors=0,20", "--jobs=1"]
    assert run([*arguments, f"--output_dir={tmp_path}"]) == 0
    runs = {found.method: found for found in read_results(tmp_path / "results.json").runs}
    assert list(runs) == ["naive", "er", "craft"]
    assert runs["craft"].drift.action > 0
    assert runs["craft"].anchors.cached_bytes > 0


@pytest.fixture
def start_bench(tmp_path):
    """Function that starts a bench with two workers, in a process group of its own, which does not outlive the test."""
    arguments = [*SMALL, f"--output_dir={tmp_path}", "--jobs=2", "--seeds=0,1", "--base_steps=400"]
    # A shell that starts the tests in the background lets them ignore Ctrl-C.
    code = f"""
import signal, sys
from lerobot_craft.cli.bench import run
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run({arguments!r}))
"""
    started = []

    def start():
        with (tmp_path / "output.txt").open("a") as output:
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, "-c", code]
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow  # each process imports lerobot
@pytest.mark.timeout(900)
def test_an_interrupted_bench_leaves_no_process_behind_and_goes_on(start_bench, tmp_path):
    first = start_bench()
    while not list(tmp_path.glob("cells/base-*/log.txt")):
        assert first.poll() is None
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGINT)
    assert first.wait(timeout=60) != 0
    end = time.monotonic() + 20
    while is_alive(first.pid):  # its workers go with it, and Python's own helper a moment later
        assert time.monotonic() < end
        time.sleep(0.1)
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/result.json")}
    assert finished
    assert start_bench().wait(timeout=700) == 0, (tmp_path / "output.txt").read_text()
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(read_results(tmp_path / "results.json").runs) == 4
