"""`--policy.compile_model=true`: the task's pass is compiled, anchors pass through the policy as it was written."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from lerobot_craft.training.journal import read_metrics

# Warnings of torch's tracer and code generator, which a test would turn into their errors.
pytestmark = pytest.mark.filterwarnings("default")

COMPILED = {"policy__compile_model": "true", "policy__compile_mode": "default"}
WHOLE = {"smolvla": {"policy__train_expert_only": "false"}}


@pytest.fixture
def traced_only(monkeypatch):
    """torch.compile without its code generator, which takes a minute: the code is traced, guarded and replaced."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode=None: real(function, backend="eager"))


@pytest.fixture
def run(train_flags, craft_train, anchor_data, tmp_path):
    """Function that trains with hidden states and actions retained, and returns logged steps and weights."""

    def run(policy_type, name, **changes):
        flags = {
            "craft.enabled": "true",
            "craft.retention_mode": "hidden+action",
            "craft.old_dataset.repo_id": "local/old",
            "craft.old_dataset.root": anchor_data / "old",
            "craft.anchor_source": "dataset",
            "craft.num_anchors": 6,
            "craft.anchor_batch_size": 2,
            "craft.probe_anchors": 2,
            "craft.retention_freq": 1,
        }
        own = [f"--{key}={value}" for key, value in flags.items()]
        changes = WHOLE.get(policy_type, {}) | changes
        assert craft_train(*train_flags(policy_type, tmp_path / name, **changes), *own) == 0
        logged = list(read_metrics(tmp_path / name))
        return logged, load_file(tmp_path / name / "checkpoints/last/pretrained_model/model.safetensors")

    return run


def assert_same(compiled, plain, rel):
    for mine, expected in zip(compiled[0], plain[0], strict=True):
        for name in ("loss", "retention_loss", "lambda", "mode_loss/hidden", "mode_loss/action"):
            assert mine[name] == pytest.approx(expected[name], rel=rel, abs=1e-7), (name, expected["step"])
    assert plain[0][-1]["mode_loss/hidden"] > 0
    assert compiled[1].keys() == plain[1].keys()
    for name, weight in plain[1].items():
        assert_close(compiled[1][name], weight, rtol=rel, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow  # tracing, and two runs; tests/policies/test_taps.py has the parts
@pytest.mark.timeout(900)
def test_a_compiled_policy_is_trained_and_held_as_a_plain_one(run, traced_only):
    compiled = run("smolvla", "compiled", **COMPILED)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0, "it was compiled"
    assert_same(compiled, run("smolvla", "plain"), rel=1e-3)


@pytest.fixture
def same_noise(monkeypatch):
    """Generated code has a random stream of its own: here noise and times of the task's pass are the same in both."""
    from lerobot.policies.smolvla.modeling_smolvla import VLAFlowMatching

    def noise(self, shape, device):
        return torch.linspace(-2, 2, math.prod(shape)).reshape(shape)

    monkeypatch.setattr(VLAFlowMatching, "sample_noise", noise)
    monkeypatch.setattr(VLAFlowMatching, "sample_time", lambda self, rows, device: torch.linspace(0.2, 0.8, rows))


@pytest.mark.slow  # real code generation, and two runs
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy_type", ["smolvla", "pi0_fast"])
def test_generated_code_trains_and_holds_as_a_plain_policy(policy_type, run, same_noise):
    assert_same(run(policy_type, "compiled", **COMPILED), run(policy_type, "plain"), rel=1e-2)
