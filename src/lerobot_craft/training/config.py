"""Settings of `craft train` beside lerobot's own: everything behind `--craft.`, checked when it is made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from lerobot_craft.anchors.recipe import (
    DRAW_FROM,
    AnchorConfig,
    DocumentsAnchors,
    asks_for_documents,
)
from lerobot_craft.anchors.retained import mode_named
from lerobot_craft.core import Dual, DualRule, EpsilonDecay, Pooling, ProjectionMode, Surgery, epsilon_schedule
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.io.argv import in_place
from lerobot_craft.training.methods import METHODS

Normalization = Literal["keep", "merge", "replace"]
TeacherKind = Literal["cache", "online"]
AnchorSource = Literal["auto", "dataset", "cross", "both"]
EpsilonUnit = Literal["teacher", "absolute"]

_TOGETHER = "+"  # between modes that are retained together
LOSS_TYPES = ("mse", "cosine", "l1", "kl")

_CHOICES: dict[str, tuple[str, ...]] = {
    "method": tuple(METHODS),
    "anchor_source": get_args(AnchorSource),
    "draw_from": DRAW_FROM,
    "teacher": get_args(TeacherKind),
    "loss_type": LOSS_TYPES,
    "pooling": tuple(pooling for pooling in get_args(Pooling) if pooling != "none"),
    "dual_rule": get_args(DualRule),
    "epsilon_decay": get_args(EpsilonDecay),
    "epsilon_unit": get_args(EpsilonUnit),
    "projection_mode": get_args(ProjectionMode),
    "normalization": get_args(Normalization),
}
_AT_LEAST_ONE = (
    "accumulate",
    "retention_freq",
    "num_anchors",
    "top_k",
    "num_draws",
    "replay_frames",
    "ewc_samples",
    "memory_bytes",
)
_AT_LEAST_ZERO = (
    "anchor_batch_size",
    "epsilon_decay_steps",
    "log_craft_metrics_freq",
    "probe_anchors",
    "remember",
    "check_ranks_freq",
)
# What is left open of the multipliers: see `dual_rule`.
_RATIO = Dual("ratio", lambda_lr=0.3, lambda_min=0.1, fall_rate=0.5, proportional_gain=2.0)
_FLOORED = Dual("ascent", lambda_lr=0.01, lambda_min=0.0, fall_rate=1.0, proportional_gain=1.0)
_POSITIVE = ("replay_ratio", "l2sp_alpha", "ewc_lambda", "lwf_lambda")


@dataclass
class CraftConfig(AnchorConfig):
    """Everything behind `--craft.`; the defaults are the settings that held the old skills in the bench.

    Which anchors there are is in `AnchorConfig`. Its settings are repeated here only where a file or the help has them
    in another place than at the end: each brings along those that follow it there.
    """

    # false: plain lerobot-train, to the bit; all other --craft flags but preload are then without effect.
    enabled: bool = False
    # craft: the constraint | naive: fine-tuning alone | er: replay of old frames | l2sp, ewc: pull the weights back |
    # lwf: hold the outputs on the new data | merge: average the weights afterwards | freeze: train only a part.
    method: str = "craft"
    # keep: the teacher's normalization statistics | merge: joined with the new data's | replace: the new data's, as
    # lerobot-train does. Methods with anchors need keep.
    normalization: str = "keep"
    # Read the new task's data into memory first: the same batches to the bit, sooner. Also where enabled is false. Old
    # data too, where er replays most of it.
    preload: bool = False
    # Save a checkpoint when so many minutes have passed since the last one; it replaces the last one of this kind.
    # Checkpoints of --save_freq stay. 0: only those. SIGINT (Ctrl-C) and SIGTERM save one too.
    save_minutes: float = 10.0

    # A cache of `craft cache build`. If there is none yet, and the anchors' origin is given below, it is built here.
    anchor_cache_dir: Path | None = None
    # Share of the places of --batch_size that anchors take from new samples, so that a step has as many samples as a
    # plain one. 0: anchors come on top.
    anchor_share: float = 0.0
    # Anchors on top of --batch_size per anchor step (and rank, and micro-batch); 0: as many as that.
    anchor_batch_size: int = 0
    # Micro-batches per optimizer step (and rank), each of --batch_size new frames and anchor_batch_size anchors: the
    # step of one batch as large as all of them, in the memory of one of them.
    accumulate: int = 1
    # K: every K-th step visits anchors.
    retention_freq: int = 1
    retention_mode: str = AnchorConfig.retention_mode
    # mse | cosine | l1 | kl. Unset: mse, for logits kl.
    loss_type: str | None = None
    # cache: the teacher's values are computed once | online: at every visit, by the PEFT adapter switched off or by a
    # frozen copy of the policy.
    teacher: str = "cache"

    # auto: the memory in the checkpoint of --policy.path, if there is one (`craft remember` makes it) | off: as if
    # there were none | the path of a memory, or of a checkpoint that has one. Its frames and instructions are held.
    memory: str = "auto"
    # Frames of the new task that are added to the memory of every checkpoint, so that the next fine-tuning holds this
    # task too. 0: none; the memory that was there is still carried on.
    remember: int = 100
    # Bytes of all frames of that memory. The newest tasks are thinned first.
    memory_bytes: int = 67108864

    anchor_source: str = AnchorConfig.anchor_source
    # true: refuse to train where an old instruction looks wrong: it is in no list that was found, the tokenizer cuts it
    # off or does not know a word, or the policy acts under it as under nonsense. false: warn.
    strict: bool = False
    num_anchors: int | None = AnchorConfig.num_anchors
    # Divide each layer's drift by the layer's own spread. Unset: where there are several layers.
    relative: bool | None = None
    # Keep the layer that turns hidden states into actions as it is: a loss on hidden states does not hold it.
    # Unset: where every token is kept.
    freeze_readout: bool | None = None
    top_k: int = AnchorConfig.top_k

    # true: a multiplier for each old task | false: one for all.
    lambda_per_task: bool = True
    # How multipliers move: ascent | pi | log | ratio. What is left open of the next ones depends on what is known: real
    # old frames that are kept out of training are followed by ratio, else ascent.
    dual_rule: str | None = None
    # Where multipliers start.
    initial_lambda: float = 3.0
    # How fast they move. Unset: 0.3 for ratio, else 0.01.
    lambda_lr: float | None = None
    # How low they may fall. Unset: no lower than they start. But where they follow real frames (ratio) and a budget is
    # given (epsilon_end), 0.1: then the budget decides.
    lambda_min: float | None = None
    # The largest value of a multiplier.
    lambda_max: float = 10.0
    # Falling multipliers move this much slower than rising ones. Unset: 0.5 for ratio, else 1.
    lambda_fall_rate: float | None = None
    # Of pi and ratio: the proportional gain, relative to lambda_lr. Unset: 2 for ratio, else 1.
    lambda_gain: float | None = None
    # Of pi and ratio: the share of the old value in the moving average.
    lambda_smoothing: float = 0.0

    # The budget of the drift at the first step. Unset: with ratio that of the end, else 1.
    epsilon_start: float | None = None
    # The budget at the end. Unset: 1 with ratio, else 0.1.
    epsilon_end: float | None = None
    # Steps from one to the other; 0: all steps.
    epsilon_decay_steps: int = 0
    # How it falls: linear | cosine | exponential.
    epsilon_decay: str = "linear"
    # teacher: 1.0 is the teacher's own error (of hidden states: their spread) on that task | absolute: the loss itself.
    epsilon_unit: str = "teacher"

    # Take from the task gradient what points against the retention gradient, where their cosine is below the threshold.
    # Stricter than the budget: drift may then stop growing long before it (decision 0003). false: the two gradients are
    # added, which is a little faster, takes no memory for a second one, and drifted more in the bench (decision 0033).
    use_grad_projection: bool = True
    # The cosine of the two gradients below which they conflict.
    conflict_threshold: float = -0.1
    # weighted: g_t + lambda g_r | equal: (g_t + g_r) / 2 | task_priority: g_t + min(lambda, 1) g_r.
    projection_mode: str = "weighted"
    # Bound on the task gradient before merging. Unset: with projection the optimizer's grad_clip_norm, else none.
    task_max_norm: float | None = None
    # Bound on the weighted retention gradient. Unset: the same.
    retention_max_norm: float | None = None

    # er: frames of the old datasets that are kept.
    replay_frames: int = 1000
    # er: how many join the batch for each new frame.
    replay_ratio: float = 1.0
    # l2sp: strength of the pull.
    l2sp_alpha: float = 0.01
    # ewc: strength of the pull.
    ewc_lambda: float = 100.0
    # ewc: frames of the old datasets that the Fisher information is measured on.
    ewc_samples: int = 256
    # lwf: weight of the distillation.
    lwf_lambda: float = 1.0
    # merge: shares of the fine-tuned weights; one checkpoint each.
    merge_alphas: str = "0.2,0.4,0.6,0.8"
    # freeze: names or patterns of what is not trained, separated by commas; `readout` stands for the output layer.
    freeze: str = ""

    # Every so many steps, and at the end: drift of the actions and the state of each old task. 0: only at the end.
    log_craft_metrics_freq: int = 100
    # Anchors on which the drift of the actions is measured, kept out of training where there are plenty; 0: none.
    probe_anchors: int = 32
    # Write lambda_history.csv and module_cosines.csv.
    save_lambda_history: bool = True

    # Several processes: spread the parameters over them (FSDP2), where the policy does not fit on one device.
    shard: bool = False
    # Let the optimizer move float32 copies of bfloat16 weights: small updates are not lost to rounding.
    master_weights: bool = False
    # Several processes: every so many steps, and before each checkpoint, stop if one of them holds other weights than
    # the rest. It reads the weights once. 0: never.
    check_ranks_freq: int = 100

    def __post_init__(self) -> None:
        if self.memory.lower() == "false":  # draccus reads values as YAML, where `off` is a truth value
            self.memory = "off"
        self._check_choices()
        self._check_numbers()
        try:  # the parts check what is theirs
            self.dual()
            self.surgery(math.inf)
            epsilon_schedule(
                0,
                1,
                *self.budget(),
                self.epsilon_decay_steps,
                self.epsilon_decay,  # type: ignore[arg-type]
            )
        except ValueError as error:
            raise CraftError(f"{setting('craft')}: {error}") from error
        super().__post_init__()

    def _check_choices(self) -> None:
        modes = self.modes
        named = f"{setting('retention_mode')}={self.retention_mode}"
        if len(set(modes)) < len(modes):
            raise CraftError(f"{named} names a mode twice: name each once")
        if len(modes) > 1 and (self.loss_type is not None or self.teacher == "online"):
            raise CraftError(
                f"{named}: several modes have a cache and the default loss each: leave out {setting('loss_type')} and "
                f"{setting('teacher')}=online"
            )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise CraftError(f"{setting(name)} must be one of {', '.join(choices)}; got {value!r}")

    def _check_numbers(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CraftError(f"{setting(name)} must be at least 1; got {value}")
        for name in _AT_LEAST_ZERO:
            if getattr(self, name) < 0:
                raise CraftError(f"{setting(name)} must be 0 or more; got {getattr(self, name)}")
        if not 0 <= self.save_minutes < math.inf:
            raise CraftError(f"{setting('save_minutes')} must be 0 or more, and finite; got {self.save_minutes}")
        if not 0 <= self.anchor_share < 1:
            raise CraftError(f"{setting('anchor_share')} must be 0 or more and less than 1; got {self.anchor_share}")
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise CraftError(f"{setting(name)} must be positive and finite; got {getattr(self, name)}")

    @property
    def modes(self) -> tuple[str, ...]:
        """What is retained, mode by mode."""
        return tuple(mode_named(name).mode for name in self.retention_mode.split(_TOGETHER))

    def by_mode(self) -> "list[CraftConfig]":
        """The same for each mode alone; with several, each has its cache in a directory of its name."""
        if len(self.modes) == 1:
            return [self]
        found = []
        for name in self.retention_mode.split(_TOGETHER):
            where = None if self.anchor_cache_dir is None else self.anchor_cache_dir / mode_named(name).mode
            found.append(replace(self, retention_mode=name, anchor_cache_dir=where))
        return found

    def divided(self, batch_size: int) -> "CraftConfig":
        """The same with the number of anchors settled; `batch_size` is `--batch_size`."""
        if self.anchor_share == 0:
            return replace(self, anchor_batch_size=self.anchor_batch_size or batch_size)
        if batch_size == 1:
            raise CraftError(f"{setting('anchor_share')}={self.anchor_share} needs a --batch_size of 2 or more")
        anchors = min(batch_size - 1, max(1, round(self.anchor_share * batch_size)))
        if self.anchor_batch_size not in (0, anchors):
            raise CraftError(
                f"{setting('anchor_share')}={self.anchor_share} of --batch_size={batch_size} makes {anchors} anchors, "
                f"and {setting('anchor_batch_size')} is {self.anchor_batch_size}: set one of the two to 0"
            )
        return replace(self, anchor_batch_size=anchors)

    def new_samples(self, batch_size: int) -> int:
        """How many of a batch's places new samples have, once it is `divided`."""
        return batch_size - self.anchor_batch_size if self.enabled and self.anchor_share else batch_size

    def of_actions(self) -> "CraftConfig":
        """The same with actions retained, whatever it says of hidden states."""
        return replace(
            self, retention_mode="action", per_token=False, pooling=None, hidden_layer=None, layers_to_save=None
        )

    def following(self) -> "CraftConfig":
        """The same where multipliers follow the drift on real frames that are kept out of training."""
        return replace(self, dual_rule=self.dual_rule or "ratio")

    def dual(self) -> Dual:
        """The multipliers' rule, with what was left open."""
        rule = self.dual_rule or "ascent"
        preset = _RATIO if rule == "ratio" else _FLOORED
        lambda_min = self.lambda_min
        if lambda_min is None:
            falls = rule == "ratio" and self.epsilon_end is not None
            lambda_min = min(preset.lambda_min, self.initial_lambda) if falls else self._start()
        return Dual(
            rule=rule,  # type: ignore[arg-type]  # checked there
            initial_lambda=self.initial_lambda,
            lambda_lr=preset.lambda_lr if self.lambda_lr is None else self.lambda_lr,
            lambda_min=lambda_min,
            lambda_max=self.lambda_max,
            fall_rate=preset.fall_rate if self.lambda_fall_rate is None else self.lambda_fall_rate,
            proportional_gain=preset.proportional_gain if self.lambda_gain is None else self.lambda_gain,
            smoothing=self.lambda_smoothing,
        )

    def _start(self) -> float:
        """Where multipliers start; 0 where that is out of bounds, which is refused with its own sentence."""
        return self.initial_lambda if 0 <= self.initial_lambda <= self.lambda_max else 0.0

    def budget(self) -> tuple[float, float]:
        """At the first step and at the end."""
        follows = self.dual_rule == "ratio"
        end = (1.0 if follows else 0.1) if self.epsilon_end is None else self.epsilon_end
        start = (end if follows else 1.0) if self.epsilon_start is None else self.epsilon_start
        return start, end

    def surgery(self, grad_clip_norm: float) -> Surgery:
        """How the two gradients are merged; `grad_clip_norm` bounds each unless told otherwise, and their sum."""
        clip = grad_clip_norm if grad_clip_norm > 0 else math.inf  # lerobot: 0 clips nothing
        return Surgery(
            use_grad_projection=self.use_grad_projection,
            conflict_threshold=self.conflict_threshold,
            projection_mode=self.projection_mode,  # type: ignore[arg-type]  # checked there
            task_max_norm=self._bound(self.task_max_norm, clip),
            retention_max_norm=self._bound(self.retention_max_norm, clip),
            merged_max_norm=clip,
        )

    def _bound(self, asked: float | None, clip: float) -> float:
        """Of one gradient. Without projection the two are added, and only their sum is bounded."""
        if asked is not None:
            return asked
        return clip if self.use_grad_projection else math.inf

    def epsilon(self, step: int, total_steps: int) -> float:
        """The budget at a step, counted from 0; over all steps, the last one has `epsilon_end`."""
        return epsilon_schedule(
            step,
            total_steps - 1,
            *self.budget(),
            self.epsilon_decay_steps,
            self.epsilon_decay,  # type: ignore[arg-type]  # checked there
        )

    def in_order(self) -> list[str]:
        """Names of all settings as files list them."""
        return in_place(CraftConfig.__annotations__, AnchorConfig.__annotations__)


@dataclass
class DocumentsConfig(DocumentsAnchors, CraftConfig):
    """Hidden states are retained at every fifth step, on 16 anchors, with multipliers that may fall to 0."""

    anchor_batch_size: int = 16
    retention_freq: int = 5
    dual_rule: str | None = "ascent"
    initial_lambda: float = 1.0
    lambda_lr: float | None = 0.01
    lambda_min: float | None = 0.0
    epsilon_start: float | None = 1.0
    epsilon_end: float | None = 0.1


def config_class(flags: Sequence[str]) -> type[CraftConfig]:
    """Whose defaults hold beside some flags of CRaFT, written `--x=y`."""
    return DocumentsConfig if asks_for_documents(flags) else CraftConfig
