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
from lerobot_craft.evaluation.intervals import (
    CONFIDENCE,
    Cell,
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    distinct_starts,
    envelope,
    has_starts,
    nested_mean,
    newcombe,
    newcombe_paired,
    paired_cells,
    wilson,
)
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
    Tier,
    View,
    check_runs,
)

BASE = "base"
BASE_LABEL = "before fine-tuning"
PLAIN = "naive"  # plain fine-tuning, by its name on the command line

_TIERS: tuple[Tier, ...] = ("nothing", "instructions", "rollouts", "frames", "everything")

type Setting = tuple[str, View, Role, str, str, Tier | None, int, int | None, str | None, str | None]


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
    """One row per policy, view, role and setting of the runs that learnt one task; bases first, then by tier."""
    single = [run for run in runs if run.stages is None]
    rows = []
    for group in group_by_policy_and_role(single):
        plain = [run for run in group if run.method == PLAIN]
        rows.append(_base_row(group))
        rows += [_row(setting, plain) for setting in group_by_setting(group)]
    return rows


def summarise_sequences(runs: Iterable[Run]) -> list[SequenceSummary]:
    """The same for runs over sequences, in LIBERO's scores."""
    sequences = [run for run in runs if run.stages is not None]
    return [
        _sequence_row(setting) for group in group_by_policy_and_role(sequences) for setting in group_by_setting(group)
    ]


def group_by_policy_and_role(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of one policy, view and role together: policies in order of appearance, final scenarios first."""
    groups: dict[tuple[str, View], dict[Role, list[Run]]] = {}
    for run in runs:
        groups.setdefault((run.policy, run.view), {"final": [], "tuning": []})[run.role].append(run)
    return [group for roles in groups.values() for group in roles.values() if group]


def group_by_setting(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs that differ by scenario and seed only. Sorted by tier, amount, then method in order of appearance.

    Runs without a tier come first, by method and then frames. Settings that are equal in all of this keep their order.
    """
    groups: dict[Setting, list[Run]] = {}
    methods: dict[str, int] = {}
    for run in runs:
        methods.setdefault(run.method, len(methods))
        groups.setdefault(setting_of(run), []).append(run)

    def place(group: list[Run]) -> tuple[int, float, int, float]:
        run = group[0]
        frames = math.inf if run.frames is None else run.frames
        if run.tier is None:
            return -1, 0, methods[run.method], frames
        return _TIERS.index(run.tier), run.rollouts or frames, methods[run.method], frames

    return sorted(groups.values(), key=place)


def setting_of(run: Run) -> Setting:
    """What two runs must share to be averaged."""
    flag, value = (run.knob.flag, run.knob.value) if run.knob else (None, None)
    given = run.tier, run.rollouts, run.frames
    return run.policy, run.view, run.role, run.method, run.label, *given, flag, value


def pair_runs(ours: Iterable[Run], theirs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Runs of two methods of one policy that learnt the same scenario from the same base policy."""
    by_base = {(run.scenario, run.seed): run for run in theirs}
    return [(run, by_base[key]) for run in ours if (key := (run.scenario, run.seed)) in by_base]


def rate(cells: Sequence[Cell], n_episodes: int, *, before: bool = False) -> Estimate:
    """Mean success with an interval: the wider of Wilson's over all episodes and the bootstrap over runs.

    The bootstrap sees how runs differ, but has no width if all agree (1.0 in every cell). Wilson's sees how few
    episodes there are, but not how runs differ. If single episodes are known, Wilson's counts each start state once,
    even if several seeds and scenarios were measured from it.

    Args:
        cells: Rates.
        n_episodes: Episodes behind each.
        before: Whether they are of base policies, which scenarios of one trunk share.
    """
    value = nested_mean(cells)
    n = distinct_starts(cells) if has_starts(cells) else _measured(cells, before) * n_episodes
    pooled = wilson(round(value * n), n)
    return Estimate(value, *envelope([pooled, bootstrap_mean(cells), (value, value)]))


def difference(first: Sequence[Cell], second: Sequence[Cell], n_episodes: int, *, before: bool = False) -> Estimate:
    """Mean of `first - second`, cell by cell, with the wider of Newcombe's interval and the paired bootstrap.

    If single episodes are known on both sides, they are paired by start state: Newcombe's interval is then the one for
    paired rates over different start states, and the bootstrap draws the same starts for both sides.

    Args:
        first: Rates.
        second: Rates of the same tasks of the same runs.
        n_episodes: Episodes behind each.
        before: Whether the first are of base policies, which scenarios of one trunk share.
    """
    pairs = paired_cells(first, second)
    value = nested_mean(pairs)
    analytic = (
        _paired_interval(first, pairs) if has_starts(pairs) else _unpaired_interval(first, second, n_episodes, before)
    )
    return Estimate(value, *envelope([analytic, bootstrap_mean(pairs), (value, value)]))


def _paired_interval(first: Sequence[Cell], pairs: Sequence[Cell]) -> Interval:
    """Shares of start states on which the sides agree or not are means like the rates themselves."""
    first_only, second_only = (nested_mean([_share(cell, sign) for cell in pairs]) for sign in (1, -1))
    return newcombe_paired(nested_mean(first) - first_only, first_only, second_only, distinct_starts(pairs))


def _share(cell: Cell, outcome: int) -> Cell:
    return replace(cell, value=cell.episodes.count(outcome) / len(cell.episodes))


def _unpaired_interval(first: Sequence[Cell], second: Sequence[Cell], n_episodes: int, before: bool) -> Interval:
    n, m = _measured(first, before) * n_episodes, len(second) * n_episodes
    return newcombe((round(nested_mean(first) * n), n), (round(nested_mean(second) * m), m))


def ratio(after: Sequence[Cell], before: Sequence[Cell], lost: Estimate) -> Estimate | None:
    """Mean of `after` over mean of `before`, with the wider of the bootstrap and of the interval of their difference.

    Args:
        after: Rates.
        before: Rates of the same tasks of the same runs.
        lost: Mean of `before - after`. The ratio's interval is at least this one's over the mean before: the
            bootstrap alone has no width if no cell changed.
    """
    base = nested_mean(before)
    if base == 0:
        return None
    value = nested_mean(after) / base
    bounds = [bootstrap_ratio(after, before), (value, value)]
    if lost.low is not None and lost.high is not None:
        bounds.append((1 - lost.high / base, 1 - lost.low / base))
    low, high = envelope(bounds)
    return Estimate(value, max(low, 0.0), high)


def old_cells(runs: Iterable[Run], *, before: bool = False) -> list[Cell]:
    """Success on every old task of every run."""
    return _cells(runs, lambda run: run.old_tasks, before)


def new_cells(runs: Iterable[Run], *, before: bool = False) -> list[Cell]:
    """Success on what each run learnt."""
    return _cells(runs, lambda run: run.new_tasks, before)


def same_scene_cells(runs: Iterable[Run], *, before: bool = False) -> list[Cell]:
    """Success on the old tasks that share the new one's scene, if any."""
    return _cells(runs, lambda run: run.same_scene, before)


def elsewhere_cells(runs: Iterable[Run], *, before: bool = False) -> list[Cell]:
    """Success on the other old tasks, if any."""
    return _cells(runs, lambda run: run.elsewhere, before)


def task_cells(runs: Iterable[Run], task: str, *, before: bool = False) -> list[Cell]:
    """Success on one task, of the runs that have it."""
    return _cells(runs, lambda run: [task] if task in run.base else [], before)


def success_matrix(run: Run) -> SuccessMatrix:
    """The success matrix of a run over a sequence."""
    stages: Sequence[Stage] = run.stages or ()
    rows = [run.base, *(stage.after for stage in stages)]
    return SuccessMatrix(rows, [stage.task for stage in stages], run.n_episodes)


def _cells(runs: Iterable[Run], tasks: Callable[[Run], Sequence[str]], before: bool) -> list[Cell]:
    cells = []
    for run in runs:
        rates, episodes = (run.base, run.base_episodes) if before else (run.after, run.after_episodes)
        cells += [
            Cell(
                run.scenario,
                run.seed,
                task,
                rates[task],
                run.trunk,
                tuple(map(int, episodes.get(task, ""))),
                run.starts_by_seed,
            )
            for task in tasks(run)
        ]
    return cells


def _measured(cells: Sequence[Cell], before: bool) -> int:
    """How many cells were measured: a base policy counts once, even if several scenarios begin with it."""
    return len({(cell.trunk or cell.scenario, cell.seed, cell.task) for cell in cells}) if before else len(cells)


def _base_row(runs: Sequence[Run]) -> Summary:
    """The policies before fine-tuning, each once."""
    bases = list({(run.scenario, run.seed): run for run in runs}.values())
    blind = {(run.scenario, run.seed): run for run in runs if run.blind}.values()
    blinded = [
        Cell(run.scenario, run.seed, task, run.blind[task], run.trunk)
        for run in blind
        for task in run.old_tasks
        if task in run.blind
    ]
    old = old_cells(bases, before=True)
    return Summary(
        method=BASE,
        label=BASE_LABEL,
        tier=None,
        rollouts=0,
        frames=0,
        **_shared_fields(bases, old, before=True),
        blind=rate(blinded, min(run.n_episodes for run in blind), before=True) if blinded else None,
        forgotten=Estimate(0.0, None, None),
        kept=Estimate(1.0, None, None) if nested_mean(old) else None,
        worst=None,
        worst_task=None,
        new_vs_plain=None,
        train_seconds=None,
        step_overhead=None,
        bytes=0,
        cached_bytes=0,
        knob=None,
    )


def _row(runs: Sequence[Run], plain: Sequence[Run]) -> Summary:
    first = runs[0]
    before, after = old_cells(runs, before=True), old_cells(runs)
    forgotten = difference(before, after, min(run.n_episodes for run in runs), before=True)
    worst, worst_task = _worst(runs)
    overheads = [run.step_overhead for run in runs if run.step_overhead is not None]
    return Summary(
        method=first.method,
        label=first.label,
        tier=first.tier,
        rollouts=first.rollouts,
        frames=first.frames,
        **_shared_fields(runs, after, before=False),
        blind=None,
        forgotten=forgotten,
        kept=ratio(after, before, forgotten),
        worst=worst,
        worst_task=worst_task,
        new_vs_plain=_new_vs_plain(runs, plain),
        train_seconds=_mean([run.train_seconds for run in runs]),
        step_overhead=_mean(overheads) if overheads else None,
        bytes=round(_mean([run.anchors.bytes for run in runs])),
        cached_bytes=round(_mean([run.anchors.cached_bytes for run in runs])),
        knob=_knob(runs),
    )


def _shared_fields(runs: Sequence[Run], old: Sequence[Cell], *, before: bool) -> dict[str, Any]:
    """Sample sizes and success: what rows of base policies and of methods have in common."""
    n = min(run.n_episodes for run in runs)
    seeds = {run.seed for run in runs}
    same, elsewhere = same_scene_cells(runs, before=before), elsewhere_cells(runs, before=before)
    return {
        "policy": runs[0].policy,
        "view": runs[0].view,
        "role": runs[0].role,
        "n_runs": len(runs),
        "n_seeds": len(seeds),
        "n_scenarios": len(_scenarios(runs)),
        "n_bases": len({run.base_policy for run in runs}),
        "scenarios": _scenarios(runs),
        "n_episodes": n,
        "n_starts": n * len(seeds) if all(run.starts_by_seed for run in runs) else n,
        "resamples_starts": has_starts(old),
        "old_mean": rate(old, n, before=before),
        "same_scene": rate(same, n, before=before) if same else None,
        "elsewhere": rate(elsewhere, n, before=before) if elsewhere else None,
        "new": rate(new_cells(runs, before=before), n, before=before),
    }


def _worst(runs: Sequence[Run]) -> tuple[float | None, str | None]:
    """The lowest ratio of after over before of a single task of a scenario, over its seeds, and the task's name."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for run in runs:
        for task in run.old_tasks:
            before, after = sums.get((task, run.scenario), (0.0, 0.0))
            sums[task, run.scenario] = (before + run.base[task], after + run.after[task])
    # Equal ratios are sorted by name, the order of tasks in a file, so that a file gives the same row when it is read.
    ratios = sorted((after / before, task, scenario) for (task, scenario), (before, after) in sums.items() if before)
    if not ratios:
        return None, None
    lowest, task, scenario = ratios[0]
    return lowest, task if len(_scenarios(runs)) == 1 else f"{task} ({scenario})"


def _new_vs_plain(runs: Sequence[Run], plain: Sequence[Run]) -> Estimate | None:
    """Success on the new task minus that of plain fine-tuning with as many steps, if all runs have such a partner."""
    pairs = pair_runs(runs, [run for run in plain if run.steps == runs[0].steps])
    if runs[0].method == PLAIN or len(pairs) < len(runs) or len({run.steps for run in runs}) > 1:
        return None
    return compare_runs(pairs, new_cells)


def compare_runs(pairs: Sequence[tuple[Run, Run]], cells: Callable[[Sequence[Run]], list[Cell]]) -> Estimate:
    """First minus second of runs from the same base policies, on the cells that `cells` takes of each side."""
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    return difference(cells(ours), cells(theirs), min(run.n_episodes for run in (*ours, *theirs)))


def _sequence_row(runs: Sequence[Run]) -> SequenceSummary:
    first = runs[0]
    matrices = [(run, success_matrix(run)) for run in runs]
    n = min(run.n_episodes for run in runs)
    base = old_cells(runs)
    return SequenceSummary(
        method=first.method,
        label=first.label,
        policy=first.policy,
        view=first.view,
        role=first.role,
        tier=first.tier,
        rollouts=first.rollouts,
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
    """A score from `least` to 1, with the wider of the bootstrap over runs and the error of finite episodes."""
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
