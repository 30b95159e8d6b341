import os
import subprocess
import sys

import numpy as np
import pytest

from lerobot_craft.bench.metaworld.simulation import Simulation
from lerobot_craft.bench.metaworld.tasks import STATE_NAMES, TASKS, VIEWS, find_task, state_names

SCENES = {}
for _task in TASKS.values():
    SCENES.setdefault(_task.scene.name, []).append(_task.name)
PAIRS = [(first, other) for first, *others in SCENES.values() for other in others]


def steps_to_success(simulation, seed):
    """How long the expert takes; None if it takes too long."""
    simulation.reset(seed)
    for step in range(1, simulation.task.max_steps + 1):
        if simulation.step(simulation.expert()):
            return step
    return None


def trajectory(simulation, seed, actions):
    states = [simulation.reset(seed)]
    for action in actions:
        simulation.step(action)
        states.append(simulation.state())
    return np.stack(states)


def random_actions(seed, length):
    return np.random.default_rng(seed).uniform(-1, 1, (length, 4))


def test_there_are_pairs_and_one_table_with_six_instructions():
    assert sum(len(names) == 2 for names in SCENES.values()) >= 6
    assert len(SCENES["block"]) == 6


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_only_the_instruction_tells_a_pair_apart(pair, view):
    one, other = (Simulation(name, view) for name in pair)
    # At random, and then as each of the experts wants, so that the object moves too.
    for seed, leader in enumerate((None, one, other)):
        np.testing.assert_array_equal(one.reset(seed), other.reset(seed))
        np.testing.assert_array_equal(one.image(32), other.image(32))
        for action in random_actions(seed, 50):
            action = action if leader is None else leader.expert()
            one.step(action)
            other.step(action)
            np.testing.assert_array_equal(one.state(), other.state())
        np.testing.assert_array_equal(one.image(32), other.image(32))


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_what_is_success_for_one_of_a_pair_is_none_for_the_other(pair):
    for mine, yours in (pair, pair[::-1]):
        leader, other = Simulation(mine), Simulation(yours)
        leader.reset(0)
        other.reset(0)
        done = False
        while not done:
            action = leader.expert()
            done = leader.step(action)
            assert not other.step(action)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", TASKS)
def test_the_expert_succeeds_well_before_the_end(name, view):
    if view == "seen" and find_task(name, view) == find_task(name):
        pytest.skip("placed as in the other view")
    simulation = Simulation(name, view)
    taken = [steps_to_success(simulation, seed) for seed in (11, 12, 13)]
    in_time = [steps is not None and 1 < steps <= 0.9 * simulation.task.max_steps for steps in taken]
    # Widely placed, one lock in eight is unlocked too late.
    assert sum(in_time) >= (2 if (name, view) == ("door-unlock", "seen") else 3), taken


@pytest.mark.slow  # 2,600 episodes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("view", VIEWS)
def test_every_expert_succeeds_in_34_of_40_episodes(view):
    for name in TASKS:
        simulation = Simulation(name, view)
        assert sum(steps_to_success(simulation, seed) is not None for seed in range(40)) >= 34, name


def test_who_sees_is_told_nothing_of_the_object():
    told, seen = Simulation("faucet-open"), Simulation("faucet-open", "seen")
    for simulation, view in ((told, "told"), (seen, "seen")):
        assert simulation.reset(0).shape == (len(state_names(view)),)
    starts = np.stack([seen.reset(seed) for seed in range(5)])
    np.testing.assert_array_equal(starts, starts[[0]].repeat(5, axis=0))
    pictures = [seen.image(64) for seed in range(5) if seen.reset(seed) is not None]
    assert len({picture.tobytes() for picture in pictures}) == 5


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.scene.wide])
def test_objects_are_placed_over_more_of_the_table_where_they_have_to_be_seen(name):
    def spread(view):
        (low, high), simulation = find_task(name, "seen").scene.wide, Simulation(name, view)
        placed = []
        for seed in range(20):
            simulation.reset(seed)
            placed.append(simulation._env._get_pos_objects()[:2].copy())
        return np.ptp(placed, axis=0), np.subtract(high, low)[:2]

    (told, _), (seen, asked) = spread("told"), spread("seen")
    assert seen.sum() > told.sum()
    assert np.all(seen >= 0.6 * asked)


def test_the_arm_is_drawn_for_people_only():
    simulation = Simulation("drawer-open", "seen")
    simulation.reset(0)
    with_arm, without = simulation.image(240, arm=True), simulation.image(240)
    assert (with_arm != without).any(-1).mean() > 0.05
    np.testing.assert_array_equal(simulation.image(240), without)


def test_states_are_what_their_names_say():
    simulation = Simulation("drawer-open")
    state = simulation.reset(0)
    assert state.dtype == np.float32
    assert state.shape == (len(STATE_NAMES),)
    for action, moved in (([1, 0, 0, -1], 0), ([0, -1, 0, -1], 1), ([0, 0, 1, -1], 2)):
        before = simulation.state()
        for _ in range(10):
            simulation.step(action)
        change = simulation.state() - before
        assert np.argmax(np.abs(change[:3])) == moved
        assert np.sign(change[moved]) == np.sign(action[moved])
    for _ in range(20):
        simulation.step([0, 0, 0, 1])
    assert simulation.state()[3] < before[3] - 0.1, "the gripper closes"


def test_the_seed_decides_the_start():
    simulation = Simulation("faucet-open")
    starts = np.stack([simulation.reset(seed) for seed in (0, 1, 2, 0)])
    np.testing.assert_array_equal(starts[0], starts[3])
    assert len(np.unique(starts[:3], axis=0)) == 3


@pytest.mark.parametrize("name", ["push-red", "door-lock", "window-close"])
def test_an_episode_knows_nothing_of_the_one_before(name):
    actions = random_actions(1, 30)
    fresh = trajectory(Simulation(name), 5, actions)
    used = Simulation(name)
    steps_to_success(used, 9)
    np.testing.assert_array_equal(trajectory(used, 5, actions), fresh)


def test_simulations_side_by_side_do_not_touch_each_other():
    left, right, alone = (Simulation("faucet-open") for _ in range(3))
    expected = [trajectory(alone, seed, random_actions(seed, 30)) for seed in (3, 4)]
    seen = [[left.reset(3)], [right.reset(4)]]
    for actions in zip(random_actions(3, 30), random_actions(4, 30), strict=True):
        for simulation, action, states in zip((left, right), actions, seen, strict=True):
            simulation.step(action)
            states.append(simulation.state())
    np.testing.assert_array_equal(seen, expected)


def test_an_action_beyond_the_limits_is_clipped():
    one, other = Simulation("reach-red"), Simulation("reach-red")
    np.testing.assert_array_equal(
        trajectory(one, 0, [[5, -5, 0.5, 2]] * 5), trajectory(other, 0, [[1, -1, 0.5, 1]] * 5)
    )


def test_pictures_come_in_any_size_and_show_both_targets():
    simulation = Simulation("push-red")
    simulation.reset(0)
    for side in (64, 240, 700):
        picture = simulation.image(side)
        assert picture.shape == (side, side, 3)
        assert picture.dtype == np.uint8
    red, green, blue = np.moveaxis(simulation.image(240).astype(int), -1, 0)
    assert ((blue > 120) & (red < 60) & (green < 60)).sum() > 20
    assert ((red > 200) & (green < 60) & (blue < 60)).sum() > 20


def test_a_picture_shows_the_object_move():
    simulation = Simulation("drawer-close")
    simulation.reset(0)
    before = simulation.image(64)
    np.testing.assert_array_equal(simulation.image(64), before)
    steps_to_success(simulation, 0)
    assert (simulation.image(64) != before).any(-1).mean() > 0.02


def run(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_simulating_takes_neither_torch_nor_graphics():
    code = """
import sys
from lerobot_craft.bench.metaworld.recording import attempt
assert attempt("drawer-close", 0, 0) is not None
assert not {"torch", "lerobot", "OpenGL.EGL"} & set(sys.modules)
"""
    done = run(code, MUJOCO_GL="disable")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # the doctor's own trials take processes and seconds
def test_where_drawing_is_impossible_the_error_says_what_to_type():
    code = """
from lerobot_craft.bench.metaworld.simulation import Simulation
simulation = Simulation("drawer-close")
simulation.reset(0)
simulation.image(32)
"""
    done = run(code, MUJOCO_GL="disable")
    assert "CraftError: MuJoCo cannot draw here" in done.stderr
    assert "export MUJOCO_GL=" in done.stderr
