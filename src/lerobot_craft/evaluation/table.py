"""The summary as Markdown: what a terminal shows and a README quotes."""

from collections.abc import Iterable, Sequence

from lerobot_craft.evaluation.results import Estimate, Knob, Role, SequenceSummary, Summary

MINUS = "−"
_ROLES: dict[Role, str] = {
    "final": "scenarios kept for this table",
    "tuning": "scenarios on which settings were chosen",
}


def summary_table(rows: Sequence[Summary]) -> str:
    """One Markdown table per policy and role, with intervals, seeds and n below the title."""
    blocks = []
    for group in grouped(rows):
        first = group[0]
        lines = [
            f"**{first.policy}**, {_ROLES[first.role]}: {sample_size(group)}",
            "",
            "| method | old frames | old tasks | same scene | new task | forgotten |",
            "|---|---|---|---|---|---|",
        ]
        for row in group:
            forgotten = "" if row.train_seconds is None else format_estimate(row.forgotten)
            cells = (
                cell(name_of(row.label, row.knob)),
                frames_of(row),
                format_estimate(row.old_mean),
                format_estimate(row.same_scene),
                format_estimate(row.new),
                forgotten,
            )
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join([*lines, *_below(group)]))
    return "\n\n".join(blocks)


def sequence_table(rows: Sequence[SequenceSummary]) -> str:
    """The same for sequences; NBT is better lower, all else higher."""
    blocks = []
    for group in grouped(rows):
        first = group[0]
        lines = [
            f"**{first.policy}**, sequences, {_ROLES[first.role]}: {sample_size(group)}",
            "",
            "| method | old frames per task | NBT, all tasks | NBT, new tasks | AUC, all tasks | FWT "
            "| base tasks at the end |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in group:
            scores = (row.nbt_all, row.nbt_new, row.auc_all, row.fwt_new, row.final_base)
            cells = (cell(name_of(row.label, row.knob)), frames(row.frames), *map(format_estimate, scores))
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join([*lines, *_below(group)]))
    return "\n\n".join(blocks)


def where_chosen(rows: Sequence[Summary] | Sequence[SequenceSummary]) -> str | None:
    """Where the settings in brackets come from, in words; None where there are none."""
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
    """Rows of one policy and role together, in the order in which they came."""
    groups: dict[tuple[str, Role], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.role), []).append(row)
    return list(groups.values())


def sample_size(rows: Sequence[Summary] | Sequence[SequenceSummary]) -> str:
    """How much stands behind the rows, in words."""
    scenarios = dict.fromkeys(name for row in rows for name in row.scenarios)
    return (
        f"{_plural(len(scenarios), 'scenario')} ({', '.join(scenarios)}), "
        f"{_range([row.n_seeds for row in rows], 'seed')}, {_range([row.n_runs for row in rows], 'run')} per row, "
        f"n = {_range([row.n_episodes for row in rows], 'episode')} per task and run, 95 % intervals"
    )


def name_of(label: str, knob: Knob | None) -> str:
    """A method's name with the setting that was swept."""
    return label if knob is None else f"{label} ({knob.flag.removeprefix('--').removeprefix('craft.')}={knob.value})"


def frames(count: int | None) -> str:
    """Old frames, or that all of them are needed."""
    return "all" if count is None else f"{count:,}"


def frames_of(row: Summary) -> str:
    """Old frames of a row; a base was not fine-tuned and has none to speak of."""
    return "" if row.train_seconds is None else frames(row.frames)


def format_estimate(estimate: Estimate | None) -> str:
    """`0.95 [0.91, 0.98]`; a dash where nothing was measured."""
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


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _range(counts: Sequence[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    return _plural(low, noun) if low == high else f"{low} to {high} {noun}s"
