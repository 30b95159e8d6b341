"""Choose each method's knob on tuning scenarios, and pass the choice to the bench that makes the table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from lerobot_craft.bench.board import scores
from lerobot_craft.bench.cell_files import CellResult
from lerobot_craft.bench.cells import Run
from lerobot_craft.bench.compared_methods import METHODS
from lerobot_craft.bench.scenarios import find_scenario
from lerobot_craft.bench.settings import BenchSettings
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import read_bytes, write_atomically
from lerobot_craft.io.strict_json import StrictJSONError, decode, parse_object, to_json

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Sweep:
    """Result of a sweep.

    Attributes:
        swept_on: Scenarios.
        knobs: Each method's best value: highest mean of old and new success over scenarios, seeds and frames. On a tie
            the method's default, then the first of its grid.
        scores: That mean, by method and value.
    """

    swept_on: list[str]
    knobs: dict[str, float]
    scores: dict[str, dict[str, float]]


def check_scenarios(names: Iterable[str]) -> None:
    """Refuse to tune on final scenarios."""
    for name in names:
        if find_scenario(name).role != "tuning":
            raise CraftError(
                f"--sweep on {name} would choose settings on a scenario that is kept for the final table: sweep on a "
                "scenario whose role is tuning, and give the chosen values to the bench with --knobs"
            )


def choose(runs: Iterable[Run], results: Mapping[str, CellResult], settings: BenchSettings) -> Sweep:
    """The best value of each knob among finished runs."""
    found: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        knob = run.method.knob
        if knob is not None and run.digest in results:
            old, _, new = scores(run, results[run.digest])
            of_value = found.setdefault(run.method.name, {}).setdefault(
                knob.value if run.knob is None else run.knob, []
            )
            of_value.append((old + new) / 2)
    means = {name: {value: fmean(seen) for value, seen in of.items()} for name, of in found.items()}
    best = {name: max(of, key=lambda value: (of[value], _is_own(name, value))) for name, of in means.items()}
    shown = {name: {f"{value:g}": score for value, score in of.items()} for name, of in means.items()}
    return Sweep(list(settings.scenarios), best, shown)


def _is_own(method: str, value: float) -> bool:
    knob = METHODS[method].knob
    return knob is not None and knob.value == value


def write_sweep(path: Path, sweep: Sweep) -> None:
    """Write a file for `--knobs`."""
    write_atomically(path, to_json(sweep))


def read_sweep(path: Path) -> Sweep:
    """Read a file of `craft bench --sweep`."""
    try:
        sweep = decode(Sweep, parse_object(read_bytes(path)))
    except StrictJSONError as error:
        raise CraftError(f"{path} is no file of `craft bench --sweep`: {error}") from error
    if unknown := [name for name in sweep.knobs if name not in METHODS or METHODS[name].knob is None]:
        raise CraftError(f"{path} sets a knob of {unknown[0]}, which is no method with one: sweep again")
    return replace(sweep, knobs={name: _as_tried(name, value) for name, value in sweep.knobs.items()})


def _as_tried(method: str, value: float) -> float:
    """The number as in the grid: JSON turns a rank of 4 into 4.0, which is not a valid rank."""
    knob = METHODS[method].knob
    tried = () if knob is None else (knob.value, *knob.grid)
    return next((number for number in tried if number == value), value)


def sweep_lines(sweep: Sweep) -> list[str]:
    """The sweep as lines of text."""
    lines = [f"mean of old and new success on {', '.join(sweep.swept_on)}:"]
    for name, of_value in sweep.scores.items():
        tried = "  ".join(f"{value}: {score:.2f}" for value, score in of_value.items())
        lines.append(f"  {name:<20} {tried}  -> {sweep.knobs[name]:g}")
    return lines
