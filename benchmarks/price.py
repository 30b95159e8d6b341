"""What a whole fine-tuning costs beside plain fine-tuning: the commands of a bench again, in processor seconds.

    python benchmarks/price.py outputs/bench/results.json --scenario=mixed-puck --seed=0

takes results of `craft bench` whose cells are still there, and repeats the `craft train` line of every method of one
scenario and seed, in turns, each in a process of its own. Anchors are built anew. Processor seconds are counted from
the moment at which everything is imported, so other work on the machine and the import of lerobot do not count.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dated import RESULTS, dated, write
from lerobot_craft.evaluation.results import Run, read_results

_MEASURE = """
import json, sys, time
import lerobot_craft.tiny, lerobot_craft.training.run, lerobot_craft.training.run_settings
from lerobot_craft.cli.train import run
began = time.process_time()
run(sys.argv[2:])
open(sys.argv[1], "w").write(json.dumps(time.process_time() - began))
"""


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and keep it in benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results.json of `craft bench`")
    parser.add_argument("--scenario", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=2, help="of every method (default: 2)")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    runs = {
        _name(run): run
        for path in options.results
        for run in read_results(path).runs
        if (run.scenario, run.seed) == (options.scenario, options.seed)
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            seconds[name].append(_processor_seconds(run.command))
            print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
    plain = statistics.median(seconds["naive"])
    rows: list[dict[str, Any]] = [
        {
            "method": name,
            "processor_seconds": values,
            "times_plain": round(statistics.median(values) / plain, 3),
            "drift": runs[name].drift.action,
            "command": runs[name].command,
        }
        for name, values in seconds.items()
    ]
    for row in rows:
        print(f"{row['method']:<40}{row['times_plain']:>6.2f} times plain")
    write(dated("price", scenario=options.scenario, seed=options.seed, rows=rows), options.output_dir)


def _name(run: Run) -> str:
    tier = f", {run.rollouts} rollouts per task" if run.rollouts else f", {run.anchors.frames} frames"
    return run.method if run.method == "naive" else run.method + tier


def _processor_seconds(command: str) -> float:
    """Of a `craft train` line, with another output directory and without anchors that are there already."""
    with tempfile.TemporaryDirectory() as directory:
        flags = [flag for flag in shlex.split(command)[2:] if not flag.startswith("--output_dir=")]
        flags = [f"--craft.anchor_cache_dir={directory}/anchors" if "anchor_cache_dir" in f else f for f in flags]
        found = Path(directory) / "seconds.json"
        threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CRAFT_HOME": directory}
        subprocess.run(  # noqa: S603  our own interpreter, and a line that `craft bench` wrote
            [sys.executable, "-c", _MEASURE, str(found), *flags, f"--output_dir={directory}/run"],
            check=True,
            env=os.environ | threads,
            capture_output=True,
        )
        return float(json.loads(found.read_text()))


if __name__ == "__main__":
    main()
