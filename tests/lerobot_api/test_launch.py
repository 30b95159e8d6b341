"""What accelerate was launched with: refused by name where a run would go on and be wrong."""

from types import SimpleNamespace

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.train_parts import check_launch


@pytest.fixture
def launched(process_as_it_was, monkeypatch):
    """Function from variables that `accelerate launch` sets to a real accelerator."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def launched(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True)

    return launched


def settings(**policy):
    return SimpleNamespace(policy=SimpleNamespace(**policy))


def test_a_plain_launch_is_fine(launched):
    check_launch(settings(compile_model=False), launched(), enabled=True)


@pytest.mark.parametrize("enabled", [True, False])
def test_accumulation_that_would_only_divide_the_loss_is_refused(enabled, launched):
    accelerator = launched(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    with pytest.raises(CraftError, match=r"over 4 steps.*only divide the loss by 4.*--craft.accumulate=4"):
        check_launch(settings(), accelerator, enabled=enabled)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_sharding_by_accelerate_is_refused_also_on_a_cpu(kind, launched, monkeypatch):
    accelerator = launched()  # before the variable: accelerate itself would look for the packages
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(CraftError, match=rf"set to {kind}, .*--multi_gpu.*--craft.shard=true"):
        check_launch(settings(), accelerator, enabled=True)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_sharding_that_accelerate_has_taken_up_is_refused(kind):
    from accelerate.utils import DistributedType

    with pytest.raises(CraftError, match=f"set to {kind}, "):
        check_launch(settings(), SimpleNamespace(distributed_type=DistributedType[kind]), enabled=True)


def test_what_compiles_more_than_the_forward_is_refused_but_not_to_lerobot_train(launched):
    check_launch(settings(type="smolvla", compile_model=True), launched(), enabled=True)
    diffusion = settings(type="diffusion", compile_model=True)
    with pytest.raises(CraftError, match=r"renames the weights.*--policy.compile_model=false"):
        check_launch(diffusion, launched(), enabled=True)
    check_launch(diffusion, launched(), enabled=False)
    accelerator = launched(ACCELERATE_DYNAMO_BACKEND="EAGER")
    with pytest.raises(CraftError, match=r"hooks.*--dynamo_backend=no.*--policy.compile_model=true"):
        check_launch(settings(), accelerator, enabled=True)
    check_launch(settings(), accelerator, enabled=False)


def test_the_command_says_it_in_one_sentence(train_flags, craft_train, launched, tmp_path, capfd):
    launched(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="2")
    assert craft_train(*train_flags("smolvla", tmp_path / "run")) == 2
    assert "craft: accelerate is set to accumulate gradients over 2 steps" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
