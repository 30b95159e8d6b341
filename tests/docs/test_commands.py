"""Lines that people copy from README and docs: verbs, flags, targets and scripts that they name must exist."""

import argparse
import functools
import re
import shlex

import pytest

from lerobot_craft.cli import VERBS, bench, cache, demo, doctor, report
from tests.docs.known_flags import names_of, options_of, parser_of
from tests.docs.pages import PAGES, ROOT, flag_lists, name, shell_lines

COPIED = re.compile(r"^(?:\w+=\S+ )*(craft|make|bash scripts/|accelerate launch|torchrun|python -m lerobot_craft)\b")
LEFT_OUT = re.compile(r"^(\.\.\.|\[?[^-].*\]|\[the|flags|of|)$")  # in place of flags: `...`, `[the flags of the run]`
# Names of other releases, and what lerobot's parser takes out before draccus reads the rest.
EXTRA = {
    "--help",
    "--config_path",
    "--discover_packages_path",
    "--eval_freq",
    "--policy.path",
    "--policy.pretrained_path",
}


def copied_lines():
    """(page, line) of every command line that is ours; flags that a page keeps in a variable stand as a training."""
    for page in PAGES:
        text = page.read_text()
        for line in (*shell_lines(text), *(f"craft train {flags}" for flags in flag_lists(text))):
            if COPIED.match(line):
                yield pytest.param(line, id=f"{name(page)}: {line[:60]}")


LINES = list(copied_lines())


@functools.cache
def train_flags():
    import lerobot.policies  # noqa: F401  registers the policy types
    from lerobot.configs.train import TrainPipelineConfig

    import lerobot_craft.bench.metaworld.configuration
    import lerobot_craft.tiny  # noqa: F401
    from lerobot_craft.training.config import CraftConfig
    from lerobot_craft.training.estimate import EstimateConfig

    ours = names_of(CraftConfig, "craft.") | names_of(EstimateConfig, "estimate.") | {"--estimate"}
    return names_of(TrainPipelineConfig) | ours | EXTRA


def of_policy(flags):
    return {flag for flag in flags if flag.startswith("--policy.")} | EXTRA


@functools.cache
def flags_of(verb):
    """Every flag that a verb takes."""
    from lerobot_craft.anchors.recipe import BuildConfig
    from lerobot_craft.evaluation.acting import ListenFlags
    from lerobot_craft.lerobot_api.env_flags import EvalFlags, RememberFlags

    if verb == "train":
        return train_flags()
    if verb == "cache build":
        own = {cache.flag_of(field.removeprefix("--")) for field in names_of(BuildConfig)}
        return own | {"--num_anchors", "--out_dir"} | of_policy(train_flags())
    if verb == "cache verify":
        return of_policy(train_flags())
    if verb == "cache info":
        return {"--help"}
    if verb == "eval":
        return names_of(EvalFlags) | {"--env.discover_packages_path"} | of_policy(train_flags())
    if verb == "listen":
        return names_of(ListenFlags) | of_policy(train_flags())
    if verb == "remember":
        own = {"--list", "--verify", "--forget", "--env.discover_packages_path"}
        return names_of(RememberFlags) | own | of_policy(train_flags())
    module = {"bench": bench, "demo": demo, "report": report, "doctor": doctor}[verb]
    return {*options_of(module.run), "--help"}


def check_craft(words):
    """The words after `craft`."""
    verb, *rest = words
    if verb in ("--help", "--version"):
        return
    assert verb in {*VERBS, "VERB"}, f"there is no verb {verb}"
    if verb == "VERB" or not rest:
        return
    if verb == "cache":
        assert rest[0] in ("build", "info", "verify"), f"there is no craft cache {rest[0]}"
        verb, rest = f"cache {rest[0]}", rest[1:]
    rest = [word.strip("[]") for word in rest if not LEFT_OUT.match(word)]
    typed = [f"--{word}" if word.startswith("craft.") else word for word in rest]
    named = {word.partition("=")[0] for word in typed if word.startswith("-")}
    assert named <= flags_of(verb), f"craft {verb} has no {', '.join(named - flags_of(verb))}"
    if verb == "train":
        check_values(typed)


def check_values(words):
    from lerobot_craft.cli.flags import parse_flags
    from lerobot_craft.cli.train import flag_of, split_flags
    from lerobot_craft.training.config import config_class

    flags = [flag for flag in split_flags(words)[0] if not flag.endswith("=...")]
    parse_flags(config_class(flags), flags, "craft train", flag_of=flag_of)


@functools.cache
def targets():
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check_line(line):
    words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    words = words[: words.index("|")] if "|" in words else words
    match words:
        case ["make", *named]:
            assert set(named) <= targets(), f"there is no target {set(named) - targets()}"
        case ["bash", script, *_]:
            assert (ROOT / script).is_file(), f"there is no {script}"
        case ["python", "-m", "lerobot_craft.tiny", *rest]:
            from lerobot_craft.tiny.__main__ import main

            parser_of(main).parse_args(rest)
        case ["craft", *rest]:
            check_craft(rest)
        case [_, *_] if "lerobot_craft" in words:
            check_craft(words[words.index("lerobot_craft") + 1 :])
        case _:
            raise AssertionError(f"not understood: {line}")


def test_the_pages_have_command_lines():
    """If a pattern here broke, there would be none, and nothing would fail."""
    found = [line.values[0] for line in LINES]
    assert len(found) > 60
    for verb in (*VERBS, "cache build", "cache info", "cache verify"):
        assert [line for line in found if re.search(rf"\b(craft|lerobot_craft) {verb}\b", line)], verb


@pytest.mark.parametrize("line", LINES)
def test_a_line_can_be_typed(line):
    check_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "craft trian --steps=3",
        "craft train --craft.retention_frequency=2",
        "craft train --craft.retention_freq=often",
        "craft train --policy.optimiser_lr=1",
        "craft train craft.enabeld=true",
        "craft cache burn anchors",
        "craft cache build --num_sample=3",
        "craft bench ... --list-cell",
        "craft eval a=b --env.typ=libero",
        "accelerate launch -m lerobot_craft train --craft.shards=true",
        "python -m lerobot_craft.tiny --output_directory=x",
        "make demos",
        "bash scripts/train_graft.sh",
    ],
)
def test_a_wrong_line_is_found(line, capsys):
    from lerobot_craft.errors import CraftError

    with pytest.raises((AssertionError, CraftError, SystemExit, argparse.ArgumentError)):
        check_line(line)
