import sys
from types import ModuleType, SimpleNamespace

import pytest

from lerobot_craft.lerobot_api.pretrained import load_policy
from lerobot_craft.lerobot_api.train_config import parse_train_config
from lerobot_craft.lerobot_api.train_steps import eval_flags, push_policy


def run_with_policy_of(module):
    """Settings of a run without an environment, whose policy's config class is defined in that module."""
    config = type("OwnConfig", (), {"__module__": module})()
    return SimpleNamespace(policy=config, env=None)


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("mine.policies.configuration_x", "mine.policies"),
        ("one_file", "one_file"),
        ("lerobot.policies.act.configuration_act", None),
        ("lerobot_policy_x.configuration_x", None),
    ],
)
def test_lerobot_eval_is_told_to_import_what_it_does_not_find_by_itself(module, package):
    assert eval_flags(run_with_policy_of(module)).get("discover_packages_path") == package


@pytest.mark.parametrize(("file", "package"), [("/somewhere/own_policy.py", "own_policy"), (None, None)])
def test_a_script_is_imported_by_the_name_of_its_file_and_a_notebook_not_at_all(monkeypatch, file, package):
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert eval_flags(run_with_policy_of("__main__")).get("discover_packages_path") == package


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # in lerobot's template of a card
@pytest.mark.parametrize("card", ["---\ntags:\n- craft\n---\nours", None])
def test_what_is_pushed_has_our_card_where_there_is_one(card, train_flags, tmp_path, monkeypatch):
    pushed = {}

    class Hub:
        """What lerobot calls of the Hub, which is out of reach here."""

        def create_repo(self, repo_id, **_):
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, folder_path, **_):
            pushed.update({path.name: path.read_text() for path in folder_path.glob("*.md")})
            return SimpleNamespace(repo_url=SimpleNamespace(url="there"))

    monkeypatch.setattr("lerobot.policies.pretrained.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.ModelCard.validate", lambda card: None)  # the Hub would do that
    cfg = parse_train_config(
        train_flags("act", tmp_path / "run", policy__push_to_hub="true", policy__repo_id="me/policy")
    )
    push_policy(cfg, load_policy(cfg.policy), (), SimpleNamespace(meta=None), card)
    assert ("ours" in pushed["README.md"]) == (card is not None)
    assert ("library_name: lerobot" in pushed["README.md"]) == (card is None)


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # in lerobot's template of a card
def test_a_memory_is_pushed_in_a_commit_of_its_own(train_flags, tmp_path, monkeypatch):
    """lerobot uploads a temporary directory, which has none."""
    pushed = []

    class Hub:
        """What is called of the Hub, which is out of reach here."""

        def create_repo(self, repo_id, **_):
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, folder_path, path_in_repo=None, **_):
            pushed.append((path_in_repo, sorted(path.name for path in folder_path.iterdir())))
            return SimpleNamespace(repo_url=SimpleNamespace(url="there"))

    for place in ("lerobot.policies.pretrained.HfApi", "huggingface_hub.HfApi"):
        monkeypatch.setattr(place, Hub)
    monkeypatch.setattr("huggingface_hub.ModelCard.validate", lambda card: None)  # the Hub would do that
    memory = tmp_path / "craft_memory"
    memory.mkdir()
    (memory / "manifest.json").touch()
    cfg = parse_train_config(
        train_flags("act", tmp_path / "run", policy__push_to_hub="true", policy__repo_id="me/policy")
    )
    push_policy(cfg, load_policy(cfg.policy), (), SimpleNamespace(meta=None), None, memory)
    (_, first), second = pushed
    assert "craft_memory" not in first
    assert second == ("craft_memory", ["manifest.json"])
