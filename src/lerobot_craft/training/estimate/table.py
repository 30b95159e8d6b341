"""An estimate as text, with what it means for the choice of a card."""

import json

from lerobot_craft.training.estimate.report import Estimate

_UNKNOWN = "unknown"
# Memory of common cards in GiB.
_CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180)
_GIB = 2**30
# Not in any tensor: the allocator's fragments, and CUDA's own context and workspaces.
_SPARE_SHARE, _SPARE_BYTES = 0.1, _GIB


def as_text(estimate: Estimate, *, on_cpu: bool) -> str:
    """The table, the total per device, and which card would hold it."""
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
    """The same for programs."""
    return json.dumps(estimate.to_json(), indent=2)


def size(bytes_: int | None) -> str:
    """Eleven characters wide."""
    if bytes_ is None:
        return f"{_UNKNOWN:>11}"
    return f"{bytes_ / _GIB:>7.2f} GiB" if bytes_ >= _GIB / 10 else f"{bytes_ / 2**20:>7.1f} MiB"


def verdict(estimate: Estimate, *, on_cpu: bool) -> str:
    """One sentence on what would hold it."""
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
