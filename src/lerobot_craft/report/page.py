"""The pages: sections in order, each left out if its data is missing; and from paths to a page on disk."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from markupsafe import Markup

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.comparison import compare_with
from lerobot_craft.evaluation.listening import Listening
from lerobot_craft.evaluation.matrix import Evaluation, matrix_table, scores_table
from lerobot_craft.evaluation.results import Results, write_text
from lerobot_craft.evaluation.summary import collect
from lerobot_craft.evaluation.table import sequence_table, summary_table
from lerobot_craft.report.figures import drift_planes, filmstrips, retention_planes, stage_curves
from lerobot_craft.report.inputs import Inputs, Source, load_inputs
from lerobot_craft.report.prose import headline, how_measured
from lerobot_craft.report.tables import (
    apart_table,
    checkpoint_table,
    comparison_table,
    cost_table,
    heatmaps,
    listening_grid,
    main_tables,
    score_table,
    sequence_tables,
    success_grid,
)
from lerobot_craft.report.templates import Child, document, part, together
from lerobot_craft.report.trainings import conflicts, traces, training_costs

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
