"""Lines that people copy: the documents' commands, docs/commands.md and the shell scripts."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import shell_lines

ROOT = Path(__file__).parents[1]
SCRIPTS = ("train_craft.sh", "train_craft_hidden_dryrun.sh")
NUMBER = r"-?\d[\d.]*(?:e[+-]\d+)?"
STEP_LINE = re.compile(
    rf"Step (\d)/3 \| loss=({NUMBER}) \| grdn={NUMBER} \| lr={NUMBER} \| updt_s={NUMBER} \| data_s={NUMBER} \| "
    rf"mode=hidden \| L_ret=({NUMBER}) \| λ=({NUMBER}) \| ε=({NUMBER})( \| conflict=✓)? \| dot={NUMBER} \| cos={NUMBER}"
)


def assert_three_hidden_steps(log):
    steps = [found.groups() for found in STEP_LINE.finditer(log)]
    assert [step[0] for step in steps] == ["1", "2", "3"]
    losses, drifts, lambdas, epsilons = ([float(step[i]) for step in steps] for i in (1, 2, 3, 4))
    assert all(math.isfinite(loss) and loss > 1 for loss in losses)  # random weights: about log of the vocabulary
    assert drifts[0] < 1e-3 < drifts[2]  # it begins as the teacher and moves away
    assert lambdas[0] == 1.0
    assert epsilons == pytest.approx([1.0, 0.55, 0.1])  # the last step has epsilon_end
    assert "DEBUG" not in log


@pytest.fixture
def craft(process_as_it_was, monkeypatch, tmp_path):
    """`craft` with the arguments of a line, in this process; it must succeed."""
    from lerobot_craft.cli import main

    monkeypatch.setenv("CRAFT_HOME", str(tmp_path / "craft_home"))

    def run(line):
        assert main(shlex.split(line)) == 0, line

    return run


@pytest.fixture
def workplace(anchor_data, checkpoints, tmp_path, monkeypatch):
    """The current directory, in which `lerobot/pi0_fast` is a checkpoint; lerobot's home has `local/old` and `new`."""
    (tmp_path / "lerobot").mkdir()
    (tmp_path / "lerobot" / "pi0_fast").symlink_to(checkpoints("pi0_fast"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "local").symlink_to(anchor_data)
    monkeypatch.chdir(tmp_path)
    # lerobot reads HF_LEROBOT_HOME once, when it is imported.
    monkeypatch.setattr("lerobot.datasets.dataset_metadata.HF_LEROBOT_HOME", tmp_path / "home")
    return tmp_path


def test_the_documents_hidden_cache_and_train_lines(workplace, craft, capfd):
    craft(
        "cache build --dataset.repo_id=local/old --policy.path=lerobot/pi0_fast --output_dir=data/anchor_hidden_cache "
        "--num_samples=100 --hidden_layer=-2 --pooling=mean_image_tokens"
    )
    craft(
        "train --dataset.repo_id=local/new --policy.path=lerobot/pi0_fast --output_dir=outputs/dryrun --steps=3 "
        "--batch_size=2 --eval_freq=0 --log_freq=1 --save_checkpoint=false --num_workers=0 --wandb.enable=false "
        "craft.enabled=true craft.retention_mode=hidden craft.anchor_cache_dir=data/anchor_hidden_cache "
        "craft.anchor_batch_size=2 craft.retention_freq=1"
    )
    told = capfd.readouterr()
    assert_three_hidden_steps(told.err)
    for line in ("Anchor cache: data/anchor_hidden_cache", "Number of anchors: 100", "Retention Mode: hidden"):
        assert line in told.err
    assert not (workplace / "outputs/dryrun/checkpoints").exists()


def test_the_documents_multi_layer_cache_line(workplace, craft):
    craft(
        "cache build --policy.pretrained_path=lerobot/pi0_fast --dataset.repo_id=local/old --out_dir=data/anchor_cache "
        "--num_anchors=30 --layers_to_save=-2,-1"
    )
    manifest = json.loads((workplace / "data/anchor_cache/manifest.json").read_text())
    assert manifest["values"]["layers_to_save"] == ["2", "3"]
    assert manifest["values"]["pooling_strategy"] == {"vision": "mean", "text": "last"}


def cookbook():
    """Lines of the runnable blocks of docs/commands.md, with their arrays put in."""
    text = (ROOT / "docs" / "commands.md").read_text()
    return [line for line in shell_lines(text, languages=("sh",)) if line.strip()]


def test_the_cookbook_names_every_method():
    from lerobot_craft.training.methods.registry import METHODS

    named = {found for line in cookbook() for found in re.findall(r"--craft\.method=(\w+)", line)}
    assert named == set(METHODS) - {"craft"}


@pytest.mark.slow  # fourteen short runs of training, and an estimate
@pytest.mark.timeout(900)
def test_every_line_of_the_cookbook_runs(anchor_data, checkpoints, tmp_path, monkeypatch, craft):
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    (tiny / "teacher").symlink_to(checkpoints("pi0_fast"))
    for name in ("old", "new"):
        (tiny / name).symlink_to(anchor_data / name)
    monkeypatch.chdir(tmp_path)
    runs = [line.removeprefix("craft ") for line in cookbook() if line.startswith("craft ")]
    assert len(runs) == 15
    for line in runs:
        craft(line)
    assert (tmp_path / "outputs/action/checkpoints/last").resolve().name == "000005"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_sound_shell(script):
    subprocess.run([shutil.which("bash"), "-n", ROOT / "scripts" / script], check=True)
    assert os.access(ROOT / "scripts" / script, os.X_OK)


def train_craft(*arguments, **variables):
    command = [shutil.which("bash"), ROOT / "scripts" / "train_craft.sh", *arguments]
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_help_of_train_craft_names_its_variables():
    result = train_craft("--help")
    assert result.returncode == 0
    for name in ("POLICY", "DATASET", "OLD_DATASET", "OLD_INSTRUCTIONS", "OUTPUT", "STEPS"):
        assert name in result.stdout


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"DATASET": "me/new"}, "POLICY is missing"),
        ({"POLICY": "me/policy", "OLD_DATASET": "me/old"}, "DATASET is missing"),
        ({"POLICY": "me/policy", "DATASET": "me/new"}, "OLD_DATASET or OLD_INSTRUCTIONS is missing"),
    ],
)
def test_train_craft_says_what_is_missing(variables, complaint):
    result = train_craft(**variables)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "usage: POLICY=" in result.stderr


@pytest.mark.slow  # three processes that import lerobot
@pytest.mark.timeout(900)
def test_the_dry_run_runs_from_anywhere(tmp_path):
    command = [shutil.which("bash"), ROOT / "scripts" / "train_craft_hidden_dryrun.sh"]
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr
    assert_three_hidden_steps(result.stderr)
    (run,) = (tmp_path / "out").glob("run_*")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
