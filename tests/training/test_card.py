"""The model card: what the Hub reads of it, what a person reads of it, and the one section that craft eval fills in."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard

from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.errors import CraftError
from lerobot_craft.training.card import HubFacts, hub_facts, hub_name, model_card, teacher_name
from lerobot_craft.training.card_sections import CARD_FILE, fill_in, teacher_of
from lerobot_craft.training.outcomes import Outcome
from tests.report.made_training import RECORD

NOTHING = HubFacts(None, ())
RETAINED = [Outcome(None, 0.2, 10, 0.04), Outcome("open", 0.1, 10, 0.03), Outcome("close", 0.35, 3)]
KEPT = [Outcome(name, 0.2, 10, 0.04, 0.02, high, verified=True) for name, high in (("open", 0.1), ("close", 0.4))]


def card_of(run=RECORD, step=40, epsilon=0.3, retained=RETAINED, hub=NOTHING):
    return model_card(run, step, epsilon, retained, hub)


def test_the_hub_finds_its_fields_and_nothing_is_guessed():
    known = {
        "library_name": "lerobot",
        "pipeline_tag": "robotics",
        "tags": ["robotics", "lerobot", "craft", "smolvla"],
    }
    assert ModelCard(card_of()).data.to_dict() == known
    with_data = ModelCard(card_of(hub=HubFacts(None, (), ["me/new", "me/old"]))).data.to_dict()
    assert with_data == known | {"datasets": ["me/new", "me/old"]}


def facts_of(new, old):
    policy = SimpleNamespace(license="mit", tags=None)
    return hub_facts(SimpleNamespace(policy=policy, dataset=SimpleNamespace(**new)), DatasetFlags(**old))


@pytest.mark.parametrize(
    ("new", "old", "named"),
    [
        ({"repo_id": "me/new", "root": None}, {"repo_id": "me/old, me/new"}, ["me/new", "me/old"]),
        ({"repo_id": "me/new", "root": "/data/new"}, {"repo_id": "me/old", "root": "/data/old"}, []),
        ({"repo_id": "local/new", "root": None}, {"repo_id": "local/old,me/old"}, ["me/old"]),
        ({"repo_id": "/data/new", "root": None}, {"repo_id": "../old"}, []),
    ],
)
def test_only_datasets_that_may_be_on_the_hub_are_named_there(new, old, named):
    assert facts_of(new, old) == HubFacts("mit", (), named)


def test_what_is_known_is_there():
    teacher = "/home/me/.cache/huggingface/hub/models--lerobot--smolvla_base/snapshots/0123"
    data = ModelCard(card_of(replace(RECORD, teacher=teacher), hub=HubFacts("mit", ["kitchen: left", "craft"]))).data
    assert (data.base_model, data.license) == ("lerobot/smolvla_base", "mit")
    assert data.tags[-1] == "kitchen: left"
    assert data.tags.count("craft") == 1
    assert "| **teacher** | lerobot/smolvla\\_base |" in card_of(replace(RECORD, teacher=teacher))
    assert hub_name("/policies/base") is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/runs/pick_cube/checkpoints/000200/pretrained_model", "pick_cube"),
        ("/home/me/runs/pick_cube/checkpoints/last", "pick_cube"),
        ("/home/me/policies/base", "base"),
        ("/home/me/policies/base/pretrained_model", "base"),
        ("outputs/base", "base"),
        ("/checkpoints/1/pretrained_model", "pretrained_model"),
        ("/", "unnamed"),
    ],
)
def test_a_teacher_is_called_by_its_name_and_not_by_its_place(path, name):
    assert teacher_name(path) == name


def test_the_card_tells_nothing_of_where_things_lie():
    """Except in the command, which is what the user typed."""
    run = replace(RECORD, teacher="/home/me/runs/base/checkpoints/000200/pretrained_model", dataset="/home/me/data/new")
    card = card_of(run)
    assert "/home" not in card
    assert "fine-tuned on new\n" in card
    typed = card_of(replace(run, command="craft train --policy.path=/home/me/base"))
    assert typed.replace("craft train --policy.path=/home/me/base", RECORD.command) == card


def test_it_says_teacher_anchors_budget_and_command():
    card = card_of()
    assert "| **teacher** | base |" in card
    assert f"| **its fingerprint** | `{RECORD.fingerprint}`" in card
    assert "| **anchors** | 2000 of 3 old tasks, from frames of old data, and the old" in card
    assert "11.7 MiB |" in card
    assert "| **budget** | drift at most 0.300 (1 = the teacher's own error on that task) |" in card
    assert "```sh\ncraft train --policy.path=base --craft.enabled=true\n```" in card
    assert "after 40 of 40 steps" in card


def test_it_says_which_task_is_over_its_budget():
    card = card_of()
    assert "| **budget met** | no: 1 of 2 constraints over it |" in card
    assert "| all old tasks | 0.040 | 0.200 | unverified |" in card
    assert "| open | 0.030 | 0.100 | unverified |\n| close | - | 0.350 | over budget |" in card


@pytest.mark.parametrize(
    ("retained", "said"),
    [
        (RETAINED[:2], "unverified: no real old frame was kept out of training to measure on"),
        (KEPT[:1], "yes"),
        (KEPT, "yes, by 1 of 2 old tasks; 1 too near to tell"),
        ([replace(RETAINED[0], drift=0.4)], "no: 1 of 1 constraint over it"),
        ([Outcome(None)], "not measured"),
    ],
)
def test_the_budget_is_met_by_each_or_by_all_together(retained, said):
    assert f"| **budget met** | {said} |" in card_of(retained=retained)


def test_a_method_without_anchors_claims_no_budget():
    card = card_of(replace(RECORD, method="er", anchors=None, mode=None), retained=[Outcome(None, None, 0, 0.2)])
    assert "**budget" not in card
    assert "| **anchors** | none of old tasks |" in card
    assert "| all old tasks | 0.200 | - | - |" in card


def test_a_note_says_what_else_was_done_and_what_was_not_measured_is_not_explained():
    card = model_card(replace(RECORD, anchors=None), 40, None, [], NOTHING, "Its weights were moved.")
    assert "). Its weights were moved. It loads in stock LeRobot.\n" in card
    assert "Drift is" not in card
    assert "Drift is" in card_of()


def test_words_of_a_user_stay_words():
    hostile = replace(RECORD, command="craft train --x='a\n```\n# b'", dataset="me/a_b|c<i>")
    card = card_of(hostile, retained=[Outcome("a | b\n<img src=x> `c` *d*", 0.1, 1)], hub=HubFacts(None, ["a: b|<i>"]))
    assert "| a \\| b &lt;img src=x&gt; \\`c\\` \\*d\\* | - | 0.100 |" in card
    assert "````sh\ncraft train --x='a\n```\n# b'\n````" in card
    assert "<i>" not in card.split("---\n", 2)[2]
    assert ModelCard(card).data.tags[-1] == "a: b|<i>"


def test_only_the_section_of_success_is_filled_in_and_again(tmp_path):
    path = tmp_path / CARD_FILE
    path.write_text(card_of() + "\nOf the owner: \\1 é\n")
    assert teacher_of(path) == RECORD.fingerprint
    before = path.read_text()
    for content in ("| a |\n\\g<0>", "| b |"):
        fill_in(path, content)
        assert content in path.read_text()
    assert "| a |" not in path.read_text()
    outside = re.compile(r"(?<= -->\n).*(?=\n<!-- /craft)", re.DOTALL)
    assert outside.sub("", path.read_text()) == outside.sub("", before)


def test_a_card_of_somebody_else_is_left_alone(tmp_path):
    path = tmp_path / CARD_FILE
    assert teacher_of(path) is None
    path.write_text("# My policy\n")
    assert teacher_of(path) is None
    with pytest.raises(CraftError, match="has lost the marks of its success section"):
        fill_in(path, "x")
    path.write_bytes(b"\xff")
    with pytest.raises(CraftError, match="is no UTF-8 text"):
        teacher_of(path)


def test_pictures_that_travel_are_listed():
    card = card_of(replace(RECORD, memory=("4 frames (8 pictures) of <me>/old, demonstrations",)))
    assert "- in `craft_memory/`: 4 frames (8 pictures) of &lt;me&gt;/old, demonstrations\n" in card
    assert "<!-- craft:memory -->\nNone.\n" in card_of(replace(RECORD, memory=()))
