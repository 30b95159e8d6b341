"""Scenarios: a policy's old tasks, the tasks it is then taught, and which of them share a scene.

The held-out rule: a method's knobs are chosen on `tuning` scenarios only, tables show `final` ones, and no task is in
both. To add a scenario, add an entry below, or add it to `SCENARIOS` from your own code. A scenario that you looked at
while choosing a setting is a `tuning` one from then on. docs/bench.md lists what has used the final ones.
"""

from dataclasses import dataclass
from typing import Literal

from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.errors import CraftError

Role = Literal["tuning", "final"]


@dataclass(frozen=True)
class Scenario:
    """Old tasks, and new tasks that are learned in sequence.

    Attributes:
        name: As in `craft bench --scenario`.
        role: What it may be used for.
        old: Training tasks of the base policy, together.
        new: Fine-tuning tasks, in this order.
        trunk: Scenarios of one trunk share old tasks, demonstrations and base policies; empty: its own.
    """

    name: str
    role: Role
    old: tuple[str, ...]
    new: tuple[str, ...]
    trunk: str = ""

    @property
    def pair(self) -> tuple[str, str] | None:
        """The first (earlier task, new task) in the same scene: only the instruction distinguishes them."""
        return self.pairs[0] if self.pairs else None

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All such pairs, in the order of the new tasks."""
        order = self.old + self.new
        return tuple(
            (earlier, new)
            for position, new in enumerate(self.new, start=len(self.old))
            for earlier in order[:position]
            if find_task(earlier).scene.name == find_task(new).scene.name
        )


_TABLE = (
    Scenario(
        "faucet",
        "tuning",
        old=("faucet-open", "button-topdown", "handle-press", "plate-in", "push-red"),
        new=("faucet-close",),
    ),
    Scenario(
        "handle",
        "tuning",
        old=("side-handle-press", "button-wall", "reach-red", "plate-in", "push-red"),
        new=("side-handle-pull",),
    ),
    # Two easy tasks: a test of minutes that everything runs.
    Scenario("reach", "tuning", old=("reach-red",), new=("reach-blue",)),
    # One base policy, three new tasks: with an object that is pushed, with a fixed object, and in a new scene.
    *(
        Scenario(
            f"mixed-{name}",
            "tuning",
            old=("push-red", "faucet-open", "button-topdown", "handle-press", "plate-in"),
            new=(new,),
            trunk="mixed",
        )
        for name, new in (("puck", "push-blue"), ("faucet", "faucet-close"), ("elsewhere", "side-handle-press"))
    ),
    # No two of its tasks share a scene: for a policy that reads no instruction.
    Scenario("apart", "tuning", old=("button-topdown", "handle-press"), new=("plate-in",)),
    # For `craft demo`.
    Scenario("demo", "tuning", old=("faucet-open", "handle-press", "button-topdown"), new=("faucet-close",)),
    Scenario(
        "window",
        "final",
        old=("window-open", "drawer-open", "dial-turn", "coffee-button", "plate-out"),
        new=("window-close",),
    ),
    Scenario(
        "drawer",
        "final",
        old=("drawer-open", "door-lock", "button-front", "coffee-button", "plate-out"),
        new=("drawer-close",),
    ),
    Scenario(
        "lock",
        "final",
        old=("door-lock", "window-close", "dial-turn", "coffee-button", "button-front"),
        new=("door-unlock",),
    ),
    # The window in the other direction, added after the settings were frozen.
    Scenario(
        "pane",
        "final",
        old=("window-close", "dial-turn", "door-unlock", "coffee-button", "drawer-close"),
        new=("window-open",),
    ),
    # Three new tasks from the same base policies, so that the most expensive part is trained once.
    *(
        Scenario(
            f"trio-{name}",
            "final",
            old=("drawer-open", "window-close", "door-lock", "coffee-button", "button-front"),
            new=(new,),
            trunk="trio",
        )
        for name, new in (("drawer", "drawer-close"), ("window", "window-open"), ("door", "door-unlock"))
    ),
    # Ten old tasks, four of which carry something; three new ones: a carried object, a fixed object, a new scene.
    *(
        Scenario(
            f"ten-{name}",
            "final",
            old=(
                *("lift-red", "sweep", "hammer", "plate-out", "drawer-open"),
                *("window-close", "door-lock", "door-close", "coffee-button", "button-front"),
            ),
            new=(new,),
            trunk="ten",
        )
        for name, new in (("block", "lift-blue"), ("drawer", "drawer-close"), ("elsewhere", "lever-pull"))
    ),
    # The same with five old tasks, three of which carry something: half the base training with vision (decision 0030).
    *(
        Scenario(
            f"five-{name}",
            "final",
            old=("lift-red", "drawer-open", "sweep", "plate-out", "coffee-button"),
            new=(new,),
            trunk="five",
        )
        for name, new in (("block", "lift-blue"), ("drawer", "drawer-close"), ("elsewhere", "window-close"))
    ),
    # Few and easy, for pi0_fast, whose base policies are the most expensive; in an old task's scene, and elsewhere.
    *(
        Scenario(
            f"cabinet-{name}", "final", old=("drawer-open", "plate-out", "coffee-button"), new=(new,), trunk="cabinet"
        )
        for name, new in (("drawer", "drawer-close"), ("elsewhere", "window-close"))
    ),
    # Five instructions, one table: every old task is in the new one's scene.
    Scenario(
        "table",
        "final",
        old=("lift-red", "lift-blue", "lift-green", "lift-yellow", "lift-white"),
        new=("lift-purple",),
    ),
    Scenario(
        "sequence",
        "final",
        old=("window-open", "drawer-open", "button-front", "plate-out"),
        new=("dial-turn", "window-close", "door-lock", "drawer-close", "door-unlock"),
    ),
)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _TABLE}


def find_scenario(name: str) -> Scenario:
    """The scenario of that name."""
    if name not in SCENARIOS:
        raise CraftError(f"There is no scenario {name!r}. There are: {', '.join(SCENARIOS)}.")
    return SCENARIOS[name]


def trunk_of(scenario: Scenario) -> Scenario:
    """The scenario of its base policies: its old tasks, and the new tasks of all scenarios that share them."""
    if not scenario.trunk:
        return scenario
    sharing = [other for other in SCENARIOS.values() if other.trunk == scenario.trunk]
    if any(other.old != scenario.old for other in sharing):
        raise CraftError(f"The scenarios of {scenario.trunk!r} share base policies, and their old tasks differ.")
    new = dict.fromkeys(task for other in sharing for task in other.new)
    return Scenario(scenario.trunk, scenario.role, scenario.old, tuple(new))
