"""Which instructions a policy still tells apart, from actions that are known by hand."""

from dataclasses import replace

import numpy as np
import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.listening import (
    SCHEMA,
    Listening,
    compare,
    listening_table,
    read_listening,
    write_listening,
)

RED, BLUE, OTHER = "put it in the red basket", "put it in the blue basket", "open the drawer"
EPISODES = np.repeat(np.arange(4), 5)


def acting(*targets, noise=0.0, seed=0):
    """Actions [I, F, H, A]: under instruction i the same movement in every frame, and noise that all of them share."""
    rng = np.random.default_rng(seed)
    moves = np.array(targets, dtype=np.float64)  # [I, A]
    actions = np.repeat(np.repeat(moves[:, None, None], len(EPISODES), axis=1), 3, axis=2)
    return actions + noise * rng.standard_normal(actions.shape[1:])


def heard(before, after, again=None, spread=(1.0, 1.0), learned=(BLUE,), names=(RED, BLUE, OTHER)):
    is_learned = [name in learned for name in names]
    found = compare(before, before if again is None else again, after, EPISODES, np.array(spread), is_learned)
    return Listening(
        schema=SCHEMA,
        craft_version="0",
        created="2026-11-18T00:00:00+00:00",
        command="craft listen",
        before="base",
        after="new",
        dataset="you/new_task",
        instructions=list(names),
        learned=list(learned),
        **found,
    )


BEFORE = acting((1, 0), (-1, 0), (0, 1))


def test_differences_are_root_mean_squares_in_units_of_the_spread():
    found = heard(BEFORE, BEFORE, spread=(2.0, 1.0))
    # (1, 0) and (-1, 0) differ by 2 in one of two dimensions, whose spread is 2.
    assert found.apart_if_kept[0][1] == pytest.approx(np.sqrt(0.5))
    assert found.apart_if_kept == found.apart_now
    assert found.moved == pytest.approx([0, 0, 0])


def test_an_instruction_that_does_what_another_does_is_named():
    found = heard(BEFORE, acting((-1, 0), (-1, 0), (0, 1)))
    other, gone = found.swallowed_by(RED)
    assert (other, gone.value) == (BLUE, pytest.approx(1.0))
    assert found.swallowed_by(OTHER)[1].value == pytest.approx(0.0)
    assert found.swallowed_by(BLUE) is None  # it was learned: what it does is right
    (sentence,) = found.sentences()
    assert sentence.startswith(f"After fine-tuning, {RED!r} does what {BLUE!r} does: 1.00")


def test_what_an_instruction_did_before_it_was_learned_does_not_count():
    """Before, the policy did under blue what it did under red; now blue is learned, and red follows it."""
    before, after = acting((1, 0), (1, 0), (0, 1)), acting((-1, 0), (-1, 0), (0, 1))
    assert heard(before, after).swallowed_by(RED)[1].value == pytest.approx(1.0)
    kept = acting((1, 0), (-1, 0), (0, 1))
    assert heard(before, kept).swallowed_by(RED)[1].value == pytest.approx(0.0)


def test_half_way_is_half_gone_with_an_interval_over_episodes():
    before, after = acting((1, 0), (-1, 0), (0, 1), noise=0.3), acting((0, 0), (-1, 0), (0, 1), noise=0.3)
    gone = heard(before, after).swallowed_by(RED)[1]
    assert gone.value == pytest.approx(0.5)
    assert gone.low <= gone.value + 1e-9
    assert gone.value <= gone.high + 1e-9
    after[0, EPISODES == 0] = before[0, EPISODES == 0]  # one episode kept it: episodes differ
    wide = heard(before, after).swallowed_by(RED)[1]
    assert wide.high - wide.low > gone.high - gone.low


def test_where_nothing_is_gone_one_sentence_says_so():
    (sentence,) = heard(BEFORE, BEFORE).sentences()
    assert "Every instruction still does its own thing" in sentence


def test_what_was_not_told_apart_before_is_not_called_gone():
    again = BEFORE + 3.0  # by itself it varies more than instructions differ
    found = heard(BEFORE, acting((-1, 0), (-1, 0), (0, 1)), again)
    assert found.swallowed_by(RED) is None
    assert "nothing can be said" in found.sentences()[0]


def test_a_dimension_that_hardly_moves_weighs_nothing():
    before, after = acting((1, 0), (-1, 0)), acting((1, 5), (-1, -5))
    found = heard(before, after, spread=(1.0, 1e-9), names=(RED, BLUE))
    assert found.apart_now == found.apart_if_kept


def test_one_episode_has_no_interval():
    found = compare(BEFORE, BEFORE, BEFORE, np.zeros(len(EPISODES), dtype=np.int64), np.ones(2), [False] * 3)
    assert found["gone"][0][1].low is None


def test_a_file_comes_back_as_it_was_and_a_damaged_one_is_refused(tmp_path):
    found, path = heard(BEFORE, acting((-1, 0), (-1, 0), (0, 1))), tmp_path / "listening.json"
    write_listening(path, found)
    assert read_listening(path) == found
    write_listening(path, replace(found, moved=[0.0]))
    with pytest.raises(CraftError, match="moved: expected 3 numbers"):
        read_listening(path)


def test_the_table_has_a_row_for_each_instruction():
    lines = listening_table(heard(BEFORE, acting((-1, 0), (-1, 0), (0, 1)))).splitlines()
    assert f"| {RED} | 1.41 | {BLUE} | 1.00 [1.00, 1.00] |" in lines
    assert f"| {BLUE} | 0.00 | (learned) |  |" in lines
