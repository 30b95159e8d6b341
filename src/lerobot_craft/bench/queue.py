"""Which cell is next: each after those it needs, none twice; a failure stops only those that need it."""

import time
from collections.abc import Callable, Iterable, Sequence

from lerobot_craft.bench.cells import Cell

_ASK_AGAIN_S = 5.0  # for a cell that another process is running


class CellQueue:
    """The cells of a bench that are neither finished nor given up.

    Args:
        cells: Each after those it needs.
        finished: Digests of finished cells.
        clock: Time in seconds, for retries.
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
        """Whether no cell is waiting or running."""
        return not self._waiting and not self._at_work

    @property
    def remaining(self) -> int:
        """Number of cells that wait or run."""
        return len(self._waiting) + len(self._at_work)

    def take(self) -> Cell | None:
        """The first cell that can run now; None if all must wait."""
        for cell in self._waiting:
            ready = all(needed.digest in self._finished for needed in cell.needs)
            if ready and self._clock() >= self._not_before.get(cell.digest, 0.0):
                self._waiting.remove(cell)
                self._at_work[cell.digest] = cell
                return cell
        return None

    def finish(self, cell: Cell) -> None:
        """Mark a cell as finished, so that others can use it."""
        del self._at_work[cell.digest]
        self._finished.add(cell.digest)

    def put_back(self, cell: Cell) -> None:
        """Another process is running the cell: retry later."""
        self._not_before[cell.digest] = self._clock() + _ASK_AGAIN_S
        self._waiting.append(self._at_work.pop(cell.digest))

    def fail(self, cell: Cell) -> list[Cell]:
        """Give up a cell; returns the cells that need it, which are also given up."""
        del self._at_work[cell.digest]
        lost = [other for other in self._waiting if any(needed.digest == cell.digest for needed in other.chain())]
        for other in lost:
            self._waiting.remove(other)
        return lost
