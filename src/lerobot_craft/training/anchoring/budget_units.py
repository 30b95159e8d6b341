"""The drift that counts as 1 against the budget, for each old task: docs/method.md, equations (25) and (28)."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from lerobot_craft.anchors.manifest import Scale
from lerobot_craft.errors import CraftError

logger = logging.getLogger(__name__)

_SMALLEST = 1e-12


def units_of(scales: Sequence[Scale], tasks: Sequence[str], loss_type: str) -> list[float]:
    """The unit of each task under a loss."""
    _require_loss_type(loss_type, (scale.values for scale in scales))
    measured = dict(zip(tasks, (scale.values[loss_type] for scale in scales), strict=True))
    return list(usable_units(measured, loss_type).values())


def usable_units(measured: Mapping[str, float], loss_type: str) -> dict[str, float]:
    """Units by task; a task whose own is 0 or not finite gets the mean of the others', with a warning."""
    units, unusable = _usable(measured)
    if unusable:
        logger.warning(
            "the anchors give no unit for the budget of %s (%s is %g there: too few anchors, or all alike); %g is used",
            "; ".join(unusable),
            loss_type,
            measured[unusable[0]],
            units[unusable[0]],
        )
    return units


def layer_scales_of(scales: Mapping[str, Mapping[str, float]] | None, loss_type: str) -> dict[str, float] | None:
    """The spread of each layer under a loss; None where no hidden states are retained."""
    if not scales:
        return None
    _require_loss_type(loss_type, scales.values())
    spreads, unusable = _usable({layer: values[loss_type] for layer, values in scales.items()})
    if unusable:
        logger.warning("layers %s do not vary over the anchors: their drift is not scaled up", ", ".join(unusable))
    return spreads


def _usable(measured: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    good = [value for value in measured.values() if _SMALLEST <= value < math.inf]
    instead = sum(good) / len(good) if good else 1.0
    unusable = [name for name, value in measured.items() if not _SMALLEST <= value < math.inf]
    return {name: instead if name in unusable else value for name, value in measured.items()}, unusable


def _require_loss_type(loss_type: str, measured: Iterable[Mapping[str, float]]) -> None:
    for values in measured:
        if loss_type not in values:
            raise CraftError(
                f"the anchors have no unit for --craft.loss_type={loss_type}: use {' or '.join(values)}, or build them "
                "again with `craft cache build`"
            )
