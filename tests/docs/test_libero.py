"""docs/libero.md: the ten instructions of the suite, the episodes of one, and its lines on a small policy."""

import contextlib
import importlib.util
import io
import re
import shlex
import sys

import pytest

from tests.docs.pages import ROOT, flag_lists, shell_lines

PAGE = (ROOT / "docs" / "libero.md").read_text()
# As libero_goal numbers them.
GOALS = (
    "open the middle drawer of the cabinet",
    "put the bowl on the stove",
    "put the wine bottle on top of the cabinet",
    "open the top drawer and put the bowl inside",
    "put the bowl on top of the cabinet",
    "push the plate to the front of the stove",
    "put the cream cheese in the bowl",
    "turn on the stove",
    "put the bowl on the plate",
    "put the wine bottle on the rack",
)


def variable(name):
    (value,) = re.findall(rf'^{name}="(.*)"$', PAGE, re.MULTILINE)
    return value


def test_the_instructions_are_those_of_the_suite():
    new, old = variable("NEW"), variable("OLD").split("; ")
    assert new in GOALS
    assert old == [goal for goal in GOALS if goal != new]
    (kept,) = re.findall(r"--env\.task_ids='\[(.*)\]'", PAGE)
    assert [GOALS[int(number)] for number in kept.split(",")] == old


def test_the_episodes_of_one_instruction_are_found(anchor_data, monkeypatch):
    (code,) = re.findall(r"<<'PY'\n(.*?)^PY$", PAGE, re.MULTILINE | re.DOTALL)
    here = code.replace('("lerobot/libero")', f'("local/old", root={str(anchor_data / "old")!r})')
    assert here != code
    monkeypatch.setattr(sys, "argv", ["-", "press it"])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(here, "page", "exec"), {})  # noqa: S102  what the page tells people to run
    assert out.getvalue() == "[2, 5, 8]\n"  # three tasks by turns


@pytest.fixture
def libero(tmp_path):
    """A dataset of LIBERO's form, and a small pi05 that knows a third camera which is never there."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.utils.feature_utils import dataset_to_policy_features

    from lerobot_craft.tiny.make import make_checkpoint, make_local_dataset

    cameras = ("observation.images.image", "observation.images.image2")
    make_local_dataset(
        tmp_path / "data", GOALS, episodes_per_task=1, cameras=cameras, image_size=64, state_dim=8, action_dim=7, fps=20
    )
    meta = LeRobotDataset("local/data", root=tmp_path / "data").meta
    features = dataset_to_policy_features(meta.features)
    outputs = {"action": features.pop("action")}
    return make_checkpoint(
        "pi05",
        tmp_path / "before",
        input_features=features,
        output_features=outputs,
        dataset_stats=meta.stats,
        instructions=GOALS,
        empty_cameras=1,
    )


def typed(line, libero):
    """A line of the page with what is here in the place of what people have."""
    line = line.replace(variable("OLD"), shlex.quote(variable("OLD"))).replace('"$EPISODES"', "[1]")
    line = line.replace("$RECIPE", "recipes/pi05_lora_one_gpu_24gb.json").replace("libero/", f"{libero.parent}/")
    return shlex.split(line.replace("=cuda", "=cpu").replace("--steps=5000", "--steps=1"))


@pytest.mark.slow  # two trainings of a small pi05
@pytest.mark.timeout(900)
def test_its_lines_train_a_policy_of_liberos_form(libero, craft_train, capfd):
    from lerobot_craft.cli import main

    (run,) = [flags for flags in flag_lists(PAGE) if "--config_path" in flags]
    lines = [line for line in shell_lines(PAGE) if line.startswith("craft train") and "--output_dir" in line]
    small = ["--dataset.root=" + str(libero.parent / "data"), "--batch_size=2", "--policy.device=cpu"]
    small += ["--num_workers=0", "--craft.num_anchors=9", "--craft.probe_anchors=0", "--policy.n_action_steps=8"]
    assert run in lines[0]
    for line in lines[:2]:
        words = typed(line.replace("--policy.n_action_steps=10", ""), libero)
        assert craft_train(*words[2:], *small) == 0
    for name in ("plain", "craft"):
        assert list((libero.parent / name / "checkpoints/last/pretrained_model").glob("adapter_model*"))
    if importlib.util.find_spec("libero") is None:
        (before, *_) = [line for line in shell_lines(PAGE) if line.startswith("craft eval before=")]
        words = typed(before.replace("--policy.n_action_steps=10", ""), libero)
        assert main(words[1:]) == 2
        assert "the environment libero cannot be made here (No module named 'libero')" in capfd.readouterr().err
