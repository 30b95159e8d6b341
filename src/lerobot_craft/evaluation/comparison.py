"""Is one method better than another? Differences over the runs that started from the same base policy."""

from collections.abc import Iterable
from dataclasses import dataclass

from lerobot_craft.evaluation.results import Estimate, Role, Run, Tier, View
from lerobot_craft.evaluation.summary import (
    compare_runs,
    group_by_policy_and_role,
    group_by_setting,
    new_cells,
    old_cells,
    pair_runs,
)
from lerobot_craft.evaluation.table import name_of

# The default of a method's knob, as written in results. A method is compared at its default, not at the other values
# that a sweep has tried.
OWN_VALUE = {"er": "1"}


@dataclass(frozen=True)
class Comparison:
    """A method minus the reference, both with the same of the old tasks, on the bases that both started from.

    Both are named with their knobs. Differences are paired by base policy, and by start state where single episodes
    are known.
    """

    policy: str
    view: View
    role: Role
    label: str
    reference: str
    tier: Tier | None
    rollouts: int
    frames: int | None
    n_pairs: int
    old_mean: Estimate
    new: Estimate


def compare_with(runs: Iterable[Run], reference: str) -> list[Comparison]:
    """Every method that needs old frames or rollouts against the method `reference` at equal tier and number of them.

    If the reference was run with several values of its knob: at its default, or at each value if none is the default.
    """
    comparisons = []
    for group in group_by_policy_and_role(run for run in runs if run.stages is None):
        settings = group_by_setting(group)
        for setting in settings:
            if setting[0].method == reference or not (setting[0].frames or setting[0].rollouts):
                continue
            alike = [
                other for other in settings if other[0].method == reference and _given(other[0]) == _given(setting[0])
            ]
            comparisons += [
                _comparison(pairs) for other in _with_own_knob(alike) if (pairs := pair_runs(setting, other))
            ]
    return comparisons


def _given(run: Run) -> tuple[Tier | None, int, int | None]:
    """What the method has of the old tasks."""
    return run.tier, run.rollouts, run.frames


def _with_own_knob(settings: list[list[Run]]) -> list[list[Run]]:
    """Runs at the method's default knob, or all runs if none used it."""
    own = [runs for runs in settings if (knob := runs[0].knob) and knob.value == OWN_VALUE.get(runs[0].method)]
    return own or settings


def _comparison(pairs: list[tuple[Run, Run]]) -> Comparison:
    ours, theirs = pairs[0]
    return Comparison(
        policy=ours.policy,
        view=ours.view,
        role=ours.role,
        label=name_of(ours.label, ours.knob),
        reference=name_of(theirs.label, theirs.knob),
        tier=ours.tier,
        rollouts=ours.rollouts,
        frames=ours.frames,
        n_pairs=len(pairs),
        old_mean=compare_runs(pairs, old_cells),
        new=compare_runs(pairs, new_cells),
    )
