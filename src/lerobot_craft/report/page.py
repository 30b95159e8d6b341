"""The pages: their sections in order, each left out if its data is missing, their sentences, and the file on disk."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from markupsafe import Markup

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.listening import Listening
from lerobot_craft.evaluation.matrix import Evaluation, matrix_table, scores_table
from lerobot_craft.evaluation.results import Results, Run, Summary, policy_name, write_text
from lerobot_craft.evaluation.summary import BASE, PLAIN, collect
from lerobot_craft.evaluation.table import compare_with, grouped, sequence_table, summary_table
from lerobot_craft.report.figures import drift_planes, filmstrips, retention_planes, stage_curves
from lerobot_craft.report.inputs import Inputs, Source, load_inputs
from lerobot_craft.report.tables import (
    apart_table,
    checkpoint_table,
    comparison_table,
    cost_table,
    episodes_of,
    heatmaps,
    listening_grid,
    main_tables,
    score_table,
    sequence_tables,
    success_grid,
)
from lerobot_craft.report.templates import Child, document, part, together
from lerobot_craft.report.trainings import conflicts, traces, training_costs


def headline(rows: Sequence[Summary]) -> list[str]:
    """What happened to the old skills: the first sentences of the page, one paragraph per policy."""
    groups = grouped(rows)
    # Scenarios kept for the final table; those used for tuning only if there are no others.
    final = [group for group in groups if group[0].role == "final"] or groups
    return [sentence for group in final if (sentence := say(group))]


def say(rows: Sequence[Summary]) -> str | None:
    """The sentences for one policy; None if there is nothing to compare."""
    base, plain = _named(rows, BASE), _named(rows, PLAIN)
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


REPORT_FILE = "report.html"
_TITLE = "What fine-tuning kept and what it lost"
_NO_ROLLOUTS = "No rollouts here: a small drift is no proof."
_REFERENCE = "er"  # replay is what most people would try first


class _Dated(Protocol):
    """Something that says when it was made (ISO 8601), and by which release."""

    @property
    def craft_version(self) -> str: ...

    @property
    def created(self) -> str: ...


def default_output(paths: Sequence[Path]) -> Path:
    """In the first directory, or beside the first file."""
    return (paths[0] if paths[0].is_dir() else paths[0].parent) / REPORT_FILE


def write_report(paths: Sequence[Path], output: Path) -> str:
    """Write the page of what is at these paths to `output`, and return its tables of success as text."""
    inputs = load_inputs(paths)
    if output.resolve() in {path.resolve() for path in inputs.files}:
        raise CraftError(f"{output} is one of the results: choose another name with --output=FILE")
    if not output.parent.exists():
        raise CraftError(f"--output={output}: there is no directory {output.parent}. Make it first, or name another")
    found = all_runs(inputs.sources)
    write_text(output, render(inputs, found))
    of_evaluations = [made(evaluation) for evaluation in inputs.evaluations for made in (matrix_table, scores_table)]
    tables = (summary_table(found.summary), sequence_table(found.sequences), *of_evaluations)
    return "\n\n".join(table for table in tables if table)


def all_runs(sources: Sequence[Source]) -> Results:
    """All runs as one result, summarised anew; the same run in two files is refused."""
    runs = [run for source in sources for run in source.results.runs]
    return collect(runs, command="", settings={})


def render(inputs: Inputs, results: Results) -> str:
    """The page of `craft report`; `results` are `all_runs` of the inputs."""
    runs, evaluations, trainings = results.runs, inputs.evaluations, inputs.trainings
    originals = [source.results for source in inputs.sources]
    strips = [strip for source in inputs.sources for strip in source.strips]
    sections = (
        ("What is kept, what is learnt", main_tables(results.summary)),
        ("Against replay with as many old frames", comparison_table(compare_with(runs, _REFERENCE))),
        ("The same prompt, before and after", filmstrips(strips)),
        ("Retention and plasticity", retention_planes(results.summary, evaluations)),
        ("Task by task", together([heatmaps(runs), *map(success_grid, evaluations)])),
        ("Does it still listen?", together(map(listening_grid, inputs.listenings))),
        ("Sequences of tasks", together([_sequences(results), *map(score_table, evaluations)])),
        ("Does drift foretell forgetting?", drift_planes(runs, results.correlations)),
        ("Drift, budget and multipliers", traces(trainings)),
        ("Where the gradients conflict", conflicts(trainings)),
        ("What it costs", together([cost_table(results.summary), training_costs(trainings)])),
        ("How it was measured", part("bullets", how_measured(runs)) if runs else None),
        ("Checkpoints", together(map(checkpoint_table, evaluations))),
        ("Commands", together([_bench_commands(originals) if runs else None, _other_commands(inputs)])),
    )
    sentences = headline(results.summary) + ([] if runs or evaluations else [_NO_ROLLOUTS])
    records = [run.record for run in trainings if run.record is not None]
    return document(_TITLE, sentences, _stamp([*originals, *evaluations, *inputs.listenings, *records]), sections)


def render_evaluation(evaluation: Evaluation) -> str:
    """The page of `craft eval`: success of checkpoints on tasks, and the scores of a sequence."""
    sections = (
        ("Success", success_grid(evaluation)),
        ("As a sequence of tasks", score_table(evaluation)),
        ("Checkpoints", checkpoint_table(evaluation)),
        ("Command", part("commands", [evaluation.command])),
    )
    return document("What the checkpoints can do", [], _stamp([evaluation]), sections)


def render_listening(found: Listening) -> str:
    """The page of `craft listen`: which instructions still do their own thing."""
    sections = (
        ("Does it still listen?", listening_grid(found)),
        ("How far instructions are told apart", apart_table(found)),
        ("Command", part("commands", [found.command])),
    )
    return document("Does the policy still listen?", [], _stamp([found]), sections)


def _stamp(sources: Iterable[_Dated]) -> str | None:
    """Releases and days that the sources come from."""
    known = list(sources)
    if not known:
        return None
    versions = ", ".join(dict.fromkeys(source.craft_version for source in known))
    dates = ", ".join(dict.fromkeys(source.created[:10] for source in known))
    return f"CRaFT {versions}, {dates}"


def _sequences(results: Results) -> Markup | None:
    if all(run.stages is None for run in results.runs):
        return None
    return together([sequence_tables(results.sequences), stage_curves(results.runs)])


def _bench_commands(sources: Sequence[Results]) -> Markup | None:
    """The commands that made these results, their settings, and the command of each run."""
    runs: list[list[Child]] = [
        [f"{run.label}, {run.scenario}, {run.policy}, seed {run.seed}", part("code", run.command)]
        for results in sources
        for run in results.runs
    ]
    settings: list[list[Child]] = [
        [name, part("code", str(value))] for results in sources for name, value in results.settings.items()
    ]
    parts = [part("commands", dict.fromkeys(results.command for results in sources))]
    if settings:
        parts.append(part("folded", "The settings", part("table", ("setting", "value"), settings, "As given.")))
    table = part("table", ("run", "command"), runs, "Each line repeats one run.")
    return together([*parts, part("folded", "The command of every run", table)])


def _other_commands(inputs: Inputs) -> Markup:
    lines = [evaluation.command for evaluation in inputs.evaluations]
    lines += [listening.command for listening in inputs.listenings]
    lines += [run.record.command for run in inputs.trainings if run.record is not None and run.record.command]
    return part("commands", lines)
