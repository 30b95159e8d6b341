import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from lerobot_craft.policies.taps import eager_attention, embedded_once, mode, outputs_of, remove_compiled, taps


class Stack(nn.Module):
    """Four layers, checkpointed if asked to; counts their runs."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.checkpointed = checkpointed
        self.runs = 0

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.run, layer, x, use_reentrant=False) if self.checkpointed else self.run(layer, x)
        return x

    def run(self, layer, x):
        x = torch.tanh(layer(x))
        self.runs += 1
        return x


@pytest.fixture(params=[False, True], ids=["", "checkpointed"])
def stack(request):
    return Stack(request.param)


def test_a_tap_sees_what_enters_the_module(stack):
    x = torch.randn(2, 3)
    with taps({"first": stack.layers[0], "third": stack.layers[2]}) as seen:
        stack(x)
    assert seen["first"] is x
    expected = torch.tanh(stack.layers[1](torch.tanh(stack.layers[0](x))))
    assert torch.equal(seen["third"], expected)


def test_stopping_skips_the_rest_of_the_pass_and_of_the_block(stack):
    with taps({"third": stack.layers[2]}, stop=True):
        stack(torch.randn(2, 3))
        pytest.fail("the pass went on")
    assert stack.runs == 2


def test_stopping_waits_for_the_last_point(stack):
    with taps({2: stack.layers[2], 1: stack.layers[1]}, stop=True) as seen:
        stack(torch.randn(2, 3))
    assert set(seen) == {1, 2}


def test_a_stopped_pass_has_the_gradients_of_a_full_one(stack):
    x = torch.randn(2, 3)
    found = []
    for stop in (True, False):
        with taps({"third": stack.layers[2]}, stop=stop) as seen:
            stack(x)
        found.append(torch.autograd.grad(seen["third"].square().sum(), list(stack.layers[:2].parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_stopped_pass_leaves_no_checkpointing_context_behind():
    stack = Stack(checkpointed=True)
    gc.disable()  # what ends the context must not be luck
    try:
        with taps({"third": stack.layers[2]}, stop=True):
            stack(torch.randn(2, 3))
        assert_tensors_are_saved_as_they_are()
    finally:
        gc.enable()


def test_nor_does_one_within_nested_checkpoints():
    stack = Stack(checkpointed=True)
    gc.disable()
    try:
        with taps({"third": stack.layers[2]}, stop=True) as seen:
            checkpoint(stack, torch.randn(2, 3), use_reentrant=False)
        assert_tensors_are_saved_as_they_are()
    finally:
        gc.enable()
    assert set(seen) == {"third"}


def assert_tensors_are_saved_as_they_are():
    weight = nn.Parameter(torch.randn(3))
    assert torch.equal((weight * weight).grad_fn._saved_self, weight)


def test_the_first_visit_counts():
    layer = nn.Linear(3, 3)
    first = torch.randn(2, 3)
    with taps({"x": layer}) as seen:
        layer(first)
        layer(first + 1)
    assert seen["x"] is first


def test_another_error_passes_and_hooks_are_removed(stack):
    with pytest.raises(RuntimeError, match="shapes"), taps({"second": stack.layers[1]}, stop=True):
        stack(torch.randn(2, 5))
    assert not stack.layers[1]._forward_pre_hooks


def test_outputs_are_kept_in_order():
    layer = nn.Linear(3, 3)
    with outputs_of(layer) as seen:
        outputs = [layer(torch.randn(1, 3)) for _ in range(3)]
    assert all(a is b for a, b in zip(seen, outputs, strict=True))
    assert not layer._forward_hooks


def fail():
    raise ZeroDivisionError


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("within", [True, False])
def test_the_mode_is_set_and_restored_even_after_an_error(before, within):
    module = nn.Sequential(nn.Dropout()).train(before)
    with mode(module, train=within):
        assert module[0].training == within
    assert module[0].training == before
    with pytest.raises(ZeroDivisionError), mode(module, train=within):
        fail()
    assert module[0].training == before


def test_the_attention_implementation_is_set_and_restored_even_after_an_error():
    config = PretrainedConfig(attn_implementation="sdpa")
    with eager_attention(config):
        assert config._attn_implementation == "eager"
    assert config._attn_implementation == "sdpa"
    with pytest.raises(ZeroDivisionError), eager_attention(config):
        fail()
    assert config._attn_implementation == "sdpa"


@pytest.fixture
def compiled():
    """As lerobot compiles a policy: `forward` of the instance."""
    stack = Stack()
    stack.config = SimpleNamespace(compile_model=True)
    stack.forward = torch.compile(stack.forward, backend="eager")
    return stack


def test_anchors_pass_a_compiled_policy_as_it_was_written(compiled):
    x = torch.randn(2, 3)
    expected, made = compiled(x), compiled.forward
    assert "forward" in vars(compiled)
    with mode(compiled, train=True), taps({"third": compiled.layers[2]}) as seen:
        assert "forward" not in vars(compiled), "the method of the class"
        assert_close(compiled(x), expected)
    assert "third" in seen
    assert compiled.forward is made


def test_a_copy_of_a_compiled_policy_has_weights_of_its_own(compiled):
    x = torch.randn(2, 3)
    before = compiled(x)
    teacher = copy.deepcopy(compiled)
    remove_compiled(teacher)
    with torch.no_grad():
        compiled.layers[0].weight.add_(1)
    assert torch.equal(teacher(x), before)
    assert not torch.equal(compiled(x), before)


class Eyes(nn.Module):
    """Embeds images by their class's method, as lerobot's backbones do, and counts."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def embed_image(self, image):
        self.calls += 1
        return image * 2


def test_equal_images_are_embedded_once_within_the_context():
    eyes, top, wrist = Eyes(), torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    with embedded_once(eyes):
        for _ in range(3):
            assert torch.equal(eyes.embed_image(top.clone()), top * 2)
            assert torch.equal(eyes.embed_image(wrist.clone()), wrist * 2)
    assert eyes.calls == 2
    assert torch.equal(eyes.embed_image(top), top * 2)
    assert eyes.calls == 3


def test_the_module_is_itself_again_after_an_error():
    eyes = Eyes()
    with pytest.raises(ZeroDivisionError), embedded_once(eyes):
        raise ZeroDivisionError
    assert "embed_image" not in vars(eyes)


def test_another_precision_is_another_image():
    eyes = Eyes()
    with embedded_once(eyes):
        assert eyes.embed_image(torch.ones(1)).dtype == torch.float32
        assert eyes.embed_image(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
