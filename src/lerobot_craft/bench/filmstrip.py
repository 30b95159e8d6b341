"""Filmstrips: the first rollout of an evaluation, replayed and drawn at a few moments."""

import io
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from lerobot_craft.bench.cell_plan import plan_films, plan_runs
from lerobot_craft.bench.cells import Base, Film
from lerobot_craft.bench.metaworld.simulation import UInt8Array
from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.bench.settings import BenchSettings, first_start
from lerobot_craft.evaluation.evaluate import side_by_side
from lerobot_craft.evaluation.results import Filmstrip
from lerobot_craft.io.files import write_atomically
from lerobot_craft.lerobot_api.rollouts import Player, load_player, watch

_FRAMES = 7
_SIDE = 140  # pixels of one frame
_EDGE, _GAP = 5, 8  # pixels
_REACHED, _NOT_REACHED, _NOTHING = (46, 160, 67), (128, 136, 146), (0, 0, 0, 0)  # the page may be light or dark


def film(cell: Film) -> None:
    """Draw the strips of a film; the filmed cell must be finished."""
    player = load_player(cell.filmed.checkpoint, cell.settings.env(cell.shown[0]))
    for task in cell.shown:
        write_atomically(cell.strip(task), _film_task(cell, player, task))


def filmstrips(settings: BenchSettings, finished: Container[str]) -> list[Filmstrip]:
    """Strips of each scenario: before fine-tuning, and after its first run of each of `naive` and `craft`.

    Args:
        settings: The bench's settings; empty without `film`.
        finished: Digests of finished cells; others are skipped.
    """
    runs = plan_runs(settings) if settings.film else []
    scenarios = dict.fromkeys(run.scenario.name for run in runs)
    films = [plan_films([run for run in runs if run.scenario.name == name]) for name in scenarios]
    return [strip for cells in films for strip in _strips([cell for cell in cells if cell.digest in finished])]


def _strips(films: Iterable[Film]) -> list[Filmstrip]:
    made: dict[str, Film] = {}
    for cell in films:
        made.setdefault("before" if isinstance(cell.filmed, Base) else cell.filmed.method.name, cell)
    shown = next((cell.shown for cell in made.values()), ())
    return [
        Filmstrip(
            next(caption(cell, task) for cell in made.values()),
            *(_place(made.get(which), task) for which in ("before", "naive", "craft")),
        )
        for task in shown
    ]


def _place(cell: Film | None, task: str) -> str | None:
    """A strip's path relative to the output directory."""
    return None if cell is None else str(cell.strip(task).relative_to(cell.settings.output_dir))


def caption(cell: Film, task: str) -> str:
    """The instruction, and what the edges mean."""
    which = "new" if task in cell.scenario.new else "old"
    view = cell.settings.view
    last = find_task(task, view).max_steps
    shown = ", as the policy saw it" if view == "seen" else ""
    return (
        f'"{find_task(task).instruction}" ({which} task), the first of {cell.settings.episodes} starts, '
        f"from step 0 to {last}{shown}; a green edge: the goal is reached"
    )


def _film_task(cell: Film, player: Player, task: str) -> bytes:
    settings = cell.settings
    camera = _Camera(find_task(task, settings.view).max_steps, as_seen=settings.view == "seen")
    filmed = cell.filmed if isinstance(cell.filmed, Base) else cell.filmed.base
    steps = watch(
        player,
        settings.env(task),
        episodes=side_by_side(settings.episodes),
        seed=first_start(filmed.seed),
        look=camera,
    )
    return develop(camera.pictures, camera.moments, steps[0])


class _Camera:
    """Draws the first environment at equally spaced steps only.

    Args:
        last: The last of these steps.
        as_seen: Use the picture last shown to the policy, instead of one for people.
    """

    def __init__(self, last: int, *, as_seen: bool) -> None:
        self._as_seen = as_seen
        self.moments = [round(i * last / (_FRAMES - 1)) for i in range(_FRAMES)]
        self._step = 0
        self._drawn: dict[int, UInt8Array] = {}
        self._end: UInt8Array | None = None  # at the end of the episode; others may be longer or shorter

    def __call__(self, env: Any) -> None:
        first = env.envs[0]
        if self._end is None:
            if first.is_frozen:
                self._end = self._picture(first)
            elif self._step in self.moments:
                self._drawn[self._step] = self._picture(first)
        self._step += 1

    def _picture(self, env: Any) -> UInt8Array:
        picture: UInt8Array = env.unwrapped.look() if self._as_seen else env.render()
        return picture

    @property
    def pictures(self) -> list[UInt8Array]:
        """One picture per moment."""
        end = next(reversed(self._drawn.values())) if self._end is None else self._end
        return [self._drawn.get(moment, end) for moment in self.moments]


def develop(pictures: Sequence[UInt8Array], moments: Sequence[int], success_step: int | None) -> bytes:
    """Pictures [H, W, 3] side by side, as a PNG; those from success on have a green edge.

    Args:
        pictures: In order.
        moments: The step of each.
        success_step: Step of success; None: never.
    """
    side = _SIDE + 2 * _EDGE
    strip = Image.new("RGBA", (len(pictures) * (side + _GAP) - _GAP, side), _NOTHING)
    for i, (picture, moment) in enumerate(zip(pictures, moments, strict=True)):
        reached = success_step is not None and moment >= success_step
        # Small pictures keep visible pixels.
        way = Image.Resampling.LANCZOS if len(picture) > _SIDE else Image.Resampling.NEAREST
        small = Image.fromarray(np.asarray(picture)).resize((_SIDE, _SIDE), way)
        edged = ImageOps.expand(small, _EDGE, _REACHED if reached else _NOT_REACHED)
        strip.paste(edged, (i * (side + _GAP), 0))
    file = io.BytesIO()
    strip.save(file, "PNG", optimize=True)
    return file.getvalue()
