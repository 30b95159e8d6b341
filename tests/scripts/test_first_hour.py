"""scripts/first_hour.py types a whole hour; the page is what it wrote."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.warm_process import environment

SCRIPT = ROOT / "scripts" / "first_hour.py"


@pytest.mark.slow  # nine commands, each a process that imports lerobot
@pytest.mark.timeout(1200)
def test_an_hour_is_typed_and_written_down(tmp_path):
    page = tmp_path / "page.md"
    line = [
        sys.executable,
        SCRIPT,
        f"--directory={tmp_path / 'hour'}",
        f"--page={page}",
        "--base_steps=4",
        "--steps=12",
    ]
    subprocess.run(line, env=environment(), check=True)
    text = page.read_text(encoding="utf-8")
    assert "SIGINT: stopped after step" in text
    assert (tmp_path / "hour" / "outputs" / "kept" / "checkpoints" / "000012").is_dir()
    assert str(tmp_path) not in text


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("first_hour", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_was_said_is_kept_without_bars_and_places(script):
    here = Path("/some/where/hour")
    said = (
        "Training:   0%|   | 0/9\rTraining:  50%|#  | 5/9\r          \r"
        "INFO 2026-11-19 04:58:50 recorder.py:243 Step 5/9\n"
        "anchors:  50%|#  | 5/9\ranchors: 100%|###| 9/9\n"
        f"Checkpoint: {here}/outputs/kept, in {here} of {script.ROOT}\n\n"
    )
    assert script.trimmed(said, here) == "Step 5/9\nCheckpoint: outputs/kept, in . of lerobot-craft"


def test_a_long_output_keeps_its_ends(script):
    lines = script.trimmed("\n".join(f"line {n}" for n in range(100)), Path("/hour")).split("\n")
    assert len(lines) == script.HEAD + 1 + script.TAIL
    assert (lines[0], lines[script.HEAD], lines[-1]) == ("line 0", "[...]", "line 99")
