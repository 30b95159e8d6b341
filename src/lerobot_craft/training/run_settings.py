"""The two halves of a run's settings: lerobot's own, and `craft_config.json` beside them."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError
from lerobot_craft.io.argv import split, value_of, without
from lerobot_craft.lerobot_api.pretrained import load_plugin, load_policy_config, local_checkpoint, may_be_on_the_hub
from lerobot_craft.lerobot_api.train_config import parse_train_config
from lerobot_craft.training.checkpoints import (
    CHECKPOINTS,
    CRAFT_CONFIG_FILE,
    CRAFT_STATE,
    TRAIN_CONFIG,
    check_settings,
    last_checkpoint,
    make_way,
    package_flags,
    require_settings,
    wait_for_way,
)
from lerobot_craft.training.config import CraftConfig

logger = logging.getLogger(__name__)

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
    argv = _where_to_go_on(_with_packages(argv))
    saved = _saved_beside(argv)
    if saved is not None and value_of("--resume", argv) == "true":
        check_settings(saved.parents[1])
    craft = craft_config(saved)
    if craft.enabled and value_of(_POLICY_PATH, argv) is None and value_of("--config_path", argv) is None:
        raise CraftError(_NO_POLICY)
    _make_way(argv)
    cfg = parse_train_config(_resolve_policy(argv, craft.enabled))
    if cfg.resume and cfg.checkpoint_path is None:
        raise CraftError(
            "--resume goes on with the policy of its checkpoint: leave out --policy.path, or leave out --resume to "
            "start a new run from that policy"
        )
    if cfg.resume and saved is None:  # lerobot may have brought the checkpoint from the Hub just now
        saved = _in_directory(cfg.policy.pretrained_path)
        craft = craft_config(saved)
    if cfg.resume and not craft.enabled and (cfg.checkpoint_path / CRAFT_STATE).is_file():
        raise CraftError(
            f"CRaFT is off, by --craft.enabled=false or in {saved}, and {cfg.checkpoint_path} was trained with it: the "
            "run would go on as plain fine-tuning. Leave out --craft.enabled; to go on without CRaFT, start a new run "
            f"with --policy.path={cfg.policy.pretrained_path} in place of --resume and --config_path"
        )
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


def _with_packages(argv: Sequence[str]) -> Sequence[str]:
    """The flags without those that name packages, which are imported: one may bring a retention mode."""
    for flag in package_flags(argv):
        name, packages = split(flag)
        for package in (packages or "").split(","):
            load_plugin(package)
        argv = without(name, argv)
    return argv


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
    output_dir = value_of("--output_dir", argv)
    is_main = os.environ.get("RANK", "0") == "0"
    if output_dir is not None and value_of("--resume", argv) in (None, "false"):
        (make_way if is_main else wait_for_way)(Path(output_dir))


def _where_to_go_on(argv: Sequence[str]) -> Sequence[str]:
    """The flags of `--resume=true` beside those of a whole run: from its last checkpoint, or from the start.

    So a job that is queued again can always have the same command.
    """
    output_dir, found = value_of("--output_dir", argv), value_of("--config_path", argv)
    if value_of("--resume", argv) != "true" or (found is not None and not _is_lost(found)):
        return argv
    if output_dir is None and found is not None:
        output_dir = str(Path(*Path(found).parts[: Path(found).parts.index(CHECKPOINTS)]))
    begins = value_of(_POLICY_PATH, argv) is not None
    last = last_checkpoint(Path(output_dir)) if output_dir is not None else None
    if last is not None:
        kept = without("--config_path", without(_POLICY_PATH, argv))
        return [*kept, f"--config_path={last / TRAIN_CONFIG}"]
    if output_dir is not None and begins:
        logger.warning("--resume=true: no checkpoint in %s yet, so the run starts from --policy.path", output_dir)
        return without("--resume", without("--config_path", argv))
    if found is not None:
        raise CraftError(
            f"--config_path={found}: there is no such file, so that run saved no checkpoint to resume from. Run the "
            "command that started it again (with or without --resume=true): it starts over"
        )
    if output_dir is not None:
        raise CraftError(
            f"--resume=true: {output_dir} holds no checkpoint. Run the command that started the run again (with or "
            "without --resume=true, but with --policy.path): it starts over"
        )
    return argv


def _is_lost(config_path: str) -> bool:
    """Whether this names a checkpoint of a run on this machine that is not there; a name on the Hub is none."""
    path = Path(config_path)
    return CHECKPOINTS in path.parts and not path.exists()


def _saved_beside(argv: Sequence[str]) -> Path | None:
    """`craft_config.json` next to the file of `--config_path`."""
    found = value_of("--config_path", argv)
    if found is None:
        return None
    path = Path(found)
    return _in_directory(path if path.is_dir() else path.parent)


def _in_directory(directory: Path) -> Path | None:
    saved = directory / CRAFT_CONFIG_FILE
    if saved.is_file():
        return saved
    require_settings(directory)
    return None


def _resolve_policy(argv: Sequence[str], enabled: bool) -> list[str]:
    """The same flags, with a policy of the Hub replaced by where it was downloaded to; without CRaFT lerobot does that.

    A missing or unreadable `config.json` is refused by name.
    """
    path = value_of(_POLICY_PATH, argv)
    if path is None or not (enabled or Path(path).is_dir() or not may_be_on_the_hub(path)):
        return list(argv)
    directory = local_checkpoint(path, value_of("--policy.pretrained_revision", argv))
    load_policy_config(directory, ["--device=cpu"])  # its errors name the file; those of lerobot's parser do not
    return [*without(_POLICY_PATH, argv), f"{_POLICY_PATH}={directory}"]


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
    return {name: encoded[name] for name in craft.in_order()}
