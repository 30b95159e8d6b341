import pytest

from lerobot_craft.training.action_drift import make_probe
from lerobot_craft.training.methods.registry import METHODS
from tests.anchor_fixtures import OLD_TASKS
from tests.training.anchor_contexts import OPEN_DATASET, make_context, old_dataset


@pytest.fixture
def probe_of(anchor_data, teachers, opened_once, monkeypatch, tmp_path):
    """Function from a policy type and settings to the probe of plain fine-tuning."""
    monkeypatch.setattr(OPEN_DATASET, opened_once)

    def probe(policy_type="smolvla", **craft):
        method = METHODS["naive"]()
        method.start(make_context(teachers(policy_type), anchor_data, method="naive", **craft))
        return make_probe(method, tmp_path)

    return probe


@pytest.mark.parametrize("source", ["dataset", "auto"])
def test_fewer_anchors_than_old_tasks_are_no_mistake(source, probe_of, anchor_data):
    probe = probe_of(old_dataset=old_dataset(anchor_data), anchor_source=source, probe_anchors=1)
    assert probe.num_anchors == 1
    assert set(probe.tasks) == set(OLD_TASKS)


def test_instructions_alone_are_enough_for_a_policy_that_reads_them(probe_of):
    instructions = "; ".join(OLD_TASKS)
    probe = probe_of(old_instructions=instructions, anchor_source="auto", probe_anchors=6)
    assert probe.num_anchors == 6
    assert probe_of("act", old_instructions=instructions, anchor_source="auto", probe_anchors=6) is None


def test_without_anything_old_there_is_none(probe_of):
    assert probe_of(anchor_source="auto") is None
