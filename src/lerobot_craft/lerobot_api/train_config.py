"""The command line of lerobot-train: its parser, its checks, and its errors as CraftErrors."""

import contextlib
import io
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from typing import Any

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.pretrained import WRONG_SETTING, in_short

_NO_REPO_ID = "'repo_id' argument missing"
_MISSING = re.compile(r"`([\w.]+)`: Missing required field\(s\) `(\w+)`.*")
_OF_FLAGS = ("unrecognized arguments", "argument ")  # how argparse complains of a flag
_PUSH_TO_HUB = "--policy.push_to_hub"
_REWARD_MODEL = "--reward_model."
_NOT_FOR_REWARDS = "craft train is for policies: train a reward model with lerobot-train"


@contextlib.contextmanager
def _command_line(argv: Sequence[str]) -> Iterator[None]:
    """Set sys.argv: lerobot reads some flags from it long after parsing."""
    own = sys.argv
    sys.argv = [own[0], *argv]
    try:
        yield
    finally:
        sys.argv = own


def parse_train_config(argv: Sequence[str]) -> Any:
    """The validated `TrainPipelineConfig` of a command line without `--craft` flags.

    A policy with push_to_hub but without a repository is trained without pushing. `lerobot-train` refuses it, and with
    it every checkpoint saved with lerobot's default config.
    """
    if any(argument.startswith(_REWARD_MODEL) for argument in argv):  # reward model types are not registered here
        raise CraftError(_NOT_FOR_REWARDS)
    try:
        return _parse(argv)
    except CraftError as error:
        if _NO_REPO_ID not in str(error) or any(argument.startswith(_PUSH_TO_HUB) for argument in argv):
            raise
        return _parse([*argv, f"{_PUSH_TO_HUB}=false"])


def _parse(argv: Sequence[str]) -> Any:
    import lerobot.policies  # noqa: F401  registers the policy types
    from draccus.utils import DraccusException
    from lerobot.configs import parser
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.utils.import_utils import register_third_party_plugins
    from yaml import YAMLError

    def take(config: TrainPipelineConfig) -> TrainPipelineConfig:
        return config

    register_third_party_plugins()
    file = parser.parse_arg("config_path", list(argv))
    complaint = io.StringIO()
    try:
        with _command_line(argv), contextlib.redirect_stderr(complaint):
            config: Any = parser.wrap()(take)()
            config.validate()
    except SystemExit as stop:
        if stop.code in (0, None):  # --help
            raise
        reason = complaint.getvalue().strip().rpartition("error: ")[2]
        raise CraftError(_advice(reason, None if reason.startswith(_OF_FLAGS) else file)) from stop
    except parser.PluginLoadError as error:
        reason = str(error).splitlines()[0]
        raise CraftError(f"a package of policies or environments cannot be imported: {reason}") from error
    except FileExistsError as error:
        raise CraftError(_output_dir_exists(argv)) from error
    except (DraccusException, YAMLError, ArgumentError, ValueError, NotImplementedError, OSError) as error:
        raise CraftError(_advice(str(error), file)) from error
    except WRONG_SETTING as error:  # a file of settings with a list for an object, or null for a number
        if file is None:
            raise
        raise CraftError(
            f"{file} cannot be read as settings of lerobot-train ({in_short(error)}). The file is damaged or was "
            "edited: copy it again"
        ) from error
    for name in ("steps", "batch_size"):
        value: int | None = getattr(config, name)  # draccus takes null for any type
        if value is None or value < 1:
            raise CraftError(f"--{name} must be at least 1; got {value}")
    if config.is_reward_model_training:
        raise CraftError(_NOT_FOR_REWARDS)
    if config.job.is_remote:
        raise CraftError(
            f"--job.target={config.job.target} sends lerobot-train to another machine, and CRaFT would stay here: run "
            "craft train on that machine itself"
        )
    return config


def _advice(reason: str, file: str | None = None) -> str:
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()] or ["the flags are wrong"]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # for several types, the first type's message
    if missing := _MISSING.fullmatch(said):
        said = f"--{missing[1]}.{missing[2]} is missing"
    where = f", in {file} or in a flag" if file is not None else ""
    return f"{said.removesuffix('.')}{where} (`craft train --help` lists the flags)"


def _output_dir_exists(argv: Sequence[str]) -> str:
    from lerobot.configs import parser

    directory = parser.parse_arg("output_dir", list(argv))
    return (
        f"--output_dir={directory} exists already: give another one, or go on with that run by "
        f"`craft train --config_path={directory}/checkpoints/last/pretrained_model/train_config.json --resume=true`"
    )


def print_train_help(argv: Sequence[str]) -> None:
    """Print lerobot-train's flags, including those of the chosen policy and environment."""
    import lerobot.policies  # noqa: F401  registers the policy types
    from lerobot.configs import parser
    from lerobot.configs.train import TrainPipelineConfig

    parser.print_scoped_help(TrainPipelineConfig, list(argv))
