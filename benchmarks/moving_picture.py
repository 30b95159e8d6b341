"""The README's moving picture: one old prompt and one start, played by the three policies of `craft demo`.

    craft demo --output_dir=outputs/demo
    python benchmarks/moving_picture.py outputs/demo

The episode is the first of those that the demo's table counts, and nothing is chosen: another seed of the demo gives
another picture.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from PIL import Image, ImageColor, ImageDraw, ImageFont

import lerobot_craft.tiny  # noqa: F401  registers the small policies
from lerobot_craft.bench.cell_plan import plan_films, plan_runs
from lerobot_craft.bench.cells import Base, Film
from lerobot_craft.bench.demo_run import demo_settings
from lerobot_craft.bench.metaworld.simulation import UInt8Array
from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.bench.settings import first_start
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.evaluate import side_by_side
from lerobot_craft.lerobot_api.rollouts import load_player, watch

PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "faucet.gif"
_CAPTIONS = {"base": "before", "naive": "plain fine-tuning", "craft": "CRaFT"}
_STRIDE = 2  # control steps between two frames
_FRAME_MS, _HOLD_MS = 60, 1_800  # the last frame stays
_GAP, _TOP, _BOTTOM, _EDGE = 16, 46, 40, 4  # pixels: between panels, above and below them, around each
_PAPER, _INK, _SOFT, _REACHED = "#ffffff", "#111722", "#8a929c", "#2ea043"
_NEARLY_PAPER = 244  # of each of red, green and blue


@dataclass(frozen=True)
class Panel:
    """One policy's episode.

    Attributes:
        caption: Who plays.
        pictures: [H, W, 3] each, `_STRIDE` steps apart; the last one is the end of the episode.
        reached: Whether the episode ended with success.
    """

    caption: str
    pictures: list[UInt8Array]
    reached: bool


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Film the three policies of `craft demo` under one old prompt.")
    parser.add_argument("demo", type=Path, metavar="DIR", help="output directory of a finished `craft demo`")
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE.gif", help="default: the README's")
    options = parser.parse_args(argv)
    try:
        films = _films(options.demo)
        # The renderer goes with the thread that made it: at the end of the process MuJoCo could not free it any more.
        with ThreadPoolExecutor(max_workers=1) as thread:
            panels = list(thread.map(play, films))
    except CraftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save(compose(find_task(films[0].shown[0]).instruction, panels), options.output)
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.2f} MB")
    return 0


def _films(demo: Path) -> list[Film]:
    """The demo's policies: before, plain, CRaFT."""
    films = plan_films(plan_runs(demo_settings(demo)))
    for film in films:
        if not film.filmed.checkpoint.is_dir():
            raise CraftError(f"{demo}: {film.filmed.checkpoint} is missing. Run: craft demo --output_dir={demo}")
    return films


def play(film: Film) -> Panel:
    """The first episode of the old task, as the demo's evaluation played it."""
    settings, filmed = film.settings, film.filmed
    base, method = (filmed, "base") if isinstance(filmed, Base) else (filmed.base, filmed.method.name)
    env = settings.env(film.shown[0])
    camera = _Camera()
    steps = watch(
        load_player(filmed.checkpoint, env),
        env,
        episodes=side_by_side(settings.episodes),
        seed=first_start(base.seed),
        look=camera,
    )
    return Panel(_CAPTIONS[method], camera.pictures, reached=steps[0] is not None)


class _Camera:
    """Draws the first environment at every `_STRIDE`-th step, until its episode ends."""

    def __init__(self) -> None:
        self.pictures: list[UInt8Array] = []
        self._step, self._ended = 0, False

    def __call__(self, env: Any) -> None:
        first = env.envs[0]
        if not self._ended and (first.is_frozen or self._step % _STRIDE == 0):
            self.pictures.append(first.render())
        self._ended = self._ended or first.is_frozen
        self._step += 1


def compose(prompt: str, panels: Sequence[Panel]) -> list[Image.Image]:
    """The frames: panels side by side under the prompt; an episode that ended stays at its last picture."""
    return [_frame(prompt, panels, moment) for moment in range(max(len(panel.pictures) for panel in panels))]


def _frame(prompt: str, panels: Sequence[Panel], moment: int) -> Image.Image:
    side = len(panels[0].pictures[0]) + 2 * _EDGE
    frame = Image.new("RGB", (len(panels) * (side + _GAP) + _GAP, _TOP + side + _BOTTOM), _PAPER)
    draw = ImageDraw.Draw(frame)
    large, small = ImageFont.load_default(26), ImageFont.load_default(23)
    draw.text((frame.width / 2, _TOP / 2), f"“{prompt}”", _INK, large, anchor="mm")
    for i, panel in enumerate(panels):
        left = _GAP + i * (side + _GAP)
        over = moment >= len(panel.pictures) - 1
        done = over and panel.reached
        draw.rectangle((left, _TOP, left + side - 1, _TOP + side - 1), _REACHED if done else _SOFT)
        picture = Image.fromarray(panel.pictures[min(moment, len(panel.pictures) - 1)])
        frame.paste(picture, (left + _EDGE, _TOP + _EDGE))
        said = f"{panel.caption}: {'done' if done else 'failed'}" if over else panel.caption
        draw.text((left + side / 2, _TOP + side + _BOTTOM / 2), said, _INK, small, anchor="mm")
    return frame


def save(frames: Sequence[Image.Image], path: Path) -> None:
    """A GIF that loops, with one palette for all frames, so that what stands still costs nothing."""
    ends = Image.new("RGB", (frames[0].width, 2 * frames[0].height))
    ends.paste(frames[0], (0, 0))
    ends.paste(frames[-1], (0, frames[0].height))
    palette = ends.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    # Pillow takes a color of the palette that is near, not the nearest: gray paper would show on a white page.
    colors = (palette.getpalette() or [])[: 3 * 256]
    for i in range(0, len(colors), 3):
        if min(colors[i : i + 3]) >= _NEARLY_PAPER:
            colors[i : i + 3] = ImageColor.getrgb(_PAPER)
    palette.putpalette(colors)
    plain = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [_FRAME_MS] * (len(plain) - 1) + [_HOLD_MS]
    plain[0].save(path, save_all=True, append_images=plain[1:], duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
