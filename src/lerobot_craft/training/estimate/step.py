"""One training step without memory, in the order of `core/retention.py`, seen by a ledger.

Task pass: forward and backward; the graph is freed as the gradients come. Anchor pass: the task gradients stay, the
forward pass of the anchors and their gradient follow. Then the two are merged in place and the optimizer steps.
Weights, optimizer state and the task's batch are alive throughout. With several micro-batches, each pass is that
of a later one: its gradients join those that are there.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.flop_counter import FlopCounterMode

from lerobot_craft.anchors.columns import Columns, Ragged
from lerobot_craft.anchors.retained import FIXED, Retained
from lerobot_craft.anchors.student_values import student_drift
from lerobot_craft.anchors.teacher_values import teacher_columns
from lerobot_craft.core.gradients import Gradients
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.input_shapes import Shape
from lerobot_craft.policies import PolicyAdapter, mode, unwrapped
from lerobot_craft.training.estimate.ledger import REST, Ledger, Peak
from lerobot_craft.training.estimate.weightless import UnknownValueError, make_batch

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
        beside: Further modes on the same anchors.
    """

    adapter: PolicyAdapter
    retained: Retained
    loss_type: str | None
    rows: int
    beside: tuple[Retained, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """Bytes of the parts of a step, each whole, and the peaks of its phases.

    Attributes:
        parts: By the labels above; the optimizer state is missing if the optimizer cannot be imitated.
        peaks: By phase; a phase that could not be imitated is missing.
        unknown: By phase, why it is missing.
        operations: Floating-point operations of matrix products, convolutions and attention, by pass.
    """

    parts: dict[str, int]
    peaks: dict[str, Peak]
    unknown: dict[str, str]
    operations: dict[str, int]


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
        return Sizes(parts, peaks, self._unknown, self._operations)

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

        def loss() -> Tensor:
            with mode(student, train=adapter.train_mode), self._autocast():
                drifts = [
                    student_drift(adapter, student, batch, columns, each, anchoring.loss_type)
                    for each, columns in asked.items()
                ]
                drift = torch.cat(drifts).sum()
            if not drift.requires_grad:
                raise CraftError(f"retention reaches nothing that is trained: {adapter.how_to_reach(student)}")
            return drift

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
