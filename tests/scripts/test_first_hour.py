"""scripts/first_hour.py types a whole hour; the page is what it wrote."""

import subprocess
import sys

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
