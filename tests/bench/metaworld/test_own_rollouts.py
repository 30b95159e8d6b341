import numpy as np
import pytest

from lerobot_craft.bench.metaworld.own_rollouts import record_own
from lerobot_craft.bench.metaworld.simulation import Simulation
from lerobot_craft.bench.metaworld.tasks import find_task, state_names

TASKS, STARTS = ("reach-red", "push-red"), range(900, 902)


@pytest.fixture(scope="module", params=["told", "seen"])
def played(request, tmp_path_factory):
    """View, dataset and successes of a policy that has learned nothing."""
    from lerobot.datasets import LeRobotDataset

    from lerobot_craft.bench.base_policies import make_start, policy_named
    from lerobot_craft.bench.metaworld.recording import record
    from lerobot_craft.bench.settings import BenchSettings
    from lerobot_craft.lerobot_api.rollouts import load_player

    root, view = tmp_path_factory.mktemp(request.param), request.param
    demos = record(root / "demos", TASKS, 1, seed=0, view=view, progress=False)
    instructions = [find_task(task).instruction for task in TASKS]
    make_start(policy_named("smolvla", view), root / "policy", demos, instructions, seed=0)
    player = load_player(root / "policy", BenchSettings(root, (), view=view).env(TASKS[0]))
    successes = record_own(root / "own", player, TASKS, len(STARTS), STARTS[0], view)
    return view, LeRobotDataset("craft/own", root=root / "own"), successes


def test_every_episode_is_there_also_where_the_policy_failed(played):
    view, dataset, successes = played
    assert dataset.num_episodes == 4
    assert dataset.features["observation.state"]["names"] == list(state_names(view))
    assert {task: len(seen) for task, seen in successes.items()} == dict.fromkeys(TASKS, 2)
    assert not all(successes["push-red"])  # it has learned nothing
    lengths = list(dataset.meta.episodes["length"])
    limits = [find_task(task, view).max_steps for _ in STARTS for task in TASKS]
    outcomes = [successes[task][number] for number in range(len(STARTS)) for task in TASKS]
    for length, limit, reached in zip(lengths, limits, outcomes, strict=True):
        assert length == limit if not reached else length <= limit


def test_the_recorded_actions_lead_through_the_recorded_states(played):
    view, dataset, _ = played
    rows = dataset.hf_dataset.with_format("numpy")
    episode = np.array(rows["episode_index"][:])
    for number, (start, task) in enumerate([(start, task) for start in STARTS for task in TASKS]):
        simulation = Simulation(task, view)
        state = simulation.reset(start)
        for row in np.flatnonzero(episode == number):
            np.testing.assert_allclose(rows[int(row)]["observation.state"], state, atol=1e-6)
            simulation.step(rows[int(row)]["action"])
            state = simulation.state()
