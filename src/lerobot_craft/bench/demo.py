"""The demo: a bench small enough to wait for, with pictures."""

from dataclasses import replace
from pathlib import Path

from lerobot_craft.bench.cell_run import Train
from lerobot_craft.bench.collecting import collect_runs
from lerobot_craft.bench.filmstrip import filmstrips
from lerobot_craft.bench.metaworld.simulation import Simulation
from lerobot_craft.bench.narration import Narrator
from lerobot_craft.bench.plan import plan_runs
from lerobot_craft.bench.scenarios import find_scenario
from lerobot_craft.bench.schedule import run_cells
from lerobot_craft.bench.settings import BenchSettings
from lerobot_craft.doctor.software import install_extra, needs
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import Results
from lerobot_craft.evaluation.summary import collect

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
