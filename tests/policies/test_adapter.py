import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Layer, unwrapped
from lerobot_craft.policies.adapter import belongs_to, normal
from tests.policies.case import rngs


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [
        ("-2", ["2"]),
        ("-2,-1", ["2", "3"]),
        ([-2, -1], ["2", "3"]),
        (" 0 , 3", ["0", "3"]),
        ("all", ["0", "1", "2", "3"]),
        ("-1,3,all", ["3", "0", "1", "2"]),
        ("expert:-1", ["expert:3"]),
        ("-2,expert:all", ["2", "expert:0", "expert:1", "expert:2", "expert:3"]),
    ],
)
def test_layers_as_a_user_writes_them(named, wanted, layers):
    subject = named("pi0")
    assert [str(layer) for layer in subject.adapter.resolve(subject.policy, wanted)] == layers


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("4", "layer 4 does not exist: the backbone of this pi0 has 4 layers"),
        ("-5", "layer -5 does not exist"),
        ("expert:9", "the stack 'expert' of this pi0 has 4 layers"),
        ("last", "'last' is no layer: write -2"),
        ("", "is no layer"),
        ("1.5", "is no layer"),
        ("decoder:0", r"no stack of layers named 'decoder' \(beside its backbone: expert\)"),
        ([], "no layer is named"),
    ],
)
def test_layers_that_do_not_exist_are_refused(named, wanted, sentence):
    subject = named("pi0")
    with pytest.raises(CraftError, match=sentence):
        subject.adapter.resolve(subject.policy, wanted)


def test_a_policy_of_one_stack_says_that_there_is_no_other(named):
    subject = named("pi0_fast")
    with pytest.raises(CraftError, match=r"named 'expert' \(beside its backbone: none\)"):
        subject.adapter.resolve(subject.policy, "expert:-1")


def test_layers_are_in_order_and_can_be_keys():
    assert sorted([Layer("expert", 0), Layer("", 2), Layer("", 1)])[0] == Layer("", 1)
    assert {Layer("", 1): "here"}[Layer("", 1)] == "here"


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_the_policy_inside_ddp_is_found(named, one_process):
    policy = named("act").policy
    assert unwrapped(policy) is policy
    assert unwrapped(DistributedDataParallel(policy)) is policy


@pytest.mark.slow  # torch's compiler takes seconds to import; the one above is without it
def test_the_policy_inside_a_compiled_one_is_found(named, one_process):
    policy = named("act").policy
    assert unwrapped(torch.compile(policy)) is policy
    assert unwrapped(DistributedDataParallel(torch.compile(policy))) is policy


def test_names_belong_to_whole_modules_only():
    assert belongs_to("layers.1.weight", ["layers.1"])
    assert belongs_to("head.weight", ["layers", "head.weight"])
    assert not belongs_to("layers.10.weight", ["layers.1"])


def test_normal_draws_each_row_from_its_own_generator():
    both = normal(rngs(2), (3, 4), torch.device("cpu"))
    assert both.shape == (2, 3, 4)
    assert torch.equal(both[1:], normal(rngs(2)[1:], (3, 4), torch.device("cpu")))
