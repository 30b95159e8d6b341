"""`make docs`: the line of the Makefile, into another directory."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def build(source: Path, output: Path):
    """Run what `make docs` runs; without a network it does the same, so it is given none to ask."""
    (line,) = re.findall(r"^\t(\$\(BIN\)/sphinx-build .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    words = shlex.split(line.replace("$(BIN)/sphinx-build", f"{sys.executable} -m sphinx"))
    places = {
        ".": str(source),
        "docs": str(ROOT / "docs"),
        "outputs/docs": str(output),
        "outputs/doctrees": f"{output}.tmp",
    }
    command = [places.get(word, word) for word in words]
    assert set(places.values()) <= set(command)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


def test_every_page_is_built_without_a_warning(tmp_path):
    done = build(ROOT, tmp_path / "html")
    assert (done.returncode, done.stderr) == (0, "")
    entrance = (tmp_path / "html" / "index.html").read_text()
    (first,) = re.findall(r'url=([^"]+)"', entrance)
    assert (tmp_path / "html" / first).is_file()
    for page in ("README", "README.zh-CN", "CONTRIBUTING", "CHANGELOG", "docs/quickstart", "docs/decisions/README"):
        assert (tmp_path / "html" / f"{page}.html").is_file()


def test_a_dead_link_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[a](gone.md) [b](#no-heading) [c](index.md#nor-this)\n")
    done = build(tmp_path, tmp_path / "html")
    assert done.returncode != 0
    for target in ("gone.md", "no-heading", "nor-this"):
        assert target in done.stderr
