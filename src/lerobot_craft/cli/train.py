"""`craft train`: lerobot-train, and the skills stay."""

import sys
from collections.abc import Sequence

from lerobot_craft.cli.flags import parse_flags
from lerobot_craft.errors import CraftError

_USAGE = """usage: craft train [flags of lerobot-train] [--craft.x=y ...]

lerobot-train, with a constraint that what the policy could do before stays within a budget. Without
--craft.enabled=true it is lerobot-train to the bit. Start from a policy that can do things (--policy.path) and
say what to keep: only the old instructions (--craft.old_instructions="open the door; close the drawer"), or also old
data (--craft.old_dataset.repo_id), or a cache of `craft cache build` (--craft.anchor_cache_dir).

What is left open is what held the old skills in the bench: actions are retained. With --craft.retention_mode=hidden
or token_ce it is as the documents of the first CRaFT have it.

go on after an interruption:
  craft train --config_path=OUTPUT_DIR/checkpoints/last/pretrained_model/train_config.json --resume=true

flags of craft, each behind --craft. (docs/commands.md has whole lines to start from):
"""
_CRAFT = "craft."
# Names of earlier lerobot releases that the documents of the first CRaFT use.
_ALIASES = {"--eval_freq": "--env_eval_freq", "--policy.pretrained_path": "--policy.path"}


def run(argv: list[str]) -> int:
    """Train and return 0; what is wrong with flags, data or anchors is raised before the first step."""
    craft_flags, rest = split_flags(argv)
    if not {"-h", "--help"}.isdisjoint(argv):
        return _help(rest)
    import lerobot_craft.tiny  # noqa: F401  registers the policies that it makes
    from lerobot_craft.training.documents import config_class
    from lerobot_craft.training.run import train
    from lerobot_craft.training.settings import read_settings

    settings = config_class(craft_flags)
    cfg, craft = read_settings(rest, lambda saved: parse_flags(settings, craft_flags, "craft train", saved, _CRAFT))
    train(cfg, craft)
    return 0


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """CRaFT's flags without their prefix, and lerobot's; `--craft.x=y`, `--craft.x y` and `craft.x=y` are the same."""
    craft: list[str] = []
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        # Without dashes and without = it is the value of the flag before it, such as a job's name.
        if not name.startswith((f"--{_CRAFT}", _CRAFT) if equals else f"--{_CRAFT}"):
            rest.append(f"{_ALIASES.get(name, name)}{equals}{value}")
            continue
        if not equals:
            value = next(arguments, "--")
            if value.startswith("--"):
                raise CraftError(f"{name} needs a value: write {name}=VALUE")
        # As one word: argparse takes a value such as -2,-1 for a flag.
        craft.append(f"--{name.removeprefix('--').removeprefix(_CRAFT)}={value}")
    return craft, rest


def _help(rest: Sequence[str]) -> int:
    from lerobot_craft.lerobot_api.train_flags import print_train_help
    from lerobot_craft.training.config import CraftConfig

    print(_USAGE)
    try:
        parse_flags(CraftConfig, ["--help"], "craft train")
    except SystemExit:
        print("\nflags of lerobot-train:\n", flush=True)
    print_train_help([argument for argument in rest if argument not in ("-h", "--help")])
    sys.stdout.flush()
    return 0
