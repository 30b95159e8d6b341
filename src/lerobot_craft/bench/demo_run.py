"""The demo: a bench small enough to wait for, with pictures, a table, and its recipe for the user's own policy."""

import dataclasses
import shlex
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lerobot_craft.bench.board import Narrator
from lerobot_craft.bench.cell_plan import plan_runs
from lerobot_craft.bench.cell_run import Train
from lerobot_craft.bench.collecting import collect_runs
from lerobot_craft.bench.compared_methods import method_named
from lerobot_craft.bench.filmstrip import filmstrips
from lerobot_craft.bench.metaworld.simulation import Simulation
from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.bench.method_definition import Flags, Known, as_argv
from lerobot_craft.bench.scenarios import find_scenario
from lerobot_craft.bench.schedule import run_cells
from lerobot_craft.bench.settings import BenchSettings
from lerobot_craft.doctor.check import install_extra, needs
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.intervals import wilson
from lerobot_craft.evaluation.results import Results, Run
from lerobot_craft.evaluation.summary import BASE_LABEL, collect


def task_table(results: Results) -> str:
    """Success on each task as Markdown, aligned for a terminal; all runs share one base."""
    first = results.runs[0]
    # First the old task most at risk: only its instruction distinguishes it from the new one.
    tasks = [*sorted(first.old_tasks, key=lambda task: task not in first.same_scene), *first.new_tasks]
    head = ["", *(f"{task} ({'new' if task in first.new_tasks else 'old'})" for task in tasks)]
    rows = [[BASE_LABEL, *(_rate(first.base[task], first.n_episodes) for task in tasks)]]
    rows += [[_label(run), *(_rate(run.after[task], run.n_episodes) for task in tasks)] for run in results.runs]
    said = "\n".join(f'{task}: "{find_task(task).instruction}"' for task in tasks)
    return f"{_aligned(head, rows)}\n\n{said}\n{first.n_episodes} rollouts per cell, 95 % Wilson intervals, one seed"


def _label(run: Run) -> str:
    if run.anchors.source is None:
        return run.label
    return f"{run.label}, {f'{run.anchors.frames} old frames' if run.anchors.frames else 'no old frame'}"


def _rate(rate: float, n: int) -> str:
    low, high = wilson(round(rate * n), n)
    return f"{rate:.2f} [{low:.2f}, {high:.2f}]"


def _aligned(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in [head, rule, *rows]
    )


POLICY, NEW_DATA, OLD_DATA = "YOUR/POLICY", "YOUR/NEW_TASK", "YOUR/OLD_TASKS"
INSTRUCTIONS = "FIRST OLD INSTRUCTION; SECOND OLD INSTRUCTION"
_METHOD = "craft"
_CRAFT = "craft."
_OUTPUT_DIR = "outputs/new_task"
_OLD_FRAMES = 100
_STEPS, _BATCH = 20_000, 32
# For the bench only: it measures drift afterward, keeps anchors with its cells and small datasets in memory.
_OF_THE_BENCH = ("craft.probe_anchors", "craft.log_craft_metrics_freq", "craft.anchor_cache_dir", "craft.preload")
_WIDTH = 110


class Advice(NamedTuple):
    """A command as words, and its purpose."""

    purpose: str
    words: list[str]

    def __str__(self) -> str:
        """The command as typed, over several lines."""
        lines = [""]
        for word in map(shlex.quote, self.words):
            if lines[-1] and len(lines[-1]) + len(word) > _WIDTH:
                lines.append("   ")
            lines[-1] += f" {word}" if lines[-1] else word
        return f"# {self.purpose}\n{' \\\n'.join(lines)}"


def own_policy_commands() -> list[Advice]:
    """Three commands; the reader replaces the words in capitals."""
    checkpoint = f"{_OUTPUT_DIR}/checkpoints/last/pretrained_model"
    ask = as_argv(
        {"policy.path": checkpoint, "env.type": "YOUR_ENV", "env.task": "ONE_OLD_TASK", "eval.n_episodes": 20}
    )
    return [
        Advice("learn the new task, and keep the old ones by their instructions alone", _train(0)),
        Advice(f"or, where you still have old data, with {_OLD_FRAMES} frames of it", _train(_OLD_FRAMES)),
        Advice(f"ask for an old task afterwards, and with --policy.path={POLICY} before", ["lerobot-eval", *ask]),
    ]


def _train(old_frames: int) -> list[str]:
    flags: Flags = {
        "policy.path": POLICY,
        "policy.push_to_hub": "false",  # otherwise lerobot asks for a repository name
        "dataset.repo_id": NEW_DATA,
        "output_dir": _OUTPUT_DIR,
        "steps": _STEPS,
        "batch_size": _BATCH,
        **_recipe(old_frames),
    }
    return ["craft", "train", *as_argv(flags)]


def _recipe(old_frames: int) -> Flags:
    """The method's flags without the defaults of `craft train`."""
    from lerobot_craft.training.config import CraftConfig

    known = Known(old_frames, False, OLD_DATA, "", INSTRUCTIONS, hidden_layers="", anchors="")
    asked = method_named(_METHOD).train_flags(known, None)
    defaults = {field.name: field.default for field in dataclasses.fields(CraftConfig)}
    return {
        name: value
        for name, value in asked.items()
        if value != "" and name not in _OF_THE_BENCH and defaults.get(name.removeprefix(_CRAFT)) != value
    }


SCENARIO = "demo"
_EXTRAS = ("bench", "smolvla")
_TRIAL_SIDE = 32  # pixels


def demo_settings(output_dir: Path, *, quick: bool = False, film: bool = True) -> BenchSettings:
    """Settings of the demo.

    The methods are the bench's, flag by flag. Training, demonstrations, tasks, seeds and rollouts are reduced.

    Args:
        output_dir: Output directory.
        quick: Run every stage with minimal work, as a smoke test; the numbers mean nothing.
        film: Whether to draw rollouts.
    """
    settings = BenchSettings(
        output_dir,
        scenarios=(SCENARIO,),
        methods=("naive", "craft"),
        anchors=(0,),
        seeds=(0,),
        episodes=20,
        old_episodes=25,
        new_episodes=20,
        base_steps=700,
        steps=250,
        film=film,
    )
    if not quick:
        return settings
    return replace(
        settings,
        episodes=2,
        old_episodes=2,
        new_episodes=2,
        base_steps=20,
        steps=5,
        batch_size=8,
    )


def check_machine() -> str | None:
    """Why no pictures can be drawn here, and the command that fixes it; None if they can.

    Raises:
        CraftError: The demo cannot run here at all.
    """
    missing = sorted({need.name for extra in _EXTRAS for need in needs(extra) if need.installed is None})
    if missing:
        raise CraftError(f"the demo needs {', '.join(missing)}. Type: {install_extra(','.join(_EXTRAS))}")
    simulation = Simulation(find_scenario(SCENARIO).new[0])
    simulation.reset(0)
    try:
        simulation.image(_TRIAL_SIDE)
    except CraftError as error:
        return str(error)
    return None


def run_demo(settings: BenchSettings, train: Train, jobs: int, narrator: Narrator, *, command: str) -> Results | None:
    """Run the missing cells and summarize; None if no fine-tuning finished.

    Args:
        settings: From `demo_settings`.
        train: Runs `craft train`; a module-level function, so that workers can import it.
        jobs: Number of processes.
        narrator: Reports progress and collects failures.
        command: The command line as typed.
    """
    try:
        results = run_cells(settings, train, jobs, narrator)
    finally:
        narrator.close()
    finished = [run for run in plan_runs(settings) if run.digest in results]
    if not finished:
        return None
    runs = collect_runs(finished, results, settings)
    return collect(runs, command=command, settings=settings.as_json(), media=filmstrips(settings, results))
