"""`craft train` as a person types it; whole runs are in tests/training/test_run.py."""

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from lerobot_craft.cli import main
from lerobot_craft.cli.flags import check_names, parse_flags, train_flags
from lerobot_craft.cli.train import flag_of, split_flags
from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig
from tests.docs.known_flags import defaults_of, names_of


@pytest.mark.parametrize(
    "written",
    [["--craft.lambda_lr=0.5"], ["craft.lambda_lr=0.5"], ["--craft.lambda_lr", "0.5"]],
    ids=["one word", "bare", "two words"],
)
def test_three_spellings_are_the_same(written):
    assert split_flags(["--steps=3", *written, "--seed=1"]) == (["--lambda_lr=0.5"], ["--steps=3", "--seed=1"])


@pytest.mark.parametrize(
    ("written", "craft"),
    [
        (["--craft.anchor_cache_dir=runs/a=b"], ["--anchor_cache_dir=runs/a=b"]),
        (["craft.old_instructions=a; b=c"], ["--old_instructions=a; b=c"]),
        (["--craft.old_dataset.repo_id=me/a,me/b"], ["--old_dataset.repo_id=me/a,me/b"]),
        (["--craft.freeze="], ["--freeze="]),
        (["--craft.layers_to_save", "-2,-1"], ["--layers_to_save=-2,-1"]),
        (["--craft.old_instructions", "a=b"], ["--old_instructions=a=b"]),
    ],
)
def test_a_value_stays_as_it_was_written(written, craft):
    assert split_flags(written) == (craft, [])


@pytest.mark.parametrize("written", [["--craft.layers_to_save", "-2,-1"], ["--craft.conflict_threshold", "-0.2"]])
def test_a_value_may_begin_with_a_minus(written):
    from lerobot_craft.cli.flags import parse_flags
    from lerobot_craft.training.config import CraftConfig

    found = parse_flags(CraftConfig, split_flags(written)[0], "craft train")
    assert str(getattr(found, written[0].removeprefix("--craft."))) == written[1]


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ([], {"retention_mode": "action", "retention_freq": 1, "initial_lambda": 3.0}),
        (["craft.retention_mode=hidden"], {"retention_mode": "hidden", "retention_freq": 5, "initial_lambda": 1.0}),
        (
            ["--craft.hidden_layer=-1"],
            {"retention_mode": "hidden", "anchor_batch_size": 16, "anchor_source": "dataset"},
        ),
        (["--craft.retention_mode=hidden", "--craft.retention_freq=2"], {"retention_freq": 2, "lambda_min": 0.0}),
    ],
)
def test_what_is_left_open_follows_what_is_retained(flags, settings, monkeypatch):
    found = []

    def read(rest, craft_config):
        found.append(craft_config(None))
        return None, found[0]

    monkeypatch.setattr("lerobot_craft.training.run_settings.read_settings", read)
    monkeypatch.setattr("lerobot_craft.training.run.train", lambda cfg, craft, command: None)
    assert main(["train", *flags]) == 0
    assert {name: getattr(found[0], name) for name in settings} == settings


@pytest.mark.parametrize("rest", [[], ["--steps=3"], ["--craft.enabled=true"]], ids=["at the end", "flag", "own flag"])
def test_a_missing_value_is_named(rest):
    with pytest.raises(CraftError, match=r"--craft.lambda_lr needs a value: write --craft.lambda_lr=VALUE"):
        split_flags(["--craft.lambda_lr", *rest])


@pytest.mark.parametrize(
    "argv",
    [
        ["--job_name", "craft.first"],
        ["--output_dir=craft.out"],
        ["--dataset.repo_id=me/craft.x"],
        ["--policy.path", "craft/policy"],
        ["--craftsman=1"],
    ],
)
def test_what_only_looks_like_ours_is_lerobots(argv):
    assert split_flags(argv) == ([], argv)


@pytest.mark.parametrize(
    ("theirs", "now"),
    [
        (["--eval_freq=0"], ["--env_eval_freq=0"]),
        (["--eval_freq", "0"], ["--env_eval_freq", "0"]),
        (["--policy.pretrained_path=me/a=b"], ["--policy.path=me/a=b"]),
        (["--eval_freqs=0"], ["--eval_freqs=0"]),
        (["--job_name=--eval_freq"], ["--job_name=--eval_freq"]),
    ],
)
def test_names_of_the_documents_are_todays(theirs, now):
    assert split_flags(theirs) == ([], now)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_both_sets_of_flags(flag, capsys):
    assert main(["train", "--policy.type=act", "--craft.enabled=true", flag]) == 0
    said = capsys.readouterr().out
    ours, _, lerobots = said.partition("flags of lerobot-train:")
    assert "usage: craft train" in ours
    assert "--craft.lambda_lr" in ours
    assert "--craft.old_dataset.repo_id" in ours
    assert "--env_eval_freq" in lerobots
    assert "--policy.n_action_steps" in lerobots, "of the policy that was chosen"
    assert "--policy.vlm_model_name" not in lerobots, "and of no other"


def without_imports(*argv):
    """`craft train` in a process that cannot import torch or lerobot; the seconds of its own work."""
    code = (
        "import sys, time; sys.modules['torch'] = sys.modules['draccus'] = None; begun = time.process_time();"
        "from lerobot_craft.cli import main; code = main(sys.argv[1:]);"
        "print(time.process_time() - begun, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, "train", *argv], capture_output=True, text=True)
    *said, seconds = done.stderr.splitlines()
    return done.returncode, done.stdout, said, float(seconds)


def test_help_answers_at_once_with_the_ten_that_matter_first():
    code, said, _, seconds = without_imports("--help")
    assert (code, seconds < 1) == (0, True)
    first = re.findall(r"^  --(\S+)", said.partition("the flags of a first run:")[2], re.MULTILINE)[:10]
    assert {"policy.path", "dataset.repo_id", "output_dir", "craft.enabled", "craft.old_instructions"} <= set(first)
    flags = re.findall(r"^  --(craft\.\S+)((?: \(.*\))?\n +\S)?", said, re.MULTILINE)
    assert [name for name, text in flags if not text] == [], "each has a text"


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--craft.old_instruction=x", "--craft.old_instructions"),
        ("--batch_sise=4", "--batch_size"),
        ("--estimat", "--estimate"),
        ("--old_instructions=x", "--craft.old_instructions"),
        ("craft.lambda_rl=1", "--craft.lambda_lr"),
        ("--dataset.repo=x", "--dataset.repo_id"),
    ],
)
def test_a_misspelt_flag_is_found_at_once(flag, meant):
    code, _, said, seconds = without_imports(flag)
    assert (code, seconds < 1) == (2, True)
    assert said == [
        f"craft: unrecognized arguments: {flag}: did you mean {meant}? (`craft train --help` lists the flags)"
    ]


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["--policy.pat=x"], "--policy.path"),
        (["--policy.type=smolvla", "--policy.push_to_hbu=false"], "--policy.push_to_hub"),
        (["--policy.type", "act", "--policy.chunksize=8"], "--policy.chunk_size"),
    ],
)
def test_a_misspelt_flag_of_the_policy_is_found_too(argv, meant):
    with pytest.raises(CraftError, match=f"unrecognized arguments: {argv[-1]}: did you mean {meant}\\?"):
        check_names(argv, {})


@pytest.mark.parametrize("policy_type", ["smolvla", "pi0_fast", "act", "pi0_fast_tiny"])
def test_every_flag_of_a_policy_is_known(policy_type, tmp_path):
    import lerobot.policies  # noqa: F401  registers the policy types
    from lerobot.configs.policies import PreTrainedConfig

    import lerobot_craft.tiny  # noqa: F401

    (tmp_path / "config.json").write_text(json.dumps({"type": policy_type}))
    flags = [f"--policy.{field.name}=x" for field in fields(PreTrainedConfig.get_choice_class(policy_type))]
    check_names([f"--policy.path={tmp_path}", *flags], {})
    with pytest.raises(CraftError, match=r"did you mean --policy\.device"):
        check_names([f"--policy.path={tmp_path}", "--policy.devise=cpu"], {})


def test_every_flag_is_known_and_flags_of_types_are_left_to_lerobot():
    from lerobot.configs.train import TrainPipelineConfig

    known = train_flags()
    ours = {flag.removeprefix("--") for flag in defaults_of(CraftConfig, "craft.")}
    assert ours == {name for name in known if name.startswith("craft.")}
    lerobots = names_of(TrainPipelineConfig) - {"--checkpoint_path"}
    check_names(sorted(f"{flag}=x" for flag in lerobots), {})
    check_names(
        ["--policy.path=x", "--policy.any=1", "--env.type=x", "--env.discover_packages_path=a", "-2", "x=y"], {}
    )


def test_help_trains_nothing(tmp_path, capsys):
    assert main(["train", f"--output_dir={tmp_path / 'run'}", "--craft.lambda_lr=nonsense", "--help"]) == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--craft.lambda_lr"], "--craft.lambda_lr needs a value"),
        (["--craft.lambda_speed=1"], "unrecognized arguments: --craft.lambda_speed=1"),
        (["--craft.lambda_lr=fast"], "lambda_lr"),
        (["--craft.retention_freq=0"], "--craft.retention_freq must be at least 1"),
    ],
)
def test_a_wrong_flag_is_a_sentence_and_exit_code_2(flags, said, capsys):
    assert main(["train", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("craft: ")
    assert said in line


@pytest.mark.parametrize("value", ["\x1b", "*", "%s", "{", "[1", "a: b: c"])
def test_a_value_that_is_no_yaml_is_a_sentence(value):
    with pytest.raises(CraftError, match=r"`craft train --help` lists the flags"):
        parse_flags(CraftConfig, [f"--lambda_lr={value}"], "craft train", flag_of=flag_of)
