"""The policies that the bench trains: small versions of lerobot's own, with their training settings.

Small policies succeeded with these settings in prototype runs. They are not tuned for a method or a scenario.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lerobot_craft.bench.metaworld.tasks import View
from lerobot_craft.errors import CraftError

CHUNK = 8  # actions, all executed before the policy is asked again


@dataclass(frozen=True)
class Training:
    """Settings of one training with `craft train`.

    Attributes:
        steps: Optimizer steps.
        learning_rate: Peak, after warm-up; a cosine reduces it to a twentieth.
        warmup_steps: Steps of linear increase.
        batch_size: Frames per step.
    """

    steps: int
    learning_rate: float
    warmup_steps: int
    batch_size: int = 64

    def changed(self, steps: int | None, batch_size: int | None, learning_rate: float | None = None) -> "Training":
        """With other steps, batch size or rate (None: unchanged); warm-up is at most a quarter of the steps."""
        steps = steps or self.steps
        return Training(
            steps,
            learning_rate or self.learning_rate,
            min(self.warmup_steps, max(1, steps // 4)),
            batch_size or self.batch_size,
        )


@dataclass(frozen=True)
class BenchPolicy:
    """A small policy.

    Attributes:
        name: Its type, as in `--policy`.
        sizes: Fields of `TinySizes` that are not the default.
        settings: Fields of lerobot's configuration.
        image_side: The field with height and width of the network's images; empty: unchanged size.
        base: Training on the old tasks.
        fine_tuning: Training on a new task.
        old_episodes: Demonstrations per old task.
        new_episodes: Demonstrations of a new task.
        hidden_layers: All its layers, as in `--craft.layers_to_save`; empty: none.
        reads_instruction: Whether it can distinguish two tasks of one scene.
        has_schedule: Whether its configuration includes a learning-rate schedule.
    """

    name: str
    base: Training
    fine_tuning: Training
    old_episodes: int = 50
    new_episodes: int = 30
    sizes: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    image_side: str = ""
    hidden_layers: str = ""
    reads_instruction: bool = True
    has_schedule: bool = True

    def as_json(self) -> dict[str, Any]:
        """Its architecture, without training settings."""
        made = asdict(self)
        return {name: made[name] for name in ("name", "sizes", "settings")}

    def train_flags(self, training: Training, seed: int) -> dict[str, object]:
        """Flags of `craft train`, except those for policy and data."""
        flags: dict[str, object] = {
            "steps": training.steps,
            "batch_size": training.batch_size,
            "seed": seed,
            "save_freq": training.steps,
            "log_freq": max(1, training.steps // 20),
            "env_eval_freq": 0,
            "num_workers": 0,
            "wandb.enable": False,
            "policy.device": "cpu",
            "policy.push_to_hub": False,
            "policy.optimizer_lr": training.learning_rate,
            "policy.optimizer_weight_decay": 1e-4,
        }
        if self.has_schedule:
            flags |= {
                "policy.optimizer_grad_clip_norm": 1.0,
                "policy.scheduler_warmup_steps": training.warmup_steps,
                "policy.scheduler_decay_steps": training.steps,
                "policy.scheduler_decay_lr": training.learning_rate / 20,
            }
        return flags


POLICIES = {
    policy.name: policy
    for policy in (
        BenchPolicy(
            "smolvla",
            base=Training(steps=4000, learning_rate=1.5e-3, warmup_steps=100),
            fine_tuning=Training(steps=400, learning_rate=5e-4, warmup_steps=50),
            # 16 px in 8 px patches, merged two by two: one token per image.
            sizes={
                "num_heads": 4,
                "num_kv_heads": 2,
                "expert_width": 48,
                "vision_depth": 1,
                "patch_size": 8,
            },
            settings={"num_steps": 4},
            image_side="resize_imgs_with_padding",
            hidden_layers="all,expert:all",
        ),
        BenchPolicy(
            "pi0_fast",
            base=Training(steps=12000, learning_rate=3e-3, warmup_steps=100, batch_size=32),
            fine_tuning=Training(steps=800, learning_rate=1e-3, warmup_steps=50, batch_size=32),
            old_episodes=200,  # with 50 it overfits: success 0.78
            new_episodes=100,
            # Again one token per image; wide, shallow, few heads: as good as the default in 0.6 of the time.
            sizes={"width": 96, "depth": 3, "mlp_dim": 192, "num_heads": 4, "vision_depth": 1, "patch_size": 16},
            # The longest prompt with only negative numbers; 5 tokens around the actions, at most 18 for 99.9 % of them.
            settings={
                "tokenizer_max_length": 31,
                "max_action_tokens": 30,
                "max_decoding_steps": 29,
                "leave_out_padding": True,
            },
            image_side="image_resolution",
            hidden_layers="all",
        ),
        BenchPolicy(
            "act",
            base=Training(steps=2500, learning_rate=1e-4, warmup_steps=1),
            fine_tuning=Training(steps=400, learning_rate=5e-5, warmup_steps=1),
            reads_instruction=False,
            has_schedule=False,
        ),
    )
}


# The same policies with vision: a vision tower as wide as the rest, and enough demonstrations to learn to use it.
_EYES = {"vision_width": 96, "vision_depth": 2, "vision_heads": 4, "vision_mlp_dim": 192, "patch_size": 16}
_SEEING = {
    policy.name: policy
    for policy in (
        replace(
            POLICIES["smolvla"],
            base=Training(steps=8000, learning_rate=1.2e-3, warmup_steps=200),
            sizes={**POLICIES["smolvla"].sizes, **_EYES},  # 64 px in 16 patches, merged two by two: four tokens
            old_episodes=150,
            new_episodes=100,  # plain fine-tuning on push-blue reaches 0.80 with 30, 0.85 with 60, 0.90 with 100
        ),
        replace(
            POLICIES["pi0_fast"],
            sizes={**POLICIES["pi0_fast"].sizes, **_EYES},  # 16 tokens
        ),
    )
}


def policy_named(name: str, view: View = "told") -> BenchPolicy:
    """The policy of that name for a view; an unknown name is refused with the known ones."""
    found = POLICIES if view == "told" else _SEEING
    if name not in found:
        raise CraftError(f"--policy={name} is not in the bench (--view={view}): choose among {', '.join(found)}")
    return found[name]


def make_start(policy: BenchPolicy, directory: Path, old_data: Path, instructions: Sequence[str], seed: int) -> None:
    """Save the untrained policy as a checkpoint for a dataset's robot.

    Args:
        policy: The policy.
        directory: Output directory.
        old_data: Directory of the old tasks' dataset.
        instructions: Of all tasks, old and new.
        seed: Seed of the weights.
    """
    from lerobot_craft.lerobot_api.datasets import open_dataset
    from lerobot_craft.tiny import TinySizes
    from lerobot_craft.tiny.make import make_checkpoint_for

    dataset = open_dataset(f"craft/{old_data.name}", old_data)
    (camera,) = dataset.meta.camera_keys
    shown = {policy.image_side: tuple(dataset.meta.features[camera]["shape"][:2])} if policy.image_side else {}
    make_checkpoint_for(
        policy.name,
        directory,
        dataset,
        instructions=instructions,
        chunk_size=CHUNK,
        sizes=TinySizes(**policy.sizes),
        seed=seed,
        **policy.settings,
        **shown,
    )
