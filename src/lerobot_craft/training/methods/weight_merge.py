"""Weight interpolation: fine-tune plainly, then average with the weights before (WiSE-FT; Wortsman et al., 2022)."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, override

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lerobot_craft.core.precision import widen
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import write_atomically
from lerobot_craft.io.strict_json import to_json
from lerobot_craft.training.methods.demonstrations import (
    Demonstrations,
    demonstration_loss,
    new_demonstrations,
    old_demonstrations,
)
from lerobot_craft.training.methods.kept_tensors import keep_start
from lerobot_craft.training.methods.method import Context, Knob, Method

SavePolicy = Callable[[Path, str], Any]  # where, and what its card has to say

_LOSS_FRAMES = 64
# LoRA's update is the product of two factors, of which one starts at zero. Shrinking that one shrinks the update; to
# average both would shrink it twice and mix in the other's random start.
_ZERO_FACTORS = (".lora_B.", ".lora_embedding_A.")
_OTHER_FACTORS = (".lora_A.", ".lora_embedding_B.")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Merged:
    """One row of the sweep.

    Attributes:
        alpha: Share of the fine-tuned weights; 0 is the policy before, 1 after fine-tuning.
        weight_drift: |theta - theta_0| over what is averaged.
        path: The checkpoint, relative to the output directory; None at the ends that were not asked for.
        old_loss: lerobot's loss on old demonstrations, None if there are none.
        new_loss: The same on the new ones.
    """

    alpha: float
    weight_drift: float
    path: str | None
    old_loss: float | None = None
    new_loss: float | None = None


class WeightMerge(Method):
    """After plain fine-tuning, theta = (1 - alpha) theta_0 + alpha theta_T for each of `--craft.merge_alphas`.

    Computed in float32; each goes to `<output_dir>/merged/alpha_0.20/pretrained_model`, and a table of all to
    `merged/sweep.json`. With `--craft.old_dataset` the table has the demonstration loss on old and new frames. theta_0
    is read from a file at the end: during training nothing is held in memory.
    """

    name: ClassVar[str] = "merge"
    label: ClassVar[str] = "weight interpolation"
    held: ClassVar[str | None] = (
        "nothing while it trains; afterwards the weights are averaged with those before, shares of the new ones "
        "{merge_alphas}"
    )
    knob: ClassVar[Knob | None] = Knob("merge_alphas", 0.6, (0.2, 0.4, 0.6, 0.8))
    needs_whole_parameters: ClassVar[bool] = True

    @override
    def start(self, context: Context) -> None:
        super().start(context)
        self._alphas = parse_alphas(context.config.merge_alphas)
        tensors = merged_tensors(context.policy)
        self._kept = keep_start(context, tensors)
        if not context.resumed:
            _require_averageable(context.policy, tensors)
        self._measured: dict[str, Demonstrations] = {}
        if context.config.old_dataset.repo_id and context.accelerator.is_main_process:
            self._measured = {
                "old_loss": old_demonstrations(context, _LOSS_FRAMES),
                "new_loss": new_demonstrations(context, _LOSS_FRAMES),
            }

    @override
    def compute(self) -> str:
        return "nothing while it trains; afterwards one policy for each share"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"start_weights": self._kept.sha256}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.require(state.get("start_weights"))

    @override
    def finish(self, save_policy: SavePolicy) -> None:
        tensors = merged_tensors(self.context.policy)
        trained = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        self._directory.mkdir(parents=True, exist_ok=True)
        alphas = tqdm(sorted({0.0, *self._alphas, 1.0}), desc="merging", unit="policy")
        try:
            rows = [self._merge(tensors, trained, alpha, save_policy) for alpha in alphas]
        finally:
            for name, tensor in tensors.items():
                tensor.copy_(trained[name])
        write_atomically(self._directory / "sweep.json", to_json({"merged": [_measured_only(row) for row in rows]}))
        logger.info("merged weights, in %s:\n%s", self._directory, sweep_table(rows))

    @property
    def _directory(self) -> Path:
        return Path(self.context.train.output_dir) / "merged"

    @torch.no_grad()
    def _merge(
        self, tensors: Mapping[str, Tensor], trained: Mapping[str, Tensor], alpha: float, save_policy: SavePolicy
    ) -> Merged:
        moved = 0.0
        for (name, tensor), start in zip(tensors.items(), self._kept.tensors(tensors), strict=True):
            tensor.copy_(interpolated(name, start, trained[name], alpha))
            if not _stays_as_trained(name):
                moved += (widen(tensor.cpu()) - widen(start)).double().square().sum().item()
        path = None
        if alpha in self._alphas:
            path = self._directory / alpha_name(alpha) / "pretrained_model"
            save_policy(path, f"Its weights are the teacher's, moved by {alpha:g} of the way to the fine-tuned ones.")
        losses = {kind: self._loss(frames) for kind, frames in self._measured.items()}
        shown = None if path is None else str(path.relative_to(self.context.train.output_dir))
        return Merged(alpha, math.sqrt(moved), shown, **losses)

    def _loss(self, frames: Demonstrations) -> float | None:
        """The same noise for every alpha, so that rows can be compared."""
        total = 0.0
        for number, raw in enumerate(frames.batches(self.context.train.batch_size)):
            loss = demonstration_loss(self.context, raw, frames.cameras, seed=self.context.seed + number)
            total += loss.item() * len(next(iter(raw.values())))
        return total / len(frames) if math.isfinite(total) else None


def parse_alphas(text: str) -> list[float]:
    """Shares of the fine-tuned weights, as written in `--craft.merge_alphas`."""
    try:
        alphas = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        alphas = []
    if not alphas or len(set(alphas)) < len(alphas) or not all(0 <= alpha <= 1 for alpha in alphas):
        raise CraftError(
            f"--craft.merge_alphas={text} must be different numbers from 0 to 1, separated by commas, such as 0.2,0.5"
        )
    return alphas


def alpha_name(alpha: float) -> str:
    """Of a merged policy's directory: two decimals, or as many as tell it from its neighbours."""
    return f"alpha_{max(f'{alpha:.2f}', repr(alpha), key=len)}"


def merged_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """What is averaged: trained parameters, and the running statistics that training may have moved; detached."""
    tensors = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    saved = policy.state_dict().keys()
    buffers = {name: b for name, b in policy.named_buffers() if name in saved and b.is_floating_point()}
    return tensors | buffers


def interpolated(name: str, start: Tensor, trained: Tensor, alpha: float) -> Tensor:
    """(1 - alpha) * start + alpha * trained, in float32 at least."""
    if _stays_as_trained(name):
        return trained
    return (1 - alpha) * widen(start) + alpha * widen(trained)


def sweep_table(rows: list[Merged]) -> str:
    """The sweep for people."""
    lines = [f"{'alpha':>8}  {'weights moved':>13}  {'old loss':>10}  {'new loss':>10}  checkpoint"]
    for row in rows:
        losses = "  ".join(f"{'-' if x is None else format(x, '.4f'):>10}" for x in (row.old_loss, row.new_loss))
        lines.append(f"{row.alpha:>8g}  {row.weight_drift:>13.3e}  {losses}  {row.path or '-'}")
    return "\n".join(lines)


def _measured_only(row: Merged) -> dict[str, Any]:
    return {key: value for key, value in asdict(row).items() if value is not None}


def _stays_as_trained(name: str) -> bool:
    return any(factor in name for factor in _OTHER_FACTORS)


def _require_averageable(policy: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for config in getattr(policy, "peft_config", {}).values():
        if config.peft_type != "LORA":
            raise CraftError(
                f"--craft.method=merge does not know how {config.peft_type.value} enters the weights: use "
                "--peft.method_type=LORA"
            )
    for name, tensor in tensors.items():
        if "lora_" in name and not any(factor in name for factor in (*_ZERO_FACTORS, *_OTHER_FACTORS)):
            raise CraftError(f"--craft.method=merge does not know how {name} enters the weights: use plain LoRA")
        if any(factor in name for factor in _ZERO_FACTORS) and tensor.any():
            raise CraftError(
                f"{name} does not start at zero, so LoRA's product cannot be averaged with the weights before: leave "
                "--peft.init_type unset"
            )
