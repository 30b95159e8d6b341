"""The page's drawings: kept against learnt, drift against lost, sequences, rollouts; and the geometry below them."""

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from lerobot_craft.evaluation.correlation import Kind, Pair, pairs_per_run, pairs_per_task
from lerobot_craft.evaluation.matrix import Evaluation, Row
from lerobot_craft.evaluation.results import Correlation, Correlations, Run, SequenceSummary, Summary, policy_name
from lerobot_craft.evaluation.summary import BASE, group_by_setting, success_matrix
from lerobot_craft.evaluation.table import given_to, grouped, name_of, number
from lerobot_craft.report.inputs import Strip
from lerobot_craft.report.templates import part, together

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 16.0, 16.0, 46.0  # room for tick labels and titles
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LOG_FROM = 30.0  # a wider span of positive values is unreadable on a linear axis
_LABEL_GAP = 13.0
BADGE = 8.5  # radius of a numbered point

# From lost to kept. People with any kind of colour vision tell orange from blue; both are light enough for dark text.
_LOST, _MIDDLE, _KEPT = (243, 164, 112), (246, 243, 238), (125, 190, 226)

type Point = tuple[float, float]


@dataclass(frozen=True)
class Family:
    """A kind of method: its name, its CSS class and its marker. Shapes help those who see colours differently."""

    name: str
    css: str
    marker: str
    corners: tuple[Point, ...] = ()  # of the marker, in units of its size

    def around(self, at: Point, size: float) -> list[Point]:
        """The corners of a marker at a pixel."""
        return [(at[0] + dx * size, at[1] + dy * size) for dx, dy in self.corners]

    def arms(self, at: Point, size: float) -> tuple[tuple[Point, Point], ...]:
        """The two lines of a cross."""
        (left, top), (right, bottom) = (at[0] - size, at[1] - size), (at[0] + size, at[1] + size)
        return ((left, top), (right, bottom)), ((left, bottom), (right, top))


BEFORE = Family("before fine-tuning", "before", "diamond", ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)))
PLAIN = Family("plain fine-tuning", "plain", "square", ((-1, -1), (1, -1), (1, 1), (-1, 1)))
REPLAY = Family("old data replayed", "replay", "triangle", ((0, -1.2), (1.15, 0.9), (-1.15, 0.9)))
CRAFT = Family("CRaFT", "craft", "circle")
OTHER = Family("other methods", "other", "cross")
FAMILIES = (BEFORE, PLAIN, REPLAY, CRAFT, OTHER)

_MEMBERS = {BASE: BEFORE, "naive": PLAIN, "er": REPLAY, "joint": REPLAY}
# Ablations are named after the part of CRaFT's loss that they change.
_CRAFT_PREFIXES = ("craft", "cross", "action", "hidden", "token_ce", "both", "floor", "ascent")


def family_of(method: str) -> Family:
    """The family of a method by its name on the command line."""
    if method in _MEMBERS:
        return _MEMBERS[method]
    return CRAFT if method.startswith(_CRAFT_PREFIXES) else OTHER


def full_name(row: Summary | SequenceSummary | Run) -> str:
    """Label, swept setting, and what the user has. "No frames" is said of CRaFT only: there it means something."""
    name = name_of(row.label, row.knob)
    if row.tier is None and row.frames == 0 and family_of(row.method) is not CRAFT:
        return name
    return f"{name}, {said}" if (said := given_to(row)) else name


def colour(value: float) -> str:
    """Orange at 0, near white in the middle, blue at 1."""
    first, second, share = (_LOST, _MIDDLE, value * 2) if value < 0.5 else (_MIDDLE, _KEPT, value * 2 - 1)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


@dataclass(frozen=True)
class Scale:
    """From values to a position between 0 and 1."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float]) -> "Scale":
        """One that holds all values, with some room; logarithmic if they are positive and span decades."""
        low, high = min(values), max(values)
        if low > 0 and high / low > _LOG_FROM:
            return cls(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)), log=True)
        room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        return cls(0.0 if 0 <= low < (high - low) else low - room, high + room)

    def position(self, value: float) -> float:
        """Where the value is: 0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 7) -> list[float]:
        """Round values to write at the axis."""
        if self.log:
            decades = round(math.log10(self.high / self.low))
            every = math.ceil((decades + 1) / most)
            return [self.low * 10**i for i in range(0, decades + 1, every)]
        raw = (self.high - self.low) / most
        power = 10 ** math.floor(math.log10(raw))
        step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= raw * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]

    def label(self, tick: float) -> str:
        """A tick in few letters: a power of ten if decades would need many zeros."""
        if self.log and not 1e-2 <= tick <= 1e3:
            return "10" + str(round(math.log10(tick))).translate(_RAISED)
        return f"{tick:g}"


@dataclass(frozen=True)
class Axes:
    """A drawing area with two scales; positions are in pixels of the drawing, which the page scales to its width."""

    x: Scale
    y: Scale
    x_title: str = ""
    y_title: str = ""
    width: float = 460.0
    height: float = 340.0
    x_labels: tuple[tuple[float, str], ...] = ()  # instead of the scale's own ticks

    def at(self, x: float, y: float) -> Point:
        """Pixel of a point."""
        return (
            _LEFT + self.x.position(x) * (self.width - _LEFT - _RIGHT),
            self.height - _BOTTOM - self.y.position(y) * (self.height - _TOP - _BOTTOM),
        )

    def x_ticks(self) -> Sequence[tuple[float, str]]:
        """Values and labels along the x axis."""
        return self.x_labels or [(tick, self.x.label(tick)) for tick in self.x.ticks()]

    def y_ticks(self) -> Sequence[tuple[float, str]]:
        """Values and labels along the y axis."""
        return [(tick, self.y.label(tick)) for tick in self.y.ticks()]


def spread(points: Sequence[Point], axes: Axes) -> list[Point]:
    """Places near the points where badges cover neither each other nor another point: the nearest, below first."""
    placed: list[Point] = []
    step = 2 * BADGE + 1
    offsets = sorted(
        ((dx * step / 2, dy * step / 2) for dx in range(-12, 13) for dy in range(-12, 25)),
        key=lambda o: (round(o[0] ** 2 + o[1] ** 2), -o[1], o[0]),
    )
    for i, (x, y) in enumerate(points):
        others = [point for j, point in enumerate(points) if j != i]
        candidates = ((x + dx, y + dy) for dx, dy in offsets)
        inside = (c for c in candidates if BADGE < c[0] < axes.width - BADGE and c[1] > BADGE)
        free = (c for c in inside if all(math.dist(c, other) >= step for other in placed))
        clear = (c for c in free if all(math.dist(c, other) > BADGE + 2 for other in others))
        placed.append(next(clear, (x, y)))
    return placed


class Line(NamedTuple):
    """A line to draw: its values, its CSS classes, its dashes, and the label at its right end."""

    values: Sequence[Point]
    css: str
    dashes: str | None
    label: str
    label_css: str
    marks: tuple[Family, Sequence[str]] | None = None  # markers at its points, and what each says


class Curve(NamedTuple):
    """The same in pixels."""

    points: list[Point]
    css: str
    dashes: str | None
    label: str
    label_css: str
    label_x: float
    label_y: float
    marks: list[tuple[Family, Point, str]]


def curves(axes: Axes, lines: Iterable[Line]) -> list[Curve]:
    """Lines as curves, with labels that do not overlap. A logarithmic axis leaves out what is not positive."""
    drawn = [
        (line, points)
        for line in lines
        if (points := [axes.at(x, y) for x, y in line.values if y > 0 or not axes.y.log])
    ]
    labels = apart([points[-1][1] for _, points in drawn])
    made = []
    for (line, points), label_y in zip(drawn, labels, strict=True):
        family, tips = line.marks or (OTHER, ())
        marks = [(family, point, tip) for point, tip in zip(points, tips, strict=bool(tips))]
        label_x = points[-1][0] + (9 if marks else 5)
        made.append(Curve(points, line.css, line.dashes, line.label, line.label_css, label_x, label_y, marks))
    return made


def apart(heights: Sequence[float]) -> list[float]:
    """Heights of labels, each moved down just enough that no two touch; in the order given."""
    placed, last = [0.0] * len(heights), -math.inf
    for i in sorted(range(len(heights)), key=heights.__getitem__):
        placed[i] = last = max(heights[i], last + _LABEL_GAP)
    return placed


_UNIT = Scale(-0.04, 1.06)
_KINDS: dict[Kind, str] = {"action": "drift of actions", "hidden": "drift of hidden states"}
_STAGES = {"before": "before fine-tuning", "plain": "after plain fine-tuning", "craft": "after CRaFT"}
_DASHES = (None, "7 4", "2 4", "9 3 2 3", "12 4")


class _Method(NamedTuple):
    """A method or a checkpoint in the plane of old and new success."""

    name: str
    css: str
    old: float
    new: float


class _Badge(NamedTuple):
    """What is drawn of it: its exact place, and that of its numbered badge."""

    name: str
    css: str
    tip: str
    at: Point
    badge: Point


def retention_planes(rows: Sequence[Summary], evaluations: Sequence[Evaluation] = ()) -> Markup | None:
    """Old against new success: a drawing per policy of a bench, and per evaluation that says what was learned."""
    groups = grouped(rows)
    shown = [group for group in groups if group[0].role == "final"] or groups
    planes = [_plane(_title(group), [_of_summary(row) for row in group]) for group in shown]
    planes += [plane for evaluation in evaluations if (plane := _evaluation_plane(evaluation))]
    return part("figures", planes) if planes else None


def _title(rows: Sequence[Summary]) -> str:
    return f"{policy_name(rows[0].policy, rows[0].view)}, {'final' if rows[0].role == 'final' else 'tuning'} scenarios"


def _of_summary(row: Summary) -> _Method:
    return _Method(full_name(row), family_of(row.method).css, row.old_mean.value, row.new.value)


def _evaluation_plane(evaluation: Evaluation) -> Markup | None:
    """Means over old and over learned tasks; None if nothing was learned, or nothing is old."""
    new = [task for task in evaluation.tasks if task in evaluation.learned]
    old = [task for task in evaluation.tasks if task not in evaluation.learned]
    whole = [row for row in evaluation.rows if set(row.successes) == set(evaluation.tasks)]
    if not (new and old and whole):
        return None
    methods = [
        _Method(row.name, "before" if row is evaluation.rows[0] else "other", _mean(row, old), _mean(row, new))
        for row in whole
    ]
    return _plane(f"Checkpoints after {', '.join(new)}", methods)


def _mean(row: Row, tasks: Sequence[str]) -> float:
    return sum(map(row.rate, tasks)) / len(tasks)


def _plane(title: str, methods: Sequence[_Method]) -> Markup:
    axes = Axes(_UNIT, _UNIT, "success on old tasks (kept)", "success on the new task (learnt)", height=400.0)
    exact = [axes.at(method.old, method.new) for method in methods]
    badges = [
        _Badge(m.name, m.css, f"{m.name}: old {number(m.old)}, new {number(m.new)}", at, badge)
        for m, at, badge in zip(methods, exact, spread(exact, axes), strict=True)
    ]
    return part("plane", title, axes, badges, BADGE)


def drift_planes(runs: Sequence[Run], correlations: dict[str, Correlations]) -> Markup | None:
    """Drift against lost success, per run and per task, for each policy and kind of drift that was measured."""
    single = [run for run in runs if run.stages is None]
    present = {family_of(run.method) for run in single}
    parts: list[Markup] = []
    for policy, found in correlations.items():
        own = [run for run in single if policy_name(run.policy, run.view) == policy]
        figures = []
        for kind in _KINDS:
            per_run = found.action_per_run if kind == "action" else found.hidden_per_run
            per_task = found.action_per_task if kind == "action" else found.hidden_per_task
            figures.append(_scatter(policy, kind, "run", pairs_per_run(own, kind), per_run))
            figures.append(_scatter(policy, kind, "task", pairs_per_task(own, kind), per_task))
        if shown := [figure for figure in figures if figure is not None]:
            parts += [part("heading", policy), part("figures", shown)]
    legend = part("legend", [family for family in FAMILIES if family in present])
    return together([legend, *parts]) if parts else None


def _scatter(
    policy: str, kind: Kind, unit: str, pairs: Sequence[Pair], correlation: Correlation | None
) -> Markup | None:
    if not pairs:
        return None
    drifts = Scale.of([pair.drift for pair in pairs])
    x_title = f"{_KINDS[kind]}{', logarithmic' if drifts.log else ''}"
    lost = Scale.of([*(pair.lost for pair in pairs), 0.0, 1.0])
    axes = Axes(drifts, lost, x_title, f"old success lost per {unit}")
    dots = [(family_of(pair.run.method), axes.at(pair.drift, pair.lost), _tip(pair)) for pair in pairs]
    caption = f"{_KINDS[kind].capitalize()} per {unit}. {_describe(correlation, len(pairs))}"
    return part("scatter", f"{policy}: {caption}", caption, axes, dots, 4.0 if unit == "run" else 3.0)


def _describe(correlation: Correlation | None, n: int) -> str:
    """Spearman's rho in words."""
    if correlation is None:
        return f"No rank correlation can be had from {n} point{'' if n == 1 else 's'}."
    text = f"Spearman ρ\u00a0=\u00a0{number(correlation.rho)}"
    if correlation.low is not None and correlation.high is not None:
        text += f" [{number(correlation.low)}, {number(correlation.high)}]"
    return f"{text}, n\u00a0=\u00a0{correlation.n}."


def _tip(pair: Pair) -> str:
    run = pair.run
    return f"{run.label}, {run.scenario}, seed {run.seed}: drift {pair.drift:.3g}, lost {number(pair.lost)}"


def stage_curves(runs: Sequence[Run]) -> Markup | None:
    """Success after each stage of a sequence, a drawing per policy and scenario; None without sequences."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.stages is not None:
            groups.setdefault((policy_name(run.policy, run.view), run.scenario), []).append(run)
    drawn = [_stages(policy, scenario, group) for (policy, scenario), group in groups.items()]
    return part("figures", drawn) if drawn else None


def _stages(policy: str, scenario: str, runs: Sequence[Run]) -> Markup:
    stages = max(len(run.new_tasks) for run in runs)
    axes = Axes(
        Scale(0.0, stages * 1.08),  # with room for the numbers at the right end of the curves
        Scale(-0.02, 1.04),
        "tasks learnt",
        "success on tasks learnt so far",
        x_labels=((0.0, "before"), *((float(i), str(i)) for i in range(1, stages + 1))),
    )
    lines, keys = [], []
    for i, setting in enumerate(group_by_setting(runs)):
        family, name, means = family_of(setting[0].method), full_name(setting[0]), stage_means(setting)
        tips = [f"{name}: {mean:.2f} after {stage} tasks" for stage, mean in enumerate(means)]
        dashes = _DASHES[i % len(_DASHES)]
        lines.append(
            Line(list(enumerate(means)), f"curve {family.css}", dashes, str(i + 1), family.css, (family, tips))
        )
        keys.append((family.css, name))
    order = " → ".join(runs[0].new_tasks)
    caption = f"{policy}, {scenario}: mean success on the base tasks and those learnt so far, after each of {order}"
    return part("curves", caption, [(caption, axes, curves(axes, lines))], keys)


def stage_means(runs: Sequence[Run]) -> list[float]:
    """Mean success on the tasks known after each stage, over tasks and runs."""
    curves = []
    for run in runs:
        matrix = success_matrix(run)
        known = [matrix.base_tasks + matrix.new_tasks[:stage] for stage in range(len(matrix.after))]
        curves.append([sum(row[t] for t in tasks) / len(tasks) for row, tasks in zip(matrix.after, known, strict=True)])
    # Runs of one setting may have sequences of different lengths; each stage is the mean of those that reach it.
    longest = max(map(len, curves))
    reached = [[curve[i] for curve in curves if i < len(curve)] for i in range(longest)]
    return [sum(values) / len(values) for values in reached]


def filmstrips(strips: Sequence[Strip]) -> Markup | None:
    """Rollouts as strips of pictures, inside the page: the same prompt before, after plain, after CRaFT."""
    return together(
        part("film", strip.caption, [(_STAGES[s], base64.b64encode(png).decode()) for s, png in strip.pictures.items()])
        for strip in strips
    )
