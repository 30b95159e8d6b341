"""Load a teacher; refuse it if it does not match its checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lerobot_craft.lerobot_api.policies import PolicyConfig, autocast, load_policy, load_policy_config
from lerobot_craft.lerobot_api.processors import Processor, load_processors
from lerobot_craft.teacher.fingerprint import fingerprint
from lerobot_craft.teacher.weights import check_weights, require_weights


@dataclass(frozen=True)
class Teacher:
    """A checked policy with the processors and statistics it was trained with.

    Attributes:
        policy: In eval mode; the adapter's mode must be set by the caller.
        preprocessor: Raw batch -> the policy's inputs.
        postprocessor: The policy's actions -> the robot's.
        config: lerobot's config, with the checkpoint's features.
        fingerprint: Part -> SHA-256, see `lerobot_craft.teacher.fingerprint`.
    """

    policy: nn.Module
    preprocessor: Processor
    postprocessor: Processor
    config: PolicyConfig
    fingerprint: dict[str, str]


def load_teacher(path: str | Path, overrides: Sequence[str] = ()) -> Teacher:
    """Load, check and fingerprint the policy of a checkpoint. Needs no dataset.

    Args:
        path: A directory written by lerobot's `save_pretrained`, or a name on the Hub.
        overrides: Settings as on lerobot's command line without `policy.`, such as `--device=cpu`.

    Raises:
        CraftError: The checkpoint is incomplete, or the policy does not run with its weights.
    """
    config = load_policy_config(path, overrides)
    directory = Path(config.pretrained_path or path)  # for a policy from the Hub: its download directory
    require_weights(directory)
    policy = load_policy(config)
    check_weights(policy, directory)
    preprocessor, postprocessor = load_processors(config)
    return Teacher(policy, preprocessor, postprocessor, config, fingerprint(policy, preprocessor, postprocessor))


@torch.no_grad()
def executed_chunk(teacher: Teacher, policy: Any, batch: Any, seed: tuple[int, ...]) -> Tensor:
    """A teacher's chunk [B, H, A] as the robot executes it; its noise depends only on the seed.

    Args:
        teacher: Its processors and settings are used.
        policy: Its network, in eval mode.
        batch: Output of its preprocessor.
        seed: Seed of the noise.
    """
    mixed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))
    with torch.random.fork_rng(), autocast(teacher.config):
        torch.manual_seed(mixed)
        chunk = policy.predict_action_chunk(batch)
    executed: Tensor = teacher.postprocessor(chunk)
    return executed.float().cpu()
