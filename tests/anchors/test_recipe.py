"""What a policy gets where nothing is asked for."""

import pytest

from lerobot_craft.anchors.build import prepare
from lerobot_craft.anchors.recipe import (
    BuildConfig,
    DatasetFlags,
    draws_from_old,
    most_visits,
    num_anchors,
    num_draws,
)
from lerobot_craft.errors import CraftError
from lerobot_craft.policies.act import ACTAdapter
from lerobot_craft.policies.pi0_fast import PI0FastAdapter
from lerobot_craft.policies.smolvla import SmolVLAAdapter


def test_a_policy_that_answers_in_tokens_gets_more():
    assert num_anchors(None, None, PI0FastAdapter()) == 8000
    assert num_anchors(None, None, SmolVLAAdapter()) == num_anchors(None, None, ACTAdapter()) == 2000


def test_old_frames_of_a_policy_that_answers_in_tokens_are_not_repeated_without_end():
    assert most_visits(PI0FastAdapter()) == 8
    assert most_visits(SmolVLAAdapter()) is most_visits(ACTAdapter()) is None


@pytest.mark.parametrize("adapter", [PI0FastAdapter(), SmolVLAAdapter()])
def test_who_asks_for_a_number_gets_it(adapter):
    assert num_anchors(7, None, adapter) == num_anchors(7, 3, adapter) == 7


def test_old_frames_come_on_top_where_no_number_is_asked_for():
    assert num_anchors(None, 20, SmolVLAAdapter()) == 2020


def test_a_policy_that_answers_in_tokens_draws_from_old_frames_where_there_are_some():
    assert draws_from_old("auto", "both", PI0FastAdapter())
    assert not draws_from_old("auto", "cross", PI0FastAdapter())
    assert not draws_from_old("statistics", "both", PI0FastAdapter())
    assert not draws_from_old("auto", "both", SmolVLAAdapter())
    assert draws_from_old("old_frames", "both", SmolVLAAdapter())


@pytest.mark.parametrize(
    ("asked", "source", "sentence"),
    [
        ("old_frames", "cross", "which has old frames to make anchors from; this is cross"),
        ("dreams", "both", "draw_from=dreams is not known. Use auto, old_frames, statistics"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(asked, source, sentence):
    with pytest.raises(CraftError, match=sentence):
        draws_from_old(asked, source, PI0FastAdapter())


@pytest.mark.parametrize(("visits", "expected"), [(100, 1), (6400, 3), (10**6, 8)])
def test_no_more_draws_than_visits(visits, expected):
    assert num_draws(None, visits, 2000) == expected
    assert num_draws(4, visits, 2000) == 4


@pytest.mark.parametrize(("policy", "cross"), [("pi0_fast", 8000), ("smolvla", 2000)])
def test_a_plan_has_them(policy, cross, teachers, anchor_data, tmp_path):
    config = BuildConfig(
        output_dir=tmp_path,
        old_dataset=DatasetFlags("local/old", str(anchor_data / "old")),
        new_dataset=DatasetFlags("local/new", str(anchor_data / "new")),
        old_frames=6,
    )
    plan = prepare(config, teachers(policy)).plan
    assert (plan.requested, int((~plan.cross).sum())) == (cross + 6, 6)
    assert plan.has_mates == (policy == "pi0_fast")
