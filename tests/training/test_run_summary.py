import shlex
from pathlib import Path

import pytest

from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.lines import Peak, Timing, eval_command, run_summary
from lerobot_craft.training.methods.method import Cost
from lerobot_craft.training.outcomes import Outcome, outcomes

CHECKPOINT = Path("outputs/my run/checkpoints/000003")


def text_of(**changes):
    arguments = {
        "config": CraftConfig(retention_mode="action"),
        "step": 3,
        "epsilon": 0.1,
        "retained": [Outcome(None, 0.05, 2, 0.04), Outcome("open", 0.125, 1)],
        "timing": Timing(steps=4, anchor_steps=2, plain_s=2.0, extra_s=0.5, start_s=7.0),
        "peak": Peak(process=3 * 2**30),
        "costs": [Cost("a second gradient", 3 << 20), Cost("decoded images", 1 << 20)],
        "checkpoint": CHECKPOINT,
        "eval_flags": {"env.type": "pusht", "eval.n_episodes": 10, "eval.batch_size": 5},
    }
    return run_summary(**{**arguments, **changes})


def test_the_end_says_what_was_retained_what_it_cost_and_how_to_run_it():
    assert text_of().splitlines() == [
        "End of training: method craft, step 3",
        "What was retained is unverified (1 = the teacher's own error on that task):",
        "  all old tasks | action drift 0.040 | drift on trained anchors 0.050 of 0.100 (n=2) | unverified",
        "  'open'        | drift on trained anchors 0.125 of 0.100 (n=1) | over budget",
        "What it cost beyond plain fine-tuning:",
        "  time: 0.125 s per step on top of 0.500 s (+25.0%), measured over 4 steps of this process, 2 with anchors; "
        "7.000 s before them",
        "  memory: 4.0 MiB",
        "    3.0 MiB a second gradient",
        "    1.0 MiB decoded images",
        "  peak of the whole process: 3.0 GiB",
        "Checkpoint: outputs/my run/checkpoints/000003",
        "Run it:",
        "  lerobot-eval '--policy.path=outputs/my run/checkpoints/000003/pretrained_model' --env.type=pusht "
        "--eval.n_episodes=10 --eval.batch_size=5",
    ]


def by_heart(drift=0.05, action_drift=0.2, held_out=32, **config):
    settings = CraftConfig(**{"retention_mode": "action", **config})
    text = text_of(config=settings, retained=[Outcome(None, drift, 2, action_drift)], held_out=held_out)
    return "learned by heart" in text


def at_bound(bounded_share=0.9, drift=0.2, **changes):
    text = text_of(retained=[Outcome(None, drift, 2)], bounded_share=bounded_share, bound=0.5, **changes)
    return "90% of the anchor steps" in text and "at its bound, 0.5" in text and "retention_max_norm=1.5 " in text


def test_a_missed_budget_that_no_multiplier_could_hold_is_told():
    assert at_bound()
    assert not at_bound(drift=0.1)  # within the budget
    assert not at_bound(bounded_share=0.4)
    assert not at_bound(epsilon=None)  # a method without a budget


def test_a_task_loss_that_was_still_falling_is_told_with_what_helps():
    still = "still falling when the run ended, from 0.400 to 0.200"
    assert still in text_of(last_losses=(0.4, 0.2))
    assert "--steps=6)" in text_of(last_losses=(0.4, 0.2))
    assert "still falling" not in text_of(last_losses=(0.4, 0.31))
    assert "still falling" not in text_of(last_losses=(0.0, 0.0))
    assert "still falling" not in text_of(last_losses=None)


def test_anchors_that_were_learned_by_heart_are_told():
    assert by_heart()
    assert not by_heart(held_out=0)  # the probe's own anchors were visited too
    assert not by_heart(drift=0.15)  # no worse than those that were
    assert not by_heart(action_drift=0.1)  # within the budget
    assert not by_heart(retention_mode="hidden")  # drifts of two kinds
    assert not by_heart(epsilon_unit="absolute")
    assert not by_heart(loss_type="l1")


def test_a_run_without_anchors_does_not_claim_to_have_retained():
    text = text_of(config=CraftConfig(method="naive"), epsilon=None, retained=[Outcome(None)], costs=[])
    assert "What was retained: not measured" in text
    assert "memory: none" in text


def test_a_task_that_was_never_measured_is_not_shown_as_retained():
    assert "'unseen'" not in text_of(retained=[Outcome("open", 0.05, 2), Outcome("unseen")])


def test_without_a_checkpoint_there_is_no_command():
    text = text_of(checkpoint=None)
    assert "Checkpoint: this process wrote none." in text
    assert "lerobot-eval" not in text


def test_a_run_that_was_already_at_its_end_measured_no_time():
    assert "no step was taken" in text_of(timing=Timing(0, 0, 0.0, 0.0))


def test_a_shell_hands_the_flags_over_as_they_were():
    flags = {
        "env.type": "metaworld",
        "env.task": "say 'hi' $HOME",
        "eval.use_async_envs": False,
        "rename_map": {"a": "b"},
    }
    assert shlex.split(eval_command(CHECKPOINT, flags)) == [
        "lerobot-eval",
        f"--policy.path={CHECKPOINT}/pretrained_model",
        "--env.type=metaworld",
        "--env.task=say 'hi' $HOME",
        "--eval.use_async_envs=false",
        '--rename_map={"a": "b"}',
    ]


def test_without_an_env_its_place_is_left_open_and_harmless_in_a_shell():
    assert shlex.split(eval_command(CHECKPOINT, {"eval.n_episodes": 10}))[2:] == [
        "--env.type=<your env>",
        "--eval.n_episodes=10",
    ]


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome("open", 0.01, 9, 0.05, 0.03, 0.09, verified=True), "within budget"),
        (Outcome("open", 0.01, 9, 0.09, 0.05, 0.12, verified=True), "near budget"),
        (Outcome("open", 0.01, 9, 0.16, 0.11, 0.30, verified=True), "over budget"),
        (Outcome("open", 0.90, 9, 0.05, 0.03, 0.09, verified=True), "within budget"),  # real frames decide
        (Outcome("open", 0.01, 9, 0.05, 0.03, 0.09), "unverified"),  # made-up anchors never say that it was kept
        (Outcome("open", 0.01, 9), "unverified"),
        (Outcome("open", 0.11, 9), "over budget"),
        (Outcome("open"), None),
    ],
)
def test_only_real_frames_kept_out_of_training_can_say_that_a_task_was_kept(outcome, said):
    assert outcome.verdict(0.1) == said
    assert outcome.verdict(None) is None


def test_a_verified_end_shows_the_interval():
    text = text_of(retained=[Outcome("open", 0.01, 9, 0.05, 0.03, 0.09, verified=True)])
    assert "What was retained (" in text
    assert "'open' | kept-out drift 0.050 [0.030, 0.090] of 0.100 |" in text


def test_outcomes_take_the_last_action_drift_and_the_mean_of_the_last_ten_visits():
    records = [{"step": step, "retention_loss": float(step), "retention_loss/open": 1.0} for step in range(1, 21)]
    records[4] |= {"action_drift": 0.5, "action_drift/open": 0.25}
    records[9] |= {"action_drift": 0.0, "action_drift_low": -1.0, "action_drift_high": 1.0, "verified": True}
    records.append({"step": 21, "loss": 1.0})
    everything, opened, closed = outcomes(records, ["open", "close"])
    assert everything == Outcome(None, pytest.approx(15.5), 10, 0.0, -1.0, 1.0, verified=True)
    assert opened == Outcome("open", 1.0, 10, 0.25, verified=True)
    assert closed == Outcome("close", verified=True)


def test_what_was_measured_of_memory_is_told():
    assert "peak of the whole process: 3.0 GiB" in text_of()
    assert "GPU" not in text_of()
    gpu = text_of(peak=Peak(process=None, gpu_plain=4 * 2**30, gpu_anchors=5 * 2**30))
    assert "peak of the GPU: 4.0 GiB, in steps with anchors 1.0 GiB more" in gpu
    assert "whole process" not in gpu
