"""Learning without forgetting: the student's outputs on the NEW data and instruction stay near the teacher's.

Li and Hoiem, 2016 (arXiv:1606.09282). No old frame is needed; what the new frames do not show is not held, and what
they do show is held to what the teacher would have done there, which is not the new task.
"""

import dataclasses
import math
from typing import Any, ClassVar

from torch import nn

from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.constrained import Constrained
from lerobot_craft.training.methods.method import Context


class LearningWithoutForgetting(Constrained):
    """The constraint's machinery with anchors from the new data, a fixed weight, and plain addition of gradients."""

    name: ClassVar[str] = "lwf"

    def freeze(self, policy: nn.Module, config: CraftConfig, policy_config: Any) -> None:
        """Nothing by itself: outputs are held, whatever flags and caches of the constraint say of hidden states."""
        super().freeze(policy, dataclasses.replace(config, retention_mode="action"), policy_config)

    @property
    def old_anchors(self) -> None:
        """None: its anchors are frames of the new task."""

    def measures_real_frames(self) -> bool:
        """No: its weight is fixed, and its anchors are frames of the new task."""
        return False

    @property
    def asked(self) -> Context:
        """With the flags of the old tasks, which it does not use."""
        return self._asked

    def start(self, context: Context) -> None:
        """Let the teacher label frames of the new data, once."""
        self._asked = context
        config, new = context.config, context.train.dataset
        fixed = dataclasses.replace(
            config,
            retention_mode="action",
            anchor_source="dataset",
            anchor_cache_dir=None,  # one that was given holds other anchors
            old_dataset=DatasetFlags(new.repo_id, str(new.root or ""), new.revision),
            old_instructions=None,
            retention_freq=1,
            lambda_per_task=False,
            initial_lambda=config.lwf_lambda,
            lambda_max=max(config.lwf_lambda, config.lambda_max),
            lambda_min=None,
            lambda_lr=0.0,
            use_grad_projection=False,
            projection_mode="weighted",
            task_max_norm=math.inf,  # only the sum is clipped, as that of one loss would be
            retention_max_norm=math.inf,
            per_token=False,
            pooling=None,
            hidden_layer=None,
            layers_to_save=None,
        )
        super().start(dataclasses.replace(context, config=fixed, remembered=None))
