"""The two functions that the documents name, on a real policy."""

import pytest
import torch

from lerobot_craft.anchors.loader import open_cache
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.training.config import DocumentsConfig
from lerobot_craft.training.hidden_loss import compute_hidden_retention_loss, extract_student_hidden_features

CAMERA_PREFIX = "observation.images"


@pytest.fixture
def anchors(build, teachers):
    """A preprocessed anchor batch with its targets, as the documents hand it around."""

    def made(*settings):
        directory = build("pi0_fast", retention_mode="hidden", num_anchors=4, **dict(settings))
        drawn = open_cache(directory).take(torch.arange(4))
        cameras = [name for name in drawn.raw if name.startswith(CAMERA_PREFIX)]
        batch = policy_batch(drawn.raw, cameras, teachers("pi0_fast").preprocessor)
        targets = {k: v for k, v in drawn.columns.items() if k in ("target_features", "teacher_hidden")}
        return batch | targets

    return made


@pytest.fixture
def policy(teachers):
    return teachers("pi0_fast").policy


def test_the_teacher_itself_has_no_drift(anchors, policy):
    loss, metrics = compute_hidden_retention_loss(policy, anchors(), DocumentsConfig())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0, abs=1e-9)
    assert metrics["student_hidden_norm"] == pytest.approx(metrics["target_features_norm"], rel=1e-5)


@pytest.mark.parametrize(("loss_type", "expected"), [("mse", None), ("cosine", 2.0), ("l1", None)])
def test_opposite_targets_are_far_and_gradients_flow(anchors, policy, loss_type, expected):
    batch = anchors()
    batch["target_features"] = -batch["target_features"]
    loss, metrics = compute_hidden_retention_loss(policy, batch, DocumentsConfig(loss_type=loss_type))
    assert metrics["retention_loss"] == loss.item() > 1e-3
    if expected is not None:
        assert loss.item() == pytest.approx(expected, rel=1e-4)
    loss.backward()
    reached = [p for p in policy.parameters() if p.grad is not None and p.grad.abs().max() > 0]
    policy.zero_grad(set_to_none=True)
    assert reached


def test_several_layers_compare_with_the_multi_layer_cache(anchors, policy):
    config = DocumentsConfig(layers_to_save="-2,-1")
    batch = anchors(("layers_to_save", "-2,-1"))
    assert extract_student_hidden_features(policy, batch, config).shape == batch["teacher_hidden"].shape
    assert compute_hidden_retention_loss(policy, batch, config)[0].item() == pytest.approx(0, abs=1e-9)


def test_features_of_another_layer_are_not_those_of_the_cache(anchors, policy):
    batch = anchors()
    found = extract_student_hidden_features(policy, batch, DocumentsConfig(hidden_layer="-1"))
    assert found.shape == batch["target_features"].shape
    assert not torch.allclose(found, batch["target_features"], atol=1e-3)


def test_a_batch_without_targets_is_refused(anchors, policy):
    batch = {name: value for name, value in anchors().items() if name != "target_features"}
    with pytest.raises(CraftError, match="target_features"):
        compute_hidden_retention_loss(policy, batch, DocumentsConfig())
