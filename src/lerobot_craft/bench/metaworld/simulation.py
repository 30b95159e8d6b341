"""One task in the simulator: seeded start states, the policy's observations, the scripted expert, pictures.

Meta-World's environments provide physics, experts and the success criterion. The observations are ours: Meta-World's
would show the goal and report the object of one scene differently in each task.
"""

import ctypes
import os
import platform
import threading
import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lerobot_craft.bench.metaworld.tasks import Scene, Task, View, find_task, state_names
from lerobot_craft.doctor import Surroundings
from lerobot_craft.doctor.check import install_extra
from lerobot_craft.doctor.machine import check_rendering, try_backend
from lerobot_craft.errors import CraftError

_VARIABLE = "MUJOCO_GL"
# The libraries of each back-end, in order of preference; PyOpenGL needs libGL in addition to libEGL.
_LIBRARIES = {"egl": ("libEGL.so.1", "libGL.so.1"), "osmesa": ("libOSMesa.so.8",)}


def import_mujoco() -> Any:
    """Import MuJoCo with a back-end that fits this machine. Graphics are only needed for drawing."""
    choose_backend(os.environ)  # child processes inherit it
    try:
        import mujoco
    except ImportError as error:
        raise CraftError(f"The bench needs MuJoCo ({error}). Type: {install_extra('bench')}") from error
    return mujoco


def choose_backend(env: MutableMapping[str, str]) -> None:
    """Set MUJOCO_GL in an environment, unless the user has set it."""
    if not env.get(_VARIABLE) and platform.system() == "Linux":
        backend = pick_backend(_can_load, _can_draw)
        if backend is not None:
            env[_VARIABLE] = backend


def pick_backend(can_load: Callable[[str], bool], can_draw: Callable[[str], bool]) -> str | None:
    """The back-end to use; None if no library can draw without a display.

    A test drawing takes a process and two seconds, so it is only done if there is a choice.

    Args:
        can_load: Whether a shared library can be loaded.
        can_draw: Whether a back-end can really draw.
    """
    here = [backend for backend, libraries in _LIBRARIES.items() if all(map(can_load, libraries))]
    if len(here) > 1:
        return next(filter(can_draw, here), here[0])
    return here[0] if here else None


def no_drawing(error: Exception) -> CraftError:
    """Why nothing can be drawn here, and the command that fixes it, as in `craft doctor`."""
    mujoco = import_mujoco()
    observed = Surroundings.observe()
    # Remove our own choice, so that the doctor tries every back-end.
    env = {name: value for name, value in observed.env.items() if name != _VARIABLE}
    check = check_rendering(mujoco.__version__, replace(observed, env=env), lambda backend: try_backend(backend, env))
    remedy = f" Type: {check.remedy}" if check.remedy else ""
    return CraftError(f"MuJoCo cannot draw here ({type(error).__name__}: {error}); {check.value}.{remedy}")


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _can_draw(backend: str) -> bool:
    return try_backend(backend, os.environ) is None


_LOOK_AT, _DISTANCE, _AZIMUTH, _ELEVATION = (-0.02, 0.72, 0.13), 1.0, 140.0, -40.0  # the arm hides little from here
_MARKER_RADIUS = 0.025
_ARM_MESHES = {"pedestal", "base", "l0", "l1", "l2", "l3", "l4", "l5", "l6", "head", "eGripperBase"}
# Plain colors instead of wood and metal, so that small dark objects are visible even at 64 pixels.
_PLAIN = {"table_wood": (0.62, 0.62, 0.6), "basic_floor": (0.5, 0.5, 0.5), "wall_metal": (0.55, 0.55, 0.55)}
_ARM_GROUP = 5  # the one of MuJoCo's six geom groups that Meta-World does not use

# An OpenGL context belongs to the thread that created it.
_here = threading.local()


def photograph(model: Any, data: Any, scene: Scene, side: int, *, arm: bool) -> npt.NDArray[np.uint8]:
    """The scene [side, side, 3]: with the scene's own markers, without Meta-World's goal sites.

    Args:
        model: MuJoCo's model.
        data: Its state.
        scene: Defines the markers.
        side: In pixels.
        arm: Draw the arm behind the hand, which has most of the faces and takes most of the time.
    """
    mujoco = import_mujoco()
    renderer = _renderer(model, side)
    camera, option = mujoco.MjvCamera(), mujoco.MjvOption()
    camera.lookat[:], camera.distance, camera.azimuth, camera.elevation = _LOOK_AT, _DISTANCE, _AZIMUTH, _ELEVATION
    option.sitegroup[:] = 0
    option.geomgroup[_ARM_GROUP] = int(arm)
    renderer.update_scene(data, camera, option)
    drawn = renderer.scene
    for flag in ("SHADOW", "REFLECTION", "HAZE"):
        drawn.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{flag}")] = 0
    for marker in scene.markers:
        ball = drawn.geoms[drawn.ngeom]
        size, turn = np.full(3, _MARKER_RADIUS), np.eye(3).ravel()
        colour = np.array([*marker.rgb, 1.0], np.float32)
        mujoco.mjv_initGeom(ball, mujoco.mjtGeom.mjGEOM_SPHERE, size, np.array(marker.at), turn, colour)
        drawn.ngeom += 1
    picture: npt.NDArray[np.uint8] = renderer.render()
    return picture


def _renderer(model: Any, side: int) -> Any:
    """One renderer per model and size: creating one takes a hundred times as long as a picture."""
    renderers: dict[tuple[int, int], Any] = _here.__dict__.setdefault("renderers", {})
    key = (id(model), side)  # models are never freed
    if key not in renderers:
        _prepare(model)
        model.vis.quality.offsamples = 0
        model.vis.quality.shadowsize = 0
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, side)
        model.vis.global_.offheight = max(model.vis.global_.offheight, side)
        try:
            renderers[key] = import_mujoco().Renderer(model, side, side)
        except Exception as error:  # drivers raise many types
            raise no_drawing(error) from error
    return renderers[key]


def _prepare(model: Any) -> None:
    """Paint the room in plain colors, and put the arm's meshes, 90 % of all faces, into their own group."""
    mesh = import_mujoco().mjtGeom.mjGEOM_MESH
    for shape in range(model.ngeom):
        if model.geom_type[shape] == mesh and model.mesh(model.geom_dataid[shape]).name in _ARM_MESHES:
            model.geom_group[shape] = _ARM_GROUP
        material = model.geom_matid[shape]
        if material >= 0 and model.mat(material).name in _PLAIN:
            model.geom_rgba[shape, :3] = _PLAIN[model.mat(material).name]
            model.geom_matid[shape] = -1


_GAIN = 25.0  # action per meter, as in Meta-World's experts
_GAIN_IN_THE_AIR = 10.0  # without contact, a gentler approach works
_OPEN, _CLOSE = -1.0, 1.0
_HAND_ABOVE_FINGERS = np.array([0.0, 0.0, 0.045])  # meters


class LiftFromAbove:
    """Moves down over the handle with open fingers, grips it and lifts.

    Meta-World's expert grips less firmly and loses a half-raised handle in one of six episodes.
    """

    def get_action(self, observation: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The action [4], not yet clipped, for Meta-World's observation [39]."""
        hand, handle = observation[:3], observation[4:7]
        if np.linalg.norm(hand[:2] - handle[:2]) > 0.02:
            target, fingers = handle + np.array([0.0, 0.0, 0.1]), _OPEN
        elif abs(hand[2] - handle[2]) > 0.03:
            target, fingers = handle, _OPEN
        else:
            target, fingers = handle + np.array([0.0, 0.0, 0.3]), _CLOSE
        return np.append(_GAIN * (target - hand), fingers)


class ReachWithFingers:
    """Moves the fingers to the target, where success is measured.

    Meta-World's expert moves the hand there, which leaves the fingers at the edge of success.
    """

    def get_action(self, observation: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The action [4], not yet clipped, for Meta-World's observation [39]."""
        hand, target = observation[:3], observation[-3:] + _HAND_ABOVE_FINGERS
        return np.append(_GAIN_IN_THE_AIR * (target - hand), 0.0)


OWN_EXPERTS = {"handle-pull-side-v3": LiftFromAbove, "reach-v3": ReachWithFingers}


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
