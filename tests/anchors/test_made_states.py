"""States of mates are read from the datasets, and walks move as the new data do."""

import numpy as np
import torch

from lerobot_craft.anchors import teacher_walk
from lerobot_craft.anchors.prepare import prepare
from lerobot_craft.anchors.recipe import BuildConfig, DatasetFlags


def job_of(anchor_data, tmp_path, teacher, **options):
    config = BuildConfig(
        output_dir=tmp_path,
        dataset=DatasetFlags("local/old", str(anchor_data / "old")),
        new_dataset=DatasetFlags("local/new", str(anchor_data / "new")),
        old_frames=6,
        num_samples=60,
        **options,
    )
    return prepare(config, teacher)


def test_mates_have_the_states_of_their_frames(anchor_data, tmp_path, teachers):
    job = job_of(anchor_data, tmp_path, teachers("pi0_fast"), walked_states=0.0)
    mates = job.make_states(job.teacher.policy).mates
    rows = np.flatnonzero(job.plan.mate >= 0)
    assert len(rows) > 20
    for row in rows:
        shown = job.datasets[job.plan.dataset[row]].dataset[int(job.plan.mate[row])]["observation.state"]
        assert torch.equal(mates[row], shown)
    assert not mates[job.plan.mate < 0].any()


def test_where_nothing_is_made_there_is_nothing(anchor_data, tmp_path, teachers):
    job = job_of(anchor_data, tmp_path, teachers("pi0_fast"), walked_states=0.0, draw_from="statistics")
    made = job.make_states(job.teacher.policy)
    assert made.walked is made.mates is None


def test_walks_from_old_frames_move_as_the_new_data_do(anchor_data, tmp_path, teachers, monkeypatch):
    """Frames of an old dataset may be few and far apart: nothing can be learned from them about motion."""
    job = job_of(anchor_data, tmp_path, teachers("pi0_fast"), walked_states=1.0)
    plan, fit_motion, fitted = job.plan, teacher_walk.fit_motion, []

    def noting(states, *rest):
        fitted.append(len(states))
        return fit_motion(states, *rest)

    monkeypatch.setattr(teacher_walk, "fit_motion", noting)
    walked = job.make_states(job.teacher.policy).walked
    assert fitted == [len(job.datasets[1].dataset)]
    starts = plan.walk_starts()
    assert set(plan.dataset[starts].tolist()) == {0, 1}
    for number, start in enumerate(starts):
        frame = job.datasets[plan.dataset[start]].dataset[int(plan.frame[start])]
        assert torch.allclose(walked[number, 0], frame["observation.state"].float())
