"""Estimates of real policies through the command itself, beside what their checkpoints and real steps hold."""

import json

import pytest
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

from lerobot_craft.training import loop
from lerobot_craft.training.dry_step import Ledger
from lerobot_craft.training.estimate import _arithmetic

# act has a test of its own below; the others are like one of the first three.
POLICIES = (
    "pi0_fast",
    "pi0",
    "smolvla",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("pi05", "act", "diffusion")),
)
CRAFT = {
    "craft__enabled": "true",
    "craft__anchor_source": "dataset",
    "craft__num_anchors": 8,
    "craft__probe_anchors": 0,
}
LORA = {"peft__method_type": "LORA", "peft__r": 4, "peft__target_modules": ".*language_model.*_proj"}


@pytest.fixture
def estimate(craft_train, train_flags, tmp_path, capsys):
    """Function from a policy type and flags to the estimate's JSON."""

    def run(policy_type, *options, **changes):
        flags = train_flags(policy_type, tmp_path / "run", **changes)
        capsys.readouterr()  # making the checkpoint may have printed something
        assert craft_train("--estimate", "--estimate.json=true", *options, *flags) == 0
        assert not (tmp_path / "run").exists()
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def old(anchor_data):
    return {"craft__old_dataset.repo_id": "local/old", "craft__old_dataset.root": anchor_data / "old"}


def parts(found):
    return {part["name"]: part["bytes"] for part in found["parts"]}


def in_file(directory):
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("policy_type", POLICIES)
def test_every_policy_is_known(policy_type, estimate, checkpoints):
    found = estimate(policy_type, **CRAFT)
    assert found["peak"] in found["phases"]
    assert not any("not known" in note for note in found["notes"])
    assert found["total_bytes"] == max(found["phases"].values())
    size = parts(found)
    assert size["weights"] == pytest.approx(in_file(checkpoints(policy_type)), rel=0.02)  # ties and buffers apart
    assert size["gradients"] <= size["weights"]
    assert size["optimizer state"] == pytest.approx(2 * size["gradients"], rel=0.1)  # AdamW: two moments
    assert 0 < size["retention gradient"] <= size["gradients"]
    assert size["activations, anchor pass"] > 0
    task, anchors = (found["operations"][phase] for phase in ("task pass", "anchor pass"))
    assert any(f"in the mean {1 + anchors / task:.2f} times" in note for note in found["notes"])


@pytest.mark.slow  # several estimates; their parts have quick tests beside this file
def test_a_larger_batch_needs_more_activations(estimate):
    small, large = (parts(estimate("smolvla", batch_size=size)) for size in (2, 8))
    assert large["weights"] == small["weights"]
    assert 3 < large["activations, task pass"] / small["activations, task pass"] < 4.5


def test_micro_batches_need_the_activations_of_one_and_one_gradient(estimate):
    flags = {**CRAFT, "batch_size": 2, "craft__use_grad_projection": "true"}
    one, four = estimate("smolvla", **flags), estimate("smolvla", **flags, craft__accumulate=4)
    for name in ("weights", "gradients", "retention gradient", "optimizer state", "batches"):
        assert parts(four)[name] == parts(one)[name]
    # A first gradient comes while activations go; a later one joins what is there from the beginning.
    for phase, gradient in (("task pass", "gradients"), ("anchor pass", "retention gradient")):
        more = four["phases"][phase] - one["phases"][phase]
        assert 0 < more <= 1.01 * parts(one)[gradient]
    assert any("4 micro-batches" in note for note in four["notes"])


def test_what_no_loss_reaches_has_neither_gradient_nor_state(estimate):
    """The last layer of pi0's language model feeds nothing but its keys and values to the expert."""
    found = parts(estimate("pi0"))
    assert found["gradients"] < 0.95 * found["weights"]


def test_the_arithmetic_of_anchors_is_that_of_their_number(estimate):
    one, two = (estimate("pi0_fast", **CRAFT, batch_size=4, craft__anchor_batch_size=rows) for rows in (4, 8))
    assert two["operations"]["anchor pass"] == 2 * one["operations"]["anchor pass"]
    assert two["operations"]["task pass"] == one["operations"]["task pass"]


def test_arithmetic_is_shared_by_the_steps_between_anchors():
    assert "in the mean 1.10 times" in _arithmetic({"task pass": 4, "anchor pass": 2}, every=5)[0]
    assert "in the mean 1.50 times" in _arithmetic({"task pass": 4, "anchor pass": 2}, every=1)[0]
    assert _arithmetic({"task pass": 4}, every=1) == []


def test_checkpointing_of_activations_is_honoured(estimate):
    plain, saving = (
        parts(estimate("pi0_fast", batch_size=8, policy__gradient_checkpointing=flag)) for flag in ("false", "true")
    )
    assert saving["activations, task pass"] < 0.8 * plain["activations, task pass"]


@pytest.mark.slow  # several estimates; their parts have quick tests beside this file
def test_lora_trains_little_and_needs_no_copy_for_an_online_teacher(estimate, old):
    found = parts(estimate("pi0_fast", **CRAFT, **old, **LORA, craft__teacher="online"))
    assert found["gradients"] < 0.2 * found["weights"]
    assert "frozen copy of the teacher" not in found
    whole = parts(estimate("pi0_fast", **CRAFT, **old, craft__teacher="online"))
    assert whole["frozen copy of the teacher"] == whole["weights"]


def test_weights_that_are_frozen_are_there_in_every_phase(estimate):
    """lerobot gives smolvla's optimizer all parameters, frozen ones too."""
    found = estimate("smolvla", policy__train_expert_only="true")
    (weights,) = (part for part in found["parts"] if part["name"] == "weights")
    assert weights["at_peak_bytes"] == weights["bytes"]
    assert sum(part["at_peak_bytes"] for part in found["parts"]) == found["total_bytes"]
    held = parts(found)
    assert found["phases"]["optimizer step"] >= held["weights"] + held["optimizer state"] + held["gradients"]


@pytest.mark.slow  # several estimates; their parts have quick tests beside this file
def test_what_is_frozen_has_no_gradient_and_no_state(estimate):
    trained = parts(estimate("smolvla", policy__train_expert_only="true"))
    everything = parts(estimate("smolvla"))
    assert trained["gradients"] < 0.5 * everything["gradients"]
    assert trained["optimizer state"] < 0.5 * everything["optimizer state"]
    frozen = parts(estimate("pi0_fast", **CRAFT, craft__method="freeze", craft__freeze="readout"))
    assert frozen["gradients"] < frozen["weights"]
    assert "retention gradient" not in frozen


@pytest.mark.slow  # several estimates; their parts have quick tests beside this file
def test_methods_keep_what_they_keep(estimate, old):
    l2sp = parts(estimate("pi0_fast", **CRAFT, craft__method="l2sp"))
    assert l2sp["the weights before fine-tuning"] == l2sp["gradients"]
    replay = parts(estimate("pi0_fast", **CRAFT, **old, craft__method="er"))
    plain = parts(estimate("pi0_fast"))
    assert replay["batches"] == 2 * plain["batches"]


@pytest.mark.slow  # several estimates; their parts have quick tests beside this file
def test_a_gpu_steps_with_one_more_copy(estimate):
    cpu, gpu = (parts(estimate("pi0_fast", policy__device=device)) for device in ("cpu", "cuda"))
    assert gpu["temporaries of the optimizer"] == pytest.approx(gpu["gradients"], rel=0.1)
    assert cpu["temporaries of the optimizer"] < gpu["temporaries of the optimizer"]


@pytest.mark.slow  # several estimates; their parts have quick tests beside this file
def test_devices_share(estimate):
    one = parts(estimate("pi0_fast"))
    ddp = parts(estimate("pi0_fast", "--estimate.world_size=8"))
    assert ddp["DDP's buckets"] == one["gradients"]
    fsdp = parts(estimate("pi0_fast", "--estimate.world_size=8", "--estimate.strategy=fsdp"))
    assert fsdp["weights"] == pytest.approx(one["weights"] / 8, abs=1)
    assert fsdp["activations, task pass"] == pytest.approx(one["activations, task pass"], rel=0.1)


@pytest.mark.slow  # several estimates; their parts have quick tests beside this file
def test_sharding_by_our_own_flag_is_reckoned_as_fsdp(estimate):
    asked = estimate("smolvla", "--estimate.world_size=4", **CRAFT, craft__shard="true")
    assert parts(asked) == parts(estimate("smolvla", "--estimate.world_size=4", "--estimate.strategy=fsdp", **CRAFT))


@pytest.mark.slow  # several estimates; their parts have quick tests beside this file
def test_float32_copies_of_bfloat16_weights_are_counted(estimate):
    name = "float32 copies of bfloat16 weights"
    half = {**CRAFT, "policy__dtype": "bfloat16"}
    without, with_copies = (estimate("pi0_fast", **half, craft__master_weights=on) for on in ("false", "true"))
    plain, found = parts(without), parts(with_copies)
    copies = found[name]
    step = "optimizer step"
    # The copy and the moments are 8 bytes, gradients are 2 more while the optimizer steps.
    assert with_copies["phases"][step] - without["phases"][step] > 2.4 * copies
    assert 0.5 < copies / (2 * found["gradients"]) <= 1  # 4 bytes for each weight of 2; some stay in float32
    assert found["optimizer state"] - plain["optimizer state"] == pytest.approx(copies, rel=1e-3)  # two moments
    assert parts(estimate("pi0_fast", **CRAFT, craft__master_weights="true"))[name] == 0


@pytest.mark.slow  # several estimates; their parts have quick tests beside this file
def test_from_scratch_and_from_a_config_without_weights(estimate, checkpoints, tmp_path):
    scratch = estimate("act", policy__path=None, policy__type="act", policy__dim_model=64)
    assert parts(scratch)["weights"] > 2**20
    (tmp_path / "described").mkdir()
    (tmp_path / "described" / "config.json").write_text((checkpoints("act") / "config.json").read_text())
    found = estimate("act", policy__path=tmp_path / "described")
    assert "no weights" in found["notes"][0]
    assert parts(found) == parts(estimate("act"))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--estimate=maybe"], "leave it out"),
        (["--estimate", "--estimate.world=2"], "--estimate.world"),
        (["--estimate", "--estimate.world_size=8", "--estimate.strategy=fsdp", "--craft.enabled=true",
          "--craft.method=l2sp"], "whole parameters"),
        (["--estimate", "--policy.vlm_model_name=nobody/nothing"], "downloads nothing"),
    ],
)  # fmt: skip
def test_a_bad_combination_is_one_sentence(flags, complaint, craft_train, train_flags, tmp_path, capsys):
    assert craft_train(*flags, *train_flags("smolvla", tmp_path / "run")) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("craft: ")
    assert complaint in said


def test_retention_that_reaches_nothing_trained_is_refused(craft_train, train_flags, tmp_path, capsys):
    flags = train_flags("pi0", tmp_path / "run", **CRAFT, craft__retention_mode="hidden")
    assert craft_train("--estimate", "--policy.train_expert_only=true", *flags) == 2
    assert "reaches nothing that is trained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy_type", "changes"),
    [
        ("pi0_fast", CRAFT),
        # Slow: what differs from the one above is measured in `test_measured.py` too.
        pytest.param(
            "pi0_fast",
            {**CRAFT, "craft__retention_mode": "hidden", "craft__retention_freq": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param("pi0_fast", LORA, marks=pytest.mark.slow),
        pytest.param("pi0", {}, marks=pytest.mark.slow),
    ],
    ids=["action", "hidden", "lora", "plain"],
)
def test_a_real_step_holds_what_was_estimated(
    policy_type, changes, estimate, old, craft_train, train_flags, tmp_path, monkeypatch
):
    """Real tensors, seen by the same ledger; `test_measured.py` asks the system instead."""
    changes = {**changes, **(old if changes.get("craft__enabled") else {}), "batch_size": 8, "steps": 2}
    found = estimate(policy_type, **changes)
    seen, take_step = [], loop._take_step

    def watched(session, batches, tracker):
        if session.step == 0:
            return take_step(session, batches, tracker)
        ledger = Ledger()
        state = [value for held in session.optimizer.state.values() for value in held.values()]
        ledger.label([*session.student.parameters(), *session.student.buffers(), *state], "held")
        with ledger, ledger.phase("step"), FlopCounterMode(display=False) as counter:
            take_step(session, batches, tracker)
        seen.append((ledger.peak("step").bytes, counter.get_total_flops()))
        return None

    monkeypatch.setattr(loop, "_take_step", watched)
    assert craft_train(*train_flags(policy_type, tmp_path / "real", **changes)) == 0
    ((peak, operations),) = seen
    assert found["total_bytes"] == pytest.approx(peak, rel=0.1)
    assert sum(found["operations"].values()) == pytest.approx(operations, rel=0.05)  # prompts at their longest
