"""What retention may cost beyond its arithmetic, beside what it did cost: a table with a column of limits."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

K1_BEYOND_ARITHMETIC = 1.05
K5 = 1.15
LORA_MEMORY = 0.02
EARLY_STOP = 1.5
DATA = 0.02
MB = 1e6


@dataclass(frozen=True)
class Measured:
    """What a row of the benchmark of training has measured; ratios are to plain fine-tuning of the same kind."""

    name: str
    k: int
    time_ratio_median: float
    operations_ratio: float
    peak_bytes: int
    peak_bytes_beyond_plain: int
    outcome: dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """One thing that has a limit: in numbers of one unit, and whether less is better."""

    what: str
    measured: float
    limit: float
    unit: str = "x"
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether it was kept."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def markdown(self) -> str:
        """The row as people see it."""
        sign = "≥" if self.at_least else "≤"
        digits = 1 if self.unit == " MB" else 2
        return (
            f"| {self.what} | {self.measured:.{digits}f}{self.unit} | {sign} {self.limit:.{digits}f}{self.unit} "
            f"| {'yes' if self.holds else 'no'} |"
        )

    def to_json(self) -> dict[str, Any]:
        """With its verdict."""
        return asdict(self) | {"holds": self.holds}


def limits(rows: Sequence[Measured], data: dict[str, float], weights: int, plain: str, plain_lora: str) -> list[Limit]:
    """All of them that the rows allow.

    Args:
        rows: Of one run of the benchmark.
        data: Share of a step that drawing, reading and preparing anchors takes, by what it is.
        weights: Bytes of the policy.
        plain: The name of the row that the others are ratios to.
        plain_lora: The same for LoRA.
    """
    of = {(row.name, row.k): row for row in rows}
    modes = [name for name, k in of if k == 5]
    activations = max(0, of[plain, 1].peak_bytes - weights)  # of as many samples; a gradient is as large as the weights
    found = [
        Limit(
            f"{name}, K=1: time against arithmetic",
            of[name, 1].time_ratio_median / of[name, 1].operations_ratio,
            K1_BEYOND_ARITHMETIC,
        )
        for name in modes
    ]
    found += [Limit(f"{name}, K=5: time against plain", of[name, 5].time_ratio_median, K5) for name in modes]
    found += [
        Limit(
            f"{name}: peak beyond plain (limit: one gradient and the anchors' activations)",
            of[name, 1].peak_bytes_beyond_plain / MB,
            (of[name, 1].outcome["retention_gradient_bytes"] + activations) / MB,
            " MB",
        )
        for name in modes
    ]
    for (name, _), row in of.items():
        if name.startswith("LoRA") and "online" not in name:
            whole = weights + of[plain_lora, 1].peak_bytes
            share = 100 * row.peak_bytes_beyond_plain / whole
            found.append(Limit(f"{name}: peak beyond plain LoRA", share, 100 * LORA_MEMORY, " %"))
    hidden, full = of["hidden, layer -2", 1], of["token_ce", 1]
    found += [
        Limit(
            f"the pass to layer -2 is cheaper than the whole one, {by}",
            (getattr(full, field) - 1) / (getattr(hidden, field) - 1),
            EARLY_STOP,
            at_least=True,
        )
        for by, field in {"by time": "time_ratio_median", "by arithmetic": "operations_ratio"}.items()
    ]
    return found + [
        Limit(f"anchors' data, {what}: share of a step", 100 * share, 100 * DATA, " %") for what, share in data.items()
    ]


def overhead_table(found: list[Limit]) -> str:
    """With the column of limits."""
    return "\n".join(
        ["| what | measured | limit | holds |", "|---|---|---|---|", *(limit.markdown() for limit in found)]
    )
