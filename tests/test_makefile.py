"""`make help` lists every target, and no target compiles lerobot anew."""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def listed():
    """Targets that `make help` prints."""
    made = subprocess.run([shutil.which("make"), "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"^  make (\S+) +\S", made.stdout, re.MULTILINE))


def declared():
    """Targets that are no files."""
    (names,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(names.split())


def test_help_lists_every_target():
    assert listed() == declared()


def test_every_target_is_declared():
    assert declared() == set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_what_python_compiled_is_kept():
    surroundings = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    asked = [shutil.which("make"), "--eval", "kept: ; @echo kept=$${PYTHONDONTWRITEBYTECODE:-yes}", "kept"]
    made = subprocess.run(asked, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=True)
    assert "kept=yes" in made.stdout
