"""The two halves of a run's settings: lerobot's own, and `craft_config.json` beside them."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.policies import local_checkpoint
from lerobot_craft.lerobot_api.train_flags import parse_train_config
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.output.run_dir import make_way

CRAFT_CONFIG_FILE = "craft_config.json"
_POLICY_PATH = "--policy.path"
_NO_POLICY = (
    "CRaFT keeps what a policy can do already: name its checkpoint directory with --policy.path=DIR (to train "
    "from scratch leave out --craft.enabled)"
)


def read_settings(argv: Sequence[str], craft_config: Callable[[Path | None], CraftConfig]) -> tuple[Any, CraftConfig]:
    """Both configs, validated; in a resumed run both start from what the checkpoint saved.

    Args:
        argv: lerobot's flags.
        craft_config: Reads CRaFT's flags over the values of a file, or (None) over the defaults.
    """
    saved = _saved_beside(argv)
    craft = craft_config(saved)
    if craft.enabled and flag_value(_POLICY_PATH, argv) is None and flag_value("--config_path", argv) is None:
        raise CraftError(_NO_POLICY)
    _make_way(argv)
    cfg = parse_train_config(_resolve_policy(argv) if craft.enabled else argv)
    if cfg.resume and cfg.checkpoint_path is None:
        raise CraftError(
            "--resume goes on with the policy of its checkpoint: leave out --policy.path, or leave out --resume to "
            "start a new run from that policy"
        )
    if cfg.resume and saved is None:  # lerobot may have brought the checkpoint from the Hub just now
        saved = _in_directory(cfg.policy.pretrained_path)
        craft = craft_config(saved)
    if craft.enabled and cfg.resume and saved is None:
        raise CraftError(
            "this checkpoint was written without CRaFT, so its teacher is not known: start a new run with "
            f"--policy.path={cfg.policy.pretrained_path} in place of --resume and --config_path"
        )
    if craft.enabled and cfg.policy.pretrained_path is None:
        raise CraftError(_NO_POLICY)
    if craft.enabled and cfg.resume:
        _require_same_seed(cfg)
    return cfg, craft


def _require_same_seed(cfg: Any) -> None:
    """The order of data and anchors is a function of seed and step: another one would mix two runs."""
    saved = json.loads((Path(cfg.policy.pretrained_path) / "train_config.json").read_text())["seed"]
    if saved != cfg.seed:
        raise CraftError(
            f"the run was begun with --seed={saved} and cannot go on with --seed={cfg.seed}, which would repeat some "
            "frames and leave out others: leave out --seed, or start a new run"
        )


def _make_way(argv: Sequence[str]) -> None:
    """Before lerobot's validation, which refuses a directory that a killed run left empty, and says less."""
    output_dir = flag_value("--output_dir", argv)
    is_main = os.environ.get("RANK", "0") == "0"
    if output_dir is not None and is_main and flag_value("--resume", argv) in (None, "false"):
        make_way(Path(output_dir))


def _saved_beside(argv: Sequence[str]) -> Path | None:
    """`craft_config.json` next to the file of `--config_path`."""
    found = flag_value("--config_path", argv)
    if found is None:
        return None
    path = Path(found)
    return _in_directory(path if path.is_dir() else path.parent)


def _in_directory(directory: Path) -> Path | None:
    saved = directory / CRAFT_CONFIG_FILE
    return saved if saved.is_file() else None


def _resolve_policy(argv: Sequence[str]) -> list[str]:
    """The same flags, with a policy of the Hub replaced by where it was downloaded to."""
    path = flag_value(_POLICY_PATH, argv)
    if path is None:
        return list(argv)
    revision = flag_value("--policy.pretrained_revision", argv)
    return [*without_flag(_POLICY_PATH, argv), f"{_POLICY_PATH}={local_checkpoint(path, revision)}"]


def flag_value(flag: str, argv: Sequence[str]) -> str | None:
    """Of `--flag=value` or `--flag value`; the first one, as lerobot reads it."""
    for index, argument in enumerate(argv):
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
        if argument == flag and index + 1 < len(argv):
            return argv[index + 1]
    return None


def without_flag(flag: str, argv: Sequence[str]) -> list[str]:
    """The same flags without `--flag=value` or `--flag value`."""
    kept: list[str] = []
    skip = False
    for argument in argv:
        if not skip and argument != flag and not argument.startswith(f"{flag}="):
            kept.append(argument)
        skip = argument == flag
    return kept


def save_craft_config(craft: CraftConfig, directory: Path) -> None:
    """Write `craft_config.json` into a checkpoint's `pretrained_model`, where lerobot's own readers never look."""
    (directory / CRAFT_CONFIG_FILE).write_text(json.dumps(as_json(craft), indent=4) + "\n")


def saved_old_instructions(directory: Path) -> str | None:
    """`old_instructions` of the run that wrote a checkpoint; None where it had none, or was no run of CRaFT."""
    saved = _in_directory(directory)
    if saved is None:
        return None
    try:
        found = json.loads(saved.read_text(encoding="utf-8")).get("old_instructions")
    except (ValueError, AttributeError) as error:
        raise CraftError(f"{saved} is damaged ({error}): copy the checkpoint again") from error
    return found if isinstance(found, str) else None


def as_json(craft: CraftConfig) -> dict[str, Any]:
    """Every setting as a JSON value."""
    import draccus

    encoded: dict[str, Any] = draccus.encode(craft)
    return encoded
