import torch

from lerobot_craft.anchors.walks import Motion, walk

ARM = torch.tensor([True, False])
# One action of one dimension moves the arm by itself; the object stays.
MOTION = Motion(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), ARM)
STATS = {
    "mean": torch.zeros(2),
    "std": torch.tensor([1e-6, 1.0]),
    "min": torch.tensor([-5.0, -5.0]),
    "max": torch.tensor([5.0, 5.0]),
}
STARTS = torch.tensor([[0.0, 0.5], [1.0, -0.5]])


def to_the_object(state, step):
    return (0.5 * (state[:, 1] - state[:, 0]))[:, None, None]


def walked(drawn=(False, False), steps=12, act=to_the_object, seed=0):
    return walk(STARTS, drawn, steps, act, MOTION, STATS, seed)


def test_the_arm_goes_where_the_teacher_sends_it():
    states = walked()
    assert states.shape == (2, 12, 2)
    assert torch.equal(states[:, 0], STARTS)
    assert torch.allclose(states[:, -1, 0], STARTS[:, 1], atol=1e-3)
    assert torch.equal(states[..., 1], STARTS[:, None, 1].expand(2, 12))  # objects stay


def test_what_is_not_the_robots_own_may_be_drawn_and_is_then_walked_to():
    states = walked(drawn=(True, False))
    assert states[0, 0, 0] == STARTS[0, 0]
    assert states[0, 0, 1] != STARTS[0, 1]
    assert torch.allclose(states[0, -1, 0], states[0, 0, 1], atol=2e-3)
    assert torch.equal(states[1], walked()[1])


def test_a_walk_stays_within_what_the_teacher_has_seen():
    states = walked(act=lambda state, step: torch.full((2, 1, 1), 3.0), steps=8)
    assert states[..., 0].max() == STATS["max"][0]


def test_the_seed_decides_and_the_global_one_does_not():
    torch.manual_seed(1)
    first = walked(drawn=(True, True))
    torch.manual_seed(2)
    assert torch.equal(walked(drawn=(True, True)), first)
    assert not torch.equal(walked(drawn=(True, True), seed=1), first)
