import io

import numpy as np
import pytest
from PIL import Image

from lerobot_craft.bench.cell_plan import plan_films, plan_runs
from lerobot_craft.bench.filmstrip import _Camera, caption, develop, filmstrips

GREEN = (46, 160, 67, 255)


def edges(png, count):
    """Colours of the upper edge, frame by frame."""
    strip = Image.open(io.BytesIO(png))
    return [strip.getpixel((round((i + 0.5) * strip.width / count), 0)) for i in range(count)]


class OneEpisode:
    """A vector of environments whose first one ends after some steps; a picture shows the step."""

    def __init__(self, length):
        self.envs, self.step, self.length, self.drawings = [self], 0, length, 0

    @property
    def is_frozen(self):
        return self.step >= self.length

    def render(self):
        self.drawings += 1
        return np.full((240, 240, 3), min(self.step, self.length), np.uint8)

    def play(self, steps, look):
        for self.step in range(steps + 1):
            look(self)


@pytest.mark.parametrize("played", [60, 50, 41])
def test_only_the_frames_that_are_shown_are_drawn(played):
    camera, episode = _Camera(60, as_seen=False), OneEpisode(length=35)
    episode.play(played, camera)
    assert camera.moments == [0, 10, 20, 30, 40, 50, 60]
    # The end of the episode is what is seen from then on, however long others go on.
    assert [int(picture[0, 0, 0]) for picture in camera.pictures] == [0, 10, 20, 30, 35, 35, 35]
    assert episode.drawings == 5


def test_an_episode_that_fails_is_drawn_to_its_end():
    camera, episode = _Camera(60, as_seen=False), OneEpisode(length=60)
    episode.play(60, camera)
    assert [int(picture[0, 0, 0]) for picture in camera.pictures] == [0, 10, 20, 30, 40, 50, 60]


def test_the_edge_turns_green_with_success():
    pictures = [np.zeros((240, 240, 3), np.uint8)] * 4
    png = develop(pictures, [0, 10, 20, 30], success_step=20)
    assert [colour == GREEN for colour in edges(png, 4)] == [False, False, True, True]
    assert GREEN not in edges(develop(pictures, [0, 10, 20, 30], success_step=None), 4)
    assert Image.open(io.BytesIO(png)).size == (4 * 150 + 3 * 8, 150)


def test_the_caption_says_what_was_asked_for(bench_settings):
    film = plan_films(plan_runs(bench_settings(episodes=20)))[0]
    assert caption(film, "reach-red").startswith('"reach for the red target" (old task), the first of 20 starts')
    assert "(new task)" in caption(film, "reach-blue")


def test_of_several_runs_of_a_method_the_first_is_shown(bench_settings):
    settings = bench_settings(anchors=(0, 20), film=True)
    films = plan_films(plan_runs(settings))
    before, plain, craft, _ = films
    old, new = filmstrips(settings, {film.digest for film in films})
    assert [old.before, old.plain, old.craft] == [
        f"cells/{film.directory.name}/reach-red.png" for film in (before, plain, craft)
    ]
    assert new.craft == f"cells/{craft.directory.name}/reach-blue.png"


def test_what_was_not_filmed_is_left_out(bench_settings):
    settings = bench_settings(film=True)
    films = plan_films(plan_runs(settings))
    strips = filmstrips(settings, {film.digest for film in films if film.name != plan_runs(settings)[0].name})
    assert [strip.plain for strip in strips] == [None, None]
    assert all(strip.before for strip in strips)
    assert filmstrips(settings, set()) == []
    assert filmstrips(bench_settings(), {film.digest for film in films}) == []


def test_who_sees_is_filmed_as_seen():
    camera, episode = _Camera(60, as_seen=True), OneEpisode(length=35)
    episode.unwrapped, episode.look = episode, lambda: np.full((64, 64, 3), 7, np.uint8)
    episode.play(60, camera)
    assert {picture.shape for picture in camera.pictures} == {(64, 64, 3)}
    assert episode.drawings == 0
    assert Image.open(io.BytesIO(develop(camera.pictures, camera.moments, None))).height == 150
