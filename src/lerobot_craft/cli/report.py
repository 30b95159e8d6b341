"""`craft report`: one HTML page from results, to look at and to send."""

import argparse
from pathlib import Path


def run(argv: list[str]) -> int:
    """Write the page, print the table, and return 0."""
    parser = argparse.ArgumentParser(
        prog="craft report",
        description="Turn results.json files of `craft bench` or `craft demo` into one self-contained HTML page.",
        epilog="Several files become one page. The same run in two of them is refused: it would count twice.",
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the page (default: report.html beside the first results file)"
    )
    options = parser.parse_args(argv)
    from lerobot_craft.report.write import write_report

    output: Path = options.output or options.results[0].parent / "report.html"
    print(write_report(options.results, output))
    print(f"\n{output}")
    return 0
