"""`craft report`: one HTML page from runs of any kind."""

import argparse
from pathlib import Path


def run(argv: list[str]) -> int:
    """Write the page, print the tables, and return 0."""
    parser = argparse.ArgumentParser(
        prog="craft report",
        description="Turn runs into one self-contained HTML page: trainings, benches and evaluations, as you like.",
        epilog="A PATH is the output directory of `craft train`, `craft bench`, `craft demo` or `craft eval`, or a "
        "results.json or evaluation.json. The same run twice is refused: it would count twice.",
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the page (default: report.html in or beside the first PATH)"
    )
    options = parser.parse_args(argv)
    from lerobot_craft.report.page import default_output, write_report

    output: Path = options.output or default_output(options.paths)
    if tables := write_report(options.paths, output):
        print(f"{tables}\n")
    print(output)
    return 0
