import threading

import pytest
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0_fast import modeling_pi0_fast

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.pi import PI0TinyConfig, TinySizes, at_sizes, swapped

NAMES = ("get_gemma_config", "PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")


def constructors(module=modeling_pi0):
    return [getattr(module, name, None) for name in NAMES]


def width(variant="gemma_2b"):
    return modeling_pi0.get_gemma_config(variant).width


def test_inside_the_block_lerobot_builds_small_and_after_it_full():
    before = constructors()
    with at_sizes(modeling_pi0, TinySizes(width=48, expert_width=24), image_size=28):
        assert (width(), width("gemma_300m")) == (48, 24)
        assert not set(constructors()) & set(before)
    assert constructors() == before
    assert (width(), width("gemma_300m")) == (2048, 1024)


def test_an_error_gives_the_constructors_back():
    before = constructors(modeling_pi0_fast)
    with pytest.raises(RuntimeError, match="inside"), at_sizes(modeling_pi0_fast, TinySizes(), image_size=28):
        raise RuntimeError("inside")
    assert constructors(modeling_pi0_fast) == before


def test_no_sizes_swap_nothing():
    before = constructors()
    with at_sizes(modeling_pi0, None, image_size=224):
        assert constructors() == before


def test_a_nested_block_has_its_own_sizes():
    with at_sizes(modeling_pi0, TinySizes(width=48), image_size=28):
        with at_sizes(modeling_pi0, TinySizes(width=32), image_size=28):
            assert width() == 32
        assert width() == 48
        with at_sizes(modeling_pi0, None, image_size=224):
            assert width() == 2048
        assert width() == 48


def test_two_threads_do_not_meet():
    seen, inside, finished = [], threading.Event(), threading.Event()

    def other():
        inside.wait(10)
        with at_sizes(modeling_pi0, TinySizes(width=32), image_size=28):
            seen.append(width())
        finished.set()

    thread = threading.Thread(target=other)
    thread.start()
    with at_sizes(modeling_pi0, TinySizes(width=48), image_size=28):
        inside.set()
        assert not finished.wait(0.2), "the other thread must wait for this block"
        seen.append(width())
    thread.join(10)
    assert seen == [48, 32]


def test_a_name_that_lerobot_dropped_is_an_error():
    with pytest.raises(AttributeError, match="NoSuchThing"), swapped(modeling_pi0, {"NoSuchThing": None}):
        pass


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depth": 0}, "depth"),
        ({"head_dim": 15}, "even"),
        ({"num_kv_heads": 3}, "share"),
        ({"vision_heads": 5}, "vision"),
    ],
)
def test_impossible_sizes_are_refused(wrong, message):
    with pytest.raises(CraftError, match=message):
        TinySizes(**wrong)


def test_pi0_has_eight_heads():
    with pytest.raises(CraftError, match="eight"):
        PI0TinyConfig(device="cpu", sizes=TinySizes(num_heads=4))
