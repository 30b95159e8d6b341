"""`craft demo`: forgetting and its remedy in a simulator, end to end, while you wait."""

import argparse
import shlex
import sys
from pathlib import Path

RESULTS_FILE, REPORT_FILE = "results.json", "report.html"
_DIRECTORY, _QUICK_DIRECTORY = Path("outputs/demo"), Path("outputs/demo_quick")
_STORY = """\
A small SmolVLA learns three tasks of a simulated arm. Then it is fine-tuned on a fourth, which happens in the
scene of the first and differs from it by the instruction alone: plainly, and with CRaFT. What is left of the three?
It takes a few minutes on two cores and needs no network. Ctrl-C at any time: the same command goes on."""


def run(argv: list[str]) -> int:
    """Run the missing stages, write the results and the page, print the table; 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="craft demo", description=_STORY, allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, help=f"gets everything (default: {_DIRECTORY})")
    parser.add_argument("--jobs", type=int, choices=range(1, 9), default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="every stage with hardly any work: see that it runs; no number means anything",
    )
    options = parser.parse_args(argv)
    output_dir: Path = options.output_dir or (_QUICK_DIRECTORY if options.quick else _DIRECTORY)
    try:
        return _run(output_dir, options.jobs, options.quick, shlex.join(["craft", "demo", *argv]))
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on with what is missing", file=sys.stderr)
        raise


def _run(output_dir: Path, jobs: int, quick: bool, command: str) -> int:
    from lerobot_craft.bench.board import Narrator
    from lerobot_craft.bench.cell_plan import plan_cells
    from lerobot_craft.bench.demo_run import check_machine, demo_settings, run_demo
    from lerobot_craft.cli import train
    from lerobot_craft.evaluation.results import write_results

    print(f"{_STORY}\n")
    without_pictures = check_machine()
    if without_pictures is not None:
        print(f"There will be no filmstrips: {without_pictures}\n")
    settings = demo_settings(output_dir, quick=quick, film=without_pictures is None)
    narrator = Narrator(plan_cells(settings), sys.stdout, live=sys.stdout.isatty())
    results = run_demo(settings, train.run, jobs, narrator, command=command)
    if results is not None:
        write_results(output_dir / RESULTS_FILE, results)
        _show(output_dir / RESULTS_FILE, output_dir / REPORT_FILE)
    for failure in narrator.failures:
        print(failure, file=sys.stderr)
    return 1 if narrator.failures else 0


def _show(results: Path, page: Path) -> None:
    """Print the table and write the page, both from the results file."""
    from lerobot_craft.bench.demo_run import own_policy_commands, task_table
    from lerobot_craft.evaluation.results import read_results
    from lerobot_craft.report.page import write_report

    write_report([results], page)
    print(f"\n{task_table(read_results(results))}\n\n{results}\n{page}\n\nThe same for your policy:\n")
    print("\n\n".join(map(str, own_policy_commands())))
