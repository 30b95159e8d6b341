"""Other ways to turn two losses into one gradient, in the place of `RetentionStep` within `craft train`.

Each leaves a merged gradient in `.grad`, bounded as ours is. Multipliers stay where they start: the step's time is
compared, not what it holds.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torchjd.aggregation import PCGrad
from torchjd.autojac import backward as jacobian_backward
from torchjd.autojac import jac_to_grad

from lerobot_craft.core import AnchorDrift, RetentionStep, StepReport
from lerobot_craft.core.retention import AnchorDrifts

Drift = Callable[[], AnchorDrifts]


def mean_of(found: AnchorDrifts) -> Tensor:
    drifts = [part.drift() for part in found] if isinstance(found, list) else [found]
    return torch.cat([(d.per_sample if isinstance(d, AnchorDrift) else d).reshape(-1) for d in drifts]).mean()


class Engine(RetentionStep):
    """A step that visits anchors each time, with gradients merged by `merged`."""

    def backward(self, task_loss: Callable[[], Tensor], anchor_drift: Drift) -> StepReport:
        """As `RetentionStep.backward`."""
        loss = self.merged(task_loss(), anchor_drift)
        bound = min(self.surgery.merged_max_norm, 1e9)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, bound))
        return StepReport(self.step, loss.detach(), norm, min(norm, bound), anchor=None)

    def merged(self, task: Tensor, anchor_drift: Drift) -> Tensor:
        """Leave the merged gradient in `.grad`; the task's loss."""
        raise NotImplementedError


class WeightedSum(Engine):
    """No surgery: one backward pass of the weighted sum, with the activations of both in memory."""

    def merged(self, task: Tensor, anchor_drift: Drift) -> Tensor:
        """One backward pass."""
        (task + self.multipliers.values[0] * mean_of(anchor_drift())).backward()
        return task


class TwoClones(Engine):
    """Clone the task's gradient, clone the anchors', project and merge into a third."""

    def merged(self, task: Tensor, anchor_drift: Drift) -> Tensor:
        """Two, and three gradients."""
        task.backward()
        tasks = self._clones()
        mean_of(anchor_drift()).backward()
        anchors = self._clones()
        dot = sum((t * r).sum() for t, r in zip(tasks, anchors, strict=True))
        squared = sum((r * r).sum() for r in anchors)
        scale = float(dot / squared) if dot < 0 else 0.0
        for p, t, r in zip(self.parameters, tasks, anchors, strict=True):
            p.grad = t - scale * r + self.multipliers.values[0] * r
        return task

    def _clones(self) -> list[Tensor]:
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return found


class TorchJD(Engine):
    """torchjd's Jacobian of both losses, and PCGrad, with its leanest settings."""

    def merged(self, task: Tensor, anchor_drift: Drift) -> Tensor:
        """Two, one for each row of the Jacobian."""
        losses = [task, mean_of(anchor_drift())]
        jacobian_backward(losses, inputs=self.parameters, parallel_chunk_size=1)
        jac_to_grad(self.parameters, PCGrad(), optimize_gramian_computation=True)
        return task
