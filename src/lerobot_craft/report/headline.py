"""The first sentence of the page, made from the numbers below it."""

from collections.abc import Sequence

from lerobot_craft.evaluation.results import Summary, policy_name
from lerobot_craft.evaluation.summary import BASE
from lerobot_craft.evaluation.table import grouped
from lerobot_craft.report.markup import Markup, element, fragment


def headline(rows: Sequence[Summary]) -> Markup | None:
    """What happened to the old skills, one paragraph per policy; None where there is no row to speak of."""
    groups = grouped(rows)
    # Scenarios that were kept for the table speak; those used for tuning only where there are no others.
    final = [group for group in groups if group[0].role == "final"] or groups
    paragraphs = [element("p", sentence, class_="headline") for group in final if (sentence := say(group))]
    return fragment(*paragraphs) if paragraphs else None


def say(rows: Sequence[Summary]) -> str | None:
    """The sentences for one policy."""
    base, plain = _named(rows, BASE), _named(rows, "naive")
    others = [row for row in rows if row not in (base, plain)]
    ours = [row for row in others if row.method == "craft"] or _best(others)
    if base is None or not (plain or ours):
        return None
    sentences = [_taken(base, plain)] if plain else [f"success on the old tasks is {_old(base)} before fine-tuning."]
    if ours:
        sentences.append(_left(ours))
    return f"{policy_name(rows[0].policy, rows[0].view)}: {' '.join(sentences)} {_learnt(plain, ours)}"


def _taken(base: Summary, plain: Summary) -> str:
    text = f"{plain.label} takes success on the old tasks from {_old(base)} to {_old(plain)}"
    if base.same_scene and plain.same_scene:
        before, after = _percent(base.same_scene.value), _percent(plain.same_scene.value)
        text += f", and on those in the new task's scene from {before} to {after}"
    return f"{text}."


def _left(rows: Sequence[Summary]) -> str:
    old = ", ".join(f"{_old(row)} {_given(row)}" for row in rows)
    same = [_percent(row.same_scene.value) for row in rows if row.same_scene]
    return f"{rows[0].label} leaves {old}{f' (same scene: {_list(same)})' if same else ''}."


def _learnt(plain: Summary | None, ours: Sequence[Summary]) -> str:
    parts = [f"{_percent(plain.new.value)} after {plain.label}"] if plain else []
    if ours:
        parts.append(f"{_list([_percent(row.new.value) for row in ours])} after {ours[0].label}")
    return f"The new task itself: {'; '.join(parts)}."


def _named(rows: Sequence[Summary], method: str) -> Summary | None:
    return next((row for row in rows if row.method == method), None)


def _best(rows: Sequence[Summary]) -> list[Summary]:
    return [max(rows, key=lambda row: row.old_mean.value)] if rows else []


def _old(row: Summary) -> str:
    return _percent(row.old_mean.value)


def _given(row: Summary) -> str:
    if row.tier == "instructions":
        return "with the instructions alone"
    if row.tier == "rollouts":
        return f"with {row.rollouts:,} rollout{'' if row.rollouts == 1 else 's'} per old task"
    if row.frames is None:
        return "with all old frames"
    return f"with {row.frames:,} old frame{'' if row.frames == 1 else 's'}" if row.frames else "without any old frame"


def _list(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} and {values[-1]}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}\u00a0%"
