"""L2-SP: pull every trained weight back to its value before fine-tuning (Li, Grandvalet and Davoine, 2018)."""

from typing import ClassVar, override

from lerobot_craft.training.methods.pull import PullToStart


class L2SP(PullToStart):
    """The task loss plus alpha/2 * |theta - theta_0|^2, with alpha = `--craft.l2sp_alpha`."""

    name: ClassVar[str] = "l2sp"

    @property
    @override
    def strength(self) -> float:
        return self.context.config.l2sp_alpha
