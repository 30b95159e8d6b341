"""The tasks of the suite: Meta-World environment, instruction, start.

A scene defines what is visible and where things start. Two tasks of one scene differ only in their instruction: the
same seed gives the same start, and the same actions give bit-identical observations.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from lerobot_craft.errors import CraftError

Position = tuple[float, float, float]  # meters: right, away from the robot, up

FPS = 80  # control steps per simulated second: five physics steps of 2.5 ms each
ACTION_NAMES = ("hand_dx", "hand_dy", "hand_dz", "gripper_effort")
ACTION_DIM = len(ACTION_NAMES)
STATE_NAMES = ("hand_x", "hand_y", "hand_z", "gripper_opening", "object_x", "object_y", "object_z")

# told: the object's position is in the state, and the camera is black. seen: the state is the robot's own four numbers,
# as in lerobot's Meta-World environment, and the object is only in the picture.
View = Literal["told", "seen"]
VIEWS: tuple[View, ...] = get_args(View)
IMAGE_SIDES: dict[View, int] = {"told": 16, "seen": 64}  # pixels of the camera's picture
_ROBOT_NUMBERS = 4


def state_names(view: View) -> tuple[str, ...]:
    """Names of the entries in `observation.state`."""
    return STATE_NAMES if view == "told" else STATE_NAMES[:_ROBOT_NUMBERS]


@dataclass(frozen=True)
class Marker:
    """A colored ball without collisions."""

    at: Position
    rgb: tuple[float, float, float]


@dataclass(frozen=True)
class Scene:
    """What all tasks of one scene share.

    Attributes:
        name: Its name.
        tracked: The site or body that `object_x, object_y, object_z` follow. Meta-World's environments of one scene
            report different points of an object, which would reveal the task. None: one task or one environment.
        start: Start of the object's joint (meters or radians), half-way for opposite tasks. None: Meta-World's.
        box: Corners of the space in which the object is placed. None: Meta-World's.
        wide: The same for the view `seen`: larger, so that a policy that does not look rarely succeeds. None: as told.
        markers: Visible goals, the same in every task of the scene.
    """

    name: str
    tracked: tuple[Literal["site", "body"], str] | None = None
    start: float | None = None
    box: tuple[Position, Position] | None = None
    wide: tuple[Position, Position] | None = None
    markers: tuple[Marker, ...] = ()


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: As in `--env.task`.
        instruction: The policy's instruction.
        environment: Meta-World's environment, which defines the expert and success.
        scene: Its scene.
        max_steps: The episode fails after this many steps. The expert needs at most three quarters of it.
        goal: The object's target, unless the environment defines it.
        wide_steps: `max_steps` for the wide box. None: the same.
    """

    name: str
    instruction: str
    environment: str
    scene: Scene
    max_steps: int
    goal: Position | None = None
    wide_steps: int | None = None


FAUCET = Scene(
    "faucet",
    ("site", "handleStartOpen"),
    box=((-0.05, 0.8, 0.0), (0.05, 0.85, 0.0)),
    wide=((-0.15, 0.72, 0.0), (0.15, 0.88, 0.0)),
)
WINDOW = Scene("window", ("site", "handleOpenStart"), start=0.1, box=((-0.1, 0.7, 0.16), (0.1, 0.9, 0.16)))
DRAWER = Scene("drawer", ("body", "drawer_link"), start=-0.1, wide=((-0.2, 0.9, 0.0), (0.2, 0.9, 0.0)))
LOCK = Scene("lock", ("site", "lockStartLock"), start=0.785, wide=((-0.15, 0.8, 0.15), (0.15, 0.85, 0.15)))
SIDE_HANDLE = Scene("side-handle", ("site", "handleStart"), start=-0.06, box=((-0.35, 0.65, 0.0), (-0.25, 0.75, 0.0)))

_RED, _BLUE, _GREEN = (0.9, 0.1, 0.1), (0.1, 0.1, 0.9), (0.1, 0.7, 0.1)
_YELLOW, _WHITE, _PURPLE = (0.9, 0.8, 0.1), (0.95, 0.95, 0.95), (0.6, 0.1, 0.7)
PUCK = Scene(
    "puck",
    wide=((-0.15, 0.55, 0.02), (0.15, 0.72, 0.02)),
    markers=(Marker((-0.1, 0.85, 0.02), _RED), Marker((0.1, 0.85, 0.02), _BLUE)),
)
AIR = Scene("air", markers=(Marker((-0.15, 0.75, 0.15), _RED), Marker((0.15, 0.75, 0.15), _BLUE)))
# One table with six places to carry the block to.
_PLACES = {
    "red": Marker((-0.2, 0.75, 0.15), _RED),
    "blue": Marker((0.2, 0.75, 0.15), _BLUE),
    "green": Marker((-0.1, 0.9, 0.15), _GREEN),
    "yellow": Marker((0.1, 0.9, 0.15), _YELLOW),
    "white": Marker((-0.1, 0.75, 0.3), _WHITE),
    "purple": Marker((0.1, 0.75, 0.3), _PURPLE),
}
BLOCK = Scene("block", wide=((-0.15, 0.55, 0.02), (0.15, 0.7, 0.02)), markers=tuple(_PLACES.values()))

_TASKS = (
    Task("faucet-open", "rotate the faucet counter clockwise", "faucet-open-v3", FAUCET, 85, wide_steps=100),
    Task("faucet-close", "rotate the faucet clockwise", "faucet-close-v3", FAUCET, 90, wide_steps=105),
    Task("window-open", "open the window", "window-open-v3", WINDOW, 110),
    Task("window-close", "close the window", "window-close-v3", WINDOW, 100),
    Task("drawer-open", "open the drawer", "drawer-open-v3", DRAWER, 90),
    Task("drawer-close", "close the drawer", "drawer-close-v3", DRAWER, 50),
    Task("door-lock", "lock the door", "door-lock-v3", LOCK, 85),
    Task("door-unlock", "unlock the door", "door-unlock-v3", LOCK, 70),
    Task("side-handle-press", "press the side handle down", "handle-press-side-v3", SIDE_HANDLE, 60),
    Task("side-handle-pull", "pull the side handle up", "handle-pull-side-v3", SIDE_HANDLE, 65),
    Task("push-red", "push the puck to the red target", "push-v3", PUCK, 90, goal=PUCK.markers[0].at),
    Task("push-blue", "push the puck to the blue target", "push-v3", PUCK, 90, goal=PUCK.markers[1].at),
    *(
        Task(f"lift-{color}", f"lift the block to the {color} target", "pick-place-v3", BLOCK, 90, goal=marker.at)
        for color, marker in _PLACES.items()
    ),
    Task("reach-red", "reach for the red target", "reach-v3", AIR, 50, goal=AIR.markers[0].at),
    Task("reach-blue", "reach for the blue target", "reach-v3", AIR, 50, goal=AIR.markers[1].at),
    Task(
        "button-topdown",
        "press the button from the top",
        "button-press-topdown-v3",
        Scene("button-topdown", wide=((-0.2, 0.72, 0.115), (0.2, 0.9, 0.115))),
        100,
        wide_steps=110,
    ),
    Task(
        "button-front",
        "press the button from the front",
        "button-press-v3",
        Scene("button-front", wide=((-0.2, 0.8, 0.115), (0.2, 0.9, 0.115))),
        90,
    ),
    Task("button-wall", "press the button behind the wall", "button-press-topdown-wall-v3", Scene("button-wall"), 85),
    Task(
        "coffee-button",
        "press the coffee machine's button",
        "coffee-button-v3",
        Scene("coffee", wide=((-0.2, 0.75, -0.001), (0.2, 0.9, 0.001))),
        55,
    ),
    Task(
        "dial-turn",
        "turn the dial",
        "dial-turn-v3",
        Scene("dial", wide=((-0.2, 0.65, 0.0), (0.2, 0.8, 0.0))),
        120,
    ),
    Task(
        "handle-press",
        "press the handle down",
        "handle-press-v3",
        Scene("handle", wide=((-0.2, 0.78, -0.001), (0.2, 0.92, 0.001))),
        65,
        wide_steps=75,
    ),
    Task("lever-pull", "pull the lever", "lever-pull-v3", Scene("lever"), 125),
    Task("plate-in", "slide the plate into the goal", "plate-slide-side-v3", Scene("plate-in"), 70),
    Task("plate-out", "slide the plate out of the goal", "plate-slide-back-side-v3", Scene("plate-out"), 75),
    Task("door-close", "close the door", "door-close-v3", Scene("door"), 100),
    Task("sweep", "sweep the cube off the table", "sweep-v3", Scene("sweep"), 130),
    Task("hammer", "hit the nail with the hammer", "hammer-v3", Scene("hammer"), 95),
    Task("shelf-place", "put the cube on the shelf", "shelf-place-v3", Scene("shelf"), 130),
)

TASKS: dict[str, Task] = {task.name: task for task in _TASKS}


def find_task(name: str, view: View = "told") -> Task:
    """The task of that name, for a view."""
    if name not in TASKS:
        raise CraftError(f"There is no Meta-World task {name!r}. There are: {', '.join(TASKS)}.")
    task = TASKS[name]
    if view == "told" or task.scene.wide is None:
        return task
    scene = replace(task.scene, box=task.scene.wide)
    return replace(task, scene=scene, max_steps=task.wide_steps or task.max_steps)
