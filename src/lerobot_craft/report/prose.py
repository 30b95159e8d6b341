"""The sentences of the page: what happened, and how it was measured."""

from collections.abc import Iterable, Sequence

from lerobot_craft.evaluation.results import Run, Summary, policy_name
from lerobot_craft.evaluation.summary import BASE
from lerobot_craft.evaluation.table import grouped
from lerobot_craft.report.tables import episodes_of


def headline(rows: Sequence[Summary]) -> list[str]:
    """What happened to the old skills: the first sentences of the page, one paragraph per policy."""
    groups = grouped(rows)
    # Scenarios kept for the final table; those used for tuning only if there are no others.
    final = [group for group in groups if group[0].role == "final"] or groups
    return [sentence for group in final if (sentence := say(group))]


def say(rows: Sequence[Summary]) -> str | None:
    """The sentences for one policy; None if there is nothing to compare."""
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


def how_measured(runs: Sequence[Run]) -> list[str]:
    """How the numbers were made: sample sizes, intervals, and the rule for settings."""
    statements = [_sample(runs)]
    statements.append(
        "An old mean is the mean over scenarios of the mean over seeds of the mean over tasks. Same scene are the old "
        "tasks that share the new one's scene, elsewhere the others. Kept of before is the mean after over the mean "
        "before; the worst single task is the lowest such ratio of one task of one scenario, over its seeds."
    )
    statements.append(
        f"Intervals are 95 %: the wider of Wilson's over all episodes (Newcombe's for differences) and a hierarchical "
        f"bootstrap that draws scenarios, seeds and tasks anew. {_starts(runs)} With few scenarios and seeds they are "
        "rough, and one run alone cannot show how runs differ."
    )
    statements.append(_tuning(runs))
    if any(run.stages is not None for run in runs):
        statements.append(
            "NBT, FWT and AUC are LIBERO's (Liu et al. 2023). Stages are measured at their end only, so FWT is the "
            "success right after learning; the last task cannot be forgotten and is no part of NBT. All tasks include "
            "those the policy came with; a lower NBT is better."
        )
    if any(run.drift.action is not None or run.drift.hidden is not None for run in runs):
        statements.append(
            "Drift is the distance from the teacher on old tasks at the end of training. Its rank correlation with "
            "lost success uses all runs that learnt one task; the interval draws whole groups of one scenario and "
            "seed."
        )
    return statements


def _sample(runs: Sequence[Run]) -> str:
    scenarios, policies = _names(run.scenario for run in runs), _names(run.policy for run in runs)
    return (
        f"{len(runs)} run{'' if len(runs) == 1 else 's'}: scenarios {scenarios}; policies {policies}; "
        f"seeds {_names(str(run.seed) for run in runs)}; n = {episodes_of(runs)} episodes per task and run."
    )


def _starts(runs: Sequence[Run]) -> str:
    shared = "Every seed drew its own start states." if all(run.starts_by_seed for run in runs) else ""
    shared = shared or "Seeds share the start states of a task."
    if not all(run.base_episodes and run.after_episodes for run in runs):
        return shared
    return (
        f"{shared} The bootstrap draws start states too; differences are paired by base policy and start state, and "
        "Wilson's and Newcombe's intervals count each start state once."
    )


def _tuning(runs: Sequence[Run]) -> str:
    tuning, final = (list(dict.fromkeys(r.scenario for r in runs if r.role == role)) for role in ("tuning", "final"))
    swept = dict.fromkeys(name for run in runs if run.knob for name in run.knob.swept_on)
    labels = dict.fromkeys(run.label for run in runs if run.knob and run.knob.swept_on)
    parts = ["No setting was swept: those in brackets are defaults or were given."]
    if swept:
        parts = [f"The settings in brackets of {', '.join(labels)} were chosen on {', '.join(swept)}."]
    if tuning:
        parts.append(f"Scenarios used for tuning: {', '.join(tuning)}.")
    if final:
        leaked = [name for name in final if name in swept]
        parts.append(f"Kept for the final table: {', '.join(final)}.")
        if leaked:
            parts.append(f"Careful: {', '.join(leaked)} also served for choosing a setting, so those rows flatter.")
    return " ".join(parts)


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
