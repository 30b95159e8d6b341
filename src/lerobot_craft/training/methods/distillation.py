"""Learning without forgetting: the student's outputs on the NEW data and instruction stay near the teacher's.

Li and Hoiem, 2016 (arXiv:1606.09282). No old frame is needed; what the new frames do not show is not held, and what
they do show is held to what the teacher would have done there, which is not the new task.
"""

import dataclasses
import math
from typing import Any, ClassVar, override

from torch import nn

from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.core import Dual, Surgery
from lerobot_craft.policies import adapter_for
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.constrained import Constrained
from lerobot_craft.training.methods.freeze import freeze_readout
from lerobot_craft.training.methods.method import Context, Knob, MethodParts


class LearningWithoutForgetting(Constrained):
    """The constraint's machinery with anchors from the new data, a fixed weight, and plain addition of gradients."""

    name: ClassVar[str] = "lwf"
    label: ClassVar[str] = "learning without forgetting"
    held: ClassVar[str | None] = "the teacher's outputs on the new data (weight {lwf_lambda:g})"
    knob: ClassVar[Knob | None] = Knob("lwf_lambda", 1.0, (0.1, 1.0, 10.0))
    every: ClassVar[int] = 1
    per_task: ClassVar[bool] = False
    old_anchors: ClassVar[None] = None  # its anchors are frames of the new task

    @classmethod
    @override
    def parts(cls, cfg: Any, config: CraftConfig, policy: nn.Module) -> MethodParts:
        held = dataclasses.replace(config.of_actions(), anchor_cache_dir=None)
        return dataclasses.replace(super().parts(cfg, held, policy), every=cls.every)

    @override
    def freeze(self, policy: nn.Module, config: CraftConfig, policy_config: Any) -> None:
        if config.freeze_readout:  # by itself nothing: outputs are held
            freeze_readout(policy, adapter_for(policy_config))

    @override
    def of_anchors(self, context: Context) -> Context:
        """Actions on the new data: a cache that was given holds other anchors."""
        new = context.train.dataset
        config = dataclasses.replace(
            context.config.of_actions(),
            anchor_source="dataset",
            anchor_cache_dir=None,
            old_dataset=DatasetFlags(new.repo_id, str(new.root or ""), new.revision),
            old_instructions=None,
        )
        return dataclasses.replace(context, config=config, remembered=None)

    @override
    def dual(self, config: CraftConfig) -> Dual:
        weight = config.lwf_lambda
        return Dual(initial_lambda=weight, lambda_lr=0.0, lambda_min=weight, lambda_max=max(weight, config.lambda_max))

    @override
    def surgery(self, config: CraftConfig, clip: float) -> Surgery:
        """The sum, of which only the whole is clipped, as that of one loss would be."""
        return dataclasses.replace(
            config.surgery(clip),
            use_grad_projection=False,
            projection_mode="weighted",
            task_max_norm=math.inf,
            retention_max_norm=math.inf,
        )

    @property
    @override
    def settled(self) -> CraftConfig:
        return self.context.config.of_actions()

    @override
    def measures_real_frames(self) -> bool:
        return False
