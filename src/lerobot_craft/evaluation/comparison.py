"""Is one method better than another? Differences over the runs that started from the same base policy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lerobot_craft.evaluation.results import Estimate, Role, Run
from lerobot_craft.evaluation.summary import (
    difference,
    group_by_policy_and_role,
    group_by_setting,
    new_cells,
    old_cells,
)


@dataclass(frozen=True)
class Comparison:
    """A method minus the reference, both with the same number of old frames, on the bases that both started from."""

    policy: str
    role: Role
    label: str
    reference: str
    frames: int
    n_pairs: int
    old_mean: Estimate
    new: Estimate


def compare_with(runs: Iterable[Run], reference: str) -> list[Comparison]:
    """Every method that needs old frames against the method `reference` at equal frames."""
    comparisons = []
    for group in group_by_policy_and_role(run for run in runs if run.stages is None):
        settings = group_by_setting(group)
        references = {setting[0].frames: setting for setting in settings if setting[0].method == reference}
        for setting in settings:
            other = references.get(setting[0].frames)
            if other and setting[0].method != reference and setting[0].frames and (pairs := _pairs(setting, other)):
                comparisons.append(_comparison(pairs))
    return comparisons


def _pairs(ours: Sequence[Run], theirs: Sequence[Run]) -> list[tuple[Run, Run]]:
    by_base = {(run.scenario, run.seed): run for run in theirs}
    return [(run, by_base[key]) for run in ours if (key := (run.scenario, run.seed)) in by_base]


def _comparison(pairs: Sequence[tuple[Run, Run]]) -> Comparison:
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    n = min(run.n_episodes for run in (*ours, *theirs))
    first = ours[0]
    return Comparison(
        policy=first.policy,
        role=first.role,
        label=first.label,
        reference=theirs[0].label,
        frames=first.anchors.frames,
        n_pairs=len(pairs),
        old_mean=difference(old_cells(ours), old_cells(theirs), n),
        new=difference(new_cells(ours), new_cells(theirs), n),
    )
