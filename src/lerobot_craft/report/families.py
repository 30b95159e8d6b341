"""Methods by family, so that few colours and shapes tell many rows apart, also for those who see colours otherwise."""

from dataclasses import dataclass

from lerobot_craft.evaluation.results import Run, SequenceSummary, Summary
from lerobot_craft.evaluation.summary import BASE
from lerobot_craft.evaluation.table import given_to, name_of


@dataclass(frozen=True)
class Family:
    """A kind of method: its name, its CSS class and its marker."""

    name: str
    css: str
    marker: str


BEFORE = Family("before fine-tuning", "before", "diamond")
PLAIN = Family("plain fine-tuning", "plain", "square")
REPLAY = Family("old data replayed", "replay", "triangle")
CRAFT = Family("CRaFT", "craft", "circle")
OTHER = Family("other methods", "other", "cross")
FAMILIES = (BEFORE, PLAIN, REPLAY, CRAFT, OTHER)

_MEMBERS = {BASE: BEFORE, "naive": PLAIN, "er": REPLAY, "joint": REPLAY}
# What CRaFT's own loss can be made of; ablations are named after what they are an ablation of.
_CRAFT_PREFIXES = ("craft", "cross", "action", "hidden", "token_ce", "both", "floor", "ascent")


def family_of(method: str) -> Family:
    """The family of a method by its name on the command line."""
    if method in _MEMBERS:
        return _MEMBERS[method]
    return CRAFT if method.startswith(_CRAFT_PREFIXES) else OTHER


def full_name(row: Summary | SequenceSummary | Run) -> str:
    """Label, swept setting and what the user has; the latter where it tells something, as "no frames" does of CRaFT."""
    name = name_of(row.label, row.knob)
    if row.tier is None and row.frames == 0 and family_of(row.method) is not CRAFT:
        return name
    return f"{name}, {said}" if (said := given_to(row)) else name
