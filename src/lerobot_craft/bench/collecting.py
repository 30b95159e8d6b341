"""From finished cells to `results.json`."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from lerobot_craft.bench import cells
from lerobot_craft.bench.board import same_scene
from lerobot_craft.bench.cell_files import CellResult
from lerobot_craft.bench.cell_plan import trial_of
from lerobot_craft.bench.settings import BenchSettings
from lerobot_craft.evaluation.results import Anchors, Drift, Knob, Run, Stage, Tier
from lerobot_craft.evaluation.summary import PLAIN


def collect_runs(runs: Iterable[cells.Run], results: Mapping[str, CellResult], settings: BenchSettings) -> list[Run]:
    """Collect runs whose cells, stage by stage, are finished; `runs` are last stages, `results` by digest."""
    whole = [run for run in runs if all(stage.digest in results for stage in stages_of(run))]
    tried = [run for run in whole if trial_of(run).digest in results]
    plain = {_where(run): _step_seconds(run, results) for run in tried if run.method.name == PLAIN}
    return [_collected(run, results, settings, plain.get(_where(run))) for run in tried]


def stages_of(run: cells.Run) -> list[cells.Run]:
    """A run and, in a sequence, the runs before it, in order."""
    return [run] if run.before is None else [*stages_of(run.before), run]


def _where(run: cells.Run) -> tuple[str, str, int]:
    return run.scenario.name, run.base.policy.name, run.base.seed


def _step_seconds(run: cells.Run, results: Mapping[str, CellResult]) -> float | None:
    known = [results[stage.digest].step_seconds for stage in stages_of(run)]
    measured = [seconds for seconds in known if seconds is not None]
    return fmean(measured) if measured else None


def _collected(
    run: cells.Run, results: Mapping[str, CellResult], settings: BenchSettings, plain_step: float | None
) -> Run:
    stages = stages_of(run)
    found = [results[stage.digest] for stage in stages]
    last, before = found[-1], results[trial_of(run).digest]
    step = _step_seconds(run, results)
    compared = run.method.name != PLAIN and step is not None and plain_step
    return Run(
        method=run.method.name,
        label=run.method.label,
        seed=run.base.seed,
        policy=run.base.policy.name,
        scenario=run.scenario.name,
        role=run.scenario.role,
        new_task=run.new_task,
        same_scene=same_scene(run),
        anchors=_anchors(run, last, results),
        base=_of_tasks(run, before.rates),
        after=last.rates,
        stages=[Stage(stage.new_task, of.rates) for stage, of in zip(stages, found, strict=True)]
        if run.is_sequence
        else None,
        n_episodes=settings.episodes,
        steps=sum(int(stage.flags["steps"]) for stage in stages),  # type: ignore[call-overload]
        train_seconds=sum(of.train_seconds or 0.0 for of in found),
        step_overhead=step / plain_step if compared and step is not None and plain_step is not None else None,
        drift=last.drift or Drift(None, None),
        lambda_final=last.lambda_final,
        eps_final=last.eps_final,
        knob=_knob(run, settings),
        command=" && ".join(of.command for of in found),
        trunk=run.scenario.trunk or None,
        view=settings.view,
        tier=_tier(run),
        rollouts=0 if run.rollouts is None else run.rollouts.episodes,
        blind={task: fmean(seen) for task, seen in _of_tasks(run, before.blind).items()},
        base_episodes=_episodes(_of_tasks(run, before.successes)),
        after_episodes=_episodes(last.successes),
        starts_by_seed=True,
    )


def _of_tasks[Value](run: cells.Run, values: Mapping[str, Value]) -> dict[str, Value]:
    """The values of the run's own tasks: a trunk also has new tasks of other scenarios."""
    return {task: value for task, value in values.items() if task in run.tasks}


def _episodes(successes: Mapping[str, Sequence[bool]]) -> dict[str, str]:
    return {task: "".join("1" if reached else "0" for reached in seen) for task, seen in successes.items()}


def _tier(run: cells.Run) -> Tier:
    """What the method gets of the old tasks."""
    if run.method.frames == "all":
        return "everything"
    if run.rollouts is not None:
        return "rollouts"
    if run.known_frames and run.method.takes_old_frames:
        return "frames"
    return "nothing" if run.method.source == "none" else "instructions"


def _anchors(run: cells.Run, result: CellResult, results: Mapping[str, CellResult]) -> Anchors:
    known = [data for cell in run.known_data if (data := results[cell.digest].recorded) is not None]
    # Replay takes every frame of the policy's own rollouts.
    replayed = run.method.train_flags(run.known, run.knob).get("craft.replay_frames")
    asked = replayed if isinstance(replayed, int) else run.known_frames
    there, size = sum(data.frames for data in known), sum(data.bytes for data in known)
    frames = min(asked, there)
    return Anchors(
        source=_source(run, frames),
        frames=frames,
        bytes=round(size * frames / there),
        cached_bytes=result.cached_bytes,
        all_frames=run.method.frames == "all",
    )


def _source(run: cells.Run, frames: int) -> str | None:
    """Where the anchors came from; for a method that takes both, what was available."""
    source = run.method.source
    if source == "both" and frames == 0:
        return "cross"
    if source == "both" and not run.base.policy.reads_instruction:
        return "dataset"
    return None if source == "none" else source


def _knob(run: cells.Run, settings: BenchSettings) -> Knob | None:
    knob = run.method.knob
    if knob is None:
        return None
    value = knob.value if run.knob is None else run.knob
    swept_on = list(settings.swept_on) if run.method.name in settings.knobs else []
    return Knob(f"--{knob.flags[0]}", f"{value:g}", swept_on)
