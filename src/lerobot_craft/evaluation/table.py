"""The summary as Markdown: what a terminal shows and a README quotes; and whether one method is better than another."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lerobot_craft.evaluation.results import (
    Estimate,
    Knob,
    Role,
    Run,
    SequenceSummary,
    Summary,
    Tier,
    View,
    policy_name,
)
from lerobot_craft.evaluation.summary import (
    compare_runs,
    group_by_policy_and_role,
    group_by_setting,
    new_cells,
    old_cells,
    pair_runs,
)

MINUS = "−"
KEPT = "kept of before"
AGAINST_PLAIN = "new task against plain"
_ROLES: dict[Role, str] = {
    "final": "scenarios kept for this table",
    "tuning": "scenarios on which settings were chosen",
}


def summary_table(rows: Sequence[Summary]) -> str:
    """One Markdown table per policy, view and role, each below its sample sizes."""
    blocks = []
    for group in grouped(rows):
        first = group[0]
        columns = columns_of(group)
        lines = [
            f"**{policy_name(first.policy, first.view)}**, {_ROLES[first.role]}: {design(group)}",
            "",
            f"| the user has | method | {' | '.join(columns)} |",
            "|---" * (len(columns) + 2) + "|",
        ]
        for row in group:
            cells = (given(row), cell(name_of(row.label, row.knob)), *(_entry(of(row)) for of in columns.values()))
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join([*lines, *_below(group)]))
    return "\n\n".join(blocks)


def columns_of(rows: Sequence[Summary]) -> dict[str, Callable[[Summary], Estimate | str | None]]:
    """Columns that at least one row has a value for, each with what it shows of a row; None if a number is missing.

    If no task is in the new task's scene, all old tasks are elsewhere and there is no such column.
    """
    columns: dict[str, Callable[[Summary], Estimate | str | None]] = {"old tasks": lambda row: row.old_mean}
    if any(row.same_scene for row in rows):
        columns["same scene"] = lambda row: row.same_scene
        if any(row.elsewhere for row in rows):
            columns["elsewhere"] = lambda row: row.elsewhere
    columns["new task"] = lambda row: row.new
    if any(row.blind for row in rows):
        columns["old tasks, blindfolded"] = lambda row: row.blind or ""
    if any(row.kept for row in rows if row.train_seconds is not None):
        columns[KEPT] = lambda row: "" if row.train_seconds is None else row.kept
    if any(row.worst is not None for row in rows):
        columns["worst single task"] = _worst
    if any(row.new_vs_plain for row in rows):
        columns[AGAINST_PLAIN] = lambda row: row.new_vs_plain or ""
    return columns


def _worst(row: Summary) -> str:
    return "" if row.worst is None else f"{number(row.worst)} {row.worst_task}"


def _entry(shown: Estimate | str | None) -> str:
    return cell(shown) if isinstance(shown, str) else format_estimate(shown)


class Given(Protocol):
    """Anything that says what a method was given of the old tasks."""

    @property
    def tier(self) -> Tier | None:
        """As in `Run`."""

    @property
    def rollouts(self) -> int:
        """As in `Run`."""

    @property
    def frames(self) -> int | None:
        """As in `Run`."""


def given(row: Summary) -> str:
    """What the user has of the old tasks; empty for a base policy, which was not fine-tuned."""
    return "" if row.train_seconds is None else given_to(row)


def given_to(method: Given) -> str:
    """What the user has of the old tasks, in words; empty if nothing."""
    if method.tier == "nothing":
        return ""
    if method.tier == "instructions":
        return "instructions"
    if method.tier == "rollouts":
        return f"{_plural(method.rollouts, 'rollout')} per task"
    if method.tier == "everything" or method.frames is None:
        return "all old data"
    return _plural(method.frames, "frame") if method.frames else "no old frames"


def sequence_table(rows: Sequence[SequenceSummary]) -> str:
    """The same for sequences; NBT is better lower, all else higher."""
    blocks = []
    for group in grouped(rows):
        first = group[0]
        lines = [
            f"**{policy_name(first.policy, first.view)}**, sequences, {_ROLES[first.role]}: {sample_size(group)}",
            "",
            "| method | the user has per old task | NBT, all tasks | NBT, new tasks | AUC, all tasks | FWT "
            "| base tasks at the end |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in group:
            scores = (row.nbt_all, row.nbt_new, row.auc_all, row.fwt_new, row.final_base)
            cells = (cell(name_of(row.label, row.knob)), given_to(row), *map(format_estimate, scores))
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join([*lines, *_below(group)]))
    return "\n\n".join(blocks)


def where_chosen(rows: Sequence[Summary] | Sequence[SequenceSummary]) -> str | None:
    """The origin of the settings in brackets, in words; None if there are none."""
    values: dict[str, set[str]] = {}
    for row in rows:
        if row.knob is not None:
            values.setdefault(row.label, set()).add(row.knob.value)
    labels: dict[str, dict[str, None]] = {}  # by origin, each once and in order
    for row in rows:
        if row.knob is not None:
            labels.setdefault(_origin(row.knob, len(values[row.label])), {})[cell(row.label)] = None
    said = "; ".join(f"{origin} ({', '.join(own)})" for origin, own in labels.items())
    return f"Settings in brackets: {said}." if said else None


def _origin(knob: Knob, values: int) -> str:
    if knob.swept_on:
        return f"chosen on {', '.join(knob.swept_on)}"
    return "several tried here" if values > 1 else "default or given"


def _below(rows: Sequence[Summary] | Sequence[SequenceSummary]) -> list[str]:
    said = where_chosen(rows)
    return [] if said is None else ["", said]


def grouped[Row: (Summary, SequenceSummary)](rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one policy, view and role together, in the order in which they came."""
    groups: dict[tuple[str, View, Role], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.view, row.role), []).append(row)
    return list(groups.values())


def sample_size(rows: Sequence[Summary] | Sequence[SequenceSummary]) -> str:
    """How much stands behind the rows, in a few words."""
    return (
        f"{_scenarios(rows)}, {_range([row.n_seeds for row in rows], 'seed')}, "
        f"{_range([row.n_runs for row in rows], 'run')} per row, "
        f"n = {_range([row.n_episodes for row in rows], 'episode')} per task and run, 95 % intervals"
    )


def design(rows: Sequence[Summary]) -> str:
    """What stands behind the rows: clusters of every kind, whether seeds share starts, what intervals resample."""
    seeds = [row.n_seeds for row in rows]
    n = _range([row.n_episodes for row in rows], "start")
    if any(row.n_starts > row.n_episodes for row in rows):
        n += f" x {_range(seeds, 'seed')} per task, each seed with its own"
    else:
        n += " per task" if max(seeds) == 1 else " per task, the same for all seeds"
    drawn = "seeds, tasks and starts" if all(row.resamples_starts for row in rows) else "seeds and tasks"
    return (
        f"{_scenarios(rows)}, {_range(seeds, 'seed')}, "
        f"{_range([row.n_bases for row in rows], 'base policy', 'base policies')}, "
        f"{_range([row.n_runs for row in rows], 'run')} per row; n = {n}; "
        f"95 % intervals resample scenarios, {drawn}"
    )


def _scenarios(rows: Sequence[Summary] | Sequence[SequenceSummary]) -> str:
    scenarios = dict.fromkeys(name for row in rows for name in row.scenarios)
    return f"{_plural(len(scenarios), 'scenario')} ({', '.join(scenarios)})"


def name_of(label: str, knob: Knob | None) -> str:
    """A method's name with the setting that was swept."""
    return label if knob is None else f"{label} ({knob.flag.removeprefix('--').removeprefix('craft.')}={knob.value})"


def format_estimate(estimate: Estimate | None) -> str:
    """`0.95 [0.91, 0.98]`; a dash if nothing was measured."""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def number(value: float) -> str:
    """Two decimals with a true minus, and never a negative zero."""
    text = f"{abs(value):.2f}"
    return text if value >= 0 or text == "0.00" else MINUS + text


def cell(text: str) -> str:
    """Text that does not break a table."""
    return " ".join(text.replace("|", "\\|").split())


def _plural(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"


def _range(counts: Sequence[int], noun: str, plural: str | None = None) -> str:
    low, high = min(counts), max(counts)
    return _plural(low, noun, plural) if low == high else f"{low} to {high} {plural or f'{noun}s'}"


# The default of a method's knob, as written in results. A method is compared at its default, not at the other values
# that a sweep has tried.
OWN_VALUE = {"er": "1"}


@dataclass(frozen=True)
class Comparison:
    """A method minus the reference, both with the same of the old tasks, on the bases that both started from.

    Both are named with their knobs. Differences are paired by base policy, and by start state where single episodes
    are known.
    """

    policy: str
    view: View
    role: Role
    label: str
    reference: str
    tier: Tier | None
    rollouts: int
    frames: int | None
    n_pairs: int
    old_mean: Estimate
    new: Estimate


def compare_with(runs: Iterable[Run], reference: str) -> list[Comparison]:
    """Every method that needs old frames or rollouts against the method `reference` at equal tier and number of them.

    If the reference was run with several values of its knob: at its default, or at each value if none is the default.
    """
    comparisons = []
    for group in group_by_policy_and_role(run for run in runs if run.stages is None):
        settings = group_by_setting(group)
        for setting in settings:
            if setting[0].method == reference or not (setting[0].frames or setting[0].rollouts):
                continue
            alike = [
                other for other in settings if other[0].method == reference and _given(other[0]) == _given(setting[0])
            ]
            comparisons += [
                _comparison(pairs) for other in _with_own_knob(alike) if (pairs := pair_runs(setting, other))
            ]
    return comparisons


def _given(run: Run) -> tuple[Tier | None, int, int | None]:
    """What the method has of the old tasks."""
    return run.tier, run.rollouts, run.frames


def _with_own_knob(settings: list[list[Run]]) -> list[list[Run]]:
    """Runs at the method's default knob, or all runs if none used it."""
    own = [runs for runs in settings if (knob := runs[0].knob) and knob.value == OWN_VALUE.get(runs[0].method)]
    return own or settings


def _comparison(pairs: list[tuple[Run, Run]]) -> Comparison:
    ours, theirs = pairs[0]
    return Comparison(
        policy=ours.policy,
        view=ours.view,
        role=ours.role,
        label=name_of(ours.label, ours.knob),
        reference=name_of(theirs.label, theirs.knob),
        tier=ours.tier,
        rollouts=ours.rollouts,
        frames=ours.frames,
        n_pairs=len(pairs),
        old_mean=compare_runs(pairs, old_cells),
        new=compare_runs(pairs, new_cells),
    )
