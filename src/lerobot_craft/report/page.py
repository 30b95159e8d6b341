"""The page: sections in order, each left out where its data is missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.comparison import compare_with
from lerobot_craft.evaluation.results import Results, read_results
from lerobot_craft.evaluation.summary import collect
from lerobot_craft.report.filmstrips import Strip, filmstrips, load_strips
from lerobot_craft.report.headline import headline
from lerobot_craft.report.heatmap import heatmaps
from lerobot_craft.report.markup import Markup, document, element, fragment, style_sheet
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
    body = fragment(
        element("header", element("h1", _TITLE), headline(results.summary), _stamp(originals)),
        element("main", [_section(title, content) for title, content in sections if content]),
    )
    return document(_head(), body)


def _section(title: str, content: Markup) -> Markup:
    return element("section", element("h2", title), content)


def _stamp(originals: Sequence[Results]) -> Markup:
    versions = ", ".join(dict.fromkeys(results.craft_version for results in originals))
    dates = ", ".join(dict.fromkeys(results.created[:10] for results in originals))
    return element("p", f"CRaFT {versions}, {dates}", class_="stamp")


def _head() -> Markup:
    css = files("lerobot_craft.report").joinpath("style.css").read_text(encoding="utf-8")
    return fragment(
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"CRaFT: {_TITLE.lower()}"),
        style_sheet(css),
    )
