"""`craft bench`: fine-tune with several methods, roll out, and report what each kept and cost."""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lerobot_craft.bench.metaworld.tasks import VIEWS
from lerobot_craft.errors import CraftError

if TYPE_CHECKING:
    from lerobot_craft.bench.settings import BenchSettings

_EPILOG = """
A bench consists of cells: demonstrations of a scenario, a policy that can do the old tasks, and for each method, number
of old frames and seed one fine-tuning. A finished cell is kept in OUTPUT_DIR/cells and not run again by the same
version, so the same command goes on after an interruption, and a larger one runs only what is missing.

on several machines, with OUTPUT_DIR on a common file system (each cell is one command):
  craft bench ... --list-cells | cut -f2 | parallel -j4                       GNU parallel
  sbatch --array=0-41 --wrap='craft bench ... --cell=$SLURM_ARRAY_TASK_ID'    Slurm
  craft bench ...                                                             then: the table, from finished cells

Exit code: 1 if a cell failed, else 0.
"""
_LIST, _CELL = "--list-cells", "--cell"
RESULTS_FILE, REPORT_FILE = "results.json", "report.html"


def run(argv: list[str]) -> int:
    """Run the missing cells, write the results, print the table; or list cells, or run one."""
    options = _parser().parse_args(argv)
    settings = _settings(options)
    if options.list_cells:
        return _list_cells(settings, argv)
    if options.cell is not None:
        return _run_one(settings, options.cell)
    return _run_all(settings, options.jobs or _cores(), shlex.join(["craft", "bench", *argv]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="craft bench",
        description="Compare methods of fine-tuning in simulation: what they keep of the old tasks, what they learn.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--scenario", type=_names, required=True, metavar="A,B", help="which old tasks and which new one")
    add("--policy", type=_names, default=("smolvla",), metavar="A,B", help="smolvla, pi0_fast or act")
    add("--methods", type=_names, default=("naive", "er", "craft"), metavar="A,B", help="what is compared")
    add(
        "--variant",
        action="append",
        metavar="'METHOD --craft.X=Y'",
        help="a method with other flags of craft train, beside --methods; may be given several times",
    )
    add("--anchors", type=_numbers, default=(0, 20, 100), metavar="N,M", help="old frames (in a sequence: per task)")
    add("--rollouts", type=_numbers, default=(), metavar="N,M", help="own episodes per old task, as old frames")
    add("--seeds", type=_numbers, default=(0, 1, 2), metavar="N,M", help="of base training and fine-tuning")
    add("--view", choices=VIEWS, default=VIEWS[0], help="where the object is: told, in the state; seen, in the picture")
    add("--episodes", type=_positive, default=20, help="per task, from the same starts for every method")
    add("--output_dir", type=Path, default=Path("outputs/bench"), help="gets everything (default: outputs/bench)")
    add("--bases", type=Path, metavar="DIR", help="base policies as files: used if there, else trained and put there")
    add("--jobs", type=_positive, help="processes (default: as many as there are cores)")
    add("--film", action="store_true", help="filmstrips of every policy, for the page")
    add("--sweep", action="store_true", help="try the grid of each method's knob, and choose; on tuning scenarios only")
    add("--curve", action="store_true", help="show the whole grid of each method's knob; nothing is chosen")
    add("--knobs", type=Path, metavar="FILE", help="use the knobs that a sweep chose (its sweep.json)")
    add("--old_episodes", type=_positive, help="demonstrations of each old task (default: the policy's)")
    add("--new_episodes", type=_positive, help="demonstrations of a new task (default: the policy's)")
    add("--base_steps", type=_positive, help="of base training (default: the policy's)")
    add("--steps", type=_positive, help="of fine-tuning (default: the policy's)")
    add("--learning_rate", type=_rate, help="of fine-tuning, at its highest (default: the policy's)")
    add("--batch_size", type=_positive, help="of both (default: the policy's)")
    add(_LIST, "--list_cells", action="store_true", help="print number, command and name of every cell")
    add(_CELL, type=int, metavar="K", help="run one cell, and first what it needs")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    if any(number < 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: give numbers from 0 on")
    return numbers


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number, at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a positive number, such as 5e-4")
    return rate


def _cores() -> int:
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _settings(options: argparse.Namespace) -> "BenchSettings":
    from lerobot_craft.bench.settings import BenchSettings
    from lerobot_craft.bench.sweep import check_scenarios, read_sweep

    if options.sweep:
        check_scenarios(options.scenario)
    sweep = None if options.knobs is None else read_sweep(options.knobs)
    return BenchSettings(
        output_dir=options.output_dir,
        bases=options.bases,
        scenarios=options.scenario,
        policies=options.policy,
        methods=(*options.methods, *(options.variant or ())),
        anchors=options.anchors,
        seeds=options.seeds,
        episodes=options.episodes,
        old_episodes=options.old_episodes,
        new_episodes=options.new_episodes,
        rollouts=options.rollouts,
        view=options.view,
        film=options.film,
        base_steps=options.base_steps,
        steps=options.steps,
        learning_rate=options.learning_rate,
        batch_size=options.batch_size,
        sweep=options.sweep,
        curve=options.curve,
        knobs={} if sweep is None else sweep.knobs,
        swept_on=() if sweep is None else tuple(sweep.swept_on),
    )


def _list_cells(settings: "BenchSettings", argv: Sequence[str]) -> int:
    from lerobot_craft.bench.cell_plan import plan_cells

    same = [argument for argument in argv if argument.replace("_", "-") != _LIST]
    for number, cell in enumerate(plan_cells(settings)):
        command = shlex.join(["craft", "bench", *same, f"{_CELL}={number}"])
        print(f"{number}\t{command}\t{cell.kind} {cell.name}")
    return 0


def _run_one(settings: "BenchSettings", number: int) -> int:
    from lerobot_craft.bench.board import outcome
    from lerobot_craft.bench.cell_files import outdated
    from lerobot_craft.bench.cell_plan import plan_cells
    from lerobot_craft.bench.cell_run import ensure
    from lerobot_craft.bench.schedule import one_thread_each
    from lerobot_craft.cli import train

    cells = plan_cells(settings)
    if not 0 <= number < len(cells):
        raise CraftError(f"{_CELL}={number}: this bench has the cells 0 to {len(cells) - 1} ({_LIST} shows them)")
    cell = cells[number]
    if (reason := outdated(cell)) is not None:
        print(f"{cell.kind} {cell.name} is run again: {reason}")
    with one_thread_each():
        result = ensure(cell, train.run)
    print(f"{cell.kind} {cell.name}: {outcome(cell, result)}")
    return 0


def _run_all(settings: "BenchSettings", jobs: int, command: str) -> int:
    from lerobot_craft.bench.board import Board
    from lerobot_craft.bench.cell_plan import plan_cells, plan_runs
    from lerobot_craft.bench.collecting import collect_runs
    from lerobot_craft.bench.filmstrip import filmstrips
    from lerobot_craft.bench.schedule import run_cells
    from lerobot_craft.bench.sweep import SWEEP_FILE, choose, sweep_lines, write_sweep
    from lerobot_craft.cli import train
    from lerobot_craft.evaluation.results import write_results
    from lerobot_craft.evaluation.summary import collect
    from lerobot_craft.report.page import write_report

    board = Board(plan_cells(settings), sys.stdout, live=sys.stdout.isatty())
    try:
        results = run_cells(settings, train.run, jobs, board)
    finally:
        board.close()
    planned = plan_runs(settings)
    runs = collect_runs(planned, results, settings)
    if runs:
        path = settings.output_dir / RESULTS_FILE
        media = filmstrips(settings, results)
        write_results(path, collect(runs, command=command, settings=settings.as_json(), media=media))
        print(write_report([path], settings.output_dir / REPORT_FILE))
        print(f"\n{path}\n{settings.output_dir / REPORT_FILE}")
    if settings.sweep and runs:
        sweep = choose(planned, results, settings)
        write_sweep(settings.output_dir / SWEEP_FILE, sweep)
        print("\n".join(sweep_lines(sweep)))
        print(f"use them: --knobs={settings.output_dir / SWEEP_FILE}")
    for failure in board.failures:
        print(failure, file=sys.stderr)
    return 1 if board.failures else 0
