"""Everything behind `--craft.`: the specification's defaults, what is refused, and where each setting goes."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from lerobot_craft.anchors.recipe import AnchorConfig, BuildConfig, DatasetFlags, DocumentsBuild
from lerobot_craft.cli.flags import parse_flags, spelled
from lerobot_craft.cli.train import flag_of
from lerobot_craft.core import Dual, Surgery
from lerobot_craft.errors import CraftError
from lerobot_craft.training.checkpoints import CRAFT_CONFIG_FILE
from lerobot_craft.training.config import CraftConfig, DocumentsConfig
from lerobot_craft.training.methods.registry import make_method
from lerobot_craft.training.run_settings import save_craft_config

SPECIFIED = {
    "enabled": False,
    "anchor_cache_dir": None,
    "anchor_batch_size": 16,
    "retention_freq": 5,
    "retention_mode": "hidden",
    "initial_lambda": 1.0,
    "lambda_lr": 0.01,
    "lambda_max": 10.0,
    "epsilon_start": 1.0,
    "epsilon_end": 0.1,
    "epsilon_decay_steps": 0,
    "use_grad_projection": True,
    "conflict_threshold": -0.1,
    "projection_mode": "weighted",
    "log_craft_metrics_freq": 100,
    "save_lambda_history": True,
}
# Where the bench knows better (docs/bench.md).
MEASURED = {
    "anchor_batch_size": 0,  # as many as new samples
    "retention_freq": 1,
    "retention_mode": "action",
    "anchor_source": "auto",
    "num_anchors": None,  # by the policy: tests/anchors/test_recipe.py
    "walked_states": 0.5,
    "drawn_states": 0.7,
    "num_draws": None,  # by the length of training
    "dual_rule": None,  # by what there is to measure on
    "initial_lambda": 3.0,
    "lambda_min": None,  # where it starts
}
# Another value than the default for every setting, all of them valid together.
OTHER = {
    "enabled": True,
    "method": "l2sp",
    "normalization": "merge",
    "preload": True,
    "save_minutes": 2.5,
    "strict": True,
    "anchor_cache_dir": Path("caches/a=b"),
    "anchor_share": 0.25,
    "anchor_batch_size": 3,
    "accumulate": 2,
    "retention_freq": 2,
    "retention_mode": "token_ce",
    "loss_type": "l1",
    "teacher": "online",
    "anchor_source": "cross",
    "old_dataset": DatasetFlags("local/a,local/b", "data/a,data/b", "v1"),
    "old_instructions": "open the door; 关上抽屉",
    "num_anchors": 7,
    "old_frames": 3,
    "memory": "off",
    "remember": 20,
    "memory_bytes": 2**20,
    "walked_states": 0.75,
    "drawn_states": 0.25,
    "draw_from": "statistics",
    "state_jitter": 0.5,
    "hidden_layer": "-3",
    "layers_to_save": "-2,-1",
    "pooling": "cls_token",
    "per_token": False,  # beside a pooling it may not be true: see PER_TOKEN
    "relative": True,
    "freeze_readout": False,
    "top_k": 5,
    "num_draws": 4,
    "lambda_per_task": False,
    "dual_rule": "pi",
    "initial_lambda": 2.0,
    "lambda_lr": 0.02,
    "lambda_min": 0.5,
    "lambda_max": 4.0,
    "lambda_fall_rate": 0.25,
    "lambda_gain": 3.0,
    "lambda_smoothing": 0.75,
    "epsilon_start": 0.8,
    "epsilon_end": 0.2,
    "epsilon_decay_steps": 10,
    "epsilon_decay": "cosine",
    "epsilon_unit": "absolute",
    "use_grad_projection": False,
    "conflict_threshold": -0.5,
    "projection_mode": "equal",
    "task_max_norm": 2.5,
    "retention_max_norm": 1.5,
    "replay_frames": 11,
    "replay_ratio": 0.5,
    "l2sp_alpha": 0.1,
    "ewc_lambda": 10.0,
    "ewc_samples": 12,
    "lwf_lambda": 2.0,
    "merge_alphas": "0.1,0.9",
    "freeze": "readout,*.vision*",
    "log_craft_metrics_freq": 9,
    "probe_anchors": 8,
    "shard": True,
    "master_weights": True,
    "check_ranks_freq": 7,
    "save_lambda_history": False,
}
PER_TOKEN = OTHER | {"per_token": True, "pooling": None}


@pytest.mark.parametrize("name", SPECIFIED)
def test_the_documents_defaults_are_the_specifications(name):
    assert getattr(DocumentsConfig(), name) == SPECIFIED[name]


@pytest.mark.parametrize("name", MEASURED)
def test_the_defaults_are_those_of_the_bench(name):
    assert getattr(CraftConfig(), name) == MEASURED[name]


def test_training_and_building_agree_on_what_is_left_open():
    for training, building in ((CraftConfig, BuildConfig), (DocumentsConfig, DocumentsBuild)):
        old, new = DatasetFlags("local/old"), DatasetFlags("local/new")
        settings = training(old_dataset=old).anchor_settings()
        assert BuildConfig(**settings, output_dir=Path("here"), new_dataset=new) == BuildConfig(
            **dataclasses.asdict(building(output_dir=Path("here"))) | {"old_dataset": old, "new_dataset": new}
        )


@pytest.mark.parametrize(
    ("old", "reads_instruction", "source"),
    [("local/old", True, "both"), ("", True, "cross"), ("local/old", False, "dataset"), ("", False, "dataset")],
)
def test_auto_takes_all_that_there_is(old, reads_instruction, source):
    assert CraftConfig(old_dataset=DatasetFlags(old)).source(reads_instruction) == source
    assert CraftConfig(old_dataset=DatasetFlags(old), anchor_source="cross").source(reads_instruction) == "cross"


@pytest.mark.parametrize(("name", "specified"), [("hidden_layer", "-2"), ("pooling", "mean_image_tokens")])
def test_what_is_unset_is_the_specifications_where_a_cache_is_built(name, specified, teachers):
    assert getattr(DocumentsConfig(), name) is None
    teacher = teachers("pi0_fast")
    from lerobot_craft.policies import adapter_for

    adapter = adapter_for(teacher.config)
    retained = DocumentsConfig().retained(adapter, teacher.policy)
    found = {"hidden_layer": retained.layers, "pooling": retained.pooling}
    assert found[name] == (adapter.resolve(teacher.policy, specified) if name == "hidden_layer" else specified)


# Setting -> (values that are refused, what the sentence says).
REFUSED = {
    "method": (["magic"], r"--craft.method must be one of craft, naive, .*; got 'magic'"),
    "normalization": (["none"], r"--craft.normalization must be one of keep, merge, replace; got 'none'"),
    "anchor_share": ([-0.1, 1.0, math.nan], r"--craft.anchor_share must be 0 or more and less than 1; got"),
    "anchor_batch_size": ([-1], r"--craft.anchor_batch_size must be 0 or more; got -1"),
    "retention_freq": ([0], r"--craft.retention_freq must be at least 1; got 0"),
    "retention_mode": (["logits"], r"--craft.retention_mode must be one of hidden, token_ce, action; got 'logits'"),
    "loss_type": (["huber"], r"--craft.loss_type must be one of mse, cosine, l1, kl; got 'huber'"),
    "teacher": (["offline"], r"--craft.teacher must be one of cache, online; got 'offline'"),
    "anchor_source": (["new"], r"--craft.anchor_source must be one of auto, dataset, cross, both; got 'new'"),
    "num_anchors": ([0], r"--craft.num_anchors must be at least 1; got 0"),
    "pooling": (["none", "max"], r"--craft.pooling must be one of (?!.*none,).*mean_image_tokens.*; got '(none|max)'"),
    "top_k": ([0], r"--craft.top_k must be at least 1; got 0"),
    "num_draws": ([0], r"--craft.num_draws must be at least 1; got 0"),
    "dual_rule": (["adam"], r"--craft.dual_rule must be one of ascent, pi, log, ratio; got 'adam'"),
    "initial_lambda": (
        [-0.1, 10.1, math.nan],
        r"--craft: initial_lambda must lie in \[0.0, 10.0\]",
    ),
    "lambda_lr": ([-1, math.inf, math.nan], r"--craft: lambda_lr must be finite and not negative"),
    "lambda_min": ([-1, 11, math.nan], r"--craft: 0 <= lambda_min <= lambda_max < infinity must hold"),
    "lambda_max": ([-1, math.inf, math.nan], r"--craft: 0 <= lambda_min <= lambda_max < infinity must hold"),
    "lambda_fall_rate": ([-0.1, 1.1, math.nan], r"fall_rate must lie in \[0, 1\]"),
    "lambda_gain": ([-1, math.inf, math.nan], r"gain must be finite and not negative"),
    "lambda_smoothing": ([-0.1, 1.0, math.nan], r"smoothing must lie in \[0, 1\)"),
    "epsilon_start": ([-1, math.inf, math.nan], r"--craft: a budget is finite and not negative"),
    "epsilon_end": ([-1, math.inf, math.nan], r"--craft: a budget is finite and not negative"),
    "epsilon_decay_steps": ([-1], r"--craft.epsilon_decay_steps must be 0 or more; got -1"),
    "epsilon_decay": (["step"], r"--craft.epsilon_decay must be one of linear, cosine, exponential; got 'step'"),
    "epsilon_unit": (["mm"], r"--craft.epsilon_unit must be one of teacher, absolute; got 'mm'"),
    "conflict_threshold": ([-1.1, 0.1, math.nan], r"--craft: conflict_threshold is a cosine"),
    "projection_mode": (["sum"], r"--craft.projection_mode must be one of weighted, equal, task_priority; got 'sum'"),
    "task_max_norm": ([0, -1, math.nan], r"--craft: task_max_norm must be positive"),
    "retention_max_norm": ([0, -1, math.nan], r"--craft: retention_max_norm must be positive"),
    "replay_frames": ([0], r"--craft.replay_frames must be at least 1; got 0"),
    "replay_ratio": ([0, -1, math.inf, math.nan], r"--craft.replay_ratio must be positive and finite"),
    "l2sp_alpha": ([0, -1, math.inf, math.nan], r"--craft.l2sp_alpha must be positive and finite"),
    "ewc_lambda": ([0, -1, math.inf, math.nan], r"--craft.ewc_lambda must be positive and finite"),
    "ewc_samples": ([0], r"--craft.ewc_samples must be at least 1; got 0"),
    "lwf_lambda": ([0, -1, math.inf, math.nan], r"--craft.lwf_lambda must be positive and finite"),
    "log_craft_metrics_freq": ([-1], r"--craft.log_craft_metrics_freq must be 0 or more; got -1"),
    "probe_anchors": ([-1], r"--craft.probe_anchors must be 0 or more; got -1"),
    "remember": ([-1], r"--craft.remember must be 0 or more; got -1"),
    "memory_bytes": ([0], r"--craft.memory_bytes must be at least 1; got 0"),
    "check_ranks_freq": ([-1], r"--craft.check_ranks_freq must be 0 or more; got -1"),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (values, _) in REFUSED.items() for value in values]
)
def test_a_setting_out_of_its_range_is_refused_when_it_is_made(name, value):
    with pytest.raises(CraftError, match=REFUSED[name][1]), spelled(flag_of):
        CraftConfig(**{name: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"log_craft_metrics_freq": 0, "probe_anchors": 0, "epsilon_decay_steps": 0},
        {"epsilon_start": 0.0, "epsilon_end": 0.0, "lambda_lr": 0.0},
        {"initial_lambda": 0.0, "lambda_max": 0.0},
        {"conflict_threshold": 0.0, "task_max_norm": math.inf, "retention_max_norm": math.inf},
        {"anchor_batch_size": 1, "retention_freq": 1, "num_anchors": 1},
        {"dual_rule": "log", "lambda_min": 1e-3},
    ],
)
def test_the_ends_of_a_range_are_in_it(settings):
    CraftConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"retention_mode": "attention_map"}, "docs/adding-a-retention-mode.md"),
        ({"dual_rule": "log", "lambda_min": 0.0}, "set lambda_min > 0"),
        ({"epsilon_decay": "exponential", "epsilon_end": 0.0}, "exponential decay needs a positive start and end"),
        ({"per_token": True, "pooling": "cls_token"}, "give one of the two"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, said):
    with pytest.raises(CraftError, match=said):
        CraftConfig(**settings)


def test_the_multipliers_rule_gets_every_setting_of_its_own():
    assert DocumentsConfig().dual() == Dual()
    assert CraftConfig().dual() == Dual(initial_lambda=3.0, lambda_min=3.0)
    assert CraftConfig(**OTHER).dual() == Dual("pi", 2.0, 0.02, 0.5, 4.0, 0.25, 3.0, 0.75)


def test_each_gradient_and_their_sum_are_bounded_by_the_optimizers_clip():
    assert CraftConfig().surgery(1.0) == Surgery(True, -0.1, "weighted", 1.0, 1.0, 1.0)
    assert CraftConfig(**OTHER).surgery(1.0) == Surgery(False, -0.5, "equal", 2.5, 1.5, 1.0)


def test_without_projection_only_the_sum_is_bounded():
    added = CraftConfig(use_grad_projection=False)
    assert added.surgery(1.0) == Surgery(use_grad_projection=False, merged_max_norm=1.0)
    assert added.surgery(1.0).is_sum
    assert not dataclasses.replace(added, retention_max_norm=2.0).surgery(1.0).is_sum
    assert not dataclasses.replace(added, projection_mode="equal").surgery(1.0).is_sum


def test_what_is_left_open_depends_on_whether_multipliers_follow_real_frames():
    floored, following = CraftConfig(), CraftConfig().following()
    assert floored.dual() == Dual("ascent", 3.0, 0.01, 3.0, 10.0)
    assert floored.budget() == (1.0, 0.1)
    assert following.dual() == Dual("ratio", 3.0, 0.3, 3.0, 10.0, fall_rate=0.5, proportional_gain=2.0)
    assert following.budget() == (1.0, 1.0)
    assert CraftConfig(epsilon_end=0.2).following().budget() == (0.2, 0.2)
    assert CraftConfig(dual_rule="ascent").following() == CraftConfig(dual_rule="ascent")
    assert CraftConfig(epsilon_end=0.2).following().dual().lambda_min == 0.1
    assert CraftConfig(epsilon_end=0.2).dual().lambda_min == 3.0
    assert CraftConfig(initial_lambda=0.05, epsilon_end=0.2).following().dual().lambda_min == 0.05


@pytest.mark.parametrize("clips_nothing", [0.0, -1.0])
def test_where_lerobot_clips_nothing_there_is_no_bound(clips_nothing):
    config = CraftConfig()
    assert config.surgery(clips_nothing) == Surgery()
    assert dataclasses.replace(config, task_max_norm=2.0).surgery(clips_nothing) == Surgery(task_max_norm=2.0)


def test_the_budget_falls_over_all_steps_or_over_those_that_are_given():
    whole = CraftConfig()
    assert [whole.epsilon(step, 11) for step in (0, 5, 10, 20)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert whole.epsilon(0, 1) == 1.0
    short = CraftConfig(epsilon_decay_steps=4)
    assert [short.epsilon(step, 10) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    cosine = CraftConfig(epsilon_decay="cosine")
    assert cosine.epsilon(2, 9) == pytest.approx(1 - 0.9 * (1 - math.sqrt(0.5)) / 2)


ORDER = """
enabled method normalization preload save_minutes anchor_cache_dir anchor_share anchor_batch_size accumulate
retention_freq retention_mode loss_type teacher memory remember memory_bytes anchor_source old_dataset old_instructions
strict num_anchors old_frames walked_states drawn_states draw_from state_jitter hidden_layer layers_to_save
pooling per_token relative freeze_readout top_k num_draws lambda_per_task dual_rule initial_lambda lambda_lr
lambda_min lambda_max lambda_fall_rate lambda_gain lambda_smoothing epsilon_start epsilon_end
epsilon_decay_steps epsilon_decay epsilon_unit use_grad_projection conflict_threshold projection_mode
task_max_norm retention_max_norm replay_frames replay_ratio l2sp_alpha ewc_lambda ewc_samples lwf_lambda
merge_alphas freeze log_craft_metrics_freq probe_anchors save_lambda_history shard master_weights
check_ranks_freq
"""


@pytest.mark.parametrize("settings", [OTHER, PER_TOKEN], ids=["pooled", "per_token"])
def test_a_cache_is_built_by_the_same_wishes(settings):
    config = CraftConfig(**settings)
    shared = {field.name for field in dataclasses.fields(AnchorConfig)}
    assert config.anchor_settings() == {name: settings[name] for name in shared}
    assert AnchorConfig(**config.anchor_settings()) == AnchorConfig(**{name: settings[name] for name in shared})


def test_files_list_the_settings_in_the_order_of_earlier_releases():
    order = CraftConfig().in_order()
    assert sorted(order) == sorted(field.name for field in dataclasses.fields(CraftConfig))
    assert order == ORDER.split()


def test_an_origin_is_named_by_data_or_by_instructions():
    assert not CraftConfig().names_an_origin
    assert CraftConfig(old_dataset=DatasetFlags("local/old")).names_an_origin
    assert CraftConfig(old_instructions="wave").names_an_origin
    assert not CraftConfig(anchor_cache_dir=Path("cache")).names_an_origin


def test_the_table_of_other_values_has_every_setting():
    fields = {field.name: getattr(CraftConfig(), field.name) for field in dataclasses.fields(CraftConfig)}
    assert set(OTHER) == set(fields)
    assert {name for name in fields if fields[name] == OTHER[name]} == {"per_token"}


@pytest.mark.parametrize("settings", [{}, OTHER, PER_TOKEN], ids=["defaults", "other", "per_token"])
def test_what_a_checkpoint_saves_is_read_back(settings, tmp_path):
    config = CraftConfig(**settings)
    save_craft_config(config, tmp_path)
    saved = tmp_path / CRAFT_CONFIG_FILE
    assert set(json.loads(saved.read_text())) == {field.name for field in dataclasses.fields(CraftConfig)}
    assert parse_flags(CraftConfig, [], "craft train", saved) == config


def test_flags_go_over_what_a_checkpoint_saved(tmp_path):
    save_craft_config(CraftConfig(**OTHER), tmp_path)
    flags = ["--lambda_lr=0.5", "--old_dataset.revision=v2", "--anchor_cache_dir=other"]
    found = parse_flags(CraftConfig, flags, "craft train", tmp_path / CRAFT_CONFIG_FILE)
    changed = {"lambda_lr": 0.5, "anchor_cache_dir": Path("other")}
    assert found == CraftConfig(
        **OTHER | changed | {"old_dataset": dataclasses.replace(OTHER["old_dataset"], revision="v2")}
    )


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CraftConfig)])
def test_every_setting_has_a_flag(field):
    if field == "old_dataset":
        flags = [f"--old_dataset.{name}={value}" for name, value in dataclasses.asdict(OTHER[field]).items()]
    else:
        flags = [f"--{field}={str(OTHER[field]).lower() if isinstance(OTHER[field], bool) else OTHER[field]}"]
    others = {"initial_lambda": 0.75, "lambda_max": 4.0}  # so that each bound of the multipliers may move alone
    with_others = [f"--{name}={value}" for name, value in others.items() if name != field]
    found = parse_flags(CraftConfig, [*with_others, *flags], "craft train")
    assert found == CraftConfig(**others | {field: OTHER[field]})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[1]", r"holds \[1\] and no settings"),
        ("null", "holds None and no settings"),
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ('{"enabled": null}', "enabled is null"),  # would be plain fine-tuning, without a word
        ('{"retention_freq": null}', "retention_freq is null"),
        ('{"lambda_lr": []}', "`lambda_lr`: "),
        ('{"old_dataset": null}', "old_dataset is null"),
        ('{"lambda": 1}', "`lambda` are not valid"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--lambda_max=3"]], ids=["alone", "with a flag"])
def test_saved_settings_that_are_none_are_refused_by_file_and_name(content, problem, flags, tmp_path):
    saved = tmp_path / CRAFT_CONFIG_FILE
    saved.write_text(content)
    with pytest.raises(CraftError, match=rf"{CRAFT_CONFIG_FILE}.*{problem}.* copy the checkpoint again") as refusal:
        parse_flags(CraftConfig, flags, "craft train", saved)
    assert str(saved) in str(refusal.value)


@pytest.mark.parametrize(
    ("batch_size", "craft", "new", "anchors"),
    [
        (64, {}, 64, 64),
        (64, {"anchor_batch_size": 16}, 64, 16),
        (64, {"anchor_share": 0.375}, 40, 24),
        (8, {"anchor_share": 0.375}, 5, 3),
        (2, {"anchor_share": 0.375}, 1, 1),
        (64, {"anchor_share": 0.9}, 6, 58),
        (2, {"anchor_share": 0.9}, 1, 1),
        (64, {"anchor_share": 0.001}, 63, 1),
    ],
    ids=str,
)
def test_anchors_take_places_of_a_batch_if_they_are_given_a_share(batch_size, craft, new, anchors):
    settled = CraftConfig(enabled=True, **craft).divided(batch_size)
    assert (settled.new_samples(batch_size), settled.anchor_batch_size) == (new, anchors)
    again = settled.divided(batch_size)  # as a resumed run does
    assert (again.new_samples(batch_size), again.anchor_batch_size) == (new, anchors)


def test_with_craft_off_new_samples_have_the_whole_batch():
    assert CraftConfig(anchor_share=0.5).new_samples(64) == 64


@pytest.mark.parametrize(
    ("batch_size", "craft", "sentence"),
    [
        (1, {"anchor_share": 0.5}, "anchor_share=0.5 needs a --batch_size of 2 or more"),
        (64, {"anchor_share": 0.5, "anchor_batch_size": 16}, "makes 32 anchors, and anchor_batch_size is 16"),
    ],
)
def test_a_batch_that_cannot_be_divided_so_is_refused(batch_size, craft, sentence):
    with pytest.raises(CraftError, match=sentence):
        CraftConfig(enabled=True, **craft).divided(batch_size)


@pytest.mark.parametrize("method", ["naive", "er", "l2sp"])
def test_a_share_for_anchors_is_refused_where_there_are_none(method):
    with pytest.raises(CraftError, match=f"method={method} has no anchors: leave out anchor_share"):
        make_method(CraftConfig(enabled=True, method=method, anchor_share=0.5))
