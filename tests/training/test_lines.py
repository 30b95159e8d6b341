import pytest

from lerobot_craft.anchors.verify import Reproduction
from lerobot_craft.io.text import human_bytes, number
from lerobot_craft.training.config import CraftConfig, DocumentsConfig
from lerobot_craft.training.lines import aligned, banner, bar_text, start_lines, step_line, task_lines
from lerobot_craft.training.methods import METHODS
from lerobot_craft.training.methods.method import Cost
from lerobot_craft.training.start_checks import StartReport

STEP = {
    "step": 2,
    "loss": 2.1234,
    "grad_norm": 1.156,
    "lr": 1e-4,
    "update_s": 0.498,
    "dataloading_s": 0.011,
    "method": "craft",
    "mode": "hidden",
    "retention_loss": 0.789,
    "lambda": 1.019,
    "epsilon": 0.8333,
    "conflict": True,
    "dot": -0.189,
    "cos": -0.123,
    "task_norm": 1.0,
    "retention_s": 0.2,
}
LINE = (
    "Step 2/3 | loss=2.123 | grdn=1.156 | lr=1.0e-04 | updt_s=0.498 | data_s=0.011 | mode=hidden | L_ret=0.789 | "
    "λ=1.019 | ε=0.833 | conflict=✓ | dot=-0.189 | cos=-0.123"
)


def without(*keys):
    return {key: value for key, value in STEP.items() if key not in keys}


def test_the_step_line_is_the_specified_one():
    assert step_line(2, 3, STEP) == LINE


def test_conflict_is_only_there_when_it_happened():
    quiet = LINE.replace(" | conflict=✓", "")
    assert step_line(2, 3, {**STEP, "conflict": False}) == quiet
    assert step_line(2, 3, without("conflict")) == quiet


def test_what_was_not_measured_is_left_out():
    plain = step_line(2, 3, without("retention_loss", "lambda", "epsilon", "conflict", "dot", "cos"))
    assert plain == LINE.split(" | L_ret")[0]


def test_another_method_says_its_name_and_its_penalty():
    line = step_line(1, 10, {"loss": 1.0, "method": "l2sp", "penalty": 2e-5})
    assert line == "Step 1/10 | loss=1.000 | method=l2sp | penalty=2.0e-05"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (-0.0, "0.000"),
        (3.2e-5, "3.2e-05"),
        (-4.9e-4, "-4.9e-04"),
        (6e-4, "0.001"),
        (999999.0, "999999.000"),
        (1.25e7, "1.2e+07"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_a_number_that_is_not_zero_never_looks_like_zero(value, text):
    assert number(value) == text


def test_a_zero_learning_rate_and_a_zero_loss_are_shown():
    assert step_line(1, 1, {"loss": 0, "lr": 0.0}) == "Step 1/1 | loss=0.000 | lr=0.0e+00"


def test_the_bar_tells_multiplier_and_drift():
    assert bar_text({**STEP, "action_drift": 0.25}) == "λ=1.019 drift=0.789/0.833 action_drift=0.250"
    assert bar_text({"loss": 1.0}) == ""


def test_each_old_task_has_a_line_and_only_what_is_over_budget_is_marked():
    values = {
        "epsilon": 0.5,
        "retention_loss/open": 0.25,
        "lambda/open": 1.0,
        "action_drift/open": 0.125,
        "retention_loss/close it": 0.75,
        "lambda/close it": 2.0,
        "lambda/lift": 3.0,
    }
    assert task_lines(values, ["open", "close it", "lift"]) == [
        "  'open'     | L_ret=0.250/0.500 | λ=1.000 | action_drift=0.125",
        "  'close it' | L_ret=0.750/0.500 | λ=2.000 | over budget",
        "  'lift'     | λ=3.000",
    ]
    assert task_lines({}, ["open"]) == ["  'open' | not measured at this step"]
    assert task_lines({"epsilon": 0.5, "retention_loss/open": 0.5}, ["open"]) == ["  'open' | L_ret=0.500/0.500"]


def test_a_line_stays_one_line_whatever_the_instruction():
    (line,) = task_lines({"lambda/a\nb": 1.0}, ["a\nb"])
    assert "\n" not in line


def test_long_instructions_that_differ_at_the_end_stay_different():
    names = [f"{'please pick up the very small thing ' * 3}and put it into the {c} basket" for c in ("red", "green")]
    red, green = aligned(names)
    assert red != green
    assert len(red) == len(green) == 60


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (7 << 30, "7.0 GiB"),
        (1 << 43, "8192.0 GiB"),
    ],
)
def test_bytes_for_people(size, text):
    assert human_bytes(size) == text


def test_the_banner_says_every_setting_of_the_specification():
    changes = {"anchor_batch_size": 2, "retention_freq": 7, "lambda_lr": 0.02, "epsilon_decay_steps": 50}
    config = DocumentsConfig(enabled=True, **changes)
    text = banner(
        config,
        anchors=123,
        tasks=["a", "b"],
        cache_dir="data/cache",
        costs=[Cost("a second gradient", 3 << 20), Cost("decoded images", 1 << 20)],
        compute="some anchors",
    )
    assert text.splitlines() == [
        "Anchor cache: data/cache",
        "Anchor batch size: 2",
        "Retention frequency K: every 7 steps",
        "Number of anchors: 123 of 2 old tasks",
        "  'a'",
        "  'b'",
        "CRaFT enabled",
        "Retention Mode: hidden",
        "Initial lambda: 1 (one per old task, rule ascent)",
        "Lambda lr: 0.02, max: 10",
        "Epsilon: 1 -> 0.1 (linear over 50 steps; 1 = the spread of the teacher's hidden states on that task)",
        "Gradient projection: on",
        "Conflict threshold: -0.1 (cosine)",
        "Merge mode: weighted",
        "Normalization: keep (the teacher's statistics are kept)",
        "Compute beyond plain fine-tuning: some anchors",
        "Memory beyond plain fine-tuning: 4.0 MiB",
        "  3.0 MiB a second gradient",
        "  1.0 MiB decoded images",
    ]


def test_what_was_checked_before_the_first_step_is_told():
    fresh = StartReport(Reproduction(anchors=32, largest=1.25e-13, floor=1e-8), held=60, free=7)
    assert start_lines(fresh) == [
        "Retention reaches 60 of 67 trained tensors",
        "Drift at step 0: 1.2e-13 relative, over 32 anchors (rounding leaves at most 1e-08)",
    ]
    assert start_lines(StartReport(None, held=1, free=0)) == ["Retention reaches 1 of 1 trained tensor"]


def test_the_banner_follows_the_settings():
    config = CraftConfig(
        retention_mode="action", use_grad_projection=False, lambda_per_task=False, epsilon_unit="absolute"
    )
    text = banner(config)
    for words in (
        "none, the teacher is online",
        "Retention Mode: action",
        "one in all",
        "over all steps; unit: the loss itself",
        "Gradient projection: off",
        "Lambda lr: 0.01, max: 10, min: 3",
    ):
        assert words in text
    assert "1 = the teacher's own error on that task" in banner(CraftConfig(retention_mode="action"))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "craft"])
def test_other_methods_say_what_they_hold_and_nothing_of_the_constraint(method):
    text = banner(CraftConfig(method=method, freeze="readout"), costs=[Cost("a copy of the weights", 1 << 20)])
    first, second, *_ = text.splitlines()
    assert first == f"Method: {method}"
    assert second.startswith("It holds: ")
    assert "1.0 MiB a copy of the weights" in text
    assert "lambda lr" not in text.lower()
    assert "CRaFT enabled" not in text
