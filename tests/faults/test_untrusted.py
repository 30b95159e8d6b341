"""A cache and a checkpoint are data: whatever code lies in them stays asleep unless somebody says that it may run.

Each planted file would make a canary sing: a file appears. With CRAFT_TRUST_REMOTE_CODE=1 it does, so the traps work.
"""

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest

from lerobot_craft.anchors.teacher import load_teacher
from lerobot_craft.cli import main
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.foreign_code import TRUST
from lerobot_craft.lerobot_api.pretrained import load_policy_config
from tests.anchor_fixtures import POLICIES
from tests.anchors.small_cache import assert_refused, build_cache, put, use
from tests.anchors.test_lies import edit_manifest
from tests.anchors.test_teacher_pi0_fast import edit_json, move_tokenizers
from tests.tiny.test_stock_commands import REACH

PICKLES = (
    *("pytorch_model.bin", "adapter_model.bin", "model.pt", "model.pkl"),
    *("optimizer.pt", "scheduler.pt", "random_states_0.pkl"),
)


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, canary):
        self._canary = canary

    def __reduce__(self):
        return Path.touch, (self._canary,)


@pytest.fixture
def canary(tmp_path, monkeypatch):
    # What is planted under one name within a second looks alike to Python, which would run the code it compiled before.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "canary"


def plant_pickles(directory, canary):
    for name in PICKLES:
        (directory / name).write_bytes(pickle.dumps(Trap(canary)))


def test_the_trap_works(canary, tmp_path):
    plant_pickles(tmp_path, canary)
    pickle.loads((tmp_path / PICKLES[0]).read_bytes())  # noqa: S301  # that is the point
    assert canary.exists()


def test_pickles_stay_asleep_in_a_checkpoint_and_in_a_cache(checkpoints, canary, tmp_path):
    policy = shutil.copytree(checkpoints("act"), tmp_path / "policy")
    build_cache(tmp_path / "cache")
    for directory in (policy, tmp_path / "cache"):
        plant_pickles(directory, canary)
    load_teacher(policy)
    use(tmp_path / "cache", verify=True)
    assert not canary.exists()


def test_a_pickle_in_the_place_of_an_adapter_stays_asleep(checkpoints, canary, tmp_path):
    """PEFT falls back to `adapter_model.bin` where there is no adapter_model.safetensors."""
    from lerobot_craft.lerobot_api.rollouts import load_player
    from tests.tiny.reach_env import ReachEnvConfig

    base, adapter = checkpoints("smolvla"), tmp_path / "adapter"
    adapter.mkdir()
    for name in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"):
        shutil.copy(base / name, adapter)
    edit_json(adapter / "config.json", lambda content: content.update(use_peft=True, input_features={}))
    lora = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "target_modules": ["action_in_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(lora))
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Trap(canary), protocol=2))  # as torch writes
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load_player(adapter, ReachEnvConfig())
    assert not canary.exists()


@pytest.mark.slow  # two runs
@pytest.mark.timeout(300)
def test_pickles_stay_asleep_in_checkpoints_caches_and_resumed_runs(
    checkpoints, build, train_flags, craft_train, canary, tmp_path, tally
):
    policy = shutil.copytree(checkpoints("act"), tmp_path / "policy")
    cache, run = build("act", retention_mode="action"), tmp_path / "run"
    for directory in (policy, cache):
        plant_pickles(directory, canary)
    own = ["--craft.enabled=true", "--craft.retention_mode=action", f"--craft.anchor_cache_dir={cache}"]
    assert craft_train(*train_flags("act", run, policy__path=policy, steps=1), *own) == 0
    for part in ("pretrained_model", "training_state"):
        plant_pickles(run / "checkpoints/last" / part, canary)
    settings = run / "checkpoints/last/pretrained_model/train_config.json"
    assert craft_train(f"--config_path={settings}", "--resume=true", "--steps=2") == 0
    assert not canary.exists()
    tally.add("planted pickles", "asleep", 4 * len(PICKLES))


def test_a_processor_step_may_not_be_any_class(checkpoints, canary, tmp_path, monkeypatch, tally):
    policy = shutil.copytree(checkpoints("act"), tmp_path / "policy")
    trap = {"class": "os.mkdir", "config": {"path": str(canary)}}
    edit_json(policy / "policy_postprocessor.json", lambda content: content["steps"].append(trap))
    with pytest.raises(CraftError, match=r"name 'os\.mkdir', which is no processor step"):
        load_teacher(policy)
    assert not canary.exists()
    tally.add("planted processor steps", "refused")
    monkeypatch.setenv(TRUST, "1")
    with pytest.raises((CraftError, TypeError, AttributeError)):  # lerobot called it, and has no step in its hands
        load_teacher(policy)
    assert canary.exists()


def test_a_processor_step_may_not_be_any_class_in_training_either(
    checkpoints, train_flags, craft_train, canary, tmp_path, capfd
):
    policy = shutil.copytree(checkpoints("act"), tmp_path / "policy")
    trap = {"class": "os.mkdir", "config": {"path": str(canary)}}
    edit_json(policy / "policy_preprocessor.json", lambda content: content["steps"].insert(0, trap))
    for enabled in ("false", "true"):
        own = [f"--craft.enabled={enabled}", "--craft.method=naive"]
        assert craft_train(*train_flags("act", tmp_path / "run", policy__path=policy), *own) == 2
        assert "name 'os.mkdir', which is no processor step" in capfd.readouterr().err
    assert not canary.exists()


@pytest.fixture
def model_with_code(canary, tmp_path):
    """A model's directory that transformers would run a file of, if it is told to trust it."""
    directory = tmp_path / "model_with_code"
    directory.mkdir()
    (directory / "trap.py").write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\nclass Trap: ...\n")
    code = {"AutoConfig": "trap.Trap", "AutoModel": "trap.Trap", "AutoProcessor": "trap.Trap"}
    for name in ("config.json", "processor_config.json"):
        (directory / name).write_text(json.dumps({"model_type": "unheard_of", "auto_map": code}))
    return directory


def topreward(model, tmp_path):
    named = "lerobot.rewards.topreward.processor_topreward.TOPRewardEncoderProcessorStep"
    return {"class": named, "config": {"vlm_name": str(model)}}


def reward_classifier(model, tmp_path):
    place = tmp_path / "classifier"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"type": "reward_classifier", "model_name": str(model)}))
    return {"registry_name": "reward_classifier_processor", "config": {"pretrained_path": str(place)}}


RUNNING = ("topreward", "reward_classifier", "gaussian_actor")


@pytest.fixture(params=RUNNING)
def running_policy(request, checkpoints, model_with_code, tmp_path):
    """A checkpoint that runs the model's code, and what is said of it."""
    policy = shutil.copytree(checkpoints("act"), tmp_path / "policy")
    if request.param == "gaussian_actor":
        config = json.loads((policy / "config.json").read_text())
        kept = {name: config[name] for name in ("input_features", "output_features", "device")}
        of_type = {"type": "gaussian_actor", "vision_encoder_name": str(model_with_code)}
        (policy / "config.json").write_text(json.dumps(kept | of_type))
        return policy, "of the type 'gaussian_actor' names with trust_remote_code=True"
    step = {"topreward": topreward, "reward_classifier": reward_classifier}[request.param](model_with_code, tmp_path)
    edit_json(policy / "policy_preprocessor.json", lambda content: content["steps"].append(step))
    return policy, "which is no processor step that is known to run no code"


def test_a_model_that_a_checkpoint_names_runs_no_code(running_policy, canary, monkeypatch, tally):
    policy, sentence = running_policy
    with pytest.raises(CraftError, match=f"{sentence}.* set {TRUST}=1"):
        load_teacher(policy)
    assert not canary.exists()
    tally.add("planted models with code", "refused")
    monkeypatch.setenv(TRUST, "1")
    with pytest.raises((CraftError, AttributeError)):  # it ran, and is no model
        load_teacher(policy)
    assert canary.exists()


# All three are judged at the same place; a run's start takes seconds.
@pytest.mark.parametrize(
    "running_policy", [RUNNING[0], pytest.param(RUNNING[1], marks=pytest.mark.slow), RUNNING[2]], indirect=True
)
def test_nor_does_it_in_training_and_in_evaluation(running_policy, train_flags, craft_train, canary, tmp_path, capfd):
    policy, sentence = running_policy
    for enabled in ("false", "true"):
        own = [f"--craft.enabled={enabled}", "--craft.method=naive"]
        assert craft_train(*train_flags("act", tmp_path / "run", policy__path=policy), *own) == 2
        assert sentence in capfd.readouterr().err
    flags = [*REACH, "--env.task=red", "--policy.device=cpu", f"--output_dir={tmp_path / 'evaluation'}"]
    assert main(["eval", str(policy), *flags]) == 2
    assert sentence in capfd.readouterr().err
    assert not canary.exists()


@pytest.mark.parametrize("policy_type", POLICIES)
def test_every_checkpoint_that_is_made_here_may_be_loaded(checkpoints, policy_type):
    assert load_policy_config(checkpoints(policy_type)).pretrained_path == checkpoints(policy_type)


@pytest.fixture
def pi0_fast(checkpoints, tmp_path):
    """A checkpoint whose tokenizers a test may tamper with."""
    policy = shutil.copytree(checkpoints("pi0_fast"), tmp_path / "pi0_fast")
    move_tokenizers(policy, tmp_path / "assets")
    return policy


def test_a_tokenizer_with_code_of_its_own_is_refused(pi0_fast, canary, tmp_path, monkeypatch, tally):
    (module,) = (tmp_path / "assets").rglob("*.py")
    load_teacher(pi0_fast)  # that module is a copy of ours
    module.write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n{module.read_text()}")
    with pytest.raises(CraftError, match=rf"brings code of its own \({module.name}\), which lerobot would run"):
        load_teacher(pi0_fast)
    assert not canary.exists()
    tally.add("planted tokenizer modules", "refused")
    monkeypatch.setenv(TRUST, "1")
    load_teacher(pi0_fast)
    assert canary.exists()


def test_code_beside_a_tokenizer_that_names_no_code_stays_asleep(checkpoints, canary, tmp_path, tally):
    policy = shutil.copytree(checkpoints("smolvla"), tmp_path / "policy")
    before = Path(json.loads((policy / "config.json").read_text())["vlm_model_name"])
    vlm = shutil.copytree(before, tmp_path / "vlm")
    for file in (policy / "config.json", policy / "policy_preprocessor.json"):
        file.write_text(file.read_text().replace(str(before), str(vlm)))
    (vlm / "trap.py").write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\nclass Trap: pass\n")
    settings = vlm / "tokenizer_config.json"
    edit_json(settings, lambda content: content.update(auto_map={"AutoTokenizer": [None, "trap.Trap"]}))
    load_teacher(policy)  # lerobot asks transformers for its own class, which it prefers
    assert not canary.exists()
    tally.add("planted tokenizer modules", "asleep")


def test_a_manifest_cannot_make_us_read_elsewhere(tmp_path, tally):
    secret = tmp_path / "secret.safetensors"
    ways = ("/etc/hostname", str(secret), "../secret.safetensors", "/dev/zero", "sub/../../secret.safetensors", "", ".")
    for number, way in enumerate(ways):
        cache = tmp_path / f"cache_{number}"
        build_cache(cache)
        shutil.copy(cache / "shard-00000.safetensors", secret)
        edit_manifest(cache, lambda content, way=way: content["shards"][0].update(file=way))
        assert_refused(cache)
        tally.add("paths out of a cache", "refused")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/full", "/dev/stdin", "/proc/self/mem"])
def test_a_link_to_a_device_is_refused_and_one_to_other_bytes_too(device, tmp_path, tally):
    for name in ("manifest.json", "manifest.sha256", "shard-00001.safetensors"):
        cache = tmp_path / name
        build_cache(cache)
        (cache / name).unlink()
        (cache / name).symlink_to(device)
        assert_refused(cache)
        tally.add("paths out of a cache", "refused")


def test_a_link_is_followed_to_the_right_bytes_only(tmp_path):
    # The Hub's own download directory is made of links: these must work, and no others can do harm.
    build_cache(tmp_path / "cache")
    shard = tmp_path / "cache" / "shard-00001.safetensors"
    blob = shutil.move(shard, tmp_path / "blob")
    shard.symlink_to(blob)
    use(tmp_path / "cache", verify=True)
    data = bytearray(Path(blob).read_bytes())
    data[-1] ^= 1
    put(Path(blob), data)
    assert_refused(tmp_path / "cache")
