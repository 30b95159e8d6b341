"""Which cell is next: each after what it needs, none twice, and a failure stops only those that need it."""

import time
from collections.abc import Callable, Iterable, Sequence

from lerobot_craft.bench.cells import Cell

_ASK_AGAIN_S = 5.0  # for a cell that a process elsewhere is at


class CellQueue:
    """The cells of a bench that are neither finished nor given up.

    Args:
        cells: Each after what it needs.
        finished: Digests of those that are finished already.
        clock: Seconds, for asking again.
    """

    def __init__(
        self, cells: Sequence[Cell], finished: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._finished = set(finished)
        self._waiting = [cell for cell in cells if cell.digest not in self._finished]
        self._not_before: dict[str, float] = {}
        self._at_work: dict[str, Cell] = {}
        self._clock = clock

    @property
    def is_over(self) -> bool:
        """Whether nothing waits and nothing is at work."""
        return not self._waiting and not self._at_work

    @property
    def remaining(self) -> int:
        """Cells that wait or are at work."""
        return len(self._waiting) + len(self._at_work)

    def take(self) -> Cell | None:
        """The first cell that can be run now; None if all that wait have to wait on."""
        for cell in self._waiting:
            ready = all(needed.digest in self._finished for needed in cell.needs)
            if ready and self._clock() >= self._not_before.get(cell.digest, 0.0):
                self._waiting.remove(cell)
                self._at_work[cell.digest] = cell
                return cell
        return None

    def finish(self, cell: Cell) -> None:
        """It is finished: others may need it."""
        del self._at_work[cell.digest]
        self._finished.add(cell.digest)

    def put_back(self, cell: Cell) -> None:
        """A process elsewhere is at it: ask again later."""
        self._not_before[cell.digest] = self._clock() + _ASK_AGAIN_S
        self._waiting.append(self._at_work.pop(cell.digest))

    def fail(self, cell: Cell) -> list[Cell]:
        """Give it up; returns the cells that need it and are given up with it."""
        del self._at_work[cell.digest]
        lost = [other for other in self._waiting if any(needed.digest == cell.digest for needed in other.chain())]
        for other in lost:
            self._waiting.remove(other)
        return lost
