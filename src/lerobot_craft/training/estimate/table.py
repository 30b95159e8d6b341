"""An estimate: made from the sizes of a step, written as a table for people and as JSON for programs."""

import json
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
_UNKNOWN = "unknown"
# Memory of common cards in GiB.
_CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180)
_GIB = 2**30
# Not in any tensor: the allocator's fragments, and CUDA's own context and workspaces.
_SPARE_SHARE, _SPARE_BYTES = 0.1, _GIB


@dataclass(frozen=True)
class Row:
    """One part of a device's memory, in bytes.

    Attributes:
        name: What it is.
        whole: Its largest size; None if unknown.
        at_peak: Its size at the largest moment of the step; None if unknown.
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
        phases: The largest moment of each phase, in bytes; None if unknown.
        host: What the machine's own memory holds at most.
        notes: What a reader must know to use the numbers.
        operations: Floating-point operations of one device's passes, if known.
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
        """Bytes at the largest moment; a lower bound if a phase is unknown."""
        return max((size for size in self.phases.values() if size is not None), default=0)

    @property
    def peak_phase(self) -> str | None:
        """In which phase that is; None if a phase is unknown."""
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
        title: The run in one line.
        sizes: Its step; peaks are of one device, parts are whole.
        constant: Parts outside of the imitated step, held in every phase.
        share: What a device holds of the divided parts.
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


def as_text(estimate: Estimate, *, on_cpu: bool) -> str:
    """The table, the total per device, and which card holds it."""
    width = max(len(name) for name in ("peak", *(row.name for row in estimate.rows), *estimate.host))
    lines = [estimate.title, "", f"{'on each device':<{width}}  {'at most':>11}  {'at the peak':>11}"]
    lines += [f"{row.name:<{width}}  {size(row.whole)}  {size(row.at_peak)}" for row in estimate.rows]
    lines.append("-" * len(lines[-1]))
    if estimate.known:
        lines.append(f"{'peak':<{width}}  {'':>11}  {size(estimate.total)}  (in the {estimate.peak_phase})")
    else:
        lines.append(f"{'peak':<{width}}  {'':>11}  {_UNKNOWN:>11}  (more than {size(estimate.total).strip()})")
    if estimate.host:
        lines += ["", "in the machine's own memory, at most"]
        lines += [f"{name:<{width}}  {size(bytes_)}" for name, bytes_ in estimate.host.items()]
    lines += ["", *(f"- {note}" for note in estimate.notes), verdict(estimate, on_cpu=on_cpu)]
    return "\n".join(lines)


def as_json(estimate: Estimate) -> str:
    """The estimate for programs, in bytes."""
    return json.dumps(estimate.to_json(), indent=2)


def size(bytes_: int | None) -> str:
    """A number of bytes, eleven characters wide."""
    if bytes_ is None:
        return f"{_UNKNOWN:>11}"
    return f"{bytes_ / _GIB:>7.2f} GiB" if bytes_ >= _GIB / 10 else f"{bytes_ / 2**20:>7.1f} MiB"


def verdict(estimate: Estimate, *, on_cpu: bool) -> str:
    """One sentence: which card holds it."""
    total = size(estimate.total).strip()
    if not estimate.known:
        return f"Each device needs more than {total}; how much more is not known, so no card is named."
    if on_cpu:
        return f"The process needs {total} beside its libraries and the data loader."
    needed = estimate.total * (1 + _SPARE_SHARE) + _SPARE_BYTES
    fitting = [card for card in _CARDS if card * _GIB >= needed]
    spare = "with 10 % and 1 GiB to spare for CUDA itself and for fragments"
    if not fitting:
        return f"Each device needs {total}: {spare}, no card of {_CARDS[-1]} GB or less holds it."
    return f"Each device needs {total}: {spare}, a card of {fitting[0]} GB holds it."
