"""An estimate: rows for people and programs, made from the sizes of a step."""

from dataclasses import dataclass, field
from typing import Any

from lerobot_craft.training.estimate.ledger import REST
from lerobot_craft.training.estimate.step import (
    ANCHOR_PASS,
    BATCH,
    DIVIDED,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    PHASES,
    RETENTION,
    TASK_PASS,
    WEIGHTS,
    Sizes,
)

# Labels of a step, and what a reader calls them; in the order of the table.
_NAMES = {
    WEIGHTS: "weights",
    OPTIMIZER: "optimizer state",
    GRADIENTS: "gradients",
    RETENTION: "retention gradient",
    BATCH: "batches",
}
_RESTS = {
    TASK_PASS: "activations, task pass",
    ANCHOR_PASS: "activations, anchor pass",
    OPTIMIZER_STEP: "temporaries of the optimizer",
}


@dataclass(frozen=True)
class Row:
    """One part of a device's memory, in bytes.

    Attributes:
        name: What it is.
        whole: When it is largest; None where it is not known.
        at_peak: Of it, at the largest moment of the step; None where that is not known.
    """

    name: str
    whole: int | None
    at_peak: int | None


@dataclass(frozen=True)
class Estimate:
    """What one device of a run holds.

    Attributes:
        title: Policy, method, batch.
        rows: The parts.
        phases: The largest moment of each phase, in bytes; None where it is not known.
        host: What the machine's own memory holds beside it, at most.
        notes: What a reader must know to use the numbers.
        operations: Floating-point operations of one device's passes, as far as they are known.
    """

    title: str
    rows: list[Row]
    phases: dict[str, int | None]
    host: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    operations: dict[str, int] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether every phase could be imitated."""
        return None not in self.phases.values()

    @property
    def total(self) -> int:
        """Bytes at the largest moment; where a phase is not known, at least so many."""
        return max((size for size in self.phases.values() if size is not None), default=0)

    @property
    def peak_phase(self) -> str | None:
        """In which phase that is; None where a phase is not known."""
        return max(self.phases, key=lambda phase: self.phases[phase] or 0) if self.known else None

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, in bytes."""
        return {
            "run": self.title,
            "total_bytes": self.total if self.known else None,
            "at_least_bytes": self.total,
            "peak": self.peak_phase,
            "parts": [{"name": row.name, "bytes": row.whole, "at_peak_bytes": row.at_peak} for row in self.rows],
            "phases": self.phases,
            "host": self.host,
            "operations": self.operations,
            "notes": self.notes,
        }


def make_estimate(
    title: str, sizes: Sizes, constant: dict[str, int], share: float, host: dict[str, int], notes: list[str]
) -> Estimate:
    """Rows and phases of a step.

    Args:
        title: Of the run.
        sizes: Of its step; the peaks are those of a device, the parts are whole.
        constant: Parts outside of the imitated step, held in every phase.
        share: Of the divided parts that a device holds.
        host: What the machine's own memory holds.
        notes: For the reader.
    """
    expected = [phase for phase in PHASES if phase in sizes.peaks or phase in sizes.unknown]
    held = sum(constant.values())
    phases = {phase: sizes.peaks[phase].bytes + held if phase in sizes.peaks else None for phase in expected}
    if None in phases.values():
        known = sum(round(size * (share if label in DIVIDED else 1)) for label, size in sizes.parts.items())
        phases = {phase: size if size is None else max(size, known + held) for phase, size in phases.items()}
        phases.setdefault("all that is known", known + held)
    estimate = Estimate(title, [], phases)
    peak = sizes.peaks[estimate.peak_phase].parts if estimate.peak_phase else None
    rows = []
    for label, name in _NAMES.items():
        if label in sizes.parts:
            whole = round(sizes.parts[label] * (share if label in DIVIDED else 1))
            rows.append(Row(name, whole, None if peak is None else peak.get(label, 0)))
    rows += [Row(name, size, size) for name, size in constant.items()]
    for phase in expected:
        size = sizes.peaks[phase].parts.get(REST, 0) if phase in sizes.peaks else None
        rows.append(Row(_RESTS[phase], size, size if phase == estimate.peak_phase else None if peak is None else 0))
    return Estimate(title, rows, phases, host, notes, sizes.operations)
