"""Load a teacher, and refuse it unless it is what its checkpoint says."""

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
        policy: In eval mode; switch it as the policy's adapter wants it.
        preprocessor: Raw batch -> the policy's inputs.
        postprocessor: The policy's actions -> the robot's.
        config: lerobot's config, features as in the checkpoint.
        fingerprint: Part -> SHA-256, see `lerobot_craft.teacher.fingerprint`.
    """

    policy: nn.Module
    preprocessor: Processor
    postprocessor: Processor
    config: PolicyConfig
    fingerprint: dict[str, str]


def load_teacher(path: str | Path, overrides: Sequence[str] = ()) -> Teacher:
    """Load, check and fingerprint the policy of a checkpoint directory; no dataset is needed.

    Args:
        path: A directory that lerobot's `save_pretrained` wrote, or a name on the Hub.
        overrides: Settings as on lerobot's command line without `policy.`, such as `--device=cpu`.

    Raises:
        CraftError: The directory is not a whole checkpoint, or the policy does not run with its weights.
    """
    config = load_policy_config(path, overrides)
    directory = Path(config.pretrained_path or path)  # of a policy of the Hub: where it was downloaded to
    require_weights(directory)
    policy = load_policy(config)
    check_weights(policy, directory)
    preprocessor, postprocessor = load_processors(config)
    return Teacher(policy, preprocessor, postprocessor, config, fingerprint(policy, preprocessor, postprocessor))


@torch.no_grad()
def executed_chunk(teacher: Teacher, policy: Any, batch: Any, seed: tuple[int, ...]) -> Tensor:
    """A teacher's chunk [B, H, A] as the robot executes it; its noise depends on the seed alone.

    Args:
        teacher: Whose processors and settings are used.
        policy: Its network, in eval mode.
        batch: As its preprocessor returns it.
        seed: Of the noise.
    """
    mixed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))
    with torch.random.fork_rng(), autocast(teacher.config):
        torch.manual_seed(mixed)
        chunk = policy.predict_action_chunk(batch)
    executed: Tensor = teacher.postprocessor(chunk)
    return executed.float().cpu()
