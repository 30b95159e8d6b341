import csv
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.training.journal import (
    HISTORY_FILE,
    MODULES_FILE,
    Journal,
    csv_line,
    history_columns,
    module_columns,
    read_history,
    read_metrics,
    read_modules,
)

TASKS = ['pick the "red" cup, then the blue one', "two\nlines\rof text", "开抽屉"]
EMPTY = b"," * (len(history_columns(TASKS)) - 1)


def metrics(step):
    return {"step": step, "loss": 1 / (step + 2), "mode": "hidden", "conflict": step % 2 == 0}


def anchors(step):
    """What an anchor step measured; the third task has an anchor in every second batch only."""
    values = {"step": step, "epsilon": 0.1, "lambda": math.pi * step, "conflict": step % 2 == 0, "dot": -1e-17 / step}
    for i, task in enumerate(TASKS):
        values[f"lambda/{task}"] = step + i / 3
        if i < 2 or step % 2:
            values[f"retention_loss/{task}"] = step / 7
    return values


def write(directory, steps, resume_step=None, history=True):
    journal = Journal(directory, history=history, tasks=TASKS, resume_step=resume_step)
    for step in steps:
        journal.log(metrics(step))
        journal.anchor_step(anchors(step))
    journal.close()


def files(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_what_is_logged_is_read_back_exactly(tmp_path):
    write(tmp_path, [1, 2, 5])
    assert list(read_metrics(tmp_path)) == [metrics(step) for step in (1, 2, 5)]
    assert list(read_history(tmp_path)) == [anchors(step) for step in (1, 2, 5)]


def test_every_float_survives(tmp_path):
    floats = [5e-324, -1.7976931348623157e308, 0.1 + 0.2, 1e22, -0.0, float(np.float32(0.1))]
    journal = Journal(tmp_path, history=True)
    for step, value in enumerate(floats):
        journal.log({"step": step, "loss": value})
        journal.anchor_step({"step": step, "dot": value})
    journal.close()
    for read, key in ((read_metrics, "loss"), (read_history, "dot")):
        found = [values[key] for values in read(tmp_path)]
        assert [value.hex() for value in found] == [value.hex() for value in floats]


def test_a_numpy_float_is_written_as_the_number_it_is(tmp_path):
    journal = Journal(tmp_path, history=True)
    journal.log({"step": 1, "loss": np.float64(0.5)})
    journal.anchor_step({"step": 1, "dot": np.float64(0.5)})
    journal.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}
    assert next(read_history(tmp_path)) == {"step": 1, "dot": 0.5}


def test_any_csv_reader_finds_the_instructions_and_empty_cells(tmp_path):
    write(tmp_path, [1, 2])
    with (tmp_path / "lambda_history.csv").open(newline="", encoding="utf-8") as file:
        header, first, second = csv.reader(file)
    assert header == history_columns(TASKS)
    column = header.index(f"retention_loss/{TASKS[2]}")
    assert first[column] == repr(1 / 7)
    assert second[column] == ""
    assert [row[header.index("conflict")] for row in (first, second)] == ["false", "true"]


def test_lines_can_be_read_by_others_while_the_run_goes_on(tmp_path):
    journal = Journal(tmp_path, history=True, tasks=TASKS)
    journal.log(metrics(1))
    journal.anchor_step(anchors(1))
    assert list(read_metrics(tmp_path)) == [metrics(1)]
    assert list(read_history(tmp_path)) == [anchors(1)]
    journal.close()
    journal.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_and_nothing_is_written(tmp_path, value):
    journal = Journal(tmp_path, history=True)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=r"loss is .* at step 3"):
        journal.log({"step": 3, "loss": value})
    with pytest.raises(ValueError, match="dot"):
        journal.anchor_step({"step": 3, "dot": value})
    with pytest.raises(ValueError, match="JSON"):
        journal.log({"step": 3, "nested": [value]})
    journal.close()
    assert files(tmp_path) == before


@pytest.mark.parametrize("step", [None, -1, 1.0, "1", True])
def test_a_line_needs_a_step(tmp_path, step):
    journal = Journal(tmp_path, history=True)
    with pytest.raises(ValueError, match="step must be"):
        journal.log({"loss": 1.0} if step is None else {"step": step})
    journal.close()


def test_no_step_is_written_twice(tmp_path):
    journal = Journal(tmp_path, history=True)
    journal.log({"step": 4})
    journal.anchor_step({"step": 4})
    for step in (3, 4):
        with pytest.raises(ValueError, match=f"step {step} comes after step 4"):
            journal.log({"step": step})
        with pytest.raises(ValueError, match=f"step {step} comes after step 4"):
            journal.anchor_step({"step": step})
    journal.close()
    journal = Journal(tmp_path, history=True, resume_step=6)
    with pytest.raises(ValueError, match="step 6 comes after step 6"):
        journal.log({"step": 6})
    journal.close()


def test_without_history_there_is_no_csv(tmp_path):
    write(tmp_path, [1], history=False)
    assert list(files(tmp_path)) == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "lambda_history.csv"])
def test_a_fresh_run_overwrites_nothing(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(CraftError, match=rf"{name} is there already: .*--output_dir.*--resume=true"):
        Journal(tmp_path, history=True)
    assert (tmp_path / name).read_text() == "precious"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Five steps in one go; and the sizes of both files after step 3, where a checkpoint was made."""
    directory, until_checkpoint = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("until_checkpoint")
    write(directory, [1, 2, 3, 4, 5])
    write(until_checkpoint, [1, 2, 3])
    return files(directory), {name: len(data) for name, data in files(until_checkpoint).items()}


@pytest.mark.parametrize("name", ["metrics.jsonl", "lambda_history.csv"])
def test_after_a_kill_anywhere_in_a_line_the_resumed_run_has_no_gap_and_no_double(tmp_path, uninterrupted, name):
    whole, sizes = uninterrupted
    end = len(whole[name])
    # Every seventh byte, and both sides of the last line's end: each case costs four writes to the disk.
    for size in {*range(sizes[name], end, 7), end - 1, end}:
        for other, data in whole.items():
            (tmp_path / other).write_bytes(data)
        (tmp_path / name).write_bytes(whole[name][:size])
        write(tmp_path, [4, 5], resume_step=3)
        assert files(tmp_path) == whole


def test_garbage_after_the_checkpoint_goes_with_the_steps_that_are_taken_again(tmp_path, uninterrupted):
    whole, _ = uninterrupted
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data + b"\0\0\0\n{]\n")
    write(tmp_path, [4, 5], resume_step=3)
    assert files(tmp_path) == whole


def test_rows_to_be_taken_again_are_cut_off_also_when_history_is_no_longer_kept(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    write(tmp_path, [3], resume_step=2, history=False)
    assert [values["step"] for values in read_history(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("name", "line", "damaged"),
    [
        ("metrics.jsonl", 2, b'{"step": 2, "lo\n'),
        ("metrics.jsonl", 2, b'{"step": 2, "loss": NaN}\n'),
        ("metrics.jsonl", 2, b'{"loss": 1.0}\n'),
        ("metrics.jsonl", 2, b'{"step": 1}\n'),
        ("metrics.jsonl", 1, b"\xff\n"),
        ("metrics.jsonl", 1, b"\n"),
        ("lambda_history.csv", 2, b"2,0.1\n"),
        ("lambda_history.csv", 2, b"1" + EMPTY + b"\n"),
        ("lambda_history.csv", 2, b"2,nan" + EMPTY[1:] + b"\n"),
        ("lambda_history.csv", 2, b"2,x" + EMPTY[1:] + b"\n"),
        ("lambda_history.csv", 1, EMPTY + b"\n"),
    ],
)
def test_a_damaged_line_that_must_stay_is_named(tmp_path, name, line, damaged):
    write(tmp_path, [1, 2, 3])
    path = tmp_path / name
    head = csv_line(history_columns(TASKS)) if name.endswith("csv") else b""
    lines = [head, *path.read_bytes().removeprefix(head).splitlines(keepends=True)]
    lines[line] = damaged
    path.write_bytes(b"".join(lines))
    before = path.read_bytes()
    above = head.count(b"\n")
    with pytest.raises(CraftError, match=rf"{name}, line {above + line}: it is damaged \(.*move it away"):
        Journal(tmp_path, history=True, tasks=TASKS, resume_step=3)
    assert path.read_bytes() == before


def test_other_old_tasks_than_before_are_refused(tmp_path):
    write(tmp_path, [1, 2])
    before = files(tmp_path)
    with pytest.raises(CraftError, match=r"lambda_history\.csv: its columns are not those of this run"):
        Journal(tmp_path, history=True, tasks=TASKS[:2], resume_step=2)
    assert files(tmp_path) == before


def test_a_missing_file_begins_anew_and_that_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        write(tmp_path, [4], resume_step=3)
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == ["it begins anew after step 3"] * 2
    assert list(read_metrics(tmp_path)) == [metrics(4)]
    assert list(read_history(tmp_path)) == [anchors(4)]


def test_a_flush_reaches_the_disk_for_both_files(tmp_path, monkeypatch):
    journal = Journal(tmp_path, history=True)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    journal.flush()
    assert set(synced) == {path.stat().st_ino for path in tmp_path.iterdir()}
    journal.close()


RUN = """
import sys
from pathlib import Path
from lerobot_craft.errors import CraftError
from lerobot_craft.training.journal import Journal
journal = Journal(Path(sys.argv[1]), history=True, tasks=["a", "b"])
try:
    for step in range(1, 1_000_000):
        journal.log({"step": step, "loss": step / 3, "text": "x" * 200})
        journal.anchor_step({"step": step, "lambda/a": step / 7, "retention_loss/b": step / 9})
        if step % 20 == 0:
            journal.flush()
            print(step, flush=True)
except CraftError as error:
    print(error)
    journal.log({"step": step})
"""


def test_a_killed_process_loses_nothing_up_to_its_last_flush(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", RUN, tmp_path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.1)
    child.send_signal(signal.SIGKILL)
    *_, flushed = [20, *(int(line) for line in child.communicate()[0].split())]
    Journal(tmp_path, history=True, tasks=["a", "b"], resume_step=flushed).close()
    for read in (read_metrics, read_history):
        assert [values["step"] for values in read(tmp_path)] == list(range(1, flushed + 1))


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )
    assert "metrics.jsonl: the file is larger than" in done.stdout
    *steps, last = list(read_metrics(tmp_path))
    assert set(last) == {"step"}  # the short line that was written after the failure
    assert last["step"] == len(steps) + 1


def test_everything_kept_or_printed_is_explained(request):
    from lerobot_craft.training.lines import _STEP_LINE

    text = (Path(request.config.rootpath) / "docs" / "metrics.md").read_text()
    for key in {*history_columns(["<task>"]), *module_columns(["<module>"]), *_STEP_LINE, "retention_s"}:
        assert f"| `{key}` |" in text, f"docs/metrics.md has no line for {key}"


def write_modules(directory, steps, resume_step=None, modules=("vision, left", "head"), history=True):
    journal = Journal(directory, history=history, modules=modules, resume_step=resume_step)
    for step in steps:
        values = {"step": step, "cos": 1.0, "cos/vision, left": -1 / step, "cos/nowhere": 0.5}
        journal.anchor_step(values | ({"cos/head": 0.25} if step % 2 else {}))
    journal.close()


def test_cosines_of_modules_have_a_file_of_their_own_and_go_on_after_a_resume(tmp_path):
    write_modules(tmp_path / made("whole", tmp_path), range(1, 5))
    write_modules(tmp_path / made("killed", tmp_path), range(1, 4))
    write_modules(tmp_path / "killed", [3, 4], resume_step=2)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    rows = list(read_modules(tmp_path / "whole"))
    assert rows[:2] == [
        {"step": 1, "cos/vision, left": -1.0, "cos/head": 0.25},
        {"step": 2, "cos/vision, left": -0.5},
    ]


def test_other_modules_are_refused_and_without_any_there_is_no_file(tmp_path):
    write_modules(tmp_path / made("a", tmp_path), [1, 2])
    with pytest.raises(CraftError, match=r"module_cosines\.csv: its columns are not those of this run"):
        write_modules(tmp_path / "a", [3], resume_step=2, modules=("head",))
    write_modules(tmp_path / made("b", tmp_path), [1], modules=())
    write_modules(tmp_path / made("c", tmp_path), [1], history=False)
    assert (tmp_path / "b" / HISTORY_FILE).exists()
    assert not (tmp_path / "b" / MODULES_FILE).exists()
    assert not (tmp_path / "c" / MODULES_FILE).exists()


def test_a_run_of_a_release_without_the_file_goes_on_with_one(tmp_path, caplog):
    write_modules(tmp_path, [1, 2], modules=())
    write_modules(tmp_path, [3], resume_step=2)
    assert "module_cosines.csv is missing: it begins anew after step 2" in caplog.text
    assert [row["step"] for row in read_modules(tmp_path)] == [3]


def test_a_header_that_is_no_text_is_named(tmp_path):
    (tmp_path / HISTORY_FILE).write_bytes(b"step,\xff\xfe\n1,2\n")
    with pytest.raises(CraftError, match=r"lambda_history\.csv: its first line is damaged"):
        list(read_history(tmp_path))


def made(name, parent):
    (parent / name).mkdir()
    return name


def test_a_link_is_not_followed_to_a_file_that_a_resume_would_cut(tmp_path):
    precious = tmp_path / "token"
    precious.write_text("no newline at its end")
    write(tmp_path, [1, 2, 3])
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(precious)
    with pytest.raises(CraftError, match=r"metrics\.jsonl is a link"):
        write(tmp_path, [3, 4], resume_step=2)
    assert precious.read_text() == "no newline at its end"
