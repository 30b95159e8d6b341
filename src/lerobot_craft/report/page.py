"""The page: sections in order, each left out where its data is missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.comparison import compare_with
from lerobot_craft.evaluation.results import Results, read_results
from lerobot_craft.evaluation.summary import collect
from lerobot_craft.report.filmstrips import Strip, filmstrips, load_strips
from lerobot_craft.report.headline import headline
from lerobot_craft.report.heatmap import heatmaps
from lerobot_craft.report.layout import page, stamp
from lerobot_craft.report.planes import drift_planes, retention_planes
from lerobot_craft.report.provenance import commands, how_measured
from lerobot_craft.report.sequences import sequences
from lerobot_craft.report.tables import comparison_table, cost_table, main_tables

_TITLE = "What fine-tuning kept and what it lost"
_REFERENCE = "er"  # replay is what most people would try first


@dataclass(frozen=True)
class Source:
    """Results and the pictures that belong to them."""

    results: Results
    strips: list[Strip]


def load_sources(paths: Sequence[Path]) -> list[Source]:
    """Read results files with their pictures."""
    sources = []
    for path in paths:
        results = read_results(path)
        if not results.runs:
            raise CraftError(f"{path}: there is no finished run in it. Let `craft bench` finish one, then try again.")
        sources.append(Source(results, load_strips(results.media, path.parent)))
    return sources


def together(sources: Sequence[Source]) -> Results:
    """All runs as one result, summarised anew; the same run in two files is refused."""
    runs = [run for source in sources for run in source.results.runs]
    return collect(runs, command="", settings={})


def render(sources: Sequence[Source], results: Results) -> str:
    """One HTML page of `results`, which are the sources taken `together`."""
    runs = results.runs
    originals = [source.results for source in sources]
    strips = [strip for source in sources for strip in source.strips]
    sections = (
        ("What is kept, what is learnt", main_tables(results.summary) if results.summary else None),
        ("Against replay with as many old frames", comparison_table(compare_with(runs, _REFERENCE))),
        ("The same prompt, before and after", filmstrips(strips)),
        ("Retention and plasticity", retention_planes(results.summary)),
        ("Task by task", heatmaps(runs)),
        ("Sequences of tasks", sequences(runs, results.sequences)),
        ("Does drift foretell forgetting?", drift_planes(runs, results.correlations)),
        ("What it costs", cost_table(results.summary)),
        ("How it was measured", how_measured(runs)),
        ("Commands", commands(originals)),
    )
    return page(_TITLE, [headline(results.summary), stamp(originals)], sections)
