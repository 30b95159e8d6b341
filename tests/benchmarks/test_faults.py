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


def test_counts_of_several_pytests_are_added(faults, tmp_path):
    parts = [
        {"counts": {"a": {"refused": 2, "same bits": 1}}, "passed": 1, "skipped": 0},
        {"counts": {"a": {"refused": 3}, "b": {"read": 1}}, "passed": 2, "skipped": 1},
    ]
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, part in zip(files, parts, strict=True):
        file.write_text(json.dumps(part))
    page = tmp_path / "page.md"
    page.write_text(f"{faults['BEGIN']}{faults['END']}")
    arguments = [f"--output_dir={tmp_path / 'results'}", f"--page={page}", "--counted", *map(str, files)]
    assert faults["main"](arguments) == 0
    (report,) = (json.loads(path.read_text()) for path in (tmp_path / "results").glob("faults-*.json"))
    assert report["counts"] == {"a": {"refused": 5, "same bits": 1}, "b": {"read": 1}}
    assert (report["tests"], report["skipped"]) == (3, 1)
    assert "| a | refused | 5 |" in page.read_text()


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
