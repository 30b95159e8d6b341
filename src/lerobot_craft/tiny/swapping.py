"""Replacing names of a lerobot module for the length of a `with` block."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# Every thread sees a module's names: two policies built at the same time must not meet each other's replacements.
_one_at_a_time = threading.RLock()


@contextmanager
def swapped(module: ModuleType, replacements: dict[str, Any]) -> Iterator[None]:
    """Give names of `module` other values inside the block, and their former values back after it, also after an error.

    Blocks may be nested; blocks of other threads wait.

    Args:
        module: The module whose globals change.
        replacements: The new value of each name. A name the module does not have is an `AttributeError`.
    """
    with _one_at_a_time:
        before = {name: getattr(module, name) for name in replacements}
        try:
            for name, value in replacements.items():
                setattr(module, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(module, name, value)
