"""Runs that are ended from outside, again and again, and resumed by the line that craft itself prints."""

import itertools
import random
import shlex
import shutil
import signal
import time

import pytest

from tests.faults.runs import (
    assert_same_run,
    newest_resume_flags,
    saved_steps,
    unfinished_saves,
    wait_until,
)

KILLS = 10
STEPS = 30


@pytest.fixture
def printed_resume(craft_train, capfd):
    """Function that gives the line to go on with, as a person gets it who types the first command again."""

    def line(flags):
        assert craft_train(*flags) == 2
        *_, last = capfd.readouterr().err.splitlines()
        craft, *argv = shlex.split(last)
        assert craft == "craft"
        return argv

    return line


def kill(command, run, rng):
    """Wait for a new checkpoint; then SIGKILL, half of the time at a random moment, half of the time in a save."""
    before = saved_steps(run)
    wait_until(lambda: saved_steps(run) > before, command)
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 0.5))
    else:
        wait_until(lambda: unfinished_saves(run), command)
        time.sleep(rng.uniform(0, 0.02))
    command.send_signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL, "it ended by itself: more steps are needed"


@pytest.mark.slow  # a dozen runs
@pytest.mark.timeout(1200)
def test_killed_ten_times_is_never_killed(run_flags, warm_process, printed_resume, tmp_path, tally):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert warm_process.run(["train", *run_flags("smolvla", whole, steps=STEPS, save_freq=1)], tmp_path / "log") == 0
    first = run_flags("smolvla", broken, steps=STEPS, save_freq=1)
    argv, rng, reached, torn = ["train", *first], random.Random(0), [], 0  # noqa: S311  # the same moments each time
    for number in range(KILLS):
        kill(warm_process.start(argv, tmp_path / f"log_{number}"), broken, rng)
        reached.append(saved_steps(broken)[-1])
        torn += bool(unfinished_saves(broken))
        argv = printed_resume(first)
        assert f"checkpoints/{reached[-1]:06d}/" in argv[1]
    assert reached == sorted(set(reached)), "every run got further"
    assert torn >= 2, "kills in the middle of a save"
    assert warm_process.run(argv, tmp_path / "log_end") == 0
    assert "which an interrupted save had left" in "".join(path.read_text() for path in tmp_path.glob("log_*"))
    assert not unfinished_saves(broken)
    assert saved_steps(broken) == saved_steps(whole)
    assert_same_run(broken, whole)
    tally.add("SIGKILL of craft train", "one run killed at random moments, resumed each time: same bits", KILLS)


@pytest.mark.slow  # three runs, each with workers to start
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed_at", [3, 5])  # in the middle of an epoch, and at the end of the first
def test_a_resumed_run_with_data_workers_is_never_killed(killed_at, run_flags, warm_process, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def flags(output):
        workers = {"num_workers": 2, "dataloader_multiprocessing_context": "fork"}  # spawned ones import lerobot first
        return ["train", *run_flags("smolvla", output, steps=12, save_freq=1, **workers)]

    assert warm_process.run(flags(whole), tmp_path / "log") == 0
    command = warm_process.start(flags(broken), tmp_path / "log_broken")
    wait_until(lambda: (broken / "checkpoints" / f"{killed_at:06d}").exists(), command)
    command.send_signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    settings = broken / f"checkpoints/{killed_at:06d}/pretrained_model/train_config.json"
    assert warm_process.run(["train", f"--config_path={settings}", "--resume=true"], tmp_path / "log_end") == 0
    assert_same_run(broken, whole)


RESUMED = 50
SHORT = 6  # steps
SEEDS = (7, 8, 9)
INJECTED = "tests.faults.injected"


class Trials:
    """Short runs that kill themselves at a chosen place, each resumed and held against one that was not killed."""

    def __init__(self, run_flags, warm_process, tmp_path):
        self._flags, self._warm, self._tmp = run_flags, warm_process, tmp_path
        self._whole = {}

    def flags(self, output, seed):
        return ["train", *self._flags("smolvla", output, steps=SHORT, save_freq=2, batch_size=4, seed=seed)]

    def whole(self, seed):
        """The run of a seed that nobody killed, and how many operations on its directory it took."""
        if seed not in self._whole:
            output, report = self._tmp / f"whole_{seed}", self._tmp / f"operations_{seed}"
            prepare = (f"{INJECTED}:count_operations", str(output), str(report))
            assert self._warm.run(self.flags(output, seed), self._tmp / f"log_{seed}", prepare=prepare) == 0
            self._whole[seed] = output, int(report.read_text())
        return self._whole[seed]

    def place(self, rng, seed, output):
        """A place to die: around an optimizer's step, at an operation of the file system, or in a line of numbers."""
        kind = rng.choice(["step", "operation", "operation", "line"])
        if kind == "step":
            return "at a step", (f"{INJECTED}:kill_around_step", rng.randint(1, SHORT), rng.random() < 0.5)
        if kind == "line":
            return "in a line", (f"{INJECTED}:kill_in_line", rng.randrange(SHORT + SHORT // 2))
        return "at an operation", self.operation(output, rng.randrange(self.whole(seed)[1]))

    def operation(self, output, number):
        return f"{INJECTED}:kill_before_operation", str(output), number

    def chosen(self, number):
        """The trial of this number."""
        rng = random.Random(number)  # noqa: S311  # the same places each time
        seed, output = rng.choice(SEEDS), self._tmp / f"trial_{number}"
        return self.run(seed, output, *self.place(rng, seed, output))

    def run(self, seed, output, where, prepare):
        """Kill a run there, go on, and compare; says what was interrupted, and what the run went on from."""
        whole, _ = self.whole(seed)
        log = self._tmp / f"{output.name}.log"
        code = self._warm.run(self.flags(output, seed), log, prepare=prepare)
        assert code == -signal.SIGKILL, log.read_text()[-2000:]
        where = "within a save" if unfinished_saves(output) else where
        resumes = bool(saved_steps(output))
        argv = ["train", *newest_resume_flags(output)] if resumes else self.flags(output, seed)
        assert self._warm.run(argv, log) == 0, (where, prepare, log.read_text()[-2000:])
        assert_same_run(output, whole)
        assert not unfinished_saves(output)
        shutil.rmtree(output)
        return f"killed {where}, {'resumed' if resumes else 'started again'}"


@pytest.fixture
def trials(run_flags, warm_process, tmp_path):
    return Trials(run_flags, warm_process, tmp_path)


@pytest.mark.slow  # two runs for each kill
@pytest.mark.timeout(3600)
def test_killed_at_chosen_places_and_resumed_fifty_times_is_never_killed(trials, tally):
    outcomes = []
    for number in itertools.count():
        outcomes.append(trials.chosen(number))
        tally.add("SIGKILL of craft train", f"{outcomes[-1]}: same bits")
        # A kill before the first checkpoint leaves nothing to resume: it is counted apart.
        if sum("resumed" in outcome for outcome in outcomes) == RESUMED:
            break
    assert sum("within a save" in outcome for outcome in outcomes) >= 5


@pytest.mark.slow  # five runs; the short form is test_resume.py
@pytest.mark.timeout(600)
def test_killed_within_a_save_or_before_its_link_is_never_killed(trials, tmp_path):
    seed, output = SEEDS[0], tmp_path / "trial"
    _, operations = trials.whole(seed)
    prepare = trials.operation(output, 2 * operations // 3)
    assert trials.run(seed, output, "at an operation", prepare).endswith("resumed")
    of_the_end = f"{INJECTED}:kill_before_link", SHORT // 2
    assert trials.run(seed, output, "before the last link", of_the_end) == "killed before the last link, resumed"
