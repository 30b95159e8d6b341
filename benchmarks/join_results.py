"""Several `results.json` of one bench as one file, with one table: the rows of a long bench are run command by command.

    python benchmarks/join_results.py A.json B.json --output=C.json --replace=/home/me/out=outputs

A run that several files hold is taken from the first. Nothing is averaged here: `evaluation/summary.py` makes the
table from all runs, as `craft bench` does. Paths of the machine can be replaced, nothing else is changed.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import Results, Run, read_results, write_results
from lerobot_craft.evaluation.summary import collect, setting_of
from lerobot_craft.evaluation.table import summary_table


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        joined = join([read_results(path) for path in options.files], dict(options.replace))
        write_results(options.output, joined)
    except CraftError as error:
        print(error, file=sys.stderr)
        return 1
    print(summary_table(joined.summary))
    return 0


def join(found: Sequence[Results], replace: dict[str, str]) -> Results:
    """All runs, each once; the commands one below the other."""
    runs: dict[tuple[object, ...], Run] = {}
    for results in found:
        for run in results.runs:
            shown = dataclasses.replace(run, command=_replaced(run.command, replace))
            runs.setdefault((*setting_of(run), run.scenario, run.seed), shown)
    commands = dict.fromkeys(_replaced(results.command, replace) for results in found)
    return collect(runs.values(), command="\n".join(commands), settings={"joined_from": len(found)})


def _replaced(text: str, replace: dict[str, str]) -> str:
    for old, new in replace.items():
        text = text.replace(old, new)
    return text


def _pair(text: str) -> tuple[str, str]:
    old, found, new = text.partition("=")
    if not (old and found):
        raise argparse.ArgumentTypeError(f"{text}: write OLD=NEW")
    return old, new


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=Path, help="results.json files of the same scenarios and base policies"
    )
    parser.add_argument("--output", type=Path, required=True, help="the joined file")
    parser.add_argument("--replace", type=_pair, action="append", default=[], metavar="OLD=NEW", help="in commands")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
