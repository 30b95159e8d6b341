import os
from dataclasses import replace

import pytest

from lerobot_craft.doctor import Status
from lerobot_craft.doctor.rendering import check_rendering, try_backend

MUJOCO = "3.9.0"


def machine(*working):
    """A machine on which just these back-ends render."""
    return lambda backend: None if backend in working else "no GL here"


def test_without_mujoco_it_is_a_note(surroundings):
    check = check_rendering(None, surroundings, machine("egl"))
    assert (check.status, check.remedy) == (Status.NOTE, "pip install 'lerobot-craft[bench]'")


def test_rendering_that_is_switched_off_is_left_alone(surroundings):
    off = replace(surroundings, env={"MUJOCO_GL": "Off"})
    assert check_rendering(MUJOCO, off, machine()).status is Status.NOTE


@pytest.mark.parametrize(
    ("env", "working", "status", "remedy"),
    [
        ({"MUJOCO_GL": "egl"}, ("egl",), "ok", None),
        ({"MUJOCO_GL": "EGL "}, ("egl",), "ok", None),
        ({"MUJOCO_GL": "osmesa"}, ("egl", "osmesa"), "ok", None),
        ({"DISPLAY": ":0"}, ("",), "ok", None),
        ({"MUJOCO_GL": "osmesa"}, ("egl",), "warn", "export MUJOCO_GL=egl"),
        ({"MUJOCO_GL": "egl"}, ("osmesa",), "warn", "export MUJOCO_GL=osmesa"),
        ({"DISPLAY": ":0"}, ("egl",), "warn", "export MUJOCO_GL=egl"),
        ({}, ("egl", "osmesa"), "warn", "export MUJOCO_GL=egl"),
        ({}, ("osmesa",), "warn", "export MUJOCO_GL=osmesa"),
        ({}, (), "warn", "apt-get update && apt-get install -y libegl1 libgl1 && export MUJOCO_GL=egl"),
        (
            {"MUJOCO_GL": "egl"},
            (),
            "warn",
            "apt-get update && apt-get install -y libegl1 libgl1 && export MUJOCO_GL=egl",
        ),
    ],
)
def test_the_line_leads_to_a_back_end_that_works(surroundings, env, working, status, remedy):
    check = check_rendering(MUJOCO, replace(surroundings, env=env), machine(*working))
    assert (check.status, check.remedy) == (status, remedy)


def test_a_mac_has_one_back_end(surroundings):
    mac = replace(surroundings, system="Darwin")
    assert check_rendering(MUJOCO, mac, machine("")).status is Status.OK
    misled = replace(mac, env={"MUJOCO_GL": "egl"})
    assert check_rendering(MUJOCO, misled, machine("")).remedy == "unset MUJOCO_GL"


def test_a_back_end_really_renders_here():
    failures = {backend: try_backend(backend, os.environ) for backend in ("egl", "osmesa", "")}
    if None not in failures.values():
        pytest.skip(f"no GL back-end on this machine: {failures}")


def test_the_reason_is_mujocos_own():
    assert "invalid value for environment variable MUJOCO_GL" in try_backend("nonsense", os.environ)


@pytest.mark.parametrize(
    ("mujoco", "reason"),
    [
        ("import os; os.abort()", "was killed by SIGABRT"),
        (
            """
import numpy
class Thing:
    from_xml_string = classmethod(lambda cls, xml: cls())
    def __init__(self, *_): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def update_scene(self, data): pass
    def render(self): return numpy.zeros((64, 64, 3), numpy.uint8)
MjModel = MjData = Renderer = mj_forward = Thing
""",
            "every pixel came out alike",
        ),
    ],
)
def test_a_back_end_that_aborts_or_paints_nothing_does_not_work(tmp_path, mujoco, reason):
    (tmp_path / "mujoco.py").write_text(mujoco)
    assert try_backend("egl", {**os.environ, "PYTHONPATH": str(tmp_path)}) == reason
