import sys

import pytest

from lerobot_craft.bench.metaworld import simulation
from lerobot_craft.errors import CraftError

EGL, OSMESA = {"libEGL.so.1", "libGL.so.1"}, {"libOSMesa.so.8"}


def pick(libraries, working=()):
    """The choice, and which back-ends were really tried for it."""
    tried = []

    def can_draw(backend):
        tried.append(backend)
        return backend in working

    return simulation.pick_backend(lambda library: library in libraries, can_draw), tried


def test_the_only_backend_is_taken_without_a_trial():
    assert pick(EGL) == ("egl", [])
    assert pick(OSMESA) == ("osmesa", [])


def test_egl_without_libgl_is_none():
    assert pick({"libEGL.so.1"}) == (None, [])


def test_of_two_backends_the_first_that_draws_is_taken():
    assert pick(EGL | OSMESA, ["egl", "osmesa"]) == ("egl", ["egl"])
    assert pick(EGL | OSMESA, ["osmesa"]) == ("osmesa", ["egl", "osmesa"])


def test_a_choice_that_was_made_already_stays():
    env = {"MUJOCO_GL": "osmesa"}
    simulation.choose_backend(env)
    assert env == {"MUJOCO_GL": "osmesa"}


@pytest.mark.parametrize("backend", ["egl", None])
def test_a_choice_is_made_where_there_is_one(monkeypatch, backend):
    monkeypatch.setattr(simulation.platform, "system", lambda: "Linux")
    monkeypatch.setattr(simulation, "pick_backend", lambda can_load, can_draw: backend)
    env = {"MUJOCO_GL": ""}
    simulation.choose_backend(env)
    assert env == {"MUJOCO_GL": backend or ""}


@pytest.mark.parametrize(
    ("package", "load"),
    [("mujoco", simulation.import_mujoco), ("metaworld.env_dict", simulation._metaworld.__wrapped__)],
)
def test_without_the_simulator_it_says_what_to_type(monkeypatch, package, load):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(CraftError, match=r"^The bench needs .* Type: pip install 'lerobot-craft\[bench\]'$"):
        load()


@pytest.mark.skipif(simulation.platform.system() != "Linux", reason="other systems have one back-end each")
def test_where_nothing_draws_the_message_says_what_to_type(monkeypatch):
    monkeypatch.setattr(simulation, "try_backend", lambda backend, env: "no such device")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    message = str(simulation.no_drawing(RuntimeError("broken driver")))
    assert "RuntimeError: broken driver" in message
    assert "egl and osmesa were tried in vain" in message
    assert "export MUJOCO_GL=egl" in message
