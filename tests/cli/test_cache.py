"""`craft cache` as a person types it; what it does is tested in tests/anchors."""

import re
import subprocess
import sys

import pytest

from lerobot_craft.cli import main
from lerobot_craft.cli.cache import flag_of
from lerobot_craft.cli.flags import parse_flags, take_policy_flags
from lerobot_craft.errors import CraftError


@pytest.fixture
def line(anchor_data, checkpoints, tmp_path):
    """The shortest useful command."""
    return [
        "cache",
        "build",
        f"--policy.path={checkpoints('pi0_fast')}",
        "--dataset.repo_id=local/old",
        f"--dataset.root={anchor_data / 'old'}",
        f"--output_dir={tmp_path / 'cache'}",
        "--num_samples=12",
    ]


def test_build_info_verify(line, checkpoints, tmp_path, capsys):
    assert main(line) == 0
    built = capsys.readouterr()
    assert "12 from dataset (12 frames of local/old" in built.out
    assert "12/12" in built.err  # the bar
    assert main(["cache", "info", str(tmp_path / "cache")]) == 0
    told = capsys.readouterr().out
    assert "action: the policy's output, up to 64 logits per token" in told
    assert re.search(r"bookkeeping \d+ B per anchor", told)
    assert "'press it'  unit (demonstrations, n=4)" in told
    assert main(["cache", "verify", str(tmp_path / "cache"), f"--policy.path={checkpoints('pi0_fast')}"]) == 0
    verified = capsys.readouterr().out
    assert "all checksums hold" in verified
    assert "the teacher reproduces 12 of them" in verified
    assert main(line) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main([*line, "--seed=1"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_the_documents_names_work_too(line, checkpoints, tmp_path, capsys):
    renamed = [
        argument.replace("--policy.path", "--policy.pretrained_path")
        .replace("--output_dir", "--out_dir")
        .replace("--num_samples", "--num_anchors")
        for argument in line
    ]
    assert main([*renamed, "--layers_to_save=-2,-1"]) == 0
    assert "hidden: layers 2, 3, pooling vision_mean+text_last" in capsys.readouterr().out


def test_a_damaged_cache_is_refused(line, tmp_path, capsys):
    assert main(line) == 0
    shard = tmp_path / "cache" / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert main(["cache", "verify", str(tmp_path / "cache")]) == 2
    error = capsys.readouterr().err
    assert "SHA-256 is not the one in the manifest" in error
    assert "craft cache build" in error


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("--pooling=meen", "pooling must be one of mean_image_tokens"),
        ("--retention_mode=hiden", "--retention_mode must be one of hidden, token_ce, action"),
        ("--hidden_layer=-9", "layer -9 does not exist: the backbone of this pi0_fast has 4 layers"),
        ("--anchor_source=cross", "--new_dataset.repo_id"),
        ("--num_samples=many", "num_samples"),
        ("--num_smaples=3", "num_smaples"),
        ("--dataset.root=/nowhere", "--dataset.root"),
        ("--policy.path=/nowhere", "no checkpoint directory /nowhere"),
        ("--inputs=copied", "--inputs must be embedded or reference"),
        ("--policy.no_such_setting=1", "no such setting"),
    ],
)
def test_a_wrong_flag_is_one_sentence(change, sentence, line, capsys):
    name = change.partition("=")[0]
    assert main([argument for argument in line if not argument.startswith(name)] + [change]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_pooling_and_per_token_exclude_each_other(line, capsys):
    assert main([*line, "--per_token=true", "--pooling=mean_masked"]) == 2
    assert "give one of the two" in capsys.readouterr().err


def test_the_teacher_must_be_named(capsys):
    assert main(["cache", "build", "--output_dir=x"]) == 2
    assert "--policy.path=DIR" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "code"), [(["cache"], 2), (["cache", "--help"], 0)])
def test_help(argv, code, capsys):
    assert main(argv) == code
    assert "craft cache build" in capsys.readouterr().out


def test_an_unknown_action(capsys):
    assert main(["cache", "biuld"]) == 2
    assert "use build, info, verify" in capsys.readouterr().err


def test_policy_flags_are_taken_in_both_spellings():
    flags, rest = take_policy_flags(
        ["--policy.path", "a", "--seed=1", "--policy.device=cpu", "--policy.discover_packages_path=x,y"]
    )
    assert (flags.path, flags.overrides, flags.plugins, rest) == ("a", ("--device=cpu",), ("x", "y"), ["--seed=1"])
    assert take_policy_flags(["--discover_packages_path=x"])[0].plugins == ("x",)
    with pytest.raises(CraftError, match="needs a value"):
        take_policy_flags(["--policy.path", "--seed=1"])


def test_help_of_build_lists_every_flag():
    from lerobot_craft.anchors.recipe import BuildConfig

    done = subprocess.run(
        [sys.executable, "-m", "lerobot_craft", "cache", "build", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    for name in BuildConfig.__dataclass_fields__:
        assert flag_of(name) in done.stdout
    assert "--num_anchors" not in done.stdout
    assert "--old_dataset" not in done.stdout
    with pytest.raises(SystemExit):
        parse_flags(BuildConfig, ["--help"], "craft cache build")


@pytest.mark.parametrize("lost", ["dataset", "new_dataset"])
def test_a_dataset_that_is_not_there_is_named_by_its_own_flag(lost, checkpoints, anchor_data, tmp_path, capsys):
    roots = {"dataset": anchor_data / "old", "new_dataset": anchor_data / "new"} | {lost: tmp_path / "nowhere"}
    argv = [f"--{flag}.{part}" for flag, root in roots.items() for part in (f"repo_id=local/{flag}", f"root={root}")]
    argv += [f"--policy.path={checkpoints('pi0_fast')}", f"--output_dir={tmp_path / 'cache'}", "--anchor_source=both"]
    assert main(["cache", "build", *argv]) == 2
    assert f"data/ as --{lost}.root, or leave --{lost}.root out" in capsys.readouterr().err
