"""Which tensors are alive when: every allocation and release of a stretch of code, and its peak."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
