"""Masks and spans against what lerobot's models themselves use, and cameras that a batch lacks."""

import pytest
import torch

from lerobot_craft.core import drift, pool_hidden_states
from tests.policies.case import rngs
from tests.policies.lerobot_cases import CAMERAS

# The smallest images (28 px) have 2 x 2 patches; smolvla folds them into one token.
IMAGE_TOKENS = {"pi0_fast": 4, "pi0": 4, "pi05": 4, "smolvla": 1, "smolvla-options": 1}
MISSING_CAMERA = {"pi0_fast": {}, "pi0": {}, "pi05": {}, "smolvla": {"empty_cameras": 1}}


def prefix(subject, batch):
    """Pad mask [B, T] and embeddings [B, T, D] of the prefix, by the policy's own code."""
    policy = subject.policy
    language = batch["observation.language.tokens"], batch["observation.language.attention_mask"].bool()
    if subject.adapter.policy_type == "smolvla":
        state = policy.prepare_state(batch)
        embedded, mask, _ = policy.model.embed_prefix(*policy.prepare_images(batch), *language, state=state)
    elif subject.adapter.policy_type == "pi0_fast":
        embedded, mask, *_ = policy.model.embed_prefix_fast(*policy._preprocess_images(batch), *language)
    else:
        embedded, mask, _ = policy.model.embed_prefix(*policy._preprocess_images(batch), *language)
    return mask, embedded


def tokens_of(subject, batch):
    layer = subject.backbone()[-1]
    with subject.anchor_mode():
        return subject.adapter.hidden(subject.policy, batch, [layer])[layer]


@pytest.mark.parametrize("name", IMAGE_TOKENS)
def test_the_mask_is_the_models_own(named, name):
    subject = named(name)
    mask, _ = prefix(subject, subject.batch)
    assert torch.equal(tokens_of(subject, subject.batch).mask, mask)
    assert not mask.all()  # the prompts differ in length


@pytest.mark.parametrize("name", IMAGE_TOKENS)
def test_image_spans_are_where_a_changed_camera_changes_the_embeddings(named, name):
    subject = named(name)
    spans = tokens_of(subject, subject.batch).spans.image
    assert [stop - start for start, stop in spans] == [IMAGE_TOKENS[name]] * len(CAMERAS)
    _, before = prefix(subject, subject.batch)
    for camera, (start, stop) in zip(CAMERAS, spans, strict=True):
        _, after = prefix(subject, {**subject.batch, camera: 1 - subject.batch[camera]})
        changed = (after != before).any(dim=-1).all(dim=0).nonzero().flatten().tolist()
        assert changed == list(range(start, stop))


@pytest.mark.parametrize("name", IMAGE_TOKENS)
def test_the_language_span_is_where_a_changed_prompt_changes_the_embeddings(named, name):
    subject = named(name)
    start, stop = tokens_of(subject, subject.batch).spans.language
    key = "observation.language.tokens"
    _, before = prefix(subject, subject.batch)
    _, after = prefix(subject, {**subject.batch, key: (subject.batch[key] + 1) % 50})
    changed = (after != before).any(dim=-1).all(dim=0).nonzero().flatten().tolist()
    assert changed == list(range(start, stop))


@pytest.mark.parametrize("name", ["smolvla", "smolvla-options"])
def test_the_state_span_is_where_a_changed_state_changes_the_embeddings(named, name):
    subject = named(name)
    _, before = prefix(subject, subject.batch)
    _, after = prefix(subject, {**subject.batch, "observation.state": subject.batch["observation.state"] + 1})
    changed = (after != before).any(dim=-1).all(dim=0).nonzero().flatten().tolist()
    assert changed == list(range(*tokens_of(subject, subject.batch).spans.state))


@pytest.mark.parametrize("name", MISSING_CAMERA)
def test_a_missing_camera_is_masked_and_the_rest_stays_usable(named, name):
    subject = named(name, **MISSING_CAMERA[name])
    assert subject.adapter.masks_missing_cameras(subject.policy)
    batch = {key: value for key, value in subject.batch.items() if key != CAMERAS[0]}
    tokens = tokens_of(subject, batch)
    mask, _ = prefix(subject, batch)
    assert torch.equal(tokens.mask, mask)
    present, missing = tokens.spans.image  # lerobot puts cameras that are there before those that are not
    assert tokens.mask[:, slice(*present)].all()
    assert not tokens.mask[:, slice(*missing)].any()
    assert torch.isfinite(tokens.hidden[tokens.mask]).all()
    with subject.anchor_mode():
        fixed = subject.adapter.fix(subject.policy, batch, rngs(len(subject)))[0]
        output = subject.adapter.output(subject.policy, batch, fixed)
    assert torch.isfinite(output.values[output.mask]).all()


@pytest.mark.parametrize("name", MISSING_CAMERA)
def test_a_missing_cameras_tokens_do_not_enter_the_image_mean(named, name):
    subject = named(name, **MISSING_CAMERA[name])
    tokens = tokens_of(subject, {key: value for key, value in subject.batch.items() if key != CAMERAS[0]})
    spoilt = tokens.hidden.detach().masked_fill(~tokens.mask[..., None], float("inf"))
    pooled = [pool_hidden_states(x, tokens.mask, "mean_image_tokens", tokens.spans) for x in (tokens.hidden, spoilt)]
    assert drift(pooled[0].features, pooled[1].features) == 0
    start, stop = tokens.spans.image[0]
    torch.testing.assert_close(pooled[1].features, tokens.hidden[:, start:stop].mean(dim=1))


@pytest.mark.parametrize("name", ["smolvla", "act", "diffusion"])
def test_policies_that_need_every_camera_say_so(named, name):
    subject = named(name)
    assert not subject.adapter.masks_missing_cameras(subject.policy)


def test_act_counts_the_pixels_of_its_feature_maps(named):
    subject = named("act")
    spans = tokens_of(subject, subject.batch).spans
    assert spans.state == (1, 2)  # after the latent
    assert spans.image == ((2, 6), (6, 10))  # 64 px leave 2 x 2 pixels of a ResNet's feature map


def test_diffusion_has_one_token_per_camera_and_observation_step(named):
    subject = named("diffusion")
    assert tokens_of(subject, subject.batch).spans.image == ((0, 2), (2, 4))
