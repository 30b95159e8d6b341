import json

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies import get_policy_class, make_pre_post_processors
from safetensors.torch import load_file

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.tiny.make import (
    POLICY_TYPES,
    chunks_of,
    make_checkpoint,
    make_local_dataset,
    safe_stats,
    smooth_numbers,
)
from lerobot_craft.tiny.pi import TinySizes
from lerobot_craft.tiny.tokenizers import STATE_BINS, make_text_tokenizer
from tests.tiny import robot
from tests.tiny.conftest import VLAS


def make(policy_type, directory, **changes):
    arguments = {
        "input_features": robot.INPUTS,
        "output_features": robot.OUTPUTS,
        "dataset_stats": robot.stats(),
        "instructions": robot.INSTRUCTIONS,
        "action_chunks": robot.chunks(),
    }
    return make_checkpoint(policy_type, directory, **{**arguments, **changes})


def load(directory):
    """Policy and processors by lerobot's own calls."""
    config = PreTrainedConfig.from_pretrained(directory)
    policy = get_policy_class(config.type).from_pretrained(directory, config=config)
    return policy, *make_pre_post_processors(config, pretrained_path=str(directory))


@pytest.fixture(scope="module")
def loaded(checkpoint):
    cache = {}

    def of(policy_type):
        if policy_type not in cache:
            cache[policy_type] = load(checkpoint(policy_type))
        return cache[policy_type]

    return of


def loss_of(policy, inputs, seed=0):
    torch.manual_seed(seed)
    return policy.train().forward(inputs)[0]


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("policy_type", VLAS)
def test_a_vla_is_tiny(loaded, policy_type):
    policy, *_ = loaded(policy_type)
    assert 100_000 < sum(p.numel() for p in policy.parameters()) < 1_000_000


@pytest.mark.parametrize("policy_type", POLICY_TYPES)
def test_a_training_step_has_finite_loss_and_gradients(loaded, policy_type):
    policy, preprocess, _ = loaded(policy_type)
    policy.zero_grad()
    loss = loss_of(policy, preprocess(robot.batch(policy_type)))
    loss.backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    # pi0 and pi05 leave a few parts of the last language layer and an unused head without one.
    assert len(gradients) > 0.8 * len(list(policy.parameters()))
    assert sum(gradient.abs().sum() for gradient in gradients) > 0


@pytest.mark.parametrize("policy_type", POLICY_TYPES)
def test_a_saved_policy_loads_back_bit_for_bit(checkpoint, loaded, policy_type):
    policy, preprocess, _ = loaded(policy_type)
    torch.manual_seed(0)
    fresh = get_policy_class(policy.config.type)(policy.config)
    if policy_type in ("pi0_fast", "pi05"):  # numbers in a prompt do not begin at random
        word = next(name for name in fresh.state_dict() if name.endswith("embed_tokens.weight"))
        fresh.get_parameter(word).data.copy_(policy.get_parameter(word))
    assert_same(fresh.state_dict(), policy.state_dict())
    assert_same(load_file(checkpoint(policy_type) / "model.safetensors"), policy.state_dict())
    made_preprocess, _ = make_pre_post_processors(policy.config, dataset_stats=robot.stats())
    inputs, made_inputs = preprocess(robot.batch(policy_type)), made_preprocess(robot.batch(policy_type))
    assert_same(made_inputs, inputs)
    with torch.no_grad():
        assert torch.equal(loss_of(fresh, made_inputs), loss_of(policy, inputs))


@pytest.mark.parametrize("policy_type", VLAS)
def test_a_chunk_of_actions_comes_out(loaded, policy_type):
    policy, preprocess, postprocess = loaded(policy_type)
    inputs = preprocess(robot.batch(policy_type))
    actions = postprocess(policy.eval().predict_action_chunk(inputs))
    assert actions.shape == (3, robot.CHUNK, robot.ACTION_DIM)
    assert torch.isfinite(actions).all()


@pytest.mark.parametrize("policy_type", VLAS)
def test_the_instruction_matters(loaded, policy_type):
    policy, preprocess, _ = loaded(policy_type)
    one = robot.batch(policy_type)
    other = {**one, "task": ["put it in the green basket"] * 3}
    with torch.no_grad():
        assert loss_of(policy, preprocess(one)) != loss_of(policy, preprocess(other))


@pytest.mark.parametrize("policy_type", ["pi0_fast", "pi05"])
def test_a_prompt_with_its_state_fits(loaded, policy_type):
    _, preprocess, _ = loaded(policy_type)
    batch = robot.batch(policy_type)
    batch["observation.state"] -= 10  # every bin is then -1, the longest there is
    mask = preprocess(batch)["observation.language.attention_mask"]
    assert (mask.sum(1) < mask.shape[1]).all()


def test_pi0_fast_reads_back_the_actions_it_was_given(loaded):
    policy, preprocess, postprocess = loaded("pi0_fast")
    batch = robot.batch("pi0_fast", size=16)
    inputs = preprocess(dict(batch))
    assert batch["action"].abs().max() > 1 >= inputs["action"].abs().max(), "the tokenizer is fitted on [-1, 1]"
    tokens = [ids[mask][1:] for ids, mask in zip(inputs["action.tokens"], inputs["action.token_mask"], strict=True)]
    actions = torch.stack([policy.detokenize_actions(ids, robot.CHUNK, robot.ACTION_DIM) for ids in tokens])
    error = postprocess(actions) - batch["action"]
    # Rounding is at most 0.05 in normalised units, which are 2.25 here: half of max - min.
    assert error.pow(2).mean((1, 2)).sqrt().max() < 0.05 * 2.25 + 1e-5


def test_pi0_fast_keeps_its_two_embeddings_apart(loaded):
    # lerobot's loader copies lm_head into the embedding of checkpoints that lack one.
    policy, *_ = loaded("pi0_fast")
    weights = policy.model.paligemma_with_expert.paligemma
    assert not torch.equal(weights.lm_head.weight, weights.model.language_model.embed_tokens.weight)


@pytest.mark.parametrize("policy_type", ["act", "diffusion"])
def test_without_cameras_act_and_diffusion_are_small_too(tmp_path, policy_type):
    directory = make(policy_type, tmp_path, input_features=robot.STATE_ONLY)
    policy, preprocess, _ = load(directory)
    assert sum(p.numel() for p in policy.parameters()) < 1_000_000
    assert torch.isfinite(loss_of(policy, preprocess(robot.batch(policy_type, inputs=robot.STATE_ONLY))))


@pytest.mark.parametrize("policy_type", VLAS)
def test_sizes_and_other_settings_are_configuration(tmp_path, loaded, policy_type):
    directory = make(policy_type, tmp_path, sizes=TinySizes(width=32, depth=2), optimizer_lr=0.125)
    policy, preprocess, _ = load(directory)
    usual, *_ = loaded(policy_type)
    assert json.loads((directory / "config.json").read_text())["optimizer_lr"] == 0.125
    assert sum(p.numel() for p in policy.parameters()) < 0.75 * sum(p.numel() for p in usual.parameters())
    assert torch.isfinite(loss_of(policy, preprocess(robot.batch(policy_type))))


def test_the_seed_decides_the_weights_and_the_callers_stays(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    same = [load_file(make("pi0", tmp_path / name) / "model.safetensors") for name in ("a", "b")]
    other = load_file(make("pi0", tmp_path / "c", seed=1) / "model.safetensors")
    assert torch.equal(torch.rand(3), expected)
    assert_same(*same)
    name = "model.action_in_proj.weight"
    assert not torch.equal(other[name], same[0][name])


def test_the_chunks_length_can_be_given_without_chunks(tmp_path):
    directory = make("pi0", tmp_path, action_chunks=None, chunk_size=6)
    config = PreTrainedConfig.from_pretrained(directory)
    assert config.chunk_size == config.n_action_steps == 6


@pytest.mark.parametrize(
    ("policy_type", "changes", "message"),
    [
        ("pi1", {}, "choose one of"),
        ("pi0", {"input_features": robot.STATE}, "camera"),
        ("smolvla", {"input_features": robot.STATE}, "camera"),
        ("act", {"input_features": robot.STATE}, "environment_state"),
        ("pi0_fast", {"action_chunks": None}, "action_chunks"),
        ("pi0", {"chunk_size": 5}, "8 steps"),
        ("pi0", {"image_resolution": (30, 30)}, "patch_size"),
        ("pi0", {"image_resolution": (28, 42)}, "square"),
        ("smolvla", {"resize_imgs_with_padding": (42, 42)}, "patches"),
        ("diffusion", {"action_chunks": None, "chunk_size": 6}, "divisible by 4"),
        ("pi05", {"dataset_stats": {"action": {"mean": 0.0}}}, "q01 and q99"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, policy_type, changes, message):
    with pytest.raises(CraftError, match=message):
        make(policy_type, tmp_path, **changes)


def test_pi0_fast_decodes_from_the_prompt_it_was_trained_on(checkpoints):
    """What it writes first is what its training forward finds likeliest after <bos>; in lerobot 0.6.1 it is not."""
    from lerobot_craft.anchors.teacher import load_teacher
    from lerobot_craft.policies import adapter_for

    teacher = load_teacher(checkpoints("pi0_fast"))
    policy = teacher.policy
    state = torch.linspace(-0.5, 0.5, policy.config.input_features["observation.state"].shape[0])
    frame = {"observation.state": state[None].repeat(3, 1), "task": ["press it"] * 3}
    for name, feature in policy.config.image_features.items():
        frame[name] = torch.rand(3, *feature.shape, generator=torch.Generator().manual_seed(0))
    batch = teacher.preprocessor(frame)
    adapter = adapter_for(policy.config)
    (fixed,) = adapter.fix(policy, batch, [None] * 3)
    with torch.no_grad():
        logits = adapter.output(policy, batch, fixed).values
    written, mask = adapter.token_labels(fixed)
    likeliest = logits.argmax(dim=-1)
    assert mask.sum() > 3
    assert torch.equal(likeliest[mask], written[mask])


def test_pi0_fast_without_its_padding_has_lerobots_loss_and_gradients(checkpoint, monkeypatch):
    from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPytorch

    policy, preprocess, _ = load(checkpoint("pi0_fast"))
    batch = preprocess(robot.batch("pi0_fast", size=4))
    lengths, stock_forward = [], PI0FastPytorch.forward

    def watched(network, images, image_masks, prompt, prompt_mask, actions, action_mask):
        lengths.append((prompt.shape[1], actions.shape[1]))
        return stock_forward(network, images, image_masks, prompt, prompt_mask, actions, action_mask)

    def loss_and_gradients():
        policy.zero_grad()
        loss, _ = policy(batch)
        loss.backward()
        return loss.item(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]

    monkeypatch.setattr(PI0FastPytorch, "forward", watched)
    stock, stock_gradients = loss_and_gradients()
    policy.config.leave_out_padding = True
    shorter, gradients = loss_and_gradients()
    assert all(now < before for before, now in zip(*lengths, strict=True)), lengths
    assert shorter == pytest.approx(stock, rel=1e-5)
    for one, other in zip(gradients, stock_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def text_tokenizer(tmp_path_factory):
    return make_text_tokenizer(tmp_path_factory.mktemp("text"), ["open the drawer"])


@pytest.mark.parametrize("width", [32, 33])
def test_near_numbers_are_near_and_words_stay(text_tokenizer, width):
    embedding = torch.randn(len(text_tokenizer), width, generator=torch.Generator().manual_seed(0))
    before = embedding.clone()
    smooth_numbers(embedding, text_tokenizer, torch.Generator().manual_seed(1))
    rows = [text_tokenizer.encode(f" {number}", add_special_tokens=False)[0] for number in range(STATE_BINS)]
    numbers = embedding[rows]
    step = (numbers[1:] - numbers[:-1]).norm(dim=1)
    assert step.max() < 0.2 * numbers.norm(dim=1).mean()
    assert (numbers[0] - numbers[-1]).norm() > 3 * step.max()  # and far ones are not the same
    assert numbers.std() == pytest.approx(before.std().item(), rel=0.2)
    others = sorted(set(range(len(text_tokenizer))) - set(rows))
    assert torch.equal(embedding[others], before[others])


@pytest.fixture(scope="module")
def old_dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "old"
    make_local_dataset(root, ("open it", "close it"), image_size=16)
    return open_dataset("local/old", root)


def test_a_chunk_ends_with_its_episode(old_dataset):
    chunks = chunks_of(old_dataset, 4)
    actions = np.stack([np.asarray(action) for action in old_dataset.hf_dataset["action"]])
    assert chunks.shape == (len(actions), 4, actions.shape[1])
    end = int(old_dataset.meta.episodes["dataset_to_index"][0])
    np.testing.assert_array_equal(chunks[0], actions[:4])
    np.testing.assert_array_equal(chunks[end - 2], actions[[end - 2, end - 1, end - 1, end - 1]])


def test_statistics_can_be_divided_by():
    stats = {"observation.state": {"mean": [1.0, 2.0], "std": [0.0, 0.5], "min": [1.0, 0.0], "max": [1.0, 2.0]}}
    safe = safe_stats(stats)["observation.state"]
    np.testing.assert_allclose(safe["std"], [0.01, 0.5])
    np.testing.assert_allclose(safe["min"], [0.999, -0.101], rtol=1e-6)
    np.testing.assert_allclose(safe["max"], [1.001, 2.101], rtol=1e-6)
    assert safe["mean"] == [1.0, 2.0]
    assert stats["observation.state"]["std"] == [0.0, 0.5]
