"""`craft train`: lerobot-train that keeps the old skills."""

import os
import shlex
import sys
from collections.abc import Sequence

from lerobot_craft.cli.flags import check_names, help_text, parse_flags, with_recipe
from lerobot_craft.errors import CraftError

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

    settings = config_class(craft_flags)
    cfg, craft = read_settings(rest, lambda saved: parse_flags(settings, craft_flags, "craft train", saved, _CRAFT))
    train(cfg, craft, shlex.join(["craft", "train", *typed]))
    return 0


def _estimate(estimate_flags: Sequence[str], craft_flags: Sequence[str], rest: Sequence[str]) -> int:
    """Print the memory that the run would need, and return 0."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before any Hub import: an estimate downloads nothing
    import lerobot_craft.tiny  # noqa: F401  registers the policies that it makes
    from lerobot_craft.training.config import config_class
    from lerobot_craft.training.estimate import EstimateConfig, as_json, as_text, estimate
    from lerobot_craft.training.run_settings import flag_value, read_settings, without_flag

    options = parse_flags(EstimateConfig, estimate_flags, "craft train", prefix=_ESTIMATE)
    settings = config_class(craft_flags)
    flags = without_flag("--output_dir", rest)  # nothing is written, so it may exist
    cfg, craft = read_settings(flags, lambda saved: parse_flags(settings, craft_flags, "craft train", saved, _CRAFT))
    device = flag_value("--policy.device", rest) or cfg.policy.device  # as typed: this machine need not have it
    found = estimate(cfg, craft, options, device)
    print(as_json(found) if options.json else as_text(found, on_cpu=device == "cpu"))
    return 0


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split CRaFT's flags, without prefix, from lerobot's; `--craft.x=y`, `--craft.x y` and `craft.x=y` are equal."""
    craft, rest = _split(argv, _CRAFT)
    aliased = []
    for argument in rest:
        name, equals, value = argument.partition("=")
        aliased.append(f"{_ALIASES.get(name, name)}{equals}{value}")
    return craft, aliased


def take_estimate_flags(argv: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """Split off `--estimate.*` flags, without prefix (None: no estimate requested)."""
    flags, rest = _split(argv, _ESTIMATE)
    asked = [argument for argument in rest if argument.partition("=")[0] == "--estimate"]
    for argument in asked:
        if argument not in ("--estimate", "--estimate=true"):
            raise CraftError(f"{argument}: write --estimate for an estimate, and leave it out for the run itself")
    return (flags if asked or flags else None), [argument for argument in rest if argument not in asked]


def _split(argv: Sequence[str], prefix: str) -> tuple[list[str], list[str]]:
    """Split off flags with a prefix; they are returned without it, one word each."""
    taken: list[str] = []
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        # Without dashes and without = it is the previous flag's value, such as a job name.
        if not name.startswith((f"--{prefix}", prefix) if equals else f"--{prefix}"):
            rest.append(argument)
            continue
        if not equals:
            value = next(arguments, "--")
            if value.startswith("--"):
                raise CraftError(f"{name} needs a value: write {name}=VALUE")
        # One word, because argparse takes a value such as -2,-1 for a flag.
        taken.append(f"--{name.removeprefix('--').removeprefix(prefix)}={value}")
    return taken, rest


def _help(rest: Sequence[str]) -> int:
    print(_USAGE)
    print(help_text(), flush=True)
    chosen = [argument for argument in rest if argument.partition("=")[0].endswith((".type", "discover_packages_path"))]
    if chosen:  # only lerobot knows their flags, and it is slow to import
        from lerobot_craft.lerobot_api.train_config import print_train_help

        print("\nflags of lerobot-train, with those of the types that were chosen:\n", flush=True)
        print_train_help([argument for argument in rest if argument not in ("-h", "--help")])
        sys.stdout.flush()
    return 0
