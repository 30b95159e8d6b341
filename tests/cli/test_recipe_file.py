"""Recipes: each that is shipped trains a small policy of its type; what is typed beside one wins."""

import json
from pathlib import Path

import pytest

from lerobot_craft.cli import main
from lerobot_craft.cli.flags import SHIPPED, check_names, with_recipe
from lerobot_craft.cli.train import split_flags

RECIPES = sorted(path.name for path in SHIPPED.glob("*.json"))
POLICIES = ("pi0_fast", "pi05", "smolvla", "act")
# Only the user knows: which policy and data, what it can do already, where to, on which machine, who looks on.
THE_USERS = ("policy.path", "policy.device", "policy.repo_id", "dataset.", "craft.old_", "craft.memory", "output_dir")
ELSEWHERE = ("wandb.", "env.", "eval.", "seed", "num_workers", "rename_map", "job")
SMALL = {"steps": 1, "batch_size": 2, "craft.num_anchors": 4, "craft.probe_anchors": 0}


def policy_of(recipe):
    return next(policy for policy in POLICIES if recipe.startswith(f"{policy}_"))


def _slow_where_large(recipe):
    """Prompts of 200 tokens make a step of pi0_fast slow; one pi05 is enough of the two."""
    slow = recipe.startswith("pi0_fast") or recipe == "pi05_lora_one_gpu_80gb.json"
    return pytest.param(recipe, marks=[pytest.mark.slow] if slow else [])


def settings_of(flags):
    return dict(flag.removeprefix("--").split("=", 1) for flag in flags)


def write(path, **sections):
    path.write_text(json.dumps(sections))
    return f"--config_path={path}"


def test_the_recipes_cover_what_the_page_promises():
    assert {policy_of(recipe) for recipe in RECIPES} == set(POLICIES)
    for part in ("one_gpu_24gb", "one_gpu_80gb", "lora", "many_gpus"):
        assert any(part in recipe for recipe in RECIPES), part


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_flags_that_exist_and_leaves_to_the_user_what_is_theirs(recipe):
    flags = with_recipe([f"--config_path=recipes/{recipe}"])
    check_names([f"--policy.type={policy_of(recipe)}", *flags], {})
    settings = settings_of(flags)
    assert settings["craft.enabled"] == "true"
    assert not [name for name in settings if name.startswith((*THE_USERS, *ELSEWHERE))]


@pytest.fixture
def old_data(anchor_data):
    return {
        "craft.old_dataset.repo_id": "local/old",
        "craft.old_dataset.root": anchor_data / "old",
        "craft.anchor_source": "dataset",
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", [_slow_where_large(recipe) for recipe in RECIPES if "many_gpus" not in recipe])
def test_a_recipe_trains_a_small_policy_of_its_type(recipe, train_flags, craft_train, old_data, tmp_path):
    run = tmp_path / "run"
    flags = train_flags(policy_of(recipe), run, **SMALL, **old_data)
    assert craft_train(f"--config_path=recipes/{recipe}", *flags) == 0

    saved = run / "checkpoints/last/pretrained_model"
    lerobot, craft = (json.loads((saved / f"{name}.json").read_text()) for name in ("train_config", "craft_config"))
    asked = json.loads((SHIPPED / recipe).read_text())
    assert asked.pop("craft").items() <= craft.items()
    for section in ("policy", "peft"):
        assert asked.pop(section, {}).items() <= (lerobot[section] or {}).items()
    assert {name: lerobot[name] for name in asked} == {name: SMALL.get(name, value) for name, value in asked.items()}


def test_the_recipe_for_many_gpus_wants_several_processes(train_flags, craft_train, old_data, tmp_path, capfd):
    """tests/distributed runs it on two."""
    (recipe,) = [recipe for recipe in RECIPES if "many_gpus" in recipe]
    assert craft_train(f"--config_path=recipes/{recipe}", *train_flags(policy_of(recipe), tmp_path, **old_data)) == 2
    assert "craft: --craft.shard spreads a policy over several processes" in capfd.readouterr().err


def test_what_is_typed_wins_and_everything_else_stays(tmp_path):
    recipe = write(
        tmp_path / "own.json",
        steps=20,
        policy={"dtype": "bfloat16", "gradient_checkpointing": True},
        peft={"method_type": "LORA", "r": 16, "target_modules": "a b"},
        craft={"enabled": True, "lambda_min": None, "merge_alphas": "0.5"},
    )
    typed = ["--policy.path=x", "--steps", "3", "--peft={r: 4}", "craft.enabled=false", "--policy.dtype=float32"]
    flags = with_recipe([typed[0], recipe, *typed[1:]])
    assert flags == [
        "--policy.gradient_checkpointing=true",
        "--craft.lambda_min=null",
        "--craft.merge_alphas=0.5",
        *typed,
    ]
    two_words = with_recipe(["--config_path", recipe.partition("=")[2], *typed])
    assert two_words == flags
    assert split_flags(flags)[0] == ["--lambda_min=null", "--merge_alphas=0.5", "--enabled=false"]


def test_what_has_no_craft_section_is_left_to_lerobot(tmp_path):
    (tmp_path / "train_config.json").write_text("{ cut off")
    saved = f"--config_path={tmp_path / 'train_config.json'}"
    plain = write(tmp_path / "plain.json", steps=3)
    elsewhere = [f"--config_path={place}" for place in ("me/run", tmp_path, "no.json", "x" * 5000 + ".json")]
    for argv in ([saved], [plain], *([place] for place in elsewhere), ["--steps=3"], ["--config_path"]):
        assert with_recipe(argv) == argv


def test_a_file_of_ones_own_comes_before_a_shipped_one_of_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = [f"--config_path=recipes/{RECIPES[0]}"]
    assert "--craft.enabled=true" in with_recipe(line)
    Path("recipes").mkdir()
    write(Path("recipes") / RECIPES[0], craft={"lambda_max": 7})
    assert with_recipe(line) == ["--craft.lambda_max=7"]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("smolvla", "no recipe of that name; the recipes are recipes/act_one_gpu_24gb.json, "),
        ("broken", "cannot be read as JSON (Expecting property name"),
        ("typo", "unrecognized arguments: --craft.lambda_maks=3: did you mean --craft.lambda_max? "),
    ],
)
def test_a_wrong_recipe_is_a_sentence(recipe, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/broken.json").write_text("{")
    write(Path("recipes/typo.json"), craft={"lambda_maks": 3})
    assert main(["train", f"--config_path=recipes/{recipe}.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
