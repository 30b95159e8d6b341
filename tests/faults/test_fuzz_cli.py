"""Whatever is typed: a clean exit code, a sentence, no traceback, and nothing is written where nobody asked for it."""

import dataclasses
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lerobot_craft.cli import main
from tests.faults.tally import Tally

values = st.one_of(
    st.sampled_from(["", "0", "-1", "1", "2.5", "nan", "inf", "true", "false", "null", "[]", "{}", "a,b", "-2,-1"]),
    st.sampled_from(["../../escaped", "/escaped", "~", "%s", "$HOME", "*", "--help", "x=y", "1e999", "0x10", "١"]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
)
LEROBOT = (
    *("steps", "batch_size", "num_workers", "log_freq", "save_freq", "seed", "job_name", "resume", "config_path"),
    *(
        "policy.device",
        "policy.type",
        "policy.path",
        "policy.dtype",
        "optimizer.type",
        "optimizer.lr",
        "scheduler.type",
    ),
    *("dataset.repo_id", "dataset.root", "dataset.episodes", "dataset.revision", "env.type", "eval.n_episodes"),
    *("peft.method_type", "rename_map", "save_checkpoint", "cudnn_deterministic", "prefetch_factor", "tolerance_s"),
)
BUILD = (
    *("num_samples", "batch_size", "shard_size", "retention_mode", "anchor_source", "hidden_layer", "layers_to_save"),
    *("pooling", "per_token", "top_k", "num_draws", "inputs", "seed", "num_workers", "old_instructions"),
    *("dataset.repo_id", "dataset.root", "dataset.episodes", "new_dataset.root", "policy.path", "policy.device"),
)
BENCH = (
    *("scenario", "policy", "methods", "anchors", "seeds", "episodes", "jobs", "old_episodes", "new_episodes"),
    *("image_size", "base_steps", "steps", "learning_rate", "batch_size", "cell", "sweep", "render", "knobs"),
)
REPORT = ("output", "results", "title", "help")
SHORT, LONG = {"bench": 30, "report": 20}, {"train": 150, "build": 150, "bench": 150, "report": 150}


def flags(names, prefix=""):
    """Some flags with some values, written in both ways, and now and then a word that belongs to none."""
    flag = st.tuples(st.sampled_from(names), values)
    written = st.one_of(
        flag.map(lambda pair: [f"--{prefix}{pair[0]}={pair[1]}"]),
        flag.map(lambda pair: [f"--{prefix}{pair[0]}", pair[1]]),
        values.map(lambda word: [word]),
    )
    return st.lists(written, min_size=1, max_size=4).map(lambda parts: [word for part in parts for word in part])


class Watch:
    """Notes what is opened for writing, made or removed outside of the places that belong to the run."""

    _OPERATIONS = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "shutil.rmtree")

    def __init__(self, allowed):
        self._allowed, self.found, self.watching = tuple(map(str, allowed)), [], False
        sys.addaudithook(self._note)  # for good; `watching` says when

    def _note(self, event, arguments):
        if not self.watching:
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            paths = arguments[:1]
        elif event in self._OPERATIONS:
            paths = arguments[:2]
        else:
            return
        for path in paths:
            if "__pycache__" in str(path):  # Python keeps what it compiled when a module is imported for the first time
                continue
            if isinstance(path, str | os.PathLike) and not str(Path(path).absolute()).startswith(self._allowed):
                self.found.append((event, str(path)))


@pytest.fixture
def watch(tmp_path, monkeypatch, process_as_it_was):
    """In a directory of its own; what libraries keep for themselves (their caches, a process's own files) is theirs."""
    from datasets.config import HF_DATASETS_CACHE

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CRAFT_HOME", str(tmp_path / "craft_home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # lerobot hands settings to draccus in a temporary file
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        yield Watch([tmp_path, "/dev", "/proc", HF_DATASETS_CACHE])


def run(argv, watch, capfd):
    """One command; its exit code."""
    watch.watching = True
    try:
        code = main(argv)
    except SystemExit as stop:  # argparse, for --help and for what is wrong
        code = stop.code
    finally:
        watch.watching = False
    said = capfd.readouterr().err
    assert code in (0, 2), (argv, code, said[-2000:])
    assert "Traceback" not in said, argv
    if code == 2:
        assert re.search("^craft: .|^craft [a-z]+: error: .", said, re.MULTILINE), (argv, said)
    assert watch.found == [], argv
    return code


def fuzz(verb, strategy, base, last, watch, capfd, tally, examples):
    counts = {}

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def typed(words):
        code = run([*base, *words, *last], watch, capfd)
        counts[code] = counts.get(code, 0) + 1

    typed()
    assert counts.get(2, 0) >= examples // 4
    for code, times in counts.items():
        tally.add(f"random flags of craft {verb}", "done" if code == 0 else "refused with a sentence", times)


@pytest.fixture
def lines(train_flags, anchor_data, checkpoints, tmp_path):
    """By verb: the beginning of a line, what the fuzz may add to it, and an end.

    The end names data that are not there: flags that happen to be right must not train for as long as they say.
    """
    from lerobot_craft.training.config import CraftConfig

    own = [field.name for field in dataclasses.fields(CraftConfig) if not field.name.endswith("_dir")]
    nowhere = [f"--dataset.root={tmp_path / 'nowhere'}"]
    return {
        "train": (
            ["train", *train_flags("act", tmp_path / "run", steps=1), f"--craft.anchor_cache_dir={tmp_path / 'cache'}"],
            st.one_of(flags(LEROBOT), flags(own, "craft."), flags([*LEROBOT, *(f"craft.{name}" for name in own)])),
            nowhere,
        ),
        "build": (
            [
                *("cache", "build", f"--policy.path={checkpoints('act')}", "--dataset.repo_id=local/old"),
                *(f"--dataset.root={anchor_data / 'old'}", f"--output_dir={tmp_path / 'cache'}", "--num_samples=2"),
            ],
            flags(BUILD),
            nowhere,
        ),
        "bench": (
            ["bench", "--list-cells", "--scenario=window", f"--output_dir={tmp_path / 'bench'}"],
            flags(BENCH),
            [],
        ),
        "report": (["report", str(tmp_path / "none.json")], flags(REPORT), []),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("verb", SHORT)
def test_whatever_is_typed_ends_with_a_sentence(verb, lines, watch, capfd):
    base, strategy, last = lines[verb]
    fuzz(verb, strategy, base, last, watch, capfd, Tally(), SHORT[verb])


@pytest.mark.slow  # minutes; flags of train are in test_bad_input.py too
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("verb", LONG)
def test_whatever_else_is_typed_ends_with_a_sentence(verb, lines, watch, capfd, tally):
    base, strategy, last = lines[verb]
    fuzz(verb, strategy, base, last, watch, capfd, tally, LONG[verb])
