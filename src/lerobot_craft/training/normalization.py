"""Which statistics a fine-tuned policy normalizes by: the teacher's, the new data's, or both joined.

lerobot-train replaces the teacher's by those of the new data. The old skills then see other inputs and their outputs
are scaled to other actions, although no weight has moved. So the default here is to keep the teacher's.

Where the new data leave the range of the statistics that are kept, a warning says so in numbers.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lerobot_craft.anchors.teacher import normalizer_stats
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.features import cameras_of, require_features, unread_cameras
from lerobot_craft.lerobot_api.processors import (
    Processor,
    load_processors,
    normalization_modes,
    set_stats,
    step_name,
    train_processors,
)
from lerobot_craft.policies import adapter_for
from lerobot_craft.training.config import Normalization

type Stats = dict[str, dict[str, Tensor]]  # feature -> statistic (mean, std, min, max, q01 .. q99, count) -> values
type Modes = Mapping[str, str]  # feature -> lerobot's NormalizationMode

NEEDED = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""What a mode normalizes by; a mode that is not here leaves values as they are."""

logger = logging.getLogger(__name__)


def make_processors(
    cfg: Any, student: nn.Module, policy: Normalization, dataset_stats: Mapping[str, Any] | None, device: torch.device
) -> tuple[Processor, Processor]:
    """Pre- and postprocessor of a training run.

    `replace` is lerobot-train, to the bit. `keep` and `merge` start from the checkpoint's own processors, features and
    tokenizers included; in a resumed run its statistics are those of the run and stay as they are.

    Args:
        cfg: lerobot's `TrainPipelineConfig`.
        student: After lerobot's `make_policy`.
        policy: `--craft.normalization`.
        dataset_stats: `dataset.meta.stats` of the new data.
        device: accelerate's.

    Raises:
        CraftError: The statistics of teacher and new data do not go together.
    """
    if policy == "replace":
        return train_processors(cfg, student, dataset_stats, device)
    preprocessor, postprocessor = load_processors(cfg.policy, cfg.rename_map, device)
    _check_relative_actions(preprocessor, cfg.policy)
    if cfg.resume:
        return preprocessor, postprocessor
    new, modes = as_stats(dataset_stats, cfg.rename_map), normalization_modes(preprocessor)
    for processor in (preprocessor, postprocessor):
        stats = stats_for(policy, normalizer_stats(processor), new, modes)
        if policy == "merge":
            set_stats(processor, stats)
    return preprocessor, postprocessor


def check_features(config: Any, present: Mapping[str, Any], rename_map: Mapping[str, str]) -> None:
    """Refuse a dataset that this policy cannot be trained on; call it before lerobot's `make_policy`.

    Args:
        config: The policy's, features as in the checkpoint.
        present: `dataset.meta.features`.
        rename_map: lerobot's `--rename_map`.

    Raises:
        CraftError: Features are missing, or state or action have another shape.
    """
    masked = require_features(
        config,
        present,
        dataset="of the new task",
        masks_missing_cameras=_masks_missing_cameras(config),
        rename_map=rename_map,
        actions=True,
    )
    if masked:
        logger.warning("the new dataset has no %s: the policy masks these cameras", ", ".join(masked))
    for camera in unread_cameras(config, present, rename_map):
        logger.warning(
            "the new dataset has the camera %s, which this %s does not read: it learns the new task without these "
            'pictures. If the policy knows this camera under another name, use --rename_map=\'{"%s": '
            '"NAME_IN_THE_POLICY"}\' (it reads %s); else fine-tune a policy that has the camera.',
            *(camera, config.type, camera, ", ".join(cameras_of(config)) or "no camera"),
        )


def _masks_missing_cameras(config: Any) -> bool:
    try:
        adapter = adapter_for(config)
    except CraftError:
        return True  # nobody knows: lerobot's own check of cameras must do
    # Adapters look at the config alone, and loading the policy only to refuse it can take minutes.
    return adapter.masks_missing_cameras(SimpleNamespace(config=config))


def as_stats(dataset_stats: Mapping[str, Any] | None, rename_map: Mapping[str, str] | None = None) -> Stats:
    """A dataset's statistics under the policy's names, as tensors."""
    names = rename_map or {}
    return {
        names.get(name, name): {stat: torch.as_tensor(values, dtype=torch.float64) for stat, values in known.items()}
        for name, known in (dataset_stats or {}).items()
    }


def stats_for(policy: Normalization, teacher: Stats, new: Stats, modes: Modes) -> Stats:
    """The statistics to normalize by.

    `merge` describes the teacher's data and the new together. Minima and maxima are those of either. Mean and standard
    deviation are pooled: from counts n_1, n_2, means m_1, m_2 and (population) variances v_1, v_2,

        m = (n_1 m_1 + n_2 m_2) / n        v = (n_1 v_1 + n_2 v_2) / n + n_1 n_2 (m_1 - m_2)^2 / n^2,    n = n_1 + n_2

    which is exact (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", The American Statistician
    37, 1983). Quantiles of a union do not follow from those of its parts: the outer ones are taken as far out as in
    either, so that neither part leaves the range, and the median is weighted by the counts. A feature that only one
    side has is taken from there; one that is not normalized, from the teacher.

    Args:
        policy: keep, merge or replace.
        teacher: What the teacher ships.
        new: Of the new dataset, under the policy's names.
        modes: How each feature is normalized.

    Raises:
        CraftError: For keep and merge, the dimensions differ; for merge, the new data lack what a mode needs.
    """
    if policy == "replace":
        return new
    used = [name for name, mode in modes.items() if mode in NEEDED and name in new]
    shared = [name for name in used if name in teacher]
    for name in shared:
        _check_dimensions(name, teacher[name], new[name], NEEDED[modes[name]])
    if policy == "keep":
        return teacher
    for name in used:
        _check_complete(name, new[name], modes[name])
    uncounted = [name for name in shared if "count" not in teacher[name] or "count" not in new[name]]
    if uncounted:
        logger.warning(
            "it is not known how many frames the statistics of %s are from: teacher and new data count the same",
            ", ".join(uncounted),
        )
    only_new = {name: {stat: values.float() for stat, values in new[name].items()} for name in used}
    return only_new | teacher | {name: _joined(teacher[name], new[name]) for name in shared}


def _joined(teacher: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Statistics of both together; what only one side has would describe that side alone and is left out."""
    pairs = {
        stat: (values.double(), new[stat].double().reshape(values.shape))
        for stat, values in teacher.items()
        if stat in new
    }
    one, other = pairs.get("count", (torch.ones(()), torch.ones(())))
    weight = float(one.max() / (one.max() + other.max()))  # of the teacher; a count is the same in all dimensions
    joined: dict[str, Tensor] = {}
    for stat, (a, b) in pairs.items():
        if stat == "count":
            joined[stat] = a + b
        elif stat == "std":
            if "mean" in pairs:
                joined[stat] = _pooled_std(a, b, *pairs["mean"], weight)
        elif _is_lower(stat):
            joined[stat] = torch.minimum(a, b)
        elif _is_upper(stat):
            joined[stat] = torch.maximum(a, b)
        else:
            joined[stat] = weight * a + (1 - weight) * b
    return {stat: values.to(teacher[stat].dtype) for stat, values in joined.items()}


def _pooled_std(std: Tensor, other_std: Tensor, mean: Tensor, other_mean: Tensor, weight: float) -> Tensor:
    within = weight * std**2 + (1 - weight) * other_std**2
    between = weight * (1 - weight) * (mean - other_mean) ** 2
    return (within + between).sqrt()


def _is_lower(stat: str) -> bool:
    return stat == "min" or (stat[0] == "q" and stat[1:].isdigit() and int(stat[1:]) < 50)


def _is_upper(stat: str) -> bool:
    return stat == "max" or (stat[0] == "q" and stat[1:].isdigit() and int(stat[1:]) > 50)


def _check_dimensions(
    name: str, teacher: Mapping[str, Tensor], new: Mapping[str, Tensor], stats: tuple[str, ...]
) -> None:
    for stat in stats:
        if stat in teacher and stat in new and teacher[stat].numel() != new[stat].numel():
            raise CraftError(
                f"{name} has {new[stat].numel()} dimensions in the new dataset and {teacher[stat].numel()} in the "
                "teacher's statistics, so they cannot normalize it: use a dataset of the teacher's robot, or "
                "--craft.normalization=replace with a method that needs no anchors"
            )


def _check_complete(name: str, stats: Mapping[str, Tensor], mode: str) -> None:
    lacking = [stat for stat in NEEDED[mode] if stat not in stats]
    if lacking:
        raise CraftError(
            f"the new dataset's statistics of {name} have no {' and '.join(lacking)}, by which the policy normalizes "
            "it: run `lerobot-edit-dataset --operation.type=recompute_stats` on it, or use --craft.normalization=keep"
        )


def _check_relative_actions(preprocessor: Processor, config: Any) -> None:
    """lerobot-train switches a checkpoint to relative actions on the fly; kept statistics are of the other kind."""
    wanted = bool(getattr(config, "use_relative_actions", False))
    for step in preprocessor.steps:
        if step_name(step) == "relative_actions_processor" and step.get_config()["enabled"] != wanted:
            raise CraftError(
                f"--policy.use_relative_actions={str(wanted).lower()}, but the teacher and its statistics are of the "
                "other kind of actions: leave the flag out, or use --craft.normalization=replace"
            )


_EPS = 1e-8  # of lerobot's normalization
_FAR = 5.0  # standard deviations: the range of MEAN_STD, which has no bounds of its own
_MARGIN = 0.1  # beyond the range that is not worth a word: a twentieth of it
_LINES = 8


@dataclass(frozen=True)
class Outside:
    """One dimension of a feature in which the new data leave the teacher's range.

    Attributes:
        feature: Its name.
        dimension: Position in the flattened feature; for images the channel.
        mode: How it is normalized.
        low: Lower end of the new data as the policy would see it, normalized by the teacher's statistics.
        high: Upper end.
        constant: Where the teacher's data never moved: the value that it stood at.
        raw: Both ends of the new data as recorded.
        name: What the new dataset calls the dimension; empty where it does not say.
    """

    feature: str
    dimension: int
    mode: str
    low: float
    high: float
    constant: float | None
    raw: tuple[float, float]
    name: str = ""

    @property
    def distance(self) -> float:
        """From the middle of the range, in units of half its width."""
        return max(-self.low, self.high) / _limit(self.mode)

    def __str__(self) -> str:
        where = f"{self.feature}[{self.dimension}]{f' ({self.name})' if self.name else ''}"
        if self.constant is not None:
            return (
                f"{where}: always {self.constant:.4g} in the teacher's data, {self.raw[0]:.4g} .. {self.raw[1]:.4g} in "
                f"the new; normalized that becomes {self.low:.2g} .. {self.high:.2g}"
            )
        if self.mode == "MEAN_STD":
            return (
                f"{where}: the new data spans {self.low:.3g} .. {self.high:.3g} standard deviations from the teacher's "
                "mean"
            )
        return f"{where}: the new data spans {self.low:.3g} .. {self.high:.3g} where the teacher's spans -1 .. 1"


def outside(teacher: Stats, new: Stats, modes: Modes) -> list[Outside]:
    """Every dimension in which the new data leave the teacher's range, the farthest first.

    Like is compared with like: smallest and largest values, for QUANTILES the 1st and 99th percentiles, for QUANTILE10
    the 10th and 90th (where the new data have none, smallest and largest too). MEAN_STD has no bounds; five standard
    deviations are taken for them.

    Args:
        teacher: Statistics that are kept.
        new: Of the new dataset, under the policy's names.
        modes: How each feature is normalized; what is not normalized has no range.
    """
    found: list[Outside] = []
    for feature, mode in modes.items():
        if mode in NEEDED and feature in teacher and feature in new:
            found += _outside_of(feature, mode, teacher[feature], new[feature])
    return sorted(found, key=lambda each: -each.distance)


def warning_lines(
    teacher: Stats, new: Stats, modes: Modes, names: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """What a person should know before training with kept statistics: a line each, the most important ones first.

    Args:
        teacher: Statistics that are kept.
        new: Of the new dataset, under the policy's names.
        modes: How each feature is normalized.
        names: Of the dimensions of a feature, where the new dataset has them.
    """
    unknown = [name for name, mode in modes.items() if mode in NEEDED and name in new and name not in teacher]
    lines = [f"{name}: the teacher ships no statistics, so the policy sees raw values" for name in unknown]
    found = outside(teacher, new, modes)
    known = names or {}
    for each in found[:_LINES]:
        name = known[each.feature][each.dimension] if each.feature in known else ""
        lines.append(str(replace(each, name=name)))
    if len(found) > _LINES:
        lines.append(f"and {len(found) - _LINES} more dimensions outside the teacher's range")
    return lines


def _outside_of(feature: str, mode: str, teacher: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[Outside]:
    ends = _ends(mode, new)
    if ends is None or any(stat not in teacher for stat in NEEDED[mode]):
        return []
    first, second = (teacher[stat].float().flatten() for stat in NEEDED[mode])  # [D]
    raw = [end.float().flatten() for end in ends]
    low, high = (_normalized(end, first, second, mode) for end in raw)
    constant = (second == 0) if mode == "MEAN_STD" else (first == second)
    limit = _limit(mode) + _MARGIN
    return [
        Outside(
            feature=feature,
            dimension=i,
            mode=mode,
            low=float(low[i]),
            high=float(high[i]),
            constant=float(first[i]) if constant[i] else None,
            raw=(float(raw[0][i]), float(raw[1][i])),
        )
        for i in range(len(first))
        if low[i] < -limit or high[i] > limit
    ]


def _ends(mode: str, new: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    pairs = [("min", "max")] if mode == "MEAN_STD" else [NEEDED[mode], ("min", "max")]
    return next(((new[low], new[high]) for low, high in pairs if low in new and high in new), None)


def _normalized(values: Tensor, first: Tensor, second: Tensor, mode: str) -> Tensor:
    """By lerobot's formula for the mode; `first` and `second` are the statistics it needs."""
    if mode == "MEAN_STD":
        return (values - first) / (second + _EPS)
    width = second - first
    return 2 * (values - first) / torch.where(width == 0, torch.tensor(_EPS), width) - 1


def _limit(mode: str) -> float:
    return _FAR if mode == "MEAN_STD" else 1.0
