"""`craft train --estimate`: how much memory a run will need, found by taking one step without any memory.

The policy is made with parameters that have shapes and types but no memory, and one real step is taken with it:
lerobot's own forward, the anchors' own drift, both gradients, the optimizer. A ledger sees every tensor come and go,
and knows at the end what was alive when there was most of it.

What a device and its machine hold beside a plain step: for the method, for sharing a run, and on the host.
"""

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from lerobot_craft.core.parameters import MasterWeights
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import open_metadata
from lerobot_craft.lerobot_api.features import input_shapes
from lerobot_craft.lerobot_api.pretrained import autocast_dtype, check_shapes, weightless_policy, wrap_peft_weightless
from lerobot_craft.lerobot_api.train_parts import make_optimizer
from lerobot_craft.policies import unwrapped
from lerobot_craft.policies.taps import IMAGES_KEPT_BYTES
from lerobot_craft.training.accumulation import check_accumulation
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.dry_step import (
    ANCHOR_PASS,
    BATCH,
    DIVIDED,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    PHASES,
    REST,
    RETENTION,
    TASK_PASS,
    WEIGHTS,
    Ledger,
    ReadsForTheLog,
    Sizes,
    Step,
    give_tensors,
    run_without_values,
    without_memory,
)
from lerobot_craft.training.methods.method import Method, MethodParts
from lerobot_craft.training.methods.registry import METHODS, make_method

Strategy = Literal["ddp", "fsdp"]
DDP_BUCKETS, FSDP_GATHERED = "DDP's buckets", "gathered by FSDP at a time"


@dataclass
class EstimateConfig:
    """`--estimate.*`: how many devices share the run, and how the answer is written."""

    # Processes of the run, one on each device.
    world_size: int = 1
    # ddp: every device holds the whole policy | fsdp: weights, gradients and optimizer state are divided.
    strategy: str = "ddp"
    # Print JSON (bytes) in place of the table.
    json: bool = False

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise CraftError(f"--estimate.world_size must be at least 1; got {self.world_size}")
        if self.strategy not in get_args(Strategy):
            raise CraftError(
                f"--estimate.strategy must be one of {', '.join(get_args(Strategy))}; got {self.strategy!r}"
            )
        if self.strategy == "fsdp" and self.world_size == 1:
            raise CraftError(
                "--estimate.strategy=fsdp divides a policy among devices: say how many, --estimate.world_size=8"
            )


def method_parts(cfg: Any, craft: CraftConfig, policy: nn.Module, options: EstimateConfig) -> MethodParts:
    """What the method of a run adds; `policy` is wrapped and frozen as in training."""
    if not craft.enabled:
        return MethodParts(cfg.batch_size)
    found = METHODS[craft.method].parts(cfg, craft, policy)
    if not craft.master_weights:
        return found
    bfloat16 = sum(p.numel() for p in policy.parameters() if p.requires_grad and p.dtype == torch.bfloat16)
    copies = {"float32 copies of bfloat16 weights": round(torch.float32.itemsize * bfloat16 * share(options))}
    return dataclasses.replace(found, kept={**copies, **found.kept})


def share(options: EstimateConfig) -> float:
    """The share of weights, gradients and optimizer state that a device holds."""
    return 1 / options.world_size if options.strategy == "fsdp" else 1.0


def shared_parts(options: EstimateConfig, policy: nn.Module) -> dict[str, int]:
    """Bytes that sharing needs on each device, by what they are.

    DDP reduces gradients in buckets of its own, as large as all gradients (lerobot leaves torch's
    `gradient_as_bucket_view` off). FSDP gathers the weights of a block of layers when it needs them, and prefetches the
    next block; gradients are whole before they are divided. What is in no block (embeddings, the output layer) belongs
    to the root and is whole during the pass.
    """
    if options.world_size == 1:
        return {}
    if options.strategy == "ddp":
        return {DDP_BUCKETS: sum(p.nbytes for p in policy.parameters() if p.requires_grad)}
    blocks = [_whole(child) for part in policy.modules() if isinstance(part, nn.ModuleList) for child in part]
    inside = {id(p) for part in policy.modules() if isinstance(part, nn.ModuleList) for p in part.parameters()}
    root = sum(_with_gradient(p) for p in policy.parameters() if id(p) not in inside)
    return {FSDP_GATHERED: root + 2 * max(blocks, default=0)}


def _whole(module: nn.Module) -> int:
    return sum(_with_gradient(parameter) for parameter in module.parameters())


def _with_gradient(parameter: nn.Parameter) -> int:
    return parameter.nbytes * (2 if parameter.requires_grad else 1)


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
    lines += [f"{row.name:<{width}}  {size_text(row.whole)}  {size_text(row.at_peak)}" for row in estimate.rows]
    lines.append("-" * len(lines[-1]))
    if estimate.known:
        lines.append(f"{'peak':<{width}}  {'':>11}  {size_text(estimate.total)}  (in the {estimate.peak_phase})")
    else:
        lines.append(f"{'peak':<{width}}  {'':>11}  {_UNKNOWN:>11}  (more than {size_text(estimate.total).strip()})")
    if estimate.host:
        lines += ["", "in the machine's own memory, at most"]
        lines += [f"{name:<{width}}  {size_text(bytes_)}" for name, bytes_ in estimate.host.items()]
    lines += ["", *(f"- {note}" for note in estimate.notes), verdict(estimate, on_cpu=on_cpu)]
    return "\n".join(lines)


def as_json(estimate: Estimate) -> str:
    """The estimate for programs, in bytes."""
    return json.dumps(estimate.to_json(), indent=2)


def size_text(bytes_: int | None) -> str:
    """A number of bytes, eleven characters wide."""
    if bytes_ is None:
        return f"{_UNKNOWN:>11}"
    return f"{bytes_ / _GIB:>7.2f} GiB" if bytes_ >= _GIB / 10 else f"{bytes_ / 2**20:>7.1f} MiB"


def verdict(estimate: Estimate, *, on_cpu: bool) -> str:
    """One sentence: which card holds it."""
    total = size_text(estimate.total).strip()
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


def estimate(cfg: Any, craft: CraftConfig, options: EstimateConfig, device: str) -> Estimate:
    """What each device of a run holds at most.

    Args:
        cfg: lerobot's validated `TrainPipelineConfig`.
        craft: `--craft.*`.
        options: `--estimate.*`.
        device: The device of the run; it need not be here.
    """
    if craft.shard:
        options = dataclasses.replace(options, strategy="fsdp")
    if options.strategy == "fsdp" and craft.enabled and METHODS[craft.method].needs_whole_parameters:
        raise CraftError(f"--craft.method={craft.method} needs whole parameters on every device: leave out fsdp")
    check_accumulation(cfg, craft)
    cfg.policy.device = device
    notes: list[str] = []
    meta = _metadata(cfg, notes)
    policy = weightless_policy(cfg.policy, meta, cfg.rename_map)
    path = cfg.policy.pretrained_path
    if path is not None and not cfg.policy.use_peft and not check_shapes(policy, Path(path)):
        notes.append(f"there are no weights in {path}: sizes are those that its config describes")
    policy = wrap_peft_weightless(policy, cfg)
    if craft.enabled:
        make_method(craft).freeze(unwrapped(policy), craft, cfg.policy)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise CraftError("there is nothing to train: every parameter is frozen")
    shapes = input_shapes(cfg.policy, meta, cfg.rename_map)
    parts = method_parts(cfg, craft, policy, options)
    constant = {**parts.kept, **shared_parts(options, policy)}
    ledger = Ledger(run_without_values)
    with warnings.catch_warnings(), without_memory(), ReadsForTheLog(), ledger:
        warnings.simplefilter("ignore")  # a real run will show lerobot's and torch's warnings
        give_tensors(policy)
        step = Step(ledger, policy, _optimizer(cfg, craft, device), shapes, lambda: _autocast(cfg.policy))
        sizes = step.take(parts.rows, parts.anchoring, share(options), craft.accumulate)
    notes += [f"{phase}: not known, because {reason}" for phase, reason in sizes.unknown.items()]
    notes += _arithmetic(sizes.operations, parts.every)
    notes += _remarks(cfg, craft, options, parts, device)
    title = _title(cfg, craft, options, parts, policy, device)
    host = dict(parts.host)
    if parts.anchoring is not None and sizes.embedded_bytes:
        host["anchors' embedded images"] = min(IMAGES_KEPT_BYTES, parts.anchoring.anchors * sizes.embedded_bytes)
    return make_estimate(title, sizes, constant, share(options), host, notes)


def _metadata(cfg: Any, notes: list[str]) -> Any | None:
    try:
        return open_metadata(cfg.dataset.repo_id, cfg.dataset.root, cfg.dataset.revision)
    except CraftError:
        if not cfg.policy.input_features or not cfg.policy.output_features:
            raise
        notes.append(f"the dataset {cfg.dataset.repo_id} is not here: image sizes are those of the policy's config")
        return None


def _optimizer(cfg: Any, craft: CraftConfig, device: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Lerobot's optimizer with the kernels that it will use on the device."""
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    def make(policy: nn.Module) -> torch.optim.Optimizer:
        optimizer, _ = make_optimizer(cfg, policy)
        many_at_once = torch.device(device).type in _get_foreach_kernels_supported_devices()
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = many_at_once  # torch decides this by the parameters' device, here the CPU
        if craft.enabled and craft.master_weights:
            MasterWeights(optimizer, policy.named_parameters())
        return optimizer

    return make


def _autocast(config: Any) -> contextlib.AbstractContextManager[Any]:
    name = autocast_dtype(config)
    return contextlib.nullcontext() if name is None else torch.autocast("cpu", dtype=getattr(torch, name))


def _arithmetic(operations: dict[str, int], every: int) -> list[str]:
    """What anchors cost if only arithmetic takes time: 1 + (anchors' operations) / (K x the task's)."""
    task, anchors = operations.get(TASK_PASS), operations.get(ANCHOR_PASS)
    if not task or anchors is None:
        return []
    counted = f"{task / 1e12:,.3g} TFLOP for the task's pass, {anchors / 1e12:,.3g} for the anchors'"
    return [f"arithmetic: {counted}; in the mean {1 + anchors / (every * task):.2f} times that of plain fine-tuning"]


def _remarks(cfg: Any, craft: CraftConfig, options: EstimateConfig, parts: MethodParts, device: str) -> list[str]:
    remarks = []
    if getattr(cfg.policy, "compile_model", False):
        remarks.append("torch.compile changes what is kept for the backward pass: these are the numbers without it")
    if parts.every > 1:
        remarks.append(f"anchors come at every {parts.every}th step: in between there is no anchor pass")
    if craft.accumulate > 1:
        remarks.append(
            f"a step has {craft.accumulate} micro-batches: activations, batches and arithmetic are those of one, and "
            "one gradient takes up all of them"
        )
    if getattr(cfg.policy, "pad_language_to", None) == "longest":
        length = cfg.policy.tokenizer_max_length
        remarks.append(f"prompts are reckoned with {length} tokens, the most there can be; shorter ones need less")
    if options.strategy == "fsdp":
        remarks.append("FSDP is reckoned with one block of layers per unit")
    if torch.device(device).type != "cpu":
        remarks.append(
            "activations are those of the CPU's kernels; a GPU's attention and autocast differ in some places"
        )
    return remarks


def _title(
    cfg: Any, craft: CraftConfig, options: EstimateConfig, parts: MethodParts, policy: nn.Module, device: str
) -> str:
    everything = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    method = craft.method if craft.enabled else Method.label
    if parts.anchoring is not None:
        retained = "+".join(each.mode for each in (parts.anchoring.retained, *parts.anchoring.beside))
        method += f" ({retained}, {parts.anchoring.rows} anchors)"
    devices = "" if options.world_size == 1 else f" x {options.world_size} ({options.strategy})"
    batch = f"batch of {parts.rows}" if craft.accumulate == 1 else f"{craft.accumulate} batches of {parts.rows} a step"
    return (
        f"{cfg.policy.type}: {everything / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M trained; {method}; "
        f"{batch} on {device}{devices}"
    )
