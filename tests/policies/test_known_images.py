"""Anchors' images are embedded once while the vision tower is not trained, and the policy cannot tell."""

import pytest
import torch
from torch.testing import assert_close

from lerobot_craft.policies.taps import KnownImages, embedded_once, outputs_of

PLENTY = 2**30
ROWS = [7, 3, 5]  # of the three rows of a case


@pytest.fixture(params=["smolvla", "pi0", "pi05", "pi0_fast"])
def frozen(request, named):
    subject = named(request.param)
    subject.policy.requires_grad_(True)
    embedder = subject.adapter.image_embedder(subject.policy)
    for part in embedder.parts:
        part.requires_grad_(False)
    yield subject
    subject.policy.requires_grad_(True)


def embedder_of(subject):
    return subject.adapter.image_embedder(subject.policy)


def passes(subject, known, rows, batch=None, fixed=None):
    """The output, and how many images the vision tower saw for it."""
    policy, adapter = subject.policy, subject.adapter
    with subject.anchor_mode(), outputs_of(embedder_of(subject).parts[1]) as seen, known.of(rows):
        values = adapter.output(policy, subject.batch if batch is None else batch, fixed or subject.draw()).values
    return values, sum(len(tokens) for tokens in seen)


def test_the_output_is_the_same_and_the_second_visit_embeds_nothing(frozen):
    known = KnownImages(embedder_of(frozen), PLENTY)
    fixed = frozen.draw()
    plain, every_image = passes(frozen, known, None, fixed=fixed)
    first, embedded = passes(frozen, known, ROWS, fixed=fixed)
    again, looked_up = passes(frozen, known, ROWS, fixed=fixed)
    assert_close(first, plain)
    assert torch.equal(again, first)
    assert (embedded, looked_up) == (every_image, 0)
    assert known.nbytes > 0


def test_gradients_are_those_of_the_whole_pass(frozen):
    known, fixed = KnownImages(embedder_of(frozen), PLENTY), frozen.draw()
    found = []
    for rows in (None, ROWS, ROWS):
        frozen.policy.zero_grad()
        values, _ = passes(frozen, known, rows, fixed=fixed)
        values.float().square().mean().backward()
        found.append([p.grad.clone() for p in frozen.policy.parameters() if p.grad is not None])
    frozen.policy.zero_grad()
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert_close(two, one, rtol=1e-3, atol=1e-6)


def images_of(subject):
    """The first camera's images as the policy embeds them."""
    module, seen = embedder_of(subject).module, []

    def embed(images):
        seen.append(images)
        return type(module).embed_image(module, images)

    module.embed_image = embed
    try:
        with subject.anchor_mode():
            subject.adapter.output(subject.policy, subject.batch, subject.draw())
    finally:
        del module.embed_image
    return seen[0]


def test_bits_do_not_depend_on_the_other_anchors_of_the_batch(frozen):
    module, images = embedder_of(frozen).module, images_of(frozen)
    together, alone = (KnownImages(embedder_of(frozen), PLENTY) for _ in range(2))
    with frozen.anchor_mode(), together.of(ROWS):
        expected = module.embed_image(images)
    for place in (2, 0, 1):
        with frozen.anchor_mode(), alone.of(ROWS[place : place + 1]):
            assert torch.equal(module.embed_image(images[place : place + 1])[0], expected[place])


def test_a_trained_vision_tower_is_not_looked_up(frozen):
    embedder = embedder_of(frozen)
    next(embedder.parts[0].parameters()).requires_grad_(True)
    known = KnownImages(embedder, PLENTY)
    _, first = passes(frozen, known, ROWS)
    _, second = passes(frozen, known, ROWS)
    assert first == second > 0
    assert known.nbytes == 0


def test_nor_is_one_that_drops_values(frozen):
    embedder = embedder_of(frozen)
    attention = next(part for part in embedder.parts[0].modules() if isinstance(getattr(part, "dropout", None), float))
    attention.dropout = 0.1
    try:
        known = KnownImages(embedder, PLENTY)
        with known.of(ROWS):
            assert "embed_image" not in vars(embedder.module)
    finally:
        attention.dropout = 0.0


def test_no_more_than_the_limit_is_kept(frozen):
    embedder = embedder_of(frozen)
    everything = KnownImages(embedder, PLENTY)
    passes(frozen, everything, ROWS)
    known = KnownImages(embedder, everything.nbytes // 2)
    passes(frozen, known, ROWS)
    _, embedded = passes(frozen, known, ROWS)
    assert known.nbytes <= everything.nbytes // 2
    assert embedded > 0


def test_another_precision_is_embedded_anew(frozen):
    known, fixed = KnownImages(embedder_of(frozen), PLENTY), frozen.draw()
    _, embedded = passes(frozen, known, ROWS, fixed=fixed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, again = passes(frozen, known, ROWS, fixed=fixed)
    assert again == embedded > 0


def fail():
    raise ZeroDivisionError


class Embedder:
    """Counts what it embeds."""

    def __init__(self):
        self.count = 0

    def embed_image(self, images):
        self.count += len(images)
        return images.flatten(1)[:, :4].unsqueeze(1)


@pytest.fixture
def made():
    from lerobot_craft.policies.taps import ImageEmbedder

    module = Embedder()
    return module, KnownImages(ImageEmbedder(module, ()), PLENTY)


def test_equal_cameras_of_one_batch_do_not_renumber_those_of_another(made):
    module, known = made
    black, one, two = torch.zeros(1, 3, 2, 2), torch.ones(1, 3, 2, 2), torch.full((1, 3, 2, 2), 2.0)
    other = torch.full((1, 3, 2, 2), 3.0)
    # anchor 0 has two black cameras and a third; with anchor 1 beside it the first two differ
    with known.of([0]):
        for camera in (black, black, one):
            module.embed_image(camera)
    with known.of([1, 0]):
        found = [module.embed_image(torch.cat(pair)) for pair in ((other, black), (two, black), (one, one))]
    assert [tokens[1, 0, 0].item() for tokens in found] == [0.0, 0.0, 1.0]
    assert [tokens[0, 0, 0].item() for tokens in found] == [3.0, 2.0, 1.0]


def test_teacher_and_student_share_what_one_of_them_embedded(made):
    module, known = made
    copied = Embedder()
    images = torch.rand(2, 3, 2, 2)
    with known.of([0, 1], copied):  # a frozen copy of the teacher: twice, as for its own actions and for its outputs
        for _ in range(2):
            copied.embed_image(images.clone())
    with known.of([0, 1]):
        module.embed_image(images)
    assert (copied.count, module.count) == (2, 0)


def test_lookups_may_be_nested_and_are_undone_after_an_error(made):
    module, known = made
    images = torch.rand(2, 3, 2, 2)
    with known.of([0, 1]), embedded_once(module):
        module.embed_image(images)
        module.embed_image(images.clone())
    with pytest.raises(ZeroDivisionError), known.of([0, 1]), embedded_once(module):
        fail()
    assert module.count == 2
    assert "embed_image" not in vars(module)
    with known.of([1]):
        module.embed_image(images[1:])
    assert module.count == 2
