"""What `craft bench` is asked for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lerobot_craft.bench.method import Method

# Of demonstrations, where the task enters too; and of the first start state of evaluation.
OLD_SEED, NEW_SEED, EVALUATION_SEED = 0, 1, 500_000


@dataclass(frozen=True)
class BenchSettings:
    """What to compare on what, and how thoroughly.

    Attributes:
        output_dir: Gets everything.
        scenarios: Names of scenarios.
        policies: Types of policies.
        methods: Names of methods.
        anchors: Numbers of old frames: of all old tasks together; in a sequence, of each task.
        seeds: Of base training and fine-tuning.
        episodes: For each task, from the same start states for every method.
        old_episodes: Demonstrations of each old task; None: as many as the policy needs.
        new_episodes: Demonstrations of a new task; None: likewise.
        image_size: Side of the camera's image in pixels.
        render: Whether the camera is on; without, its image is blank and the policy acts by the state.
        film: Whether filmstrips are made of every policy.
        base_steps: Steps of base training; None: the policy's own.
        steps: Steps of fine-tuning; None: the policy's own.
        learning_rate: Of fine-tuning, at its highest; None: the policy's own.
        batch_size: None: the policy's own.
        sweep: Whether each method's knob is tried over its grid.
        knobs: Values for knobs, by method.
        swept_on: Scenarios on which they were chosen.
    """

    output_dir: Path
    scenarios: tuple[str, ...]
    policies: tuple[str, ...] = ("smolvla",)
    methods: tuple[str, ...] = ("naive", "er", "craft")
    anchors: tuple[int, ...] = (0, 20, 100)
    seeds: tuple[int, ...] = (0, 1, 2)
    episodes: int = 20
    old_episodes: int | None = None
    new_episodes: int | None = None
    image_size: int = 16
    render: bool = False
    film: bool = False
    base_steps: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    sweep: bool = False
    knobs: dict[str, float] = field(default_factory=dict)
    swept_on: tuple[str, ...] = ()

    @property
    def evaluation_inputs(self) -> dict[str, Any]:
        """What success depends on, beside policy and tasks."""
        return {"episodes": self.episodes, "seed": EVALUATION_SEED}

    def knob_values(self, method: Method) -> tuple[float | None, ...]:
        """Values of a method's knob that are run; None is its own."""
        if self.sweep and method.knob is not None:
            return method.knob.grid
        return (self.knobs.get(method.name),)

    def as_json(self) -> dict[str, Any]:
        """For `results.json`."""
        return {
            name: list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
            for name, value in vars(self).items()
        }
