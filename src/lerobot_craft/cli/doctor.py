"""`craft doctor`: whether this machine is ready, and the command that fixes each problem."""

import argparse
import sys
from contextlib import closing

from lerobot_craft.doctor import Surroundings, as_json, as_lines, examine, is_ready, verdict, wants_colour


def run(argv: list[str]) -> int:
    """Check this machine, print the findings, and return 1 if something required is missing, else 0."""
    parser = argparse.ArgumentParser(
        prog="craft doctor",
        description="Say whether this machine is ready, and for each problem the line that mends it.",
        epilog="Exit code: 1 if something needed is missing, else 0. Warnings and notes do not fail.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for bug reports and machines")
    options = parser.parse_args(argv)
    surroundings = Surroundings.observe()
    checks = []
    # Closed explicitly: the examination owns child processes, which must not be orphaned if the reader leaves.
    with closing(examine(surroundings)) as examination:
        for check in examination:
            checks.append(check)
            if not options.json:
                print(as_lines(check, wants_colour(surroundings.env, sys.stdout)), flush=True)
    print(as_json(checks) if options.json else f"\n{verdict(checks)}")
    return 0 if is_ready(checks) else 1
