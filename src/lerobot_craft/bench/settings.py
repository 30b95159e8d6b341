"""What `craft bench` is asked for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lerobot_craft.bench.metaworld.tasks import View
from lerobot_craft.bench.method import Method
from lerobot_craft.bench.policies import CHUNK

# Of demonstrations, where the task enters too; of the first start state of evaluation, and of a policy's own rollouts.
OLD_SEED, NEW_SEED, EVALUATION_SEED, ROLLOUT_SEED = 0, 1, 500_000, 800_000
_STARTS_APART = 1_000  # start states between those of one seed and of the next


def first_start(seed: int, kind: int = EVALUATION_SEED) -> int:
    """The first start state of a base policy's seed: every seed has start states of its own."""
    return kind + _STARTS_APART * seed


@dataclass(frozen=True)
class BenchSettings:
    """What to compare on what, and how thoroughly.

    Attributes:
        output_dir: Gets everything.
        bases: Directory of base policies as files: those that are there are not trained, those that are trained are
            put there. None: there is none.
        scenarios: Names of scenarios.
        policies: Types of policies.
        methods: Names of methods.
        anchors: Numbers of old frames: of all old tasks together; in a sequence, of each task.
        rollouts: Numbers of episodes of each old task that the policy itself plays before fine-tuning.
        seeds: Of base training and fine-tuning.
        episodes: For each task, from the same start states for every method.
        old_episodes: Demonstrations of each old task; None: as many as the policy needs.
        new_episodes: Demonstrations of a new task; None: likewise.
        view: What a policy observes: the object's position in the state (`told`), or only in the picture (`seen`).
        film: Whether filmstrips are made of every policy.
        base_steps: Steps of base training; None: the policy's own.
        steps: Steps of fine-tuning; None: the policy's own.
        learning_rate: Of fine-tuning, at its highest; None: the policy's own.
        batch_size: None: the policy's own.
        sweep: Whether each method's knob is tried over its grid, to choose one.
        curve: Whether it is tried over its grid to show all of them: nothing is chosen.
        knobs: Values for knobs, by method.
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
        """What success depends on, beside policy and tasks; `seed` is the base policy's."""
        return {"episodes": self.episodes, "seed": first_start(seed)}

    def env(self, task: str, *, blindfold: bool = False) -> Any:
        """Configuration of the environment that a task is played in."""
        import lerobot_craft.bench.metaworld.configuration  # noqa: F401  registers the environment
        from lerobot_craft.lerobot_api.rollouts import env_config

        # Policies of the bench execute whole chunks, and look at nothing in between.
        shown = {"view": self.view, "blindfold": blindfold, "look_every": CHUNK}
        return env_config("craft_metaworld", {"task": task, **shown})

    def knob_values(self, method: Method) -> tuple[float | None, ...]:
        """Values of a method's knob that are run; None is its own."""
        if (self.sweep or self.curve) and method.knob is not None:
            return method.knob.grid
        return (self.knobs.get(method.name),)

    def as_json(self) -> dict[str, Any]:
        """For `results.json`."""
        return {
            name: list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
            for name, value in vars(self).items()
        }
