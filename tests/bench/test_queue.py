from types import SimpleNamespace

import pytest

from lerobot_craft.bench.schedule import CellQueue


class FakeCell(SimpleNamespace):
    """As much of a cell as a queue looks at."""

    def chain(self):
        for needed in self.needs:
            yield from needed.chain()
        yield self


@pytest.fixture
def cells():
    demos = FakeCell(digest="demos", needs=())
    base = FakeCell(digest="base", needs=(demos,))
    other = FakeCell(digest="other", needs=(demos,))
    return demos, base, other, FakeCell(digest="run", needs=(base,)), FakeCell(digest="run of other", needs=(other,))


def test_a_cell_waits_for_what_it_needs(cells):
    queue = CellQueue(cells)
    demos = queue.take()
    assert demos.digest == "demos"
    assert queue.take() is None
    queue.finish(demos)
    assert [queue.take().digest for _ in range(2)] == ["base", "other"]
    assert queue.take() is None


def test_what_is_finished_is_not_taken_again(cells):
    queue = CellQueue(cells, finished=["demos", "base", "other"])
    assert [queue.take().digest for _ in range(2)] == ["run", "run of other"]


def test_a_failure_gives_up_only_what_needs_it(cells):
    queue = CellQueue(cells, finished=["demos"])
    base, other = queue.take(), queue.take()
    assert [cell.digest for cell in queue.fail(base)] == ["run"]
    queue.finish(other)
    assert queue.take().digest == "run of other"
    assert queue.take() is None
    assert not queue.is_over


def test_a_cell_that_somebody_else_is_at_is_asked_for_later(cells):
    now = [0.0]
    queue = CellQueue(cells, finished=["demos"], clock=lambda: now[0])
    queue.put_back(queue.take())
    assert queue.take().digest == "other"
    assert queue.take() is None
    now[0] = 60.0
    assert queue.take().digest == "base"
