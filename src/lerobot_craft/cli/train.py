"""`craft train`: lerobot-train that keeps the old skills."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lerobot_craft.cli.flags import check_names, help_text, parse_flags, spelled, with_recipe
from lerobot_craft.errors import CraftError
from lerobot_craft.io.argv import renamed, split, take_flags, value_of, without

_USAGE = """usage: craft train [flags of lerobot-train] [--craft.x=y ...]

lerobot-train, with a constraint that what the policy could do before stays within a budget. Without
--craft.enabled=true it is lerobot-train to the bit. Start from a policy that can do things (--policy.path). What to
keep is found in its memory (`craft remember`); or it is given as old data (--craft.old_dataset.repo_id), or only as the
old instructions (--craft.old_instructions="open the door; close the drawer").

What is left open is what held the old skills in the bench: actions are retained. With --craft.retention_mode=hidden
or token_ce it is as the documents of the first CRaFT have it.

resume after an interruption:
  craft train --output_dir=OUTPUT_DIR --resume=true

from a recipe, with your own policy and data; every flag of it may be given here too, and then replaces it:
  craft train --config_path=recipes/smolvla_one_gpu_24gb.json --policy.path=... --dataset.repo_id=...

how much memory a run will need, without running it and without reading weights (docs/scaling.md):
  craft train --estimate [the flags of the run] [--estimate.world_size=8] [--estimate.strategy=ddp|fsdp]
      [--estimate.json=true]

docs/commands.md has whole lines to start from; docs/flags.md every flag.
"""
_CRAFT = "craft."
_ESTIMATE = "estimate."
# Names in earlier lerobot releases, which the original CRaFT notes use.
_ALIASES = {"--eval_freq": "--env_eval_freq", "--policy.pretrained_path": "--policy.path"}
# Settings that are not behind `--craft.` by their own name.
_FLAGS = {
    "dataset": "--dataset",
    "new_dataset": "--dataset",
    "output_dir": "--craft.anchor_cache_dir",
    "seed": "--seed",
    "craft": "--craft",
}


def flag_of(setting: str) -> str:
    """The flag of a setting: of CRaFT's behind `--craft.`, and lerobot's own for the new task's dataset."""
    name, dot, part = setting.partition(".")
    return f"{_FLAGS.get(name, f'--{_CRAFT}{name}')}{dot}{part}"


@spelled(flag_of)
def run(argv: list[str]) -> int:
    """Train and return 0; problems with flags, data or anchors are raised before the first step."""
    wants_help = not {"-h", "--help"}.isdisjoint(argv)
    typed, argv = argv, with_recipe(argv)
    if not wants_help:
        check_names(argv, _ALIASES)  # before any slow import
    craft_flags, rest = split_flags(argv)
    estimate_flags, rest = take_estimate_flags(rest)
    if wants_help:
        return _help(rest)
    if estimate_flags is not None:
        return _estimate(estimate_flags, craft_flags, rest)
    import lerobot_craft.tiny  # noqa: F401  registers the policies that it makes
    from lerobot_craft.training.config import config_class
    from lerobot_craft.training.run import train
    from lerobot_craft.training.run_settings import read_settings

    cfg, craft = read_settings(rest, lambda saved: _parse(config_class(craft_flags), craft_flags, saved))
    train(cfg, craft, shlex.join(["craft", "train", *typed]))
    return 0


def _estimate(estimate_flags: Sequence[str], craft_flags: Sequence[str], rest: Sequence[str]) -> int:
    """Print the memory that the run would need, and return 0."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before any Hub import: an estimate downloads nothing
    import lerobot_craft.tiny  # noqa: F401  registers the policies that it makes
    from lerobot_craft.training.config import config_class
    from lerobot_craft.training.estimate import EstimateConfig, as_json, as_text, estimate
    from lerobot_craft.training.run_settings import read_settings

    options = parse_flags(EstimateConfig, estimate_flags, "craft train", flag_of=f"--{_ESTIMATE}{{}}".format)
    flags = without("--output_dir", rest)  # nothing is written, so it may exist
    cfg, craft = read_settings(flags, lambda saved: _parse(config_class(craft_flags), craft_flags, saved))
    device = value_of("--policy.device", rest) or cfg.policy.device  # as typed: this machine need not have it
    found = estimate(cfg, craft, options, device)
    print(as_json(found) if options.json else as_text(found, on_cpu=device == "cpu"))
    return 0


def _parse[Config](settings: type[Config], flags: Sequence[str], saved: Path | None) -> Config:
    return parse_flags(settings, flags, "craft train", saved, flag_of)


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split CRaFT's flags, without prefix, from lerobot's; `--craft.x=y`, `--craft.x y` and `craft.x=y` are equal."""
    craft, rest = _split(argv, _CRAFT)
    return craft, renamed(rest, lambda name: _ALIASES.get(name, name))


def take_estimate_flags(argv: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """Split off `--estimate.*` flags, without prefix (None: no estimate requested)."""
    flags, rest = _split(argv, _ESTIMATE)
    asked = [argument for argument in rest if split(argument)[0] == "--estimate"]
    for argument in asked:
        if argument not in ("--estimate", "--estimate=true"):
            raise CraftError(f"{argument}: write --estimate for an estimate, and leave it out for the run itself")
    return (flags if asked or flags else None), [argument for argument in rest if argument not in asked]


def _split(argv: Sequence[str], prefix: str) -> tuple[list[str], list[str]]:
    """Split off flags with a prefix; they are returned without it, one word each."""
    taken, rest = take_flags(argv, lambda name: name.startswith((f"--{prefix}", prefix)))
    # One word, because argparse takes a value such as -2,-1 for a flag.
    return [f"--{name.removeprefix('--').removeprefix(prefix)}={value}" for name, value in taken], rest


def _help(rest: Sequence[str]) -> int:
    print(_USAGE)
    print(help_text(), flush=True)
    chosen = [argument for argument in rest if split(argument)[0].endswith((".type", "discover_packages_path"))]
    if chosen:  # only lerobot knows their flags, and it is slow to import
        from lerobot_craft.lerobot_api.train_config import print_train_help

        print("\nflags of lerobot-train, with those of the types that were chosen:\n", flush=True)
        print_train_help([argument for argument in rest if argument not in ("-h", "--help")])
        sys.stdout.flush()
    return 0
