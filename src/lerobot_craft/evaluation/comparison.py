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
from lerobot_craft.evaluation.table import name_of

# The value that a method's knob has by itself, as results have it: with it a method is compared, not with one that a
# sweep happens to have tried as well.
OWN_VALUE = {"er": "1"}


@dataclass(frozen=True)
class Comparison:
    """A method minus the reference, both with the same number of old frames, on the bases that both started from.

    Both are named with their knobs.
    """

    policy: str
    role: Role
    label: str
    reference: str
    frames: int
    n_pairs: int
    old_mean: Estimate
    new: Estimate


def compare_with(runs: Iterable[Run], reference: str) -> list[Comparison]:
    """Every method that needs old frames against the method `reference` at equal frames.

    Where the reference was run with several values of its knob, with the one that it has by itself; where that is not
    among them, with each.
    """
    comparisons = []
    for group in group_by_policy_and_role(run for run in runs if run.stages is None):
        settings = group_by_setting(group)
        for setting in settings:
            if setting[0].method == reference or not setting[0].frames:
                continue
            alike = [
                other for other in settings if (other[0].method, other[0].frames) == (reference, setting[0].frames)
            ]
            comparisons += [_comparison(pairs) for other in _with_own_knob(alike) if (pairs := _pairs(setting, other))]
    return comparisons


def _with_own_knob(settings: list[list[Run]]) -> list[list[Run]]:
    """Of settings of one method those with its own value; all if none has it."""
    own = [runs for runs in settings if (knob := runs[0].knob) and knob.value == OWN_VALUE.get(runs[0].method)]
    return own or settings


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
        label=name_of(first.label, first.knob),
        reference=name_of(theirs[0].label, theirs[0].knob),
        frames=first.anchors.frames,
        n_pairs=len(pairs),
        old_mean=difference(old_cells(ours), old_cells(theirs), n),
        new=difference(new_cells(ours), new_cells(theirs), n),
    )
