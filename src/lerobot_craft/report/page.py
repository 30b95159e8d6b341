"""The page: sections in order, each left out where its data is missing."""

from collections.abc import Iterable, Sequence

from lerobot_craft.evaluation.comparison import compare_with
from lerobot_craft.evaluation.listening import Listening
from lerobot_craft.evaluation.matrix import Evaluation
from lerobot_craft.evaluation.results import Results
from lerobot_craft.evaluation.summary import collect
from lerobot_craft.report.conflicts import conflicts
from lerobot_craft.report.evaluation_page import checkpoint_table, score_table, success_grid
from lerobot_craft.report.filmstrips import filmstrips
from lerobot_craft.report.headline import headline
from lerobot_craft.report.heatmap import heatmaps
from lerobot_craft.report.inputs import Inputs, Source
from lerobot_craft.report.layout import Dated, page, stamp
from lerobot_craft.report.listening_page import listening_grid
from lerobot_craft.report.markup import Markup, element, fragment
from lerobot_craft.report.planes import drift_planes, retention_planes
from lerobot_craft.report.provenance import commands, how_measured
from lerobot_craft.report.sequences import sequences
from lerobot_craft.report.tables import comparison_table, cost_table, main_tables
from lerobot_craft.report.traces import traces
from lerobot_craft.report.training_costs import training_commands, training_costs

_TITLE = "What fine-tuning kept and what it lost"
_NO_ROLLOUTS = "No rollouts here: a small drift is no proof."
_REFERENCE = "er"  # replay is what most people would try first


def together(sources: Sequence[Source]) -> Results:
    """All runs as one result, summarised anew; the same run in two files is refused."""
    runs = [run for source in sources for run in source.results.runs]
    return collect(runs, command="", settings={})


def render(inputs: Inputs, results: Results) -> str:
    """One HTML page of the inputs; `results` are those of a bench among them taken `together`."""
    runs, evaluations, trainings = results.runs, inputs.evaluations, inputs.trainings
    originals = [source.results for source in inputs.sources]
    strips = [strip for source in inputs.sources for strip in source.strips]
    typed = [commands(originals) if runs else None, *_lines([*evaluations, *inputs.listenings])]
    sections = (
        ("What is kept, what is learnt", main_tables(results.summary) if results.summary else None),
        ("Against replay with as many old frames", comparison_table(compare_with(runs, _REFERENCE))),
        ("The same prompt, before and after", filmstrips(strips)),
        ("Retention and plasticity", retention_planes(results.summary, evaluations)),
        ("Task by task", _all([heatmaps(runs), *map(success_grid, evaluations)])),
        ("Does it still listen?", _all(map(listening_grid, inputs.listenings))),
        ("Sequences of tasks", _all([sequences(runs, results.sequences), *map(score_table, evaluations)])),
        ("Does drift foretell forgetting?", drift_planes(runs, results.correlations)),
        ("Drift, budget and multipliers", traces(trainings)),
        ("Where the gradients conflict", conflicts(trainings)),
        ("What it costs", _all([cost_table(results.summary), training_costs(trainings)])),
        ("How it was measured", how_measured(runs) if runs else None),
        ("Checkpoints", _all(map(checkpoint_table, evaluations))),
        ("Commands", _all([*typed, training_commands(trainings)])),
    )
    unplayed = None if runs or evaluations else element("p", _NO_ROLLOUTS, class_="headline")
    return page(_TITLE, [headline(results.summary), unplayed, stamp(_dated(inputs))], sections)


def _all(parts: Iterable[Markup | None]) -> Markup | None:
    """One after the other; None where there are none."""
    return fragment(*parts) or None


def _lines(inputs: Sequence[Evaluation | Listening]) -> list[Markup]:
    return [element("pre", element("code", one.command)) for one in inputs]


def _dated(inputs: Inputs) -> list[Dated]:
    records = [run.record for run in inputs.trainings if run.record is not None]
    return [*(source.results for source in inputs.sources), *inputs.evaluations, *inputs.listenings, *records]
