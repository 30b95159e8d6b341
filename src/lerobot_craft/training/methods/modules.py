"""A policy's trained parameters by module, coarse enough for a column each: where two gradients agree and where not."""

from collections.abc import Sequence

_MOST = 10  # modules: a table of more is not read
_LARGE = 0.5  # of all trained values in one module: it hides what is inside it


def module_names(sizes: Sequence[tuple[str, int]]) -> list[str]:
    """For each parameter the module that it counts to.

    Beginning with the whole policy, the module that holds more than half of the values is taken apart into its
    children, until there is none or there would be too many modules. What all names have in common is left out.

    Args:
        sizes: Dotted name of each parameter, and how many values it has.
    """
    paths = [tuple(name.split(".")[:-1]) for name, _ in sizes]
    modules: list[tuple[str, ...]] = [() for _ in paths]
    while True:
        held: dict[tuple[str, ...], int] = {}
        for module, (_, size) in zip(modules, sizes, strict=True):
            held[module] = held.get(module, 0) + size
        largest = max(held, key=lambda module: held[module])
        finer = [
            path[: len(module) + 1] if module == largest else module
            for module, path in zip(modules, paths, strict=True)
        ]
        if finer == modules or held[largest] <= _LARGE * sum(held.values()) or len(set(finer)) > _MOST:
            break
        modules = finer
    common = _common(sorted(set(modules)))
    return [".".join(module[common:]) or "itself" for module in modules]


def _common(modules: Sequence[tuple[str, ...]]) -> int:
    """How many leading names all modules share; of a single module all but its own."""
    if len(modules) == 1:
        return max(len(modules[0]) - 1, 0)
    first, last = modules[0], modules[-1]
    shared = [a == b for a, b in zip(first, last, strict=False)]
    return shared.index(False) if False in shared else len(shared)
