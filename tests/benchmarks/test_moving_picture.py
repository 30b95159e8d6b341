"""The README's moving picture: what its frames show, and that the committed one is small enough to load."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
SIDE = 40


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "moving_picture.py"))


def shades(count):
    """Pictures that can be told apart."""
    return [np.full((SIDE, SIDE, 3), 60 + 20 * i, np.uint8) for i in range(count)]


def test_every_panel_stays_at_its_end_and_says_how_it_ended(script, tmp_path):
    panels = [script["Panel"](*args) for args in (("before", shades(3), True), ("plain", shades(5), False))]
    frames = script["compose"]("open the drawer", panels)
    edge, gap, top = script["_EDGE"], script["_GAP"], script["_TOP"]
    middle = top + edge + SIDE // 2
    left, right = (gap + i * (SIDE + 2 * edge + gap) for i in (0, 1))
    shown = [[frame.getpixel((x + edge + SIDE // 2, middle))[0] for x in (left, right)] for frame in frames]
    assert shown == [[60, 60], [80, 80], [100, 100], [100, 120], [100, 140]]
    edges = [[frame.getpixel((x, middle)) for x in (left, right)] for frame in frames]
    green = (46, 160, 67)
    assert [[colour == green for colour in frame] for frame in edges] == [[False] * 2] * 2 + [[True, False]] * 3

    script["save"](frames, tmp_path / "m.gif")
    with Image.open(tmp_path / "m.gif") as made:
        assert (made.n_frames, made.info["loop"], made.size) == (5, 0, frames[0].size)
        made.seek(4)
        assert made.info["duration"] == script["_HOLD_MS"]
        drift = np.abs(np.asarray(made.convert("RGB"), int) - np.asarray(frames[4], int))
        assert drift[middle, right + edge + 1].max() <= 8
        assert made.convert("RGB").getpixel((1, 1)) == (255, 255, 255)


def test_a_directory_without_a_demo_is_refused(script, tmp_path, capsys):
    assert script["main"]([str(tmp_path / "none"), f"--output={tmp_path / 'm.gif'}"]) == 1
    assert "Run: craft demo --output_dir=" in capsys.readouterr().err
    assert not (tmp_path / "m.gif").exists()


def test_the_committed_one_has_three_panels_and_loads_quickly(script):
    path = script["PICTURE"]
    assert path.stat().st_size < 2_000_000
    with Image.open(path) as picture:
        side = 240 + 2 * script["_EDGE"]
        assert picture.width == 3 * side + 4 * script["_GAP"]
        assert picture.n_frames > 20
