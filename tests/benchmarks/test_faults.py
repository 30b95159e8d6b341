import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.fixture
def faults():
    return runpy.run_path(str(SCRIPT))


def test_the_page_shows_the_newest_counts(faults):
    page = faults["PAGE"].read_text()
    assert faults["on_page"](page, faults["newest"]()) == page
    assert faults["newest"]()["counts"]["damage to a cache"].keys() == {"refused", "harmless"}


def test_counts_of_some_tests_keep_the_others_with_their_dates(faults):
    about = {"torch": "2", "machine": "m"}
    first = {"date": "2026-01-01", "tests": 9, "counts": {"a": {"refused": 1}, "b": {"refused": 2}}, **about}
    second = {"date": "2026-01-02", "tests": 1, "counts": {"b": {"same bits": 3}}, **about}
    third = {"date": "2026-01-03", "tests": 1, "counts": {"c": {"refused": 4}}, **about}
    report = faults["merged"](third, faults["merged"](second, first))
    assert faults["table"](report).splitlines()[-3:] == [
        "| a | refused | 1 | 2026-01-01 |",
        "| b | same bits | 3 | 2026-01-02 |",
        "| c | refused | 4 | 2026-01-03 |",
    ]
    assert "counted on" not in faults["table"](first)


@pytest.mark.slow  # a thousand mutations
def test_counts_are_written_with_their_date_and_onto_the_page(faults, tmp_path, capfd):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{faults['BEGIN']}\nold\n{faults['END']}\nafter\n")
    arguments = [f"--output_dir={tmp_path}", f"--page={page}", "tests/faults/test_cache_damage.py"]
    assert faults["main"](arguments) == 0
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("faults-*.json"))
    assert sum(report["counts"]["damage to a cache"].values()) == 1000
    assert report["tests"] == 2
    before, middle, after = page.read_text().split("<!--", 2)
    assert (before, after.rpartition("-->")[2]) == ("before\n", "\nafter\n")
    assert f"| damage to a cache | refused | {report['counts']['damage to a cache']['refused']} |" in middle + after


@pytest.mark.slow  # a pytest of its own
def test_tests_that_do_not_pass_write_nothing(faults, tmp_path, capfd):
    arguments = [f"--output_dir={tmp_path / 'results'}", f"--page={tmp_path / 'page.md'}", "tests/nothing.py"]
    assert faults["main"](arguments) != 0
    assert not (tmp_path / "results").exists()
