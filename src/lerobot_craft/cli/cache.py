"""`craft cache build | info | verify`: the teacher's values on chosen inputs, computed once and stored."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from lerobot_craft.cli.flags import PolicyFlags, parse_flags, spelled, take_policy_flags
from lerobot_craft.errors import CraftError
from lerobot_craft.io.argv import renamed

if TYPE_CHECKING:
    from lerobot_craft.anchors.teacher import Teacher

_USAGE = """usage: craft cache build --policy.path=DIR --dataset.repo_id=NAME --output_dir=DIR [...]
       craft cache info DIR
       craft cache verify DIR [--policy.path=DIR]

  build    run the teacher once over chosen inputs and keep what it made of them (`craft cache build --help`)
  info     what a cache holds, its size per anchor, the unit of its budget
  verify   compare all checksums; with --policy.path also compute some anchors again and compare

exit codes: 0 done, 2 something is wrong with the flags, the cache or the teacher"""

# Flags, and the settings that they set; in the original CRaFT notes the last two.
_SETTINGS = {
    "--num_samples": "--num_anchors",
    "--dataset": "--old_dataset",
    "--out_dir": "--output_dir",
    "--policy.pretrained_path": "--policy.path",
}
_FLAGS = {"num_anchors": "--num_samples", "old_dataset": "--dataset"}


def flag_of(setting: str) -> str:
    """The flag of a setting of `craft cache build`."""
    name, dot, part = setting.partition(".")
    return f"{_FLAGS.get(name, f'--{name}')}{dot}{part}"


@spelled(flag_of)
def run(argv: list[str]) -> int:
    """Run one of the three actions and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="craft: %(message)s")
    actions = {"build": _build, "info": _info, "verify": _verify}
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] not in actions:
        raise CraftError(f"`craft cache {argv[0]}` is not known: use {', '.join(actions)}")
    return actions[argv[0]](renamed(argv[1:], _as_setting))


def _as_setting(flag: str) -> str:
    name, dot, part = flag.partition(".")
    return _SETTINGS.get(flag) or f"{_SETTINGS.get(name, name)}{dot}{part}"


def _build(argv: Sequence[str]) -> int:
    policy, rest = _with_plugins(argv)
    from lerobot_craft.anchors.recipe import BuildConfig, DocumentsBuild, asks_for_documents

    settings = DocumentsBuild if asks_for_documents(rest) else BuildConfig
    config = parse_flags(settings, rest, program="craft cache build", flag_of=flag_of)
    from lerobot_craft.anchors.build import Ranks, build_cache, is_finished, prepare, share
    from lerobot_craft.anchors.store import AnchorStore
    from lerobot_craft.anchors.verify import cache_summary

    teacher = _load_teacher(policy)
    ranks = Ranks.joined(cpu=teacher.config.device == "cpu")
    job = prepare(config, teacher)
    if is_finished(job, config.output_dir):
        print(f"{config.output_dir} is this very cache already: nothing to do")
    else:
        # Ranks have equal shares, so the main rank's bar shows when all are done.
        with tqdm(total=share(job, ranks), desc="anchors", unit="anchor", disable=not ranks.is_main) as bar:
            build_cache(job, config.output_dir, ranks=ranks, num_workers=config.num_workers, progress=bar.update)
    if ranks.is_main:
        print(cache_summary(AnchorStore.open(config.output_dir, verify=False)))
    return 0


def _info(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="craft cache info", description="Say what a cache holds.")
    parser.add_argument("directory", type=Path)
    _, rest = _with_plugins(argv)
    options = parser.parse_args(rest)
    from lerobot_craft.anchors.store import AnchorStore
    from lerobot_craft.anchors.verify import cache_summary

    print(cache_summary(AnchorStore.open(options.directory, verify=False)))
    return 0


def _verify(argv: Sequence[str]) -> int:
    policy, rest = _with_plugins(argv)
    parser = argparse.ArgumentParser(prog="craft cache verify", description="Check a cache.")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(rest)
    from lerobot_craft.anchors.manifest import Manifest
    from lerobot_craft.anchors.verify import verify_cache

    total = sum(shard.bytes for shard in Manifest.load(options.directory).shards)
    teacher = _load_teacher(policy) if policy.path else None
    with tqdm(total=total, desc="checksums", unit="B", unit_scale=True) as bar:
        manifest, reproduction = verify_cache(options.directory, teacher, bar.update)
    print(f"{options.directory}: {manifest.num_anchors} anchors in {len(manifest.shards)} shards, all checksums hold")
    if manifest.kind == "memory":
        print("it is a memory, which holds no teacher's values: there is nothing more to check")
    elif reproduction is None:
        print("give --policy.path=TEACHER to also compute some of them again")
    else:
        print(
            f"the teacher reproduces {reproduction.anchors} of them: relative drift up to {reproduction.largest:.1e} "
            f"(rounding leaves at most {reproduction.floor:.0e})"
        )
    return 0


def _with_plugins(argv: Sequence[str]) -> tuple[PolicyFlags, list[str]]:
    """The policy's flags and the others, after importing the packages that they name."""
    policy, rest = take_policy_flags(argv)
    if policy.plugins:
        from lerobot_craft.lerobot_api.pretrained import load_plugin

        for plugin in policy.plugins:
            load_plugin(plugin)
    return policy, rest


def _load_teacher(policy: PolicyFlags) -> "Teacher":
    if not policy.path:
        raise CraftError("give the teacher's checkpoint directory as --policy.path=DIR")
    import lerobot_craft.tiny  # noqa: F401  registers the policies that it makes
    from lerobot_craft.anchors.teacher import load_teacher

    print(f"loading the teacher from {policy.path}", file=sys.stderr)
    return load_teacher(policy.path, policy.overrides)
