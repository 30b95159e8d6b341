"""Where the new data leave the range that the teacher's statistics give its inputs and outputs, in numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lerobot_craft.training.statistics.normalization import NEEDED, Modes, Stats

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
