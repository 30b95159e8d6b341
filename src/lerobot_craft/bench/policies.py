"""The policies that the bench trains: lerobot's own at a small size, and how long and how fast each is trained.

The settings are those under which small policies reached success in prototype runs. All methods share them: none is
tuned for a method or a scenario.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lerobot_craft.bench.metaworld.tasks import View
from lerobot_craft.errors import CraftError

CHUNK = 8  # actions, all of which are executed before the policy is asked again


@dataclass(frozen=True)
class Training:
    """One training by `craft train`.

    Attributes:
        steps: Of the optimizer.
        learning_rate: At its highest, after the warm-up; a cosine takes it down to a twentieth.
        warmup_steps: In which it rises.
        batch_size: Of demonstrations.
    """

    steps: int
    learning_rate: float
    warmup_steps: int
    batch_size: int = 64

    def changed(self, steps: int | None, batch_size: int | None, learning_rate: float | None = None) -> "Training":
        """With another length, batch or rate (None: its own); the warm-up stays within a quarter of the steps."""
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
        name: Its type, as `--policy` names it.
        sizes: Fields of `TinySizes` that are not the default.
        settings: Fields of lerobot's configuration.
        image_side: The field that holds height and width of the images that the network sees; empty: as they are.
        base: How it learns the old tasks.
        fine_tuning: How it learns a new one.
        old_episodes: Demonstrations of each old task that it needs.
        new_episodes: Demonstrations of a new task.
        hidden_layers: What "all layers" is for it, as `--craft.layers_to_save` has it; empty where there are none.
        reads_instruction: Whether it can tell the two tasks of one scene apart.
        has_schedule: Whether its configuration holds a learning-rate schedule.
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
        """What it is made of, without how it is trained."""
        made = asdict(self)
        return {name: made[name] for name in ("name", "sizes", "settings")}

    def train_flags(self, training: Training, seed: int) -> dict[str, object]:
        """Flags of `craft train`, beside those that say what is trained on what."""
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
            # 16 px in patches of 8, folded two by two: an image is one token.
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
            old_episodes=200,  # from 50 it learns them by heart: success 0.78
            new_episodes=100,
            # One token per image again; wide and shallow, with few heads: as good as the default at 0.6 of its time.
            sizes={"width": 96, "depth": 3, "mlp_dim": 192, "num_heads": 4, "vision_depth": 1, "patch_size": 16},
            # The suite's longest prompt, all of whose numbers may be negative; five tokens around the actions, and of
            # these 99.9 % of chunks have at most 18.
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


# The same policies with eyes: a vision tower that is as wide as the rest, and demonstrations enough to learn to look.
_EYES = {"vision_width": 96, "vision_depth": 2, "vision_heads": 4, "vision_mlp_dim": 192, "patch_size": 16}
_SEEING = {
    policy.name: policy
    for policy in (
        replace(
            POLICIES["smolvla"],
            base=Training(steps=8000, learning_rate=1.2e-3, warmup_steps=200),
            sizes={**POLICIES["smolvla"].sizes, **_EYES},  # 64 px in 16 patches, folded two by two: four tokens
            old_episodes=150,
            new_episodes=100,  # plain fine-tuning reaches 0.80 of push-blue with 30, 0.85 with 60, 0.90 with 100
        ),
        replace(
            POLICIES["pi0_fast"],
            sizes={**POLICIES["pi0_fast"].sizes, **_EYES},  # 16 tokens
        ),
    )
}


def policy_named(name: str, view: View = "told") -> BenchPolicy:
    """The policy of that name for a view, or a sentence with the names there are."""
    found = POLICIES if view == "told" else _SEEING
    if name not in found:
        raise CraftError(f"--policy={name} is not in the bench (--view={view}): choose among {', '.join(found)}")
    return found[name]


def make_start(policy: BenchPolicy, directory: Path, old_data: Path, instructions: Sequence[str], seed: int) -> None:
    """Make the policy before it has learned anything, as a checkpoint for the robot of a dataset.

    Args:
        policy: Which.
        directory: Where to save.
        old_data: Directory of the dataset of the old tasks.
        instructions: Of all tasks, old and new.
        seed: Of its weights.
    """
    from lerobot_craft.lerobot_api.datasets import open_dataset
    from lerobot_craft.tiny import TinySizes
    from lerobot_craft.tiny.checkpoints import make_checkpoint_for

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
