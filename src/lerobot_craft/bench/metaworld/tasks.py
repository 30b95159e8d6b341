"""The tasks of the suite: which Meta-World environment, which words, which start.

A scene is what is seen and where things start. Two tasks of one scene differ by their instruction and by nothing else:
the same seed gives the same start, and the same actions then give the same observations, to the bit.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from lerobot_craft.errors import CraftError

Position = tuple[float, float, float]  # metres: to the right, away from the robot, up

FPS = 80  # control steps per second of simulated time: five physics steps of 2.5 ms each
ACTION_NAMES = ("hand_dx", "hand_dy", "hand_dz", "gripper_effort")
ACTION_DIM = len(ACTION_NAMES)
STATE_NAMES = ("hand_x", "hand_y", "hand_z", "gripper_opening", "object_x", "object_y", "object_z")

# told: the object's position is in the state, and the camera is blank. seen: the state is the robot's own four numbers,
# as in lerobot's Meta-World environment, and the object is in the picture only.
View = Literal["told", "seen"]
VIEWS: tuple[View, ...] = get_args(View)
IMAGE_SIDES: dict[View, int] = {"told": 16, "seen": 64}  # pixels of the camera's picture
_ROBOT_NUMBERS = 4


def state_names(view: View) -> tuple[str, ...]:
    """What the numbers of `observation.state` are."""
    return STATE_NAMES if view == "told" else STATE_NAMES[:_ROBOT_NUMBERS]


@dataclass(frozen=True)
class Marker:
    """A coloured ball that is drawn and touches nothing."""

    at: Position
    rgb: tuple[float, float, float]


@dataclass(frozen=True)
class Scene:
    """What all tasks of one scene have in common.

    Attributes:
        name: its name.
        tracked: what `object_x, object_y, object_z` follow: a site or a body of the model. Meta-World's environments
            of one scene report different points of the same object, which would give the task away. None where
            the scene has one task, or where all of its tasks are played in one environment.
        start: where the object's joint starts (metres or radians), half-way for opposite tasks. None leaves it to
            Meta-World.
        box: corners of the space in which the object is placed. None leaves it to Meta-World.
        wide: the same in the view `seen`: larger, so that a policy that does not look rarely succeeds. None: as told.
        markers: goals that can be seen, in every task of the scene alike.
    """

    name: str
    tracked: tuple[Literal["site", "body"], str] | None = None
    start: float | None = None
    box: tuple[Position, Position] | None = None
    wide: tuple[Position, Position] | None = None
    markers: tuple[Marker, ...] = ()


@dataclass(frozen=True)
class Task:
    """One thing to do.

    Attributes:
        name: as in `--env.task`.
        instruction: what the policy is told.
        environment: Meta-World's environment, which has the expert and says what success is.
        scene: where it happens.
        max_steps: after this many steps the episode has failed. The expert needs three quarters of it or less.
        goal: where the object has to go, where that is not the environment's own affair.
        wide_steps: the same as `max_steps`, where the scene is wide. None: as told.
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
# One table, six places to carry the block to.
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
    """The task of that name, as it is in a view."""
    if name not in TASKS:
        raise CraftError(f"There is no Meta-World task {name!r}. There are: {', '.join(TASKS)}.")
    task = TASKS[name]
    if view == "told" or task.scene.wide is None:
        return task
    scene = replace(task.scene, box=task.scene.wide)
    return replace(task, scene=scene, max_steps=task.wide_steps or task.max_steps)
