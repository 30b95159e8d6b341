"""One training step without memory, in the order of `core/retention.py`, seen by a ledger.

Task pass: forward and backward; the graph is freed as the gradients come. Anchor pass: the task gradients stay, the
forward pass of the anchors and their gradient follow. Then the two are merged in place and the optimizer steps.
Weights, optimizer state and the task's batch are alive throughout. With several micro-batches, each pass is that
of a later one: its gradients join those that are there.

An estimate asks for sizes only. If code reads a value, it gets the one that makes memory largest: every position of a
mask is real, every comparison with the cache agrees, and a loss that is read for the log is not a number. A decision on
a value that has no stand-in is an error, and the estimate says `unknown`.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lerobot_craft.anchors.columns import Columns, Ragged
from lerobot_craft.anchors.retained import FIXED, Retained
from lerobot_craft.anchors.values import looked_up, student_drift, teacher_columns
from lerobot_craft.core.gradients import Gradients
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.features import Shape
from lerobot_craft.policies import PolicyAdapter, mode, unwrapped
from lerobot_craft.policies.taps import KnownImages

_aten = torch.ops.aten


def without_memory() -> FakeTensorMode:
    """The mode in which tensors on the CPU have no memory, and operations on them do no work."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def give_tensors(module: nn.Module) -> None:
    """Within `without_memory`: put every tensor of a module that is on the meta device onto the CPU, ties included.

    On the CPU because meta tensors know no autocast and no choice of attention kernel.
    """
    replaced: dict[int, Tensor] = {}

    def on_cpu(tensor: Tensor) -> Tensor:
        if id(tensor) not in replaced:
            moved = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            replaced[id(tensor)] = (
                nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
            )
        return replaced[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers, vars(part)):
            for name, value in tensors.items():
                if isinstance(value, Tensor):
                    tensors[name] = on_cpu(value)  # type: ignore[assignment]


def make_batch(shapes: Mapping[str, Shape], rows: int) -> dict[str, Any]:
    """Within `without_memory`: a batch as the preprocessor would return it."""
    return {name: torch.zeros((rows, *shape.size), dtype=shape.dtype) for name, shape in shapes.items()}


class UnknownValueError(CraftError):
    """The size of something depends on a value that is not there."""


class ReadsForTheLog(TorchFunctionMode):
    """Mode in which a tensor without values can be read as an array: every number is not a number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what only reads values; everything else runs as it is."""
        reads = func in (torch.Tensor.numpy, torch.Tensor.tolist)
        if reads and isinstance(args[0], FakeTensor) and args[0].dtype.is_floating_point:
            values = np.full(tuple(args[0].shape), np.nan)
            return values.tolist() if func is torch.Tensor.tolist else values
        return func(*args, **(kwargs or {}))


def run_without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on tensors of which some have no values."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors) and not _on_meta(tensors):
        with unset_fake_temporarily():  # small real ones, such as lengths of rows, keep their values
            return func(*args, **kwargs)
    if func is _aten._local_scalar_dense.default:
        return _scalar(args[0])
    if func is _aten.equal.default:
        return True
    if func is _aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
    if func is _aten.index.Tensor:
        return func(args[0], [part for index in args[1] for part in _as_positions(index)], **kwargs)
    return func(*args, **kwargs)


def _scalar(tensor: Tensor) -> float:
    if tensor.dtype.is_floating_point:
        return float("nan")
    raise UnknownValueError("its forward pass decides by a value, and an estimate has none")


def _as_positions(index: Tensor | None) -> list[Tensor | None]:
    """A mask as the positions that it chooses, all of them; anything else as it is."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.dim())]


def _on_meta(tensors: list[Tensor]) -> bool:
    return any(tensor.is_meta for tensor in tensors)


REST = "rest"


@dataclass(frozen=True)
class Peak:
    """What is held at the largest moment of a phase, in bytes by label; what has no label is the rest."""

    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


class Ledger(TorchDispatchMode):
    """Sees the storage of every tensor that an operation returns, from its first appearance to its release.

    What an operation needs within itself, such as a convolution's workspace, is not seen. Labels may be given late,
    also after the peak has passed: which storages were gradients is known only once they have arrived.

    Args:
        run: How an operation is run; as it is, or with what stands in for values that nobody knows.
    """

    def __init__(self, run: Callable[..., Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run or _as_it_is
        self._living: dict[int, tuple[weakref.ref[Any], int]] = {}  # id of a storage -> itself, its number
        self._sizes: list[int] = []  # by number
        self._labels: dict[int, str] = {}
        self._events: list[int] = []  # number of what came, its complement of what went
        self._phases: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and enter what it returned."""
        result = self._run(func, args, kwargs or {})
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._enter(value)
        return result

    def label(self, tensors: Iterable[Tensor | None], name: str) -> int:
        """Call the memory of these tensors by a name, and return how many bytes it is."""
        numbers = {self._enter(tensor) for tensor in tensors if tensor is not None}
        self._labels |= dict.fromkeys(numbers, name)
        return sum(self._sizes[number] for number in numbers)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A stretch whose peak will be asked for."""
        start = len(self._events)
        yield
        self._phases[name] = start, len(self._events)

    def has(self, phase: str) -> bool:
        """Whether a phase came to its end."""
        return phase in self._phases

    def peak(self, phase: str, scale: Mapping[str, float] | None = None) -> Peak:
        """The largest moment of a phase.

        Args:
            phase: Its name.
            scale: Factors by label, for what this device holds only a share of.
        """
        factors = scale or {}
        sizes = [size * factors.get(self._labels.get(n, REST), 1.0) for n, size in enumerate(self._sizes)]
        start, stop = self._phases[phase]
        living: set[int] = set()
        for event in self._events[:start]:
            _apply(living, event)
        held = most = sum(sizes[number] for number in living)
        at_most = start
        for index, event in enumerate(self._events[start:stop], start=start):
            held += sizes[event] if event >= 0 else -sizes[~event]
            if held > most:
                most, at_most = held, index + 1
        for event in self._events[start:at_most]:
            _apply(living, event)
        parts: dict[str, float] = {}
        for number in living:
            label = self._labels.get(number, REST)
            parts[label] = parts.get(label, 0) + sizes[number]
        return Peak({label: round(size) for label, size in parts.items()})

    def _enter(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        known = self._living.get(id(storage))
        if known is not None:
            return known[1]
        number = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._living[id(storage)] = weakref.ref(storage, partial(self._leave, id(storage))), number
        self._events.append(number)
        return number

    def _leave(self, key: int, _: Any) -> None:
        _, number = self._living.pop(key)
        self._events.append(~number)


def _apply(living: set[int], event: int) -> None:
    if event >= 0:
        living.add(event)
    else:
        living.discard(~event)


def _as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


WEIGHTS, OPTIMIZER, GRADIENTS, RETENTION, BATCH = "weights", "optimizer", "gradients", "retention", "batch"
COPIES = "copies"  # of --craft.master_weights; made with the optimizer here, alive throughout in a run
DIVIDED = (WEIGHTS, OPTIMIZER, GRADIENTS, RETENTION)  # by FSDP, among its devices
PHASES = TASK_PASS, ANCHOR_PASS, OPTIMIZER_STEP = "task pass", "anchor pass", "optimizer step"


@dataclass(frozen=True)
class Anchoring:
    """The anchor pass of a run.

    Attributes:
        adapter: The adapter of the policy.
        retained: Which values are retained.
        loss_type: How they are compared; None: by the default of their kind.
        rows: Anchors in a step.
        anchors: How many there are in all.
        looks_up_images: Whether images are embedded once, if nothing that embeds them is trained.
        beside: Further modes on the same anchors.
    """

    adapter: PolicyAdapter
    retained: Retained
    loss_type: str | None
    rows: int
    anchors: int
    looks_up_images: bool = True
    beside: tuple[Retained, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """Bytes of the parts of a step, each whole, and the peaks of its phases.

    Attributes:
        parts: By the labels above; the optimizer state is missing if the optimizer cannot be imitated.
        peaks: By phase; a phase that could not be imitated is missing.
        unknown: By phase, why it is missing.
        operations: Floating-point operations of matrix products, convolutions and attention, by pass.
        embedded_bytes: Of an anchor's images as an untrained vision tower has embedded them; 0 if it is trained.
    """

    parts: dict[str, int]
    peaks: dict[str, Peak]
    unknown: dict[str, str]
    operations: dict[str, int]
    embedded_bytes: int = 0


class Step:
    """A step of a run whose optimizer has its state; to be used within `without_memory` and its ledger.

    Args:
        ledger: Already entered.
        policy: With tensors that have no memory.
        make_optimizer: As training makes it.
        shapes: Of one sample.
        autocast: The precision of a forward pass; entered anew for each.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        shapes: Mapping[str, Shape],
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._make_optimizer = make_optimizer
        self._shapes = shapes
        self._autocast = autocast
        self._trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self._parts: dict[str, int] = {}
        self._unknown: dict[str, str] = {}
        self._operations: dict[str, int] = {}
        self._embedded_bytes = 0

    def take(self, rows: int, anchoring: Anchoring | None, share: float = 1.0, micro_batches: int = 1) -> Sizes:
        """Take it.

        Args:
            rows: Samples in a micro-batch.
            anchoring: The anchor pass of a micro-batch; None: there is none.
            share: The part of weights, gradients and optimizer state that this device holds, in the peaks.
            micro_batches: How many make up the step.
        """
        self._accumulates = micro_batches > 1
        ledger, parts = self._ledger, self._parts
        parts[WEIGHTS] = ledger.label([*self._policy.parameters(), *self._policy.buffers()], WEIGHTS)
        self._policy.train()
        batch = make_batch(self._shapes, rows)
        parts[BATCH] = ledger.label(batch.values(), BATCH)
        loss = self._try(TASK_PASS, lambda: self._task_pass(batch))  # lerobot's update holds it to the end of the step
        if loss is None:
            self._zero_gradients()
        parts[GRADIENTS] = ledger.label([parameter.grad for parameter in self._trained], GRADIENTS)
        if anchoring is not None:
            parts[RETENTION] = parts[GRADIENTS]  # at most; what it is once the pass is known
            self._try(ANCHOR_PASS, lambda: self._anchor_pass(anchoring))
        self._try(OPTIMIZER_STEP, self._optimizer_steps)
        peaks = {phase: self._peak(phase, share) for phase in PHASES if ledger.has(phase)}
        return Sizes(parts, peaks, self._unknown, self._operations, self._embedded_bytes)

    def _peak(self, phase: str, share: float) -> Peak:
        divided = dict.fromkeys(DIVIDED, share)
        if phase == OPTIMIZER_STEP:
            # An optimizer works on what it holds. Copies are counted with what is there all along.
            return self._ledger.peak(phase, {**divided, REST: share, COPIES: 0.0})
        # From the second step on the optimizer's state is there all along.
        state = round(share * self._parts.get(OPTIMIZER, 0))
        return Peak(self._ledger.peak(phase, divided).parts | {OPTIMIZER: state})

    def _task_pass(self, batch: dict[str, Any]) -> Tensor:
        if self._accumulates:
            torch.autograd.backward(self._loss(batch))
            self._ledger.label([parameter.grad for parameter in self._trained], GRADIENTS)
        with self._pass(TASK_PASS):
            loss = self._loss(batch)
            torch.autograd.backward(loss)
        return loss

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        with self._autocast():
            loss: Tensor = self._policy.forward(batch)[0]
        return loss

    @contextlib.contextmanager
    def _pass(self, phase: str) -> Iterator[None]:
        """Seen by the ledger, its arithmetic counted; noted when it has come to its end."""
        with self._ledger.phase(phase), FlopCounterMode(display=False) as counter:
            yield
        self._operations[phase] = counter.get_total_flops()

    def _anchor_pass(self, anchoring: Anchoring) -> None:
        student, adapter, retained = unwrapped(self._policy), anchoring.adapter, anchoring.retained
        batch = make_batch(self._shapes, anchoring.rows)
        with mode(student, train=adapter.train_mode), self._autocast():
            asked = {
                each: _anchor_columns(adapter, student, batch, each, anchoring.rows)
                for each in (retained, *anchoring.beside)
            }
        batch = {name: value for name, value in batch.items() if name not in self._policy_outputs(student)}
        self._parts[BATCH] += self._ledger.label(batch.values(), BATCH)

        images = KnownImages(adapter.image_embedder(student) if anchoring.looks_up_images else None)

        def drift_of(retained: Retained, columns: Columns) -> Tensor:
            known = looked_up(images, range(anchoring.rows), retained, adapter, student)
            with mode(student, train=adapter.train_mode), self._autocast(), known:
                return student_drift(adapter, student, batch, columns, retained, anchoring.loss_type)

        def loss() -> Tensor:
            drift = torch.cat([drift_of(each, columns) for each, columns in asked.items()]).sum()
            if not drift.requires_grad:
                raise CraftError(f"retention reaches nothing that is trained: {adapter.how_to_reach(student)}")
            return drift

        with torch.no_grad():  # the first visit, if images are looked up from the second on
            for each, columns in asked.items() if images.looks_up else ():
                drift_of(each, columns)
        # Without values all cameras are equal, and only the first is kept.
        self._embedded_bytes = images.nbytes // anchoring.rows * max(1, len(student.config.image_features))

        gradients: Gradients = []
        if self._accumulates:
            gradients = torch.autograd.grad(loss(), self._trained, allow_unused=True)
            self._ledger.label(gradients, RETENTION)
        with self._pass(ANCHOR_PASS):
            gradients = self._joined(gradients, loss())
        self._parts[RETENTION] = self._ledger.label(gradients, RETENTION)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            if parameter.grad is None:  # merging writes into the task's gradient if there is one
                parameter.grad = gradient

    def _joined(self, before: Gradients, loss: Tensor) -> Gradients:
        """The gradient of a loss, in what another micro-batch has left, if there is one; the task's are set aside."""
        if not before:
            return torch.autograd.grad(loss, self._trained, allow_unused=True)
        task = [parameter.grad for parameter in self._trained]
        for parameter, gradient in zip(self._trained, before, strict=True):
            parameter.grad = gradient
        torch.autograd.backward(loss, inputs=self._trained)
        joined = [parameter.grad for parameter in self._trained]
        for parameter, gradient in zip(self._trained, task, strict=True):
            parameter.grad = gradient
        return joined

    @staticmethod
    def _policy_outputs(student: Any) -> set[str]:
        """What anchors lack: what the demonstrator did, and its tokens."""
        names = set(student.config.output_features)
        return names | {f"{name}{end}" for name in names for end in ("_is_pad", ".tokens", ".token_mask")}

    def _optimizer_steps(self) -> None:
        """Two: the first makes the state, of parameters that have a gradient and of no others."""
        optimizer = self._make_optimizer(self._policy)
        moved: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # lerobot hands it what is frozen too: only what is no parameter of the policy is a copy.
        self._ledger.label(set(moved) - set(self._policy.parameters()), COPIES)
        reached = [parameter for parameter in self._trained if parameter.grad is not None]
        optimizer.step()
        state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
        self._parts[OPTIMIZER] = self._ledger.label(state, OPTIMIZER)
        for parameter in reached:
            if parameter.grad is None:  # float32 copies take the gradients away
                parameter.grad = torch.zeros_like(parameter)
        self._ledger.label([parameter.grad for parameter in reached], GRADIENTS)
        with self._ledger.phase(OPTIMIZER_STEP):
            optimizer.step()

    def _zero_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)

    def _try[Result](self, phase: str, imitate: Callable[[], Result]) -> Result | None:
        """The result, or None and the reason noted: a policy may do anything with tensors that have no values."""
        try:
            return imitate()
        except UnknownValueError as error:
            self._unknown[phase] = str(error)
        except CraftError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()
            self._unknown[phase] = f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__
        return None


def _anchor_columns(
    adapter: PolicyAdapter, policy: Any, batch: Mapping[str, Any], retained: Retained, rows: int
) -> Columns:
    """What a teacher would have left in the cache: columns of the right shapes. The policy stands for its teacher.

    A policy cannot write tokens without values, so the chunks of a token policy have the largest length it may write.
    """
    if adapter.output_kind == "logits" and retained.needs_fixed:
        return _token_columns(policy.config.max_action_tokens, retained, rows)
    rngs = [np.random.default_rng(row) for row in range(rows)]
    with torch.no_grad():
        return teacher_columns(adapter, policy, batch, retained.once(), rngs)


def _token_columns(length: int, retained: Retained, rows: int) -> Columns:
    columns: Columns = {f"{FIXED}tokens": _ragged(rows, length, torch.int32)}
    return columns | {
        name: _ragged(rows, positions, dtype, *width)
        for name, (positions, dtype, width) in retained.token_columns(length).items()
    }


def _ragged(rows: int, length: int, dtype: torch.dtype, *width: int) -> Ragged:
    with unset_fake_temporarily():
        lengths = torch.full((rows,), length)  # real: code asks for its values
    return Ragged(torch.zeros((rows * length, *width), dtype=dtype), lengths)
