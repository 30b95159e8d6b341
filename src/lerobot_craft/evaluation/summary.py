"""From runs to the table: every method at every setting, averaged over scenarios and seeds, with intervals."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import NormalDist
from typing import Any

from lerobot_craft import __version__
from lerobot_craft.evaluation.continual import Score, SuccessMatrix, auc, fwt, nbt
from lerobot_craft.evaluation.correlation import correlate
from lerobot_craft.evaluation.intervals import CONFIDENCE, Cell, bootstrap_mean, envelope, nested_mean, newcombe, wilson
from lerobot_craft.evaluation.results import (
    SCHEMA,
    Estimate,
    Filmstrip,
    Knob,
    Results,
    Role,
    Run,
    SequenceSummary,
    Stage,
    Summary,
    check_runs,
)

BASE = "base"
BASE_LABEL = "before fine-tuning"

type Setting = tuple[str, Role, str, str, int | None, str | None, str | None]


def collect(
    runs: Iterable[Run], *, command: str, settings: Mapping[str, Any], media: Iterable[Filmstrip] = ()
) -> Results:
    """Results of `runs`, checked and summarised, with this release's version and the present time."""
    runs = list(runs)
    check_runs(runs)
    return Results(
        schema=SCHEMA,
        craft_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        settings=dict(settings),
        runs=runs,
        summary=summarise(runs),
        sequences=summarise_sequences(runs),
        correlations=correlate(runs),
        media=list(media),
    )


def summarise(runs: Iterable[Run]) -> list[Summary]:
    """One row per policy, role, method and setting of the runs that learnt one task; bases first, then as they came."""
    single = [run for run in runs if run.stages is None]
    rows = []
    for group in group_by_policy_and_role(single):
        rows.append(_base_row(group))
        rows += [_row(setting) for setting in group_by_setting(group)]
    return rows


def summarise_sequences(runs: Iterable[Run]) -> list[SequenceSummary]:
    """The same for runs over sequences, in LIBERO's scores."""
    sequences = [run for run in runs if run.stages is not None]
    return [
        _sequence_row(setting) for group in group_by_policy_and_role(sequences) for setting in group_by_setting(group)
    ]


def group_by_policy_and_role(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of one policy and role together: policies as they came, scenarios kept for the table before tuning ones."""
    groups: dict[str, dict[Role, list[Run]]] = {}
    for run in runs:
        groups.setdefault(run.policy, {"final": [], "tuning": []})[run.role].append(run)
    return [group for roles in groups.values() for group in roles.values() if group]


def group_by_setting(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs that differ by scenario and seed only; methods as they came, few frames first."""
    groups: dict[Setting, list[Run]] = {}
    methods: dict[str, int] = {}
    for run in runs:
        methods.setdefault(run.method, len(methods))
        groups.setdefault(setting_of(run), []).append(run)
    # All frames come last. Settings that are equal here keep the order in which they came.
    return sorted(groups.values(), key=lambda g: (methods[g[0].method], g[0].frames is None, g[0].frames or 0))


def setting_of(run: Run) -> Setting:
    """What two runs must share to be averaged."""
    flag, value = (run.knob.flag, run.knob.value) if run.knob else (None, None)
    return run.policy, run.role, run.method, run.label, run.frames, flag, value


def rate(cells: Sequence[Cell], n_episodes: int, *, before: bool = False) -> Estimate:
    """Mean success with an interval: the wider of Wilson's over all episodes and the bootstrap over runs.

    The bootstrap sees how runs differ but is a point where all agree (1.0 in every cell); Wilson's sees how few the
    episodes are but not how runs differ.

    Args:
        cells: Rates.
        n_episodes: Episodes behind each.
        before: Whether they are of base policies, which scenarios of one trunk share.
    """
    value = nested_mean(cells)
    pooled = wilson(*_pooled(value, _measured(cells, before), n_episodes))
    return Estimate(value, *envelope([pooled, bootstrap_mean(cells), (value, value)]))


def difference(first: Sequence[Cell], second: Sequence[Cell], n_episodes: int, *, before: bool = False) -> Estimate:
    """Mean of `first - second`, cell by cell, with the wider of Newcombe's interval and the paired bootstrap.

    Args:
        first: Rates.
        second: Rates of the same tasks of the same runs.
        n_episodes: Episodes behind each.
        before: Whether the first are of base policies, which scenarios of one trunk share.
    """
    pairs = [replace(a, value=a.value - b.value) for a, b in zip(_sorted(first), _sorted(second), strict=True)]
    value = nested_mean(pairs)
    pooled = newcombe(
        _pooled(nested_mean(first), _measured(first, before), n_episodes),
        _pooled(nested_mean(second), len(second), n_episodes),
    )
    return Estimate(value, *envelope([pooled, bootstrap_mean(pairs), (value, value)]))


def old_cells(runs: Iterable[Run], *, before: bool = False) -> list[Cell]:
    """Success on every old task of every run."""
    return _cells(runs, lambda run: run.old_tasks, before)


def new_cells(runs: Iterable[Run], *, before: bool = False) -> list[Cell]:
    """Success on what each run learnt."""
    return _cells(runs, lambda run: run.new_tasks, before)


def same_scene_cells(runs: Iterable[Run], *, before: bool = False) -> list[Cell]:
    """Success on the old task that differs from the new one by its instruction only, where there is one."""
    return _cells(runs, lambda run: [run.same_scene] if run.same_scene else [], before)


def success_matrix(run: Run) -> SuccessMatrix:
    """The success matrix of a run over a sequence."""
    stages: Sequence[Stage] = run.stages or ()
    rows = [run.base, *(stage.after for stage in stages)]
    return SuccessMatrix(rows, [stage.task for stage in stages], run.n_episodes)


def _cells(runs: Iterable[Run], tasks: Callable[[Run], Sequence[str]], before: bool) -> list[Cell]:
    return [
        Cell(run.scenario, run.seed, task, (run.base if before else run.after)[task], run.trunk)
        for run in runs
        for task in tasks(run)
    ]


def _measured(cells: Sequence[Cell], before: bool) -> int:
    """How many of them were measured: a base policy once, however many scenarios begin with it."""
    return len({(cell.trunk or cell.scenario, cell.seed, cell.task) for cell in cells}) if before else len(cells)


def _sorted(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: (cell.scenario, cell.seed, cell.task))


def _pooled(value: float, cells: int, n_episodes: int) -> tuple[int, int]:
    n = cells * n_episodes
    return round(value * n), n


def _base_row(runs: Sequence[Run]) -> Summary:
    """The policies before fine-tuning, each once however many methods started from it."""
    bases = list({(run.scenario, run.seed): run for run in runs}.values())
    return _summary(bases, BASE, BASE_LABEL, frames=0, before=True)


def _row(runs: Sequence[Run]) -> Summary:
    first = runs[0]
    return _summary(runs, first.method, first.label, first.frames, before=False)


def _summary(runs: Sequence[Run], method: str, label: str, frames: int | None, *, before: bool) -> Summary:
    n = min(run.n_episodes for run in runs)
    pair = same_scene_cells(runs, before=before)
    old = old_cells(runs, before=before)
    overheads = [run.step_overhead for run in runs if run.step_overhead is not None and not before]
    return Summary(
        method=method,
        label=label,
        policy=runs[0].policy,
        role=runs[0].role,
        frames=frames,
        n_runs=len(runs),
        n_seeds=len({run.seed for run in runs}),
        scenarios=_scenarios(runs),
        n_episodes=n,
        old_mean=rate(old, n, before=before),
        same_scene=rate(pair, n, before=before) if pair else None,
        new=rate(new_cells(runs, before=before), n, before=before),
        forgotten=Estimate(0.0, None, None)
        if before
        else difference(old_cells(runs, before=True), old, n, before=True),
        train_seconds=None if before else _mean([run.train_seconds for run in runs]),
        step_overhead=_mean(overheads) if overheads else None,
        bytes=0 if before else round(_mean([run.anchors.bytes for run in runs])),
        cached_bytes=0 if before else round(_mean([run.anchors.cached_bytes for run in runs])),
        knob=None if before else _knob(runs),
    )


def _sequence_row(runs: Sequence[Run]) -> SequenceSummary:
    first = runs[0]
    matrices = [(run, success_matrix(run)) for run in runs]
    n = min(run.n_episodes for run in runs)
    base = old_cells(runs)
    return SequenceSummary(
        method=first.method,
        label=first.label,
        policy=first.policy,
        role=first.role,
        frames=first.frames,
        n_runs=len(runs),
        n_seeds=len({run.seed for run in runs}),
        scenarios=_scenarios(runs),
        n_episodes=n,
        nbt_all=_required(_score(((run, nbt(matrix, matrix.all_tasks)) for run, matrix in matrices), least=-1.0)),
        nbt_new=_score(((run, nbt(matrix, matrix.new_tasks)) for run, matrix in matrices), least=-1.0),
        fwt_new=_required(_score((run, fwt(matrix, matrix.new_tasks)) for run, matrix in matrices)),
        auc_all=_required(_score((run, auc(matrix, matrix.all_tasks)) for run, matrix in matrices)),
        auc_new=_required(_score((run, auc(matrix, matrix.new_tasks)) for run, matrix in matrices)),
        final_base=rate(base, n),
        final_all=rate(base + new_cells(runs), n),
        knob=_knob(runs),
    )


def _score(scores: Iterable[tuple[Run, Score | None]], least: float = 0.0) -> Estimate | None:
    """A score from `least` to 1: the wider of the bootstrap over runs and of what finite episodes alone leave open."""
    known = [(run, score) for run, score in scores if score is not None]
    if not known:
        return None
    cells = [Cell(run.scenario, run.seed, "", score.value, run.trunk) for run, score in known]
    value = nested_mean(cells)
    error = math.sqrt(sum(score.error**2 for _, score in known)) / len(known)
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    within = (max(value - half, least), min(value + half, 1.0))
    return Estimate(value, *envelope([within, bootstrap_mean(cells)]))


def _required(estimate: Estimate | None) -> Estimate:
    if estimate is None:
        raise ValueError("a checked sequence has base tasks and stages")
    return estimate


def _knob(runs: Sequence[Run]) -> Knob | None:
    knobs = [run.knob for run in runs if run.knob is not None]
    if not knobs:
        return None
    swept_on = dict.fromkeys(scenario for knob in knobs for scenario in knob.swept_on)
    return Knob(knobs[0].flag, knobs[0].value, list(swept_on))


def _scenarios(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(run.scenario for run in runs))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
