"""Rollouts with lerobot's own evaluation, in this process: policy, environment, success per episode, pictures."""

import copy
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.pretrained import PolicyConfig, load_policy_config, plain_making, quiet_loading
from lerobot_craft.lerobot_api.processors import Processor, load_processors
from lerobot_craft.lerobot_api.train_steps import undisturbed_rng


@dataclass(frozen=True)
class Player:
    """A policy that is ready to act, with its checkpoint's processors."""

    policy: nn.Module
    preprocessor: Processor
    postprocessor: Processor
    config: PolicyConfig


def load_player(
    checkpoint: Path | str,
    env: Any,
    overrides: Sequence[str] = ("--device=cpu",),
    rename_map: Mapping[str, str] | None = None,
) -> Player:
    """The policy of a checkpoint directory, as `lerobot-eval` loads it, including PEFT adapters.

    Args:
        checkpoint: As for `--policy.path`.
        env: Config of an environment it will act in; lerobot takes the action shape from it.
        overrides: Settings as on lerobot's command line without `policy.`.
        rename_map: The environment's observation names -> the policy's.

    Raises:
        CraftError: Not a checkpoint, or its cameras do not match the environment's.
    """
    from lerobot.policies import make_policy

    names = dict(rename_map or {})
    config = load_policy_config(checkpoint, overrides)
    _check_cameras(config, env, names)
    own = copy.deepcopy(config)  # make_policy puts the environment's actions into the other one
    with plain_making(config), quiet_loading():
        policy = make_policy(cfg=config, env_cfg=env, rename_map=names)
    return Player(policy.eval(), *load_processors(own, names), config)


def _check_cameras(config: PolicyConfig, env: Any, rename_map: Mapping[str, str]) -> None:
    """Refuse mismatched cameras before weights are read; `make_policy` would refuse them only afterward.

    With a rename map lerobot does not check at all, and a policy without any camera then fails in its first step.
    """
    from lerobot.envs import env_to_policy_features
    from lerobot.policies.utils import validate_visual_features_consistency

    if not config.input_features:  # make_policy uses the environment's
        return
    features = {rename_map.get(name, name): feature for name, feature in env_to_policy_features(env).items()}
    shown, read = _cameras(features), _cameras(config.input_features)
    if rename_map:
        fits = not shown or not read or bool(shown & read)
    else:
        try:
            validate_visual_features_consistency(config, features)
            fits = True
        except ValueError:
            fits = False
    if not fits:
        example = f'{{"{min(shown - read)}": "{min(read - shown)}"}}'
        raise CraftError(
            f"the environment {env.type} has {_listed(shown - read)}, the policy in {config.pretrained_path} reads "
            f"{_listed(read - shown)}: translate the environment's names into the policy's with --rename_map, such as "
            f"--rename_map='{example}'"
        )


def _cameras(features: Mapping[str, Any]) -> set[str]:
    return {name for name, feature in features.items() if feature.type.value == "VISUAL"}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def env_config(env_type: str, settings: Mapping[str, Any]) -> Any:
    """Config of a registered environment, as `--env.type` and `--env.x=y` make it."""
    from lerobot.envs import make_env_config

    return make_env_config(env_type, **settings)


def play(player: Player, env: Any, *, episodes: int, batch_size: int, seed: int) -> list[bool]:
    """Success of each episode in an environment with one task.

    Args:
        player: The policy.
        env: Config of an environment with one task.
        episodes: Number of episodes; episode i starts from the state of `seed + i`.
        batch_size: Episodes played in parallel.
        seed: Seed of the first start state, and of the policy's noise.
    """
    with ready(player, env, batch_size) as stages:
        (stage,) = stages.values()
        return stage.play(episodes, seed)


@dataclass(frozen=True)
class PlayedEpisode:
    """What a policy saw and did.

    Attributes:
        instruction: From the environment; empty if it has none.
        observations: As passed to the policy's preprocessor, by the environment's names: [T, ...]; images uint8.
        actions: As returned by the policy's postprocessor, [T, A].
        success: Whether it reached the goal.
    """

    instruction: str
    observations: dict[str, torch.Tensor]
    actions: torch.Tensor
    success: bool


@dataclass(frozen=True)
class Stage:
    """One task of an environment, set up for one player; `parts` holds lerobot's rollout arguments."""

    parts: dict[str, Any]

    def play(self, episodes: int, seed: int) -> list[bool]:
        """Success per episode, from lerobot's `eval_policy`: episode i starts from the state of `seed + i`."""
        from lerobot.scripts.lerobot_eval import eval_policy

        with seeded(seed):
            found = eval_policy(**self.parts, n_episodes=episodes, start_seed=seed)
        return [bool(episode["success"]) for episode in found["per_episode"]]

    def record(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """Episodes with everything the policy saw and did, from lerobot's `rollout`; one per seed, in parallel.

        The number of seeds must equal the stage's number of environments.
        """
        from lerobot.scripts.lerobot_eval import rollout

        seen, done = _Listener(self.parts["preprocessor"]), _Listener(self.parts["postprocessor"])
        with seeded(seeds[0]):
            found = rollout(**{**self.parts, "preprocessor": seen, "postprocessor": done}, seeds=list(seeds))
        over = found["done"].int().argmax(dim=1) + 1  # [B]
        return [
            _episode(seen.given, done.returned, place, int(length), found["success"])
            for place, length in enumerate(over.tolist())
        ]


class _Listener:
    """A processor that records its inputs and outputs."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.given: list[Any] = []
        self.returned: list[Any] = []

    def __call__(self, value: Any) -> Any:
        self.given.append(dict(value) if isinstance(value, dict) else value)
        answer = self._processor(value)
        self.returned.append(answer)
        return answer


def _episode(
    seen: Sequence[Mapping[str, Any]], done: Sequence[Any], place: int, length: int, success: torch.Tensor
) -> PlayedEpisode:
    """One of several episodes that were played in parallel."""
    observations = {}
    for name, value in seen[0].items():
        if not isinstance(value, torch.Tensor) or not name.startswith("observation."):
            continue
        steps = torch.stack([step[name][place].cpu() for step in seen[:length]])  # [T, ...]
        is_picture = name.startswith("observation.image") and steps.is_floating_point()
        # lerobot divides bytes by 255; this restores them exactly.
        observations[name] = (steps * 255).round().to(torch.uint8) if is_picture else steps
    actions = torch.stack([action[place].float().cpu() for action in done[:length]])  # [T, A]
    return PlayedEpisode(str(seen[0]["task"][place]), observations, actions, bool(success[place, :length].any()))


@contextmanager
def ready(player: Player, env: Any, side_by_side: int) -> Iterator[dict[str, Stage]]:
    """An environment's tasks by name: the suite's name, plus the task's number if a suite has several."""
    from lerobot.envs import close_envs, make_env, make_env_pre_post_processors

    before, after = make_env_pre_post_processors(env_cfg=env, policy_cfg=player.config)
    try:
        envs = make_env(env, n_envs=side_by_side, use_async_envs=False)
    except (ImportError, EOFError, OSError) as error:
        raise CraftError(_without_simulator(env.type, error)) from error
    common = {
        "policy": player.policy,
        "env_preprocessor": before,
        "env_postprocessor": after,
        "preprocessor": player.preprocessor,
        "postprocessor": player.postprocessor,
    }
    try:
        yield {
            suite if len(tasks) == 1 else f"{suite}/{number}": Stage({"env": vector, **common})
            for suite, tasks in envs.items()
            for number, vector in tasks.items()
        }
    finally:
        close_envs(envs)


def _without_simulator(env_type: str, error: Exception) -> str:
    if isinstance(error, EOFError):  # LIBERO's first import asks where its datasets go
        return (
            f"the environment {env_type} cannot be made here: its simulator asks a question when it is first imported, "
            "and nobody can answer. Import it once in a terminal; for LIBERO type "
            'python -c "import libero.libero" <<< N'
        )
    if isinstance(error, OSError):
        return (
            f"the environment {env_type} cannot be made here: a file of its simulator is missing or cannot be read "
            f"({error}). Install the simulator again, with its assets; paths of LIBERO are in ~/.libero/config.yaml"
        )
    lerobot = importlib.metadata.distribution("lerobot")
    extras = lerobot.metadata.get_all("Provides-Extra") or []
    if env_type in extras:
        remedy = f"type pip install 'lerobot[{env_type}]=={lerobot.version}'"
    else:
        remedy = "install its simulator, for which lerobot has no extra"
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return f"the environment {env_type} cannot be made here ({reason}): {remedy}"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Disable gradients and draw the policy's noise from `seed`; random generators are restored afterward.

    Two policies of one kind then draw the same noise.
    """
    from lerobot.utils.random_utils import set_seed

    with torch.no_grad(), undisturbed_rng():
        set_seed(seed)
        yield


def watch(player: Player, env: Any, *, episodes: int, seed: int, look: Callable[[Any], None]) -> list[int | None]:
    """Play episodes with a callback; returns each episode's steps to success, or None without success.

    The episodes equal those of `rollouts.play` with the same seed if it plays as many in parallel.

    Args:
        player: The policy.
        env: Config of an environment with one task.
        episodes: All played in parallel; episode i starts from the state of `seed + i`.
        seed: Seed of the first start state, and of the policy's noise.
        look: Called with the vector of environments at the start and after each step; finished ones do not change.
    """
    from lerobot.scripts.lerobot_eval import rollout

    with ready(player, env, episodes) as stages, seeded(seed):
        (stage,) = stages.values()
        played = rollout(**stage.parts, seeds=list(range(seed, seed + episodes)), render_callback=look)
    reached = played["success"].bool()  # [episodes, steps]
    return [int(steps.int().argmax()) + 1 if bool(steps.any()) else None for steps in reached]
