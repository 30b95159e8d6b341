"""lerobot's settings and CRaFT's, read together: what a checkpoint saved, flags over it, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

import lerobot_craft.tiny  # noqa: F401  registers the policies that it makes
from lerobot_craft.cli.flags import parse_flags
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.pretrained import load_policy_config
from lerobot_craft.training.card_sections import success_section
from lerobot_craft.training.checkpoints import CRAFT_CONFIG_FILE, CRAFT_STATE, claim_run_dir, save_craft_state
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.run_settings import as_json, read_settings, save_craft_config

ENABLED = ("--enabled=true",)


def read(flags, *craft_flags):
    return read_settings(flags, lambda saved: parse_flags(CraftConfig, craft_flags, "craft train", saved))


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def saved_run(anchor_data, checkpoints, run_dir):
    """Function that leaves the settings of a run as its checkpoint has them, and returns their directory."""

    def save(craft: CraftConfig | None) -> Path:
        from lerobot.configs.default import DatasetConfig
        from lerobot.configs.train import TrainPipelineConfig

        policy = load_policy_config(checkpoints("act"), ["--push_to_hub=false"])
        data = DatasetConfig("local/new", root=str(anchor_data / "new"))
        directory = run_dir / "checkpoints" / "000002" / "pretrained_model"
        directory.mkdir(parents=True)
        TrainPipelineConfig(data, policy=policy, output_dir=run_dir, batch_size=2).save_pretrained(directory)
        if craft is not None:
            save_craft_config(craft, directory)
            save_craft_state(directory.parent, {})
        return directory

    return save


def test_a_fresh_run_has_both_halves(train_flags, run_dir, checkpoints):
    cfg, craft = read(train_flags("act", run_dir, steps=7), "--enabled=true", "--lambda_lr=0.5")
    assert (cfg.steps, cfg.output_dir, cfg.policy.type) == (7, run_dir, "act")
    assert cfg.policy.pretrained_path == checkpoints("act")
    assert (craft.enabled, craft.lambda_lr, craft.lambda_max) == (True, 0.5, 10.0)
    assert not run_dir.exists(), "reading settings writes nothing"


@pytest.mark.parametrize("spelling", ["file", "directory", "two words"])
def test_a_resumed_run_has_what_was_saved_and_flags_go_over_it(spelling, saved_run):
    directory = saved_run(CraftConfig(enabled=True, lambda_lr=0.5, retention_freq=3))
    file = directory / "train_config.json"
    flags = {
        "file": [f"--config_path={file}"],
        "directory": [f"--config_path={directory}"],
        "two words": ["--config_path", str(file)],
    }[spelling]
    cfg, craft = read([*flags, "--resume=true", "--steps=9"], "--lambda_lr=0.25")
    assert (cfg.resume, cfg.steps, cfg.batch_size, cfg.checkpoint_path) == (True, 9, 2, directory.parent)
    assert (craft.enabled, craft.lambda_lr, craft.retention_freq) == (True, 0.25, 3)


@pytest.mark.parametrize("name", [CRAFT_CONFIG_FILE, "train_config.json"])
def test_a_resumed_run_takes_changes_as_flags_and_not_from_an_edited_file(name, saved_run):
    directory = saved_run(CraftConfig(enabled=True, lambda_lr=0.5))
    edited = directory / name
    edited.write_text(edited.read_text().replace("0.5", "0.25").replace('"batch_size": 2', '"batch_size": 3'))
    with pytest.raises(CraftError, match=f"{name} is not what was saved, .* takes changes as flags"):
        read([f"--config_path={directory / 'train_config.json'}", "--resume=true"])


@pytest.mark.parametrize("resume", [["--resume=true"], ["--output_dir=other"]], ids=["resumed", "begun"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: [],
        lambda content: None,
        lambda content: {},
        lambda content: content | {"dataset": None},
        lambda content: content | {"policy": []},
        lambda content: content | {"policy": {"type": None}},
        lambda content: content | {"batch_size": None},
        lambda content: content | {"batch_size": "many"},
        lambda content: content | {"steps": {}},
        lambda content: content | {"wheels": 4},
    ],
)
def test_lerobots_settings_that_are_none_are_refused_by_file(damage, resume, saved_run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    file = saved_run(None) / "train_config.json"
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    with pytest.raises(CraftError, match=r"train_config\.json|--batch_size must be at least 1; got None"):
        read([f"--config_path={file}", *resume])


def test_a_checkpoint_without_craft_is_gone_on_with_as_lerobot_train_does(saved_run):
    file = saved_run(None) / "train_config.json"
    cfg, craft = read([f"--config_path={file}", "--resume=true"])
    assert cfg.resume
    assert craft == CraftConfig()


def test_a_checkpoint_that_lost_its_craft_settings_is_not_gone_on_with(saved_run):
    directory = saved_run(None)
    save_craft_state(directory.parent, {})
    with pytest.raises(CraftError, match=r"craft_config\.json is missing, and craft_state\.json says"):
        read([f"--config_path={directory / 'train_config.json'}", "--resume=true"])
    save_craft_config(CraftConfig(enabled=True), directory)
    with pytest.raises(CraftError, match=r"CRaFT is off, .* was trained with it"):
        read([f"--config_path={directory / 'train_config.json'}", "--resume=true"], "--enabled=false")
    (directory.parent / CRAFT_STATE).unlink()
    (directory / "craft_config.json").unlink()
    (directory / "README.md").write_text(success_section("0" * 64, "Not evaluated."))
    with pytest.raises(CraftError, match=r"craft_config\.json is missing, and README\.md says"):
        read([f"--config_path={directory / 'train_config.json'}", "--resume=true"])


def test_a_whole_command_resumes_or_starts_over(saved_run, train_flags, run_dir, checkpoints):
    flags = train_flags("act", run_dir, steps=7, seed=1000)  # lerobot's default, which the saved run has
    cfg, _ = read([*flags, "--resume=true"], *ENABLED)
    assert (cfg.resume, cfg.policy.pretrained_path) == (False, checkpoints("act"))
    with pytest.raises(CraftError, match=r"holds no checkpoint\. Run the command that started the run again"):
        read([f"--output_dir={run_dir}", "--resume=true"])
    lost = run_dir / "checkpoints" / "last" / "pretrained_model" / "train_config.json"
    with pytest.raises(CraftError, match="saved no checkpoint to resume from"):
        read([f"--config_path={lost}", "--resume=true"])
    directory = saved_run(CraftConfig(enabled=True, lambda_lr=0.5))
    (directory.parent / "training_state" / "training_step.json").write_text("{}")
    for resumed in (flags, [f"--output_dir={run_dir}"], [f"--config_path={lost}"]):
        cfg, craft = read([*resumed, "--resume=true"])
        assert (cfg.resume, cfg.checkpoint_path, craft.lambda_lr) == (True, directory.parent, 0.5)


def test_a_checkpoint_without_craft_has_no_teacher(saved_run):
    directory = saved_run(None)
    with pytest.raises(CraftError, match="written without CRaFT") as refusal:
        read([f"--config_path={directory / 'train_config.json'}", "--resume=true"], *ENABLED)
    assert f"--policy.path={directory}" in str(refusal.value)


def test_settings_of_a_checkpoint_can_begin_a_new_run(saved_run, tmp_path, checkpoints):
    file = saved_run(CraftConfig(enabled=True, lambda_lr=0.5)) / "train_config.json"
    cfg, craft = read([f"--config_path={file}", f"--output_dir={tmp_path / 'again'}"])
    assert (cfg.resume, craft.lambda_lr) == (False, 0.5)
    assert cfg.policy.pretrained_path == checkpoints("act")


def test_a_checkpoint_that_lerobot_brings_from_the_hub_keeps_its_craft_settings(saved_run, tmp_path, monkeypatch):
    directory = saved_run(CraftConfig(enabled=True, lambda_lr=0.5))

    def brought(repo_id: str, output_dir: Path) -> Path:
        return Path(shutil.copytree(directory.parent, output_dir / "checkpoints" / "000002"))

    from lerobot.configs.train import TrainPipelineConfig

    def from_hub(cls, path, **options):
        return known(directory if str(path) == "me/run" else path, **options)

    known = TrainPipelineConfig.from_pretrained
    monkeypatch.setattr(TrainPipelineConfig, "from_pretrained", classmethod(from_hub))
    monkeypatch.setattr("lerobot.common.train_utils.resolve_resume_checkpoint", brought)
    flags = ["--config_path=me/run", "--resume=true", f"--output_dir={tmp_path / 'here'}"]
    cfg, craft = read(flags)
    assert cfg.checkpoint_path == tmp_path / "here/checkpoints/000002"
    assert (craft.enabled, craft.lambda_lr) == (True, 0.5), "a run under a constraint must not go on without it"


def test_resume_and_another_policy_exclude_each_other(saved_run, checkpoints):
    file = saved_run(CraftConfig(enabled=True)) / "train_config.json"
    with pytest.raises(CraftError, match=r"leave out --policy.path"):
        read([f"--config_path={file}", "--resume=true", f"--policy.path={checkpoints('act')}"])


def test_craft_needs_a_policy_that_can_do_something(run_dir, anchor_data):
    flags = ["--dataset.repo_id=local/new", f"--dataset.root={anchor_data / 'new'}", "--policy.type=act"]
    flags += ["--policy.device=cpu", f"--output_dir={run_dir}"]
    with pytest.raises(CraftError, match=r"--policy.path=DIR"):
        read(flags, *ENABLED)
    cfg, _ = read(flags)
    assert cfg.policy.pretrained_path is None


@pytest.fixture
def on_the_hub(checkpoints, tmp_path, monkeypatch) -> Path:
    """A policy `me/act` as the Hub's client keeps it: the directory of its snapshot."""
    import huggingface_hub

    snapshot = tmp_path / "hub" / "models--me--act" / "snapshots" / ("0" * 40)
    shutil.copytree(checkpoints("act"), snapshot)
    for name in ("main", "v1"):
        ref = tmp_path / "hub" / "models--me--act" / "refs" / name
        ref.parent.mkdir(exist_ok=True)
        ref.write_text(snapshot.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


@pytest.mark.parametrize(
    "written",
    [["--policy.path=me/act"], ["--policy.path", "me/act", "--policy.pretrained_revision=v1"]],
    ids=["one word", "two words"],
)
def test_a_policy_of_the_hub_is_where_it_was_downloaded_to(written, train_flags, run_dir, on_the_hub):
    rest = train_flags("act", run_dir, policy__path=None)
    cfg, _ = read([*rest[:3], *written, *rest[3:]], *ENABLED)
    assert cfg.policy.pretrained_path == on_the_hub
    assert (cfg.policy.device, cfg.steps, cfg.seed) == ("cpu", 3, 7), "the flags around it stay"


def test_a_revision_that_is_not_there_is_refused(train_flags, run_dir, on_the_hub):
    flags = train_flags("act", run_dir, policy__path="me/act", policy__pretrained_revision="v2")
    with pytest.raises(CraftError, match="There is no checkpoint directory me/act"):
        read(flags, *ENABLED)


def test_without_craft_lerobot_itself_looks_the_policy_up(train_flags, run_dir, on_the_hub, monkeypatch):
    monkeypatch.setattr("lerobot_craft.training.run_settings.local_checkpoint", None)
    cfg, _ = read(train_flags("act", run_dir, policy__path="me/act"))
    assert (cfg.policy.type, str(cfg.policy.pretrained_path)) == ("act", "me/act")


@pytest.mark.parametrize("flags", [ENABLED, ()], ids=["with CRaFT", "without"])
def test_a_setting_that_cannot_be_read_is_named_with_its_file(flags, train_flags, run_dir, checkpoints, tmp_path):
    copy = shutil.copytree(checkpoints("act"), tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | {"n_heads": "many"}))
    with pytest.raises(CraftError, match=r"copy/config\.json: `n_heads`: .*Copy the checkpoint again"):
        read(train_flags("act", run_dir, policy__path=copy), *flags)


@pytest.mark.parametrize("resume", [[], ["--resume=false"]], ids=["unset", "false"])
def test_a_directory_that_a_killed_run_left_empty_is_used_again(resume, train_flags, run_dir):
    run_dir.mkdir()
    (run_dir / ".craft.pid").write_text("1 on another machine\n")
    cfg, _ = read([*train_flags("act", run_dir), *resume])
    assert cfg.output_dir == run_dir


def test_only_the_main_process_makes_way(train_flags, run_dir, monkeypatch):
    run_dir.mkdir()
    (run_dir / "kept").write_text("by another rank")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CraftError, match=r"exists already: give another one"):
        read(train_flags("act", run_dir))
    assert (run_dir / "kept").exists()


def test_a_directory_in_use_is_refused_before_lerobot_looks_at_it(train_flags, run_dir):
    with claim_run_dir(run_dir, resume=False), pytest.raises(CraftError, match="is in use by process"):
        read(train_flags("act", run_dir))


def test_a_resumed_run_finds_its_directory_full(saved_run):
    file = saved_run(CraftConfig(enabled=True)) / "train_config.json"
    run_dir = file.parents[3]
    cfg, _ = read([f"--config_path={file}", f"--output_dir={run_dir}", "--resume=true"])
    assert cfg.output_dir == run_dir
    assert file.exists()


def test_craft_settings_are_json_beside_the_policy(tmp_path):
    craft = CraftConfig(enabled=True, anchor_cache_dir=tmp_path / "cache")
    save_craft_config(craft, tmp_path)
    text = (tmp_path / CRAFT_CONFIG_FILE).read_text()
    assert json.loads(text) == as_json(craft)
    assert text.endswith("}\n")
