"""`craft train` in N processes is `craft train` in one with batches N times as large, step by step."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from lerobot_craft.training.journal import read_history
from tests.distributed.conftest import ANCHORS, PACKAGE, SAMPLES, Run
from tests.distributed.per_sample.modeling_per_sample import DIVERGE
from tests.faults.test_bad_input import poison
from tests.warm_process import environment, rank_log

# A budget that is missed, so that multipliers move; each old task has its own.
BUDGET = {
    "craft__use_grad_projection": "true",
    "craft__epsilon_start": 1e-6,
    "craft__epsilon_end": 1e-6,
    "craft__epsilon_unit": "absolute",
    "craft__lambda_lr": 5.0,
    "craft__lambda_max": 50.0,
    "craft__lambda_per_task": "true",
}
K_STEP = {"craft__retention_freq": 2}
OLD_FRAMES = {"craft__anchor_source": "dataset"}
# Both losses reach the backbone (but for its last layer, which lerobot freezes), the task alone the action expert.
SMOLVLA_HIDDEN = {
    "craft__retention_mode": "hidden",
    "craft__hidden_layer": -1,
    "policy__train_expert_only": "false",
    "policy__freeze_vision_encoder": "false",
    "optimizer__lr": 0.01,
}
REACHED_BY_BOTH = "model.vlm_with_expert.vlm.model.text_model.layers.2.mlp.down_proj.weight"
REACHED_BY_TASK = "model.action_out_proj.weight"

RUNS = {
    "smolvla, actions": ("smolvla", K_STEP),
    "smolvla, hidden": ("smolvla", SMOLVLA_HIDDEN | K_STEP | OLD_FRAMES),
    "pi0_fast, actions": ("pi0_fast", K_STEP),
    "pi0_fast, hidden": ("pi0_fast", {"craft__retention_mode": "hidden"} | K_STEP),
    "act, actions": ("act", K_STEP | OLD_FRAMES),
}
STEPS = 12  # an epoch has 9


def assert_same_run(many: Run, one: Run, rel: float = 1e-3) -> None:
    """The same trace of every logged number, and the same weights."""
    for run in (one, many):
        assert run.exit_code == 0, run.said()[-3000:]
    for mine, expected in zip(many.metrics, one.metrics, strict=True):
        assert mine.keys() >= expected.keys()  # where gradients are added, one process has no norms of each
        for name, value in expected.items():
            if isinstance(value, float):
                assert mine[name] == pytest.approx(value, rel=rel, abs=1e-6), (name, expected["step"])
            else:
                assert mine[name] == value, (name, expected["step"])
    mine, expected = many.weights, one.weights
    assert mine.keys() == expected.keys()
    for name, weight in expected.items():
        assert_close(mine[name], weight, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def assert_worth_comparing(run: Run) -> None:
    """Gradients conflicted and were projected, multipliers moved each in its own way, and some steps had no anchors."""
    history = list(read_history(run.output))
    assert any(row["conflict"] and row["cos"] < -0.01 for row in history)
    assert len({round(value, 3) for name, value in history[-1].items() if name.startswith("lambda/")}) > 1
    assert history[-1]["lambda"] > history[0]["lambda"]
    assert len(history) < len(run.metrics)


def changed(run: Run, start, name: str) -> bool:
    return not torch.equal(run.weights[name], start[name])


@pytest.mark.timeout(300)
def test_two_processes_are_one_with_batches_twice_as_large(train):
    """The short one: a step without anchors, and two with them."""
    settings = {**BUDGET, **K_STEP, **OLD_FRAMES, "craft__probe_anchors": 2, "steps": 4}
    one, two = (train("smolvla", ranks, **settings) for ranks in (1, 2))
    assert_same_run(two, one)
    assert any(row["conflict"] for row in read_history(two.output))
    files = [sorted(str(path.relative_to(run.output)) for path in run.output.rglob("*")) for run in (one, two)]
    own = "checkpoints/000004/training_state/rng_state_rank_1.safetensors"
    assert sorted([*files[0], own]) == files[1], "one set of files, written by the main process"
    assert "Step 4/4" not in two.said(rank=1)


@pytest.mark.slow  # two runs, up to four processes on two cores
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_many_processes_are_one_with_a_larger_batch(name, ranks, train):
    policy_type, settings = RUNS[name]
    one = train(policy_type, 1, **BUDGET, **settings, steps=STEPS)
    many = train(policy_type, ranks, **BUDGET, **settings, steps=STEPS)
    assert_same_run(many, one)
    assert_worth_comparing(many)
    if name == "smolvla, hidden":
        start = train(policy_type, 1, "untrained", **settings | {"steps": 1, "optimizer__lr": 0}).weights
        assert all(changed(many, start, weight) for weight in (REACHED_BY_BOTH, REACHED_BY_TASK))


@pytest.mark.slow  # three runs for each seed; tests/distributed/test_first_step.py has more seeds
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["action", "hidden"])
@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_agree_where_the_first_step_visits_anchors(seed, mode, train):
    """K = 1: the student is still its teacher there, and the sizes of batches round in different ways."""
    samples, anchors = 12, 24
    weights = {}
    for ranks in (1, 2, 3):
        sizes = {"batch_size": samples // ranks, "craft__anchor_batch_size": anchors // ranks}
        settings = {**OLD_FRAMES, **sizes, "seed": seed, "craft__retention_mode": mode, "craft__num_anchors": 48}
        run = train("act", ranks, steps=6, craft__retention_freq=1, craft__probe_anchors=0, **settings)
        assert run.exit_code == 0, run.said()[-3000:]
        assert not run.metrics[0]["conflict"]
        weights[ranks] = run.weights
    for ranks in (2, 3):
        for name, weight in weights[1].items():
            assert_close(weights[ranks][name], weight, rtol=1e-4, atol=2e-5, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.slow  # processes that import lerobot
@pytest.mark.timeout(900)
def test_accelerate_launch(train, flags_of, per_sample, tmp_path):
    """Its own launcher starts the processes. Adam, as the policy's preset has it, in place of SGD."""
    adam = {"use_policy_training_preset": "true", "optimizer__type": None, "optimizer__lr": None}
    adam |= {"optimizer__grad_clip_norm": None, "scheduler__type": None, "scheduler__num_warmup_steps": None}
    settings = {**BUDGET, **K_STEP, **OLD_FRAMES, **adam, "steps": 4}
    one = train("pi0_fast", 1, **settings)
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", "-m", "lerobot_craft"]
    output = tmp_path / "launched"
    command = [sys.executable, "-m", *launch, "train", *flags_of("pi0_fast", output, 2, **settings)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    launched = Run(0, output, tmp_path / "log")
    for mine, expected in zip(launched.metrics, one.metrics, strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert mine["task_norm"] == pytest.approx(expected["task_norm"], rel=1e-3)
    # Where a gradient is zero but for rounding, Adam takes whole steps of it: few weights, and no function of them.
    mine, expected = launched.weights, one.weights
    start = load_file(per_sample("pi0_fast") / "model.safetensors")
    apart, moved = (
        math.sqrt(sum((weight - other[name]).square().sum() for name, weight in expected.items()))
        for other in (mine, start)
    )
    assert apart < 0.1 * moved


@pytest.mark.slow  # three runs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy_type", ["smolvla"])
def test_ranks_draw_numbers_of_their_own_and_take_them_up_again(
    policy_type, train, checkpoints, warm_process, tmp_path
):
    """The policy as lerobot has it, which draws noise: two processes, stopped and resumed, to the bit."""
    settings = {**K_STEP, **OLD_FRAMES, "policy__path": checkpoints("smolvla"), "discover_packages_path": None}
    whole = train("smolvla", 2, "whole", **settings, steps=6, save_freq=4)
    assert whole.exit_code == 0, whole.said()[-3000:]
    state = whole.output / "checkpoints/000004/training_state"
    main, other = (state / f"rng_state{rank}.safetensors" for rank in ("", "_rank_1"))
    assert main.read_bytes() != other.read_bytes()
    config = whole.output / "checkpoints/000004/pretrained_model/train_config.json"
    expected, trace = whole.weights, whole.metrics
    argv = ["train", f"--config_path={config}", "--resume=true"]
    assert warm_process.run(argv, tmp_path / "log_resumed", ranks=2) == 0
    assert whole.metrics == trace
    assert all(torch.equal(weight, expected[name]) for name, weight in whole.weights.items())


@pytest.mark.timeout(300)
def test_a_rank_that_goes_its_own_way_stops_the_run(train):
    settings = {**OLD_FRAMES, "craft__check_ranks_freq": 2, "craft__probe_anchors": 0, "steps": 4}
    run = train("smolvla", 2, env={DIVERGE: "1:2"}, **settings)
    assert run.exit_code == 2
    for rank in range(2):
        (sentence,) = [line for line in run.said(rank).splitlines() if line.startswith("craft: ")]
        assert "after step 2 the weights on rank 1 are not those of the other 1 rank (first: model." in sentence
        assert "start again" in sentence
    assert not run.checkpoint.exists()


@pytest.mark.slow  # two processes; the short forms are in test_blame.py
@pytest.mark.timeout(300)
def test_all_ranks_blame_the_batch_that_was_not_finite(train, checkpoints, anchor_data, tmp_path):
    """After the reduction every rank has the NaN; one of them had the frame."""
    poisoned = poison(anchor_data / "new", tmp_path / "poisoned", episode=1, frame=0)
    stock = {"policy__path": checkpoints("smolvla"), "discover_packages_path": None}
    settings = {**OLD_FRAMES, **stock, "craft__probe_anchors": 0, "dataset__root": poisoned, "steps": 9}
    run = train("smolvla", 2, **settings)
    assert run.exit_code == 2
    said = [[line for line in run.said(rank).splitlines() if line.startswith("craft: ")] for rank in range(2)]
    (mine,), (others,) = said
    assert mine == others
    assert re.search(r"It came from the batch of local/new on rank [01]: [^.]*episode 1 frame 0\b[^0-9]", mine)
    assert not run.checkpoint.exists()


@pytest.mark.slow  # two processes; tests/cli/test_recipe_file.py has the other recipes
@pytest.mark.timeout(600)
def test_the_recipe_for_many_gpus_trains_on_two_ranks(train_flags, warm_process, anchor_data, tmp_path):
    small = {"steps": 1, "batch_size": 2, "craft.num_anchors": 4, "craft.probe_anchors": 0}
    old = {"craft.old_dataset.repo_id": "local/old", "craft.old_dataset.root": anchor_data / "old"}
    flags = train_flags("pi05", tmp_path / "run", **small, **old, **{"craft.anchor_source": "dataset"})
    argv = ["train", "--config_path=recipes/pi05_many_gpus_24gb.json", *flags]
    assert warm_process.run(argv, tmp_path / "log", ranks=2) == 0, rank_log(tmp_path / "log", 0).read_text()[-3000:]
    saved = tmp_path / "run/checkpoints/last"
    craft = json.loads((saved / "pretrained_model/craft_config.json").read_text())
    assert (craft["shard"], craft["master_weights"]) == (True, True)
    assert (saved / "training_state/master_weights.safetensors").is_file()


def assert_stock_lerobot_loads(run: Run) -> None:
    """By its own loader, with every weight as it is in the file."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class

    directory = run.checkpoint / "pretrained_model"
    policy = get_policy_class(PreTrainedConfig.from_pretrained(directory).type).from_pretrained(directory, strict=True)
    state = policy.state_dict()
    assert run.weights.keys() <= state.keys()
    assert all(torch.equal(state[name], weight) for name, weight in run.weights.items())


SHARDED = {
    "smolvla": SMOLVLA_HIDDEN | OLD_FRAMES,
    "pi0_fast": OLD_FRAMES,
}


@pytest.mark.slow  # four runs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy_type", SHARDED)
def test_a_sharded_run_is_a_whole_one_and_so_are_its_checkpoints(policy_type, train, warm_process, tmp_path):
    settings = {**BUDGET, **K_STEP, **SHARDED[policy_type], "optimizer__momentum": 0.5}
    one = train(policy_type, 1, **settings, steps=6)
    two = train(policy_type, 2, **settings, steps=6, save_freq=3, craft__shard="true")
    assert_same_run(two, one)
    assert_worth_comparing(two)
    moments = [load_file(run.checkpoint / "training_state/optimizer_state.safetensors") for run in (one, two)]
    assert moments[0].keys() == moments[1].keys()
    for name, moment in moments[0].items():
        assert_close(moments[1][name], moment, rtol=1e-4, atol=1e-5)
    assert_stock_lerobot_loads(two)
    trace, weights = two.metrics, two.weights
    middle = two.output / "checkpoints/000003/pretrained_model/train_config.json"
    argv = ["train", f"--config_path={middle}", "--resume=true", f"--discover_packages_path={PACKAGE}"]
    log = tmp_path / "log_again"
    assert warm_process.run(argv, log, ranks=2) == 0, log.read_text()[-2000:]
    assert two.metrics == trace, "sharded again: to the bit"
    assert all(torch.equal(weight, weights[name]) for name, weight in two.weights.items())
    alone = [*argv, "--craft.shard=false", f"--batch_size={SAMPLES}", f"--craft.anchor_batch_size={ANCHORS}"]
    assert warm_process.run(alone, log) == 0, log.read_text()[-2000:]
    assert_same_run(two, one)


# What else was tried with `--craft.shard`; docs/scaling.md says the same.
SHARDED_TOO = {
    "naive": ("smolvla", {"craft__method": "naive"}),
    "er": ("smolvla", {"craft__method": "er", "craft__replay_frames": 12}),
    "lwf": ("smolvla", {"craft__method": "lwf"}),
    "freeze": ("smolvla", {"craft__method": "freeze", "craft__freeze": "readout"}),
    "online teacher": ("smolvla", {"craft__teacher": "online"}),
    "pi0": ("pi0", K_STEP),
    "pi05": ("pi05", K_STEP),
    "act": ("act", K_STEP),
    # Its image encoder has kinks (ReLU, largest of a window): one process whose weights differ by 1e-7 from the start
    # is as far from itself after four such steps, 1e-2 in a weight, as two sharded ones are. So few and small ones.
    "diffusion": ("diffusion", K_STEP | {"steps": 2, "optimizer__lr": 0.005}),
}


@pytest.mark.slow  # two runs, one of them of two processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHARDED_TOO)
def test_other_methods_and_policies_are_the_same_sharded(name, train):
    policy_type, settings = SHARDED_TOO[name]
    settings = {**BUDGET, **OLD_FRAMES, "steps": 4, **settings}
    one = train(policy_type, 1, **settings)
    two = train(policy_type, 2, **settings, craft__shard="true")
    assert_same_run(two, one)
    assert_stock_lerobot_loads(two)
