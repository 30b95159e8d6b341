"""The bench page's figure from a results file of `craft bench`: what is left of old skills, and what was learnt.

    python benchmarks/figure.py benchmarks/results/bench-smolvla-400-steps-2026-11-16.json

The drawing brings its own paper and both colour schemes: GitHub shows it as a picture, where the page's theme does not
reach. Of replay and of CRaFT it shows the row with the fewest old frames.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import Estimate, Summary, read_results, write_text
from lerobot_craft.evaluation.summary import BASE, summarise
from lerobot_craft.evaluation.table import grouped, number, sample_size
from lerobot_craft.report.figures import CRAFT, Axes, Scale, family_of
from lerobot_craft.report.templates import ENVIRONMENT

_FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "retention.svg"
_METHODS = (BASE, "naive", "er", "craft")
_WIDTH, _HEIGHT = 760.0, 400.0
_LEGEND, _NOTE = 22.0, 44.0  # room above and below the drawing
_BAR, _GAP = 0.205, 0.015  # of the width of a group
_STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.paper { fill: var(--paper); stroke: var(--rule); }
.grid { stroke: var(--rule); }
.bar { fill: var(--family); }
.bar.before { opacity: .55; }
.halo { stroke: var(--paper); stroke-width: 4.5; stroke-linecap: square; fill: none; }
.whisker { stroke: var(--ink); stroke-width: 1.6; fill: none; }
text { fill: var(--ink); font-size: 15px; }
.tick, .note { fill: var(--soft); font-size: 13px; }
.value { font-weight: 600; font-size: 14px; }
"""
_DRAWING = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" role="img"
 aria-label="Success with 95 % intervals. {{ label }}">
<style>
{{ style | safe }}</style>
<rect x="0.5" y="0.5" width="{{ width - 1 }}" height="{{ height - 1 }}" rx="8" class="paper"/>
{% for x, name, css in legend %}
<rect x="{{ x }}" y="14" width="13" height="13" class="bar {{ css }}"/>
<text x="{{ x + 19 }}" y="25.5">{{ name }}</text>
{% endfor %}
<g transform="translate(0 {{ legend_height }})">
{% for text, y in ticks %}
<line x1="{{ left }}" x2="{{ right }}" y1="{{ y }}" y2="{{ y }}" class="grid"/>
<text x="{{ left - 8 }}" y="{{ y + 4.5 }}" class="tick" text-anchor="end">{{ text }}</text>
{% endfor %}
{% for group in groups %}
{% for bar in group.bars %}
<g><title>{{ bar.tip }}</title>
<rect x="{{ bar.left }}" y="{{ bar.top }}" width="{{ bar.width }}" height="{{ bar.height }}" class="bar {{ bar.css }}"/>
<path d="{{ bar.whisker }}" class="halo"/><path d="{{ bar.whisker }}" class="whisker"/>
<text x="{{ bar.x }}" y="{{ bar.y }}" class="value" text-anchor="middle">{{ bar.text }}</text></g>
{% endfor %}
<text x="{{ group.x }}" y="{{ group.y }}" text-anchor="middle">{{ group.name }}</text>
{% endfor %}
</g>
{% for line in notes %}
<text x="24" y="{{ height - 34 + 18 * loop.index0 }}" class="note">{{ line }}</text>
{% endfor %}
</svg>
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Draw what fine-tuning kept, from a results file of `craft bench`.")
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--output", type=Path, default=_FIGURE, metavar="FILE", help="default: docs/bench.md's figure")
    parser.add_argument("--policy", help="which one of several (default: the first)")
    options = parser.parse_args(argv)
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.output, draw(rows_of(options.results, options.policy)))
    except CraftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


def rows_of(path: Path, policy: str | None = None) -> list[Summary]:
    """The rows to draw, in order: of scenarios kept for the final table unless there are none."""
    # Anew from the runs, as `craft report` does: the file's own summary is of the release that wrote it.
    groups = [group for group in grouped(summarise(read_results(path).runs)) if policy in (None, group[0].policy)]
    shown = next((group for group in groups if group[0].role == "final"), groups[0] if groups else [])
    rows = [row for method in _METHODS if (row := _fewest(shown, method)) is not None]
    if len(rows) < 2:
        of_policy = f" of {policy}" if policy else ""
        raise CraftError(
            f"{path}: there is nothing to compare in it{of_policy}. It needs the base and one of "
            f"{', '.join(_METHODS[1:])}, as `craft bench` writes them."
        )
    return rows


def _fewest(rows: Sequence[Summary], method: str) -> Summary | None:
    own = [row for row in rows if row.method == method and row.frames is not None]
    return min(own, key=lambda row: row.frames or 0, default=None)


def draw(rows: Sequence[Summary]) -> str:
    """The drawing as a file."""
    groups: list[tuple[str, list[Estimate | None]]] = [
        ("old skill, same scene", [row.same_scene for row in rows]),
        ("all old tasks", [row.old_mean for row in rows]),
        ("new task", [row.new for row in rows]),
    ]
    groups = [(name, estimates) for name, estimates in groups if any(estimates)]
    axes = Axes(Scale(0.0, float(len(groups))), Scale(0.0, 1.08), width=_WIDTH, height=_HEIGHT - _LEGEND - _NOTE)
    return ENVIRONMENT.from_string(_DRAWING).render(
        width=_WIDTH,
        height=_HEIGHT,
        legend_height=_LEGEND,
        style=_palette() + _STYLE,
        label="; ".join(f"{name}: {_in_words(rows, estimates)}" for name, estimates in groups),
        ticks=[(f"{tick:g}", axes.at(0.0, tick)[1]) for tick in (0.0, 0.25, 0.5, 0.75, 1.0)],
        left=axes.at(0.0, 0.0)[0],
        right=axes.at(axes.x.high, 0.0)[0],
        groups=[_group(axes, i, name, rows, estimates) for i, (name, estimates) in enumerate(groups)],
        legend=_legend(rows),
        notes=(f"{rows[0].policy}: success before and after one new task was learnt", sample_size(rows)),
    )


def _palette() -> str:
    """The page's colours, light and dark, and which family has which."""
    css = files("lerobot_craft.report").joinpath("templates/style.css").read_text(encoding="utf-8")
    families = [line for line in css.splitlines() if line.startswith(".") and "--family: var(" in line]
    return css[: css.index("* {")] + "\n".join(families)


def _group(
    axes: Axes, index: int, name: str, rows: Sequence[Summary], estimates: Sequence[Estimate | None]
) -> dict[str, Any]:
    pitch = _BAR + _GAP
    first = index + 0.5 - len(rows) * pitch / 2
    bars = [
        _bar(axes, first + i * pitch, row, estimate)
        for i, (row, estimate) in enumerate(zip(rows, estimates, strict=True))
        if estimate is not None
    ]
    x, y = axes.at(index + 0.5, 0.0)
    return {"name": name, "x": x, "y": y + 24, "bars": bars}


def _bar(axes: Axes, start: float, row: Summary, estimate: Estimate) -> dict[str, Any]:
    (left, top), (right, bottom) = axes.at(start, estimate.value), axes.at(start + _BAR, 0.0)
    middle = (left + right) / 2
    low = estimate.value if estimate.low is None else estimate.low
    high = estimate.value if estimate.high is None else estimate.high
    upper, lower = axes.at(0.0, high)[1], axes.at(0.0, low)[1]
    side = f"{middle - 5:.1f}"
    return {
        "tip": f"{_name(row)}: {number(estimate.value)} [{number(low)}, {number(high)}]",
        "left": left,
        "top": top,
        "width": right - left,
        "height": bottom - top,
        "css": _css(row),
        "whisker": f"M{side} {upper:.1f}h10M{middle:.1f} {upper:.1f}V{lower:.1f}M{side} {lower:.1f}h10",
        "text": number(estimate.value),
        "x": middle,
        "y": upper - 6,
    }


def _legend(rows: Sequence[Summary]) -> list[tuple[float, str, str]]:
    # The width of a drawn name is not known here: an average letter is half as wide as its line is high.
    widths = [34 + 7.6 * len(_name(row)) for row in rows]
    gap = (_WIDTH - 48 - sum(widths)) / max(len(rows) - 1, 1)
    return [(24 + sum(widths[:i]) + i * gap, _name(row), _css(row)) for i, row in enumerate(rows)]


def _name(row: Summary) -> str:
    if row.frames:
        return f"{row.label}, {row.frames:,} old frames"
    return f"{row.label}, no old frame" if family_of(row.method) is CRAFT else row.label


def _css(row: Summary) -> str:
    return family_of(row.method).css


def _in_words(rows: Sequence[Summary], estimates: Sequence[Estimate | None]) -> str:
    return ", ".join(f"{_name(row)} {number(e.value)}" for row, e in zip(rows, estimates, strict=True) if e is not None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
