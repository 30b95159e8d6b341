"""Every name of the original CRaFT notes is in one table, in both editions."""

import re

import pytest

from lerobot_craft.training.config import CraftConfig
from tests.docs.pages import ROOT

ENGLISH, CHINESE = ((ROOT / "docs" / name).read_text() for name in ("commands.md", "notes.zh-CN.md"))
FLAGS = [
    "enabled",
    "anchor_cache_dir",
    "anchor_batch_size",
    "retention_freq",
    "retention_mode",
    "hidden_layer",
    "pooling",
    "loss_type",
    "initial_lambda",
    "lambda_lr",
    "lambda_max",
    "epsilon_start",
    "epsilon_end",
    "epsilon_decay_steps",
    "use_grad_projection",
    "conflict_threshold",
    "projection_mode",
    "log_craft_metrics_freq",
    "save_lambda_history",
]
NAMES = [
    *FLAGS,
    *("hidden_multi_layer", "attention_map", "--num_samples", "--num_anchors", "--layers_to_save", "--out_dir"),
    *("compute_dot", "project_if_conflict", "merge_grads", "update_lambda", "compute_hidden_retention_loss"),
    *("extract_student_hidden_features", "pool_hidden_states", "identify_image_tokens", "CraftConfig"),
    *("target_features", "teacher_hidden", "labels", "meta.layers_to_save", "meta.pooling_strategy"),
    *("retention_loss", "student_hidden_norm", "target_features_norm"),
    *("lerobot.scripts.build_anchor_hidden_cache", "lerobot.scripts.build_anchor_cache"),
    *("lerobot.scripts.lerobot_train_craft", "scripts/train_craft.sh", "scripts/train_craft_hidden_dryrun.sh"),
    *("CRaFT enabled", "Retention Mode: hidden", "mode=", "L_ret=", "λ=", "ε=", "conflict=✓", "dot=", "cos="),
]


def rows(page):
    table = page.partition("<!-- names -->\n")[2].partition("\n\n")[0]
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["english", "chinese"])
def test_every_name_is_in_the_table(page):
    theirs = " ".join(row[0] for row in rows(page))
    written = [name for name in NAMES if not re.search(rf"`[^`]*{re.escape(name)}[^`]*`", theirs)]
    assert written == []


def test_both_editions_have_the_same_rows():
    def code(page):
        return [(re.findall(r"`[^`]+`", row[0]), sorted(re.findall(r"`[^`]+`", row[1]))) for row in rows(page)]

    assert code(CHINESE) == code(ENGLISH)
    assert len(code(ENGLISH)) > 25


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_is_one_of_ours(flag):
    assert hasattr(CraftConfig(), flag)
