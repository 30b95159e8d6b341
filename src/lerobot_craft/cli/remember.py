"""`craft remember`: put frames of a policy's old tasks into its checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lerobot_craft.cli.eval import register_plugins
from lerobot_craft.cli.flags import parse_flags, take_policy_flags
from lerobot_craft.errors import CraftError
from lerobot_craft.io.argv import split
from lerobot_craft.lerobot_api import policy_in

if TYPE_CHECKING:
    from lerobot_craft.lerobot_api.env_flags import RememberFlags
    from lerobot_craft.memory.format import Memory

_USAGE = """usage: craft remember CHECKPOINT --dataset.repo_id=NAME [flags]
       craft remember CHECKPOINT --dataset.root=DIR [flags]
       craft remember CHECKPOINT --env.type=TYPE --env.task=TASK [--episodes=3] [flags]
       craft remember CHECKPOINT --list | --verify | --forget="INSTRUCTION"

Puts frames of tasks that the policy can do into CHECKPOINT/craft_memory: pictures, states, instructions and actions.
`craft train --policy.path=CHECKPOINT --craft.enabled=true` finds them there, holds the policy to what it does on
them, and measures on some that it keeps out of training. A memory that is there is extended.

CHECKPOINT is what --policy.path takes, or the output directory of a training, whose last one counts.

  --dataset.*      frames of a LeRobotDataset: demonstrations, or rollouts that lerobot-eval or lerobot-rollout recorded
  --env.*          frames of the policy's own rollouts in a simulator; failed ones too, unless --successful_only=true
  --list           what it remembers, from which datasets, and how many bytes that is
  --verify         compare all checksums and decode every picture
  --forget=TEXT    remove a task

Pictures travel with the weights: whoever gets the checkpoint gets them too.

flags:
"""
_BARE = ("--list", "--verify", "--successful_only")
_FORGET = "--forget"
_PLUGINS = "--env.discover_packages_path"


def run(argv: list[str]) -> int:
    """Change or show the memory of one checkpoint, and return 0."""
    if not argv:
        print(_USAGE)
        return 2
    places = [argument for argument in argv if not argument.startswith("-")]
    policy, rest = take_policy_flags([argument for argument in argv if argument.startswith("-")])
    register_plugins([*policy.plugins, *(split(flag)[1] or "" for flag in rest if flag.startswith(_PLUGINS))])
    from lerobot_craft.lerobot_api.env_flags import RememberFlags

    if not {"-h", "--help"}.isdisjoint(rest):
        print(_USAGE, flush=True)
        parse_flags(RememberFlags, ["--help"], "craft remember")
    checkpoint = find_checkpoint(places if policy.path is None else [*places, policy.path])
    asked, flags = _split(rest)
    settings = parse_flags(RememberFlags, flags, "craft remember")
    if asked:
        return _look_or_forget(checkpoint, asked, settings)
    _remember(checkpoint, settings, policy.overrides)
    return 0


def find_checkpoint(places: Sequence[str]) -> Path:
    """The `pretrained_model` of a checkpoint or training directory.

    Raises:
        CraftError: There is none, or not exactly one path is given.
    """
    if len(places) != 1:
        said = "say which checkpoint" if not places else f"one checkpoint at a time, not {', '.join(places)}"
        raise CraftError(f"{said}: craft remember CHECKPOINT ... (`craft remember --help` has examples)")
    found = policy_in(given := Path(places[0]))
    if not (found / "config.json").is_file():
        raise CraftError(
            f"{given} is not a checkpoint: there is no config.json in it, in its pretrained_model or in its last "
            "checkpoint. Give the directory that lerobot-train or craft train wrote; a policy of the Hub must be on "
            f"this machine first: `hf download {given} --local-dir=DIR`."
        )
    return found


def _split(flags: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split off the actions other than collecting; plugins are already registered."""
    asked: dict[str, str] = {}
    rest: list[str] = []
    for flag in flags:
        name, value = split(flag)
        if value is None and name in _BARE:
            value = "true"
        if value is None:
            raise CraftError(f"{flag} needs a value: write {flag}=VALUE")
        if name == _FORGET or (name in ("--list", "--verify") and value == "true"):
            asked[name] = value
        elif not flag.startswith(_PLUGINS) and name not in ("--list", "--verify"):
            rest.append(f"{name}={value}")
    return asked, rest


def _look_or_forget(checkpoint: Path, asked: dict[str, str], settings: "RememberFlags") -> int:
    from lerobot_craft.memory.change import forgotten
    from lerobot_craft.memory.format import contents, memory_in, read_memory, remove_memory, write_memory

    if settings.dataset.repo_id or settings.dataset.root or settings.env is not None or len(asked) > 1:
        raise CraftError("--list, --verify, --forget and collecting frames are four commands: give one at a time")
    directory = memory_in(checkpoint)
    if directory is None:
        raise CraftError(
            f"{checkpoint} has no memory: make one with `craft remember {checkpoint} --dataset.repo_id=NAME`"
        )
    memory = read_memory(directory)
    if _FORGET in asked:
        left = forgotten(memory, asked[_FORGET])
        if left is None:
            remove_memory(directory)
            _update_card(checkpoint, [])
            print(f"{asked[_FORGET]!r} was the last task: {checkpoint} remembers nothing any more")
            return 0
        write_memory(left, directory)
        memory = left
        _update_card(checkpoint, contents(memory))
    if "--verify" in asked:
        from lerobot_craft.memory.dataset import decoded_bytes

        size = decoded_bytes(memory, _config(checkpoint, ()))
        print(f"all checksums hold, and all {memory.num_pictures} pictures can be decoded ({size} bytes of pixels)")
    _show(checkpoint, memory)
    return 0


def _remember(checkpoint: Path, settings: "RememberFlags", overrides: Sequence[str]) -> None:
    from lerobot_craft.anchors.manifest import MEMORY_FOLDER
    from lerobot_craft.memory.change import extended
    from lerobot_craft.memory.format import contents, memory_in, read_memory, write_memory

    if settings.frames_per_task < 1 or settings.max_bytes < 1 or settings.episodes < 1:
        raise CraftError("--frames_per_task, --max_bytes and --episodes must be at least 1")
    from_data = bool(settings.dataset.repo_id or settings.dataset.root)
    if from_data == (settings.env is not None):
        raise CraftError(
            "say what to remember: frames of a dataset (--dataset.repo_id=NAME or --dataset.root=DIR), or of the "
            "policy's own rollouts (--env.type=TYPE --env.task=TASK); one of the two at a time"
        )
    directory = memory_in(checkpoint)
    memory = None if directory is None else read_memory(directory)  # finds damage before hours of rollouts
    added = (
        _of_datasets(checkpoint, settings, overrides) if from_data else _of_rollouts(checkpoint, settings, overrides)
    )
    for part in added:
        memory = extended(memory, part, frames_per_task=settings.frames_per_task, max_bytes=settings.max_bytes)
    if memory is None:
        raise CraftError("there was nothing to remember")
    write_memory(memory, checkpoint / MEMORY_FOLDER)
    _update_card(checkpoint, contents(memory))
    _show(checkpoint, memory)


def _update_card(checkpoint: Path, lines: Sequence[str]) -> None:
    from lerobot_craft.training.card_sections import CARD_FILE, list_memory

    card = checkpoint / CARD_FILE
    if list_memory(card, lines):
        print(f"{card} lists the pictures now")
    elif card.is_file():
        print(f"{card} is not a card of craft train and was left as it is: say there which pictures travel along")


def _of_datasets(checkpoint: Path, settings: "RememberFlags", overrides: Sequence[str]) -> "list[Memory]":
    from lerobot_craft.lerobot_api.datasets import open_dataset, records_success
    from lerobot_craft.memory.collect import from_dataset

    config, chosen = _config(checkpoint, overrides), settings.dataset
    found = []
    for name, root in _addresses(chosen.repo_id, chosen.root):
        dataset = open_dataset(name, root, chosen.revision, policy_config=config, episodes=chosen.episodes)
        found.append(
            from_dataset(
                dataset,
                config,
                kind="rollouts" if records_success(dataset) else "demonstrations",
                frames_per_task=settings.frames_per_task,
                seed=settings.seed,
                revision=chosen.revision,
                rename_map=settings.rename_map,
                successful_only=settings.successful_only,
            )
        )
    return found


def _addresses(repo_id: str, root: str) -> list[tuple[str, Path | None]]:
    """Name and directory of each dataset: lerobot-eval writes one per environment, env_0, env_1, ..."""
    if not root:
        return [(repo_id, None)]
    place = Path(root)
    inner = sorted(path for path in place.glob("env_*") if (path / "meta" / "info.json").is_file())
    if (place / "meta" / "info.json").is_file() or not inner:
        return [(repo_id or f"local/{place.resolve().name}", place)]
    return [(f"{repo_id or f'local/{place.resolve().name}'}_{path.name}", path) for path in inner]


def _of_rollouts(checkpoint: Path, settings: "RememberFlags", overrides: Sequence[str]) -> "list[Memory]":
    from dataclasses import replace

    from lerobot_craft.lerobot_api.rollouts import load_player, ready
    from lerobot_craft.memory.collect import from_rollouts

    env: Any = settings.env
    player = load_player(checkpoint, env, overrides or ("--device=cpu",), settings.rename_map)
    seeds = range(settings.seed, settings.seed + settings.episodes)
    played = []
    with ready(player, env, settings.episodes) as stages:
        for name, stage in stages.items():
            episodes = [replace(one, instruction=one.instruction or name) for one in stage.record(seeds)]
            successes = sum(episode.success for episode in episodes)
            print(f"{name}: {successes} of {len(episodes)} rollouts succeeded ({episodes[0].instruction!r})")
            played += episodes
    return [
        from_rollouts(
            played,
            player.config,
            name=f"rollouts/{env.type}",
            fps=float(env.fps),
            frames_per_task=settings.frames_per_task,
            seed=settings.seed,
            rename_map=settings.rename_map,
            successful_only=settings.successful_only,
        )
    ]


def _config(checkpoint: Path, overrides: Sequence[str]) -> Any:
    from lerobot_craft.lerobot_api.pretrained import load_policy_config

    return load_policy_config(checkpoint, overrides or ("--device=cpu",))


def _show(checkpoint: Path, memory: "Memory") -> None:
    from lerobot_craft.memory.format import contents

    tasks = "task" if len(memory.instructions) == 1 else "tasks"
    print(
        f"{checkpoint} remembers {len(memory.instructions)} {tasks}: {len(memory)} frames, {memory.num_pictures} "
        f"pictures, {memory.nbytes} bytes ({memory.nbytes / 2**20:.1f} MiB). They travel with the weights."
    )
    for line in contents(memory):
        print(f"  {line}")
    for instruction, count in zip(memory.instructions, memory.counts(), strict=True):
        print(f"  {count:>5}  {instruction!r}")
