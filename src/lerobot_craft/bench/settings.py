"""Settings of `craft bench`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lerobot_craft.bench.base_policies import CHUNK
from lerobot_craft.bench.metaworld.tasks import View
from lerobot_craft.bench.method_definition import Method

# Seeds of demonstrations (combined with the task), first start states of evaluation and of a policy's own rollouts.
OLD_SEED, NEW_SEED, EVALUATION_SEED, ROLLOUT_SEED = 0, 1, 500_000, 800_000
_STARTS_APART = 1_000  # start states reserved per seed


def first_start(seed: int, kind: int = EVALUATION_SEED) -> int:
    """The first start state of a base policy's seed; seeds do not share start states."""
    return kind + _STARTS_APART * seed


@dataclass(frozen=True)
class BenchSettings:
    """What to compare, on what, and with how much data.

    Attributes:
        output_dir: Output directory.
        bases: Directory of base policies as files: existing ones are used, new ones are added. None: not used.
        scenarios: Names of scenarios.
        policies: Policy types.
        methods: Names of methods.
        anchors: Numbers of old frames: of all old tasks together; in a sequence, of each task.
        rollouts: Numbers of episodes per old task that the policy itself plays before fine-tuning.
        seeds: Seeds of base training and fine-tuning.
        episodes: Per task, from the same start states for every method.
        old_episodes: Demonstrations per old task; None: the policy's default.
        new_episodes: Demonstrations of a new task; None: likewise.
        view: What a policy observes: the object's position in the state (`told`), or only in the picture (`seen`).
        film: Whether to make filmstrips.
        base_steps: Steps of base training; None: the policy's default.
        steps: Steps of fine-tuning; None: likewise.
        learning_rate: Peak rate of fine-tuning; None: likewise.
        batch_size: None: likewise.
        sweep: Whether to try each knob's grid in order to choose a value.
        curve: Whether to try each knob's grid in order to show all values; nothing is chosen.
        knobs: Knob values by method.
        swept_on: Scenarios on which they were chosen.
    """

    output_dir: Path
    scenarios: tuple[str, ...]
    policies: tuple[str, ...] = ("smolvla",)
    methods: tuple[str, ...] = ("naive", "er", "craft")
    anchors: tuple[int, ...] = (0, 20, 100)
    rollouts: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    episodes: int = 20
    old_episodes: int | None = None
    new_episodes: int | None = None
    view: View = "told"
    film: bool = False
    base_steps: int | None = None
    steps: int | None = None
    bases: Path | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    sweep: bool = False
    curve: bool = False
    knobs: dict[str, float] = field(default_factory=dict)
    swept_on: tuple[str, ...] = ()

    def evaluation_inputs(self, seed: int) -> dict[str, Any]:
        """What success depends on besides policy and tasks; `seed` is the base policy's."""
        return {"episodes": self.episodes, "seed": first_start(seed)}

    def env(self, task: str, *, blindfold: bool = False) -> Any:
        """Config of a task's environment."""
        import lerobot_craft.bench.metaworld.configuration  # noqa: F401  registers the environment
        from lerobot_craft.lerobot_api.rollouts import env_config

        # The bench's policies execute whole chunks, and look at nothing in between.
        shown = {"view": self.view, "blindfold": blindfold, "look_every": CHUNK}
        return env_config("craft_metaworld", {"task": task, **shown})

    def knob_values(self, method: Method) -> tuple[float | None, ...]:
        """Knob values to run; None: the method's default."""
        if (self.sweep or self.curve) and method.knob is not None:
            return method.knob.grid
        return (self.knobs.get(method.name),)

    def as_json(self) -> dict[str, Any]:
        """For `results.json`."""
        return {
            name: list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
            for name, value in vars(self).items()
        }
