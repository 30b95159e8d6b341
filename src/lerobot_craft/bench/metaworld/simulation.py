"""One task in the simulator: seeded start states, the policy's observations, the scripted expert, pictures.

Meta-World's environments provide physics, experts and the success criterion. The observations are ours: Meta-World's
would show the goal and report the object of one scene differently in each task.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lerobot_craft.bench.metaworld.camera import photograph
from lerobot_craft.bench.metaworld.experts import OWN_EXPERTS
from lerobot_craft.bench.metaworld.gl import import_mujoco
from lerobot_craft.bench.metaworld.tasks import Task, View, find_task, state_names
from lerobot_craft.doctor.software import install_extra
from lerobot_craft.errors import CraftError

FloatArray = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]
_ARM = 9  # joint positions: arm and fingers come first, then the object
_WIDEST_GRIP = 0.1  # meters between the open fingers


class Simulation:
    """A task that can be reset and stepped. More instances are cheap, because those of one task share a model.

    Args:
        task: Its name in `TASKS`.
        view: What a policy observes.
    """

    def __init__(self, task: str, view: View = "told") -> None:
        self.task: Task = find_task(task, view)
        self.view: View = view
        self._stage = _stage(task)
        self._env = _build(self.task, self._stage.model)
        self._env.init_tcp = self._stage.tcp.copy()
        # The hand's way to its start is the same in every episode, and the stage has already moved it there.
        self._env._reset_hand = lambda steps=50: None
        expert = OWN_EXPERTS.get(self.task.environment) or _metaworld()[1][self.task.environment]
        self._expert: Any = expert()
        self._bodies, self._sites = self._stage.bodies, self._stage.sites
        self._raw: npt.NDArray[np.float64] = np.zeros(0)  # [39], Meta-World's own observation, for the expert only

    def reset(self, seed: int) -> FloatArray:
        """Start an episode; the seed determines the object's position. Returns the state."""
        mujoco, env, stage = import_mujoco(), self._env, self._stage
        self._place(stage.bodies, stage.sites)
        self._restore()
        env.seed(seed)
        env.curr_path_length = 0
        env.reset_model()  # draws the object's position and with it the goal
        self._bodies, self._sites = stage.model.body_pos.copy(), stage.model.site_pos.copy()
        # Environments of one scene stop the physics at different times here, so continue from one common state.
        thing = env.data.qpos[_ARM:].copy()
        self._restore()
        env.data.qpos[_ARM:] = thing if self.task.scene.start is None else self.task.scene.start
        if self.task.goal is not None:
            env._target_pos = np.array(self.task.goal)
        mujoco.mj_forward(stage.model, env.data)
        env._prev_obs = env._get_curr_obs_combined_no_goal()
        self._raw = self._with_goal(env._get_obs())
        return self.state()

    def state(self) -> FloatArray:
        """The policy's state: hand and gripper opening, in the view `told` also the object; see `state_names`."""
        data = self._env.data
        grip = np.linalg.norm(data.body("rightclaw").xpos - data.body("leftclaw").xpos) / _WIDEST_GRIP
        tracked = self.task.scene.tracked
        if tracked is None:
            thing = self._env._get_pos_objects()[:3]
        else:
            kind, name = tracked
            thing = (data.site(name) if kind == "site" else data.body(name)).xpos
        known = np.hstack([data.body("hand").xpos, min(grip, 1.0), thing]).astype(np.float32)
        return known[: len(state_names(self.view))]

    def expert(self) -> FloatArray:
        """The action [4] of the scripted expert, which knows the goal, clipped to [-1, 1]."""
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Meta-World's experts always request more than 1 and warn that it is clipped
            action: npt.NDArray[np.float64] = self._expert.get_action(self._raw)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def step(self, action: npt.ArrayLike) -> bool:
        """Execute an action [4], clipped to [-1, 1]; returns whether the goal is reached."""
        self._place(self._bodies, self._sites)
        observation, _, _, _, info = self._env.step(np.clip(action, -1.0, 1.0))
        self._raw = self._with_goal(observation)
        return bool(info["success"] > 0.5)

    def image(self, side: int, *, arm: bool = False) -> UInt8Array:
        """A picture [side, side, 3] of the scene that does not reveal the requested task.

        Args:
            side: In pixels.
            arm: Draw the whole arm, for people; policies see only the hand.
        """
        return photograph(self._stage.model, self._env.data, self.task.scene, side, arm=arm)

    def _place(self, bodies: npt.NDArray[np.float64], sites: npt.NDArray[np.float64]) -> None:
        # The model is shared, and Meta-World stores the object's position in it.
        self._stage.model.body_pos[:] = bodies
        self._stage.model.site_pos[:] = sites

    def _restore(self) -> None:
        mujoco = import_mujoco()
        mujoco.mj_setState(self._stage.model, self._env.data, self._stage.ready, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_forward(self._stage.model, self._env.data)

    def _with_goal(self, observation: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        # Without `set_task`, the environment clips the goal to an empty range.
        observation[-3:] = self._env._target_pos
        return observation


@dataclass(frozen=True)
class _Stage:
    """What all simulations of one task share: the compiled model (18 MB) and the robot at its start."""

    model: Any
    bodies: npt.NDArray[np.float64]  # [B, 3], as compiled
    sites: npt.NDArray[np.float64]  # [S, 3], as compiled
    ready: npt.NDArray[np.float64]  # full physics state with the hand at its start
    tcp: npt.NDArray[np.float64]  # [3], the point between the fingers in that state


@cache
def _stage(task: str) -> _Stage:
    mujoco = import_mujoco()
    env = _build(find_task(task), None)
    model, data = env.model, env.data
    bodies, sites = model.body_pos.copy(), model.site_pos.copy()
    mujoco.mj_resetData(model, data)
    env._reset_hand()
    everything = mujoco.mjtState.mjSTATE_INTEGRATION
    ready = np.empty(mujoco.mj_stateSize(model, everything))
    mujoco.mj_getState(model, data, ready, everything)
    return _Stage(model, bodies, sites, ready, env.init_tcp.copy())


def _build(task: Task, model: Any) -> Any:
    """Meta-World's environment for a task, with a given model or (None) a new one."""
    mujoco = import_mujoco()
    environment: Any = _metaworld()[0][task.environment]
    if model is not None:
        sharing = {"_initialize_simulation": lambda self: (model, mujoco.MjData(model))}
        environment = type(environment.__name__, (environment,), sharing)
    env = environment()
    env._set_task_called = True  # otherwise it refuses to step without goals from its own benchmark
    env._partially_observable = False
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    if task.scene.box is not None:
        from gymnasium.spaces import Box

        # Some environments also draw the goal: that part stays unchanged.
        (low, high), own = task.scene.box, env._random_reset_space
        env._random_reset_space = Box(
            np.hstack([low, own.low[len(low) :]]), np.hstack([high, own.high[len(high) :]]), dtype=np.float64
        )
    return env


@cache
def _metaworld() -> tuple[dict[str, Any], dict[str, Any]]:
    """Meta-World's environments and experts, by environment name."""
    import_mujoco()
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP
    except ImportError as error:
        raise CraftError(f"The bench needs Meta-World ({error}). Type: {install_extra('bench')}") from error
    return ALL_V3_ENVIRONMENTS, ENV_POLICY_MAP
