"""Every fault that the tests know, and what came of it, counted. `make faults` runs this.

The counts come from the tests themselves (tests/faults, and those of the cache's storage), long versions included; a
test that fails stops the count from being written. The table of docs/reliability.md is made from the newest counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dated import RESULTS, dated, write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- counts: written by make faults -->", "<!-- end of counts -->"
TESTS = (
    "tests/faults",
    "tests/anchors/test_faults.py",
    "tests/anchors/test_lies.py",
    "tests/training/test_card.py",
    "tests/training/test_checkpoints.py",
    "tests/training/test_craft_state.py",
    "tests/training/test_killed_saves.py",
    "tests/training/test_resume_command.py",
    "tests/training/test_run_dir.py",
)


def table(report: dict[str, Any]) -> str:
    """The counts as the page shows them."""
    earlier = report.get("earlier", {})
    rows = [
        f"| {fault} | {outcome} | {times} |" + (f" {earlier.get(fault, report['date'])} |" if earlier else "")
        for fault, outcomes in sorted(report["counts"].items())
        for outcome, times in sorted(outcomes.items())
    ]
    head = f"{report['date']}, {report['tests']} tests, torch {report['torch']}, {report['machine']}."
    titles = ["| fault | what came of it | times |", "|---|---|---|"]
    if earlier:
        titles = ["| fault | what came of it | times | counted on |", "|---|---|---|---|"]
    return "\n".join([head, "", *titles, *rows])


def merged(report: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """New counts of some faults, and the counts before of all others with their dates."""
    known = before["counts"]
    kept = {fault: before.get("earlier", {}).get(fault, before["date"]) for fault in known.keys() - report["counts"]}
    return report | {"counts": known | report["counts"], "earlier": kept}


def added(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts of several pytests as if they had been one."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    passed = skipped = 0
    for part in parts:
        passed, skipped = passed + part["passed"], skipped + part["skipped"]
        for fault, outcomes in part["counts"].items():
            sums[fault].update(outcomes)
    return {"counts": {fault: dict(outcomes) for fault, outcomes in sums.items()}, "passed": passed, "skipped": skipped}


def counted(tests: Sequence[str]) -> dict[str, Any] | int:
    """What these tests count and how long that takes, or pytest's exit code if they do not pass."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "counts.json"
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", f"--fault-counts={file}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run([*pytest, *tests], cwd=ROOT, env=environment).returncode  # noqa: S603  # our own
        if code:
            return code
        found: dict[str, Any] = json.loads(file.read_text())
    return found | {"minutes": round((time.monotonic() - began) / 60, 1)}


def newest(results: Path = RESULTS) -> dict[str, Any]:
    """The last counts that were written."""
    report: dict[str, Any] = json.loads(max(results.glob("faults-*.json")).read_text())
    return report


def on_page(page: str, report: dict[str, Any]) -> str:
    """The page with these counts in its table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(report)}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest is given (default: all tests of faults)")
    parser.add_argument("--merge", action="store_true", help="keep the newest counts of faults that TESTS do not count")
    parser.add_argument(
        "--counted",
        type=Path,
        nargs="+",
        help="run nothing: add up these files, which `pytest --fault-counts=FILE` wrote of tests that passed",
    )
    options = parser.parse_args(arguments)
    if options.counted:
        found: dict[str, Any] | int = added(json.loads(file.read_text()) for file in options.counted)
    else:
        found = counted(options.tests)
    if isinstance(found, int):
        return found
    report = dated("faults", tests=found.pop("passed"), **found)
    if options.merge:
        report = merged(report, newest(options.output_dir))
    write(report, options.output_dir)
    options.page.write_text(on_page(options.page.read_text(), report))
    print(f"and to {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
