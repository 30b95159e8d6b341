"""States of mates are read from the datasets, and walks move as the new data do."""

import numpy as np
import pytest
import torch

from lerobot_craft.anchors import walks
from lerobot_craft.anchors.build import prepare
from lerobot_craft.anchors.loader import open_cache
from lerobot_craft.anchors.recipe import BuildConfig, DatasetFlags
from lerobot_craft.anchors.verify import verify_cache
from lerobot_craft.lerobot_api.datasets import open_dataset


def job_of(anchor_data, tmp_path, teacher, **options):
    config = BuildConfig(
        output_dir=tmp_path,
        old_dataset=DatasetFlags("local/old", str(anchor_data / "old")),
        new_dataset=DatasetFlags("local/new", str(anchor_data / "new")),
        old_frames=6,
        num_anchors=60,
        **options,
    )
    return prepare(config, teacher)


def test_mates_have_the_states_of_their_frames(anchor_data, tmp_path, teachers):
    job = job_of(anchor_data, tmp_path, teachers("pi0_fast"), walked_states=0.0, drawn_states=0.7)
    mates = job.make_states(job.teacher.policy).mates
    rows = np.flatnonzero(job.plan.mate >= 0)
    assert len(rows) > 20
    for row in rows:
        shown = job.datasets[job.plan.dataset[row]].dataset[int(job.plan.mate[row])]["observation.state"]
        assert torch.equal(mates[row], shown)
    assert not mates[job.plan.mate < 0].any()


def test_where_nothing_is_made_there_is_nothing(anchor_data, tmp_path, teachers):
    job = job_of(
        anchor_data, tmp_path, teachers("pi0_fast"), walked_states=0.0, drawn_states=0.7, draw_from="statistics"
    )
    made = job.make_states(job.teacher.policy)
    assert made.walked is made.mates is None


def test_walks_from_old_frames_move_as_the_new_data_do(anchor_data, tmp_path, teachers, monkeypatch):
    """Frames of an old dataset may be few and far apart: nothing can be learned from them about motion."""
    job = job_of(anchor_data, tmp_path, teachers("pi0_fast"), walked_states=1.0, drawn_states=0.7)
    plan, fit_motion, fitted = job.plan, walks.fit_motion, []

    def noting(states, *rest):
        fitted.append(len(states))
        return fit_motion(states, *rest)

    monkeypatch.setattr(walks, "fit_motion", noting)
    walked = job.make_states(job.teacher.policy).walked
    assert fitted == [len(job.datasets[1].dataset)]
    starts = plan.walk_starts()
    assert set(plan.dataset[starts].tolist()) == {0, 1}
    for number, start in enumerate(starts):
        frame = job.datasets[plan.dataset[start]].dataset[int(plan.frame[start])]
        assert torch.allclose(walked[number, 0], frame["observation.state"].float())


@pytest.mark.parametrize("policy", ["smolvla", "pi0_fast"])
def test_anchors_near_old_frames(policy, build, teachers, anchor_data):
    """States between two old frames and walks from old frames; what is demonstrated keeps its own error."""
    options = {"anchor_source": "both", "retention_mode": "action", "draw_from": "old_frames", "old_frames": 6}
    directory = build(policy, walked_states=0.5, drawn_states=0.7, num_anchors=60, **options)
    manifest, reproduction = verify_cache(directory, teachers(policy))
    assert reproduction.holds
    anchors = open_cache(directory).take(torch.arange(60))
    columns, states = anchors.columns, anchors.raw["observation.state"].flatten(start_dim=1)
    old = ~columns["cross"]
    near = columns["cross"] & (columns["dataset"] == 0)
    assert int(old.sum()) == 6
    assert int(near.sum()) > 20
    assert set(columns["frame"][near].tolist()) <= set(columns["frame"][old].tolist())
    assert len(manifest.datasets[0].frames) == 6  # each once, however often it was used
    assert len(states[near].unique(dim=0)) > 15
    dataset = open_dataset("local/old", anchor_data / "old")
    for row in old.nonzero().flatten().tolist():
        assert torch.allclose(states[row], dataset[int(columns["frame"][row])]["observation.state"])
    errors = [name for name in columns if name.startswith("own_error")]
    assert errors
    assert all(bool((columns[name][old] > 0).all()) for name in errors)
    assert all(value > 0 for scale in manifest.scales for value in scale.values.values())
