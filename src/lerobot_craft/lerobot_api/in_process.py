"""Run several trainings in one process: undo the global changes of each."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Use around a training: lerobot replaces the root logger's handlers, accelerate keeps one device and precision."""
    from accelerate.state import AcceleratorState

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        AcceleratorState._reset_state(reset_partial_state=True)
