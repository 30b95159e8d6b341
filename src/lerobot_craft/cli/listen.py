"""`craft listen`: does a fine-tuned policy still distinguish its instructions? No simulator, no robot."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lerobot_craft import __version__
from lerobot_craft.cli.flags import parse_flags, spelled, take_policy_flags, whole_flag
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import policy_in

if TYPE_CHECKING:
    from lerobot_craft.evaluation.acting import ListenFlags
    from lerobot_craft.evaluation.listening import Listening

_USAGE = """usage: craft listen BEFORE AFTER --dataset.repo_id=NAME [--dataset.root=DIR] [flags]

The same frames under every instruction, by the policy before and after fine-tuning. Where two instructions gave two
movements before and give one now, the policy no longer listens to one of them. BEFORE and AFTER are what --policy.path
takes, or the output directory of a training, whose last checkpoint counts. The dataset may be the new task's: no old
frame is needed.

  craft listen YOU/SMOLVLA outputs/new_task --dataset.repo_id=YOU/NEW_TASK --instructions="open the drawer; close it"

--policy.x=y changes a setting of both policies, such as --policy.device=cuda.

flags:
"""
REPORT_FILE = "report.html"


def flag_of(setting: str) -> str:
    """The flag of a setting."""
    return "--instructions" if setting == "old_instructions" else f"--{setting}"


@spelled(flag_of)
def run(argv: list[str]) -> int:
    """Let both policies act, print the table, write the page, and return 0."""
    named = [argument for argument in argv if not argument.startswith("-")]
    policy, rest = take_policy_flags([whole_flag(argument) for argument in argv if argument.startswith("-")])
    if not {"-h", "--help"}.isdisjoint(rest):
        print(_USAGE, flush=True)
    elif len(named) != 2:
        raise CraftError(f"`craft listen` compares two checkpoints, BEFORE and AFTER; {len(named)} are given")
    elif not any(flag.startswith("--dataset.repo_id=") for flag in rest):
        raise CraftError("give frames to act in: --dataset.repo_id=NAME, such as the new task's dataset")
    import lerobot_craft.tiny  # noqa: F401  registers its policies
    from lerobot_craft.evaluation.acting import ListenFlags
    from lerobot_craft.evaluation.listening import LISTENING_FILE, listening_table, write_listening
    from lerobot_craft.evaluation.results import write_text
    from lerobot_craft.lerobot_api.pretrained import load_plugin
    from lerobot_craft.report.page import render_listening

    for package in policy.plugins:
        load_plugin(package)
    flags = parse_flags(ListenFlags, rest, "craft listen")
    before, after = (policy_in(Path(place)) for place in named)
    found = _listen(flags, before, after, policy.overrides, shlex.join(["craft", "listen", *argv]))
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    write_listening(flags.output_dir / LISTENING_FILE, found)
    write_text(flags.output_dir / REPORT_FILE, render_listening(found))
    print(f"\n{listening_table(found)}\n")
    print(f"{flags.output_dir / LISTENING_FILE}\n{flags.output_dir / REPORT_FILE}")
    return 0


def _listen(flags: "ListenFlags", before: Path, after: Path, overrides: Sequence[str], command: str) -> "Listening":
    from tqdm import tqdm

    from lerobot_craft.anchors.teacher import load_teacher
    from lerobot_craft.evaluation.acting import PASSES, listen, take_frames
    from lerobot_craft.evaluation.listening import SCHEMA, Listening
    from lerobot_craft.lerobot_api.datasets import instructions, open_dataset

    addresses = flags.dataset.addresses("dataset")
    if len(addresses) != 1:
        raise CraftError(f"--dataset.repo_id names {len(addresses)} datasets: give one to act in")
    ((repo_id, root),) = addresses
    policy, fine_tuned = (load_teacher(checkpoint, overrides) for checkpoint in (before, after))
    dataset = open_dataset(repo_id, root, flags.dataset.revision, policy_config=policy.config)
    learned = instructions(dataset.meta)
    others = _others(flags.instructions, before, after)
    told = list(dict.fromkeys([*(other for other in others if other not in learned), *learned]))
    if len(told) < 2:
        raise CraftError(
            f"there is one instruction to listen to, {told[0]!r}, and it takes two to tell apart: list the old ones as "
            '--instructions="open the drawer; press the button"'
        )
    frames = take_frames(policy, dataset, flags.frames, flags.batch_size, flags.seed)
    with tqdm(total=PASSES * len(told) * len(frames.episode), desc="listening", unit="frame") as bar:
        found = listen(policy, fine_tuned, frames, told, learned, bar.update)
    return Listening(
        schema=SCHEMA,
        craft_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        before=str(before),
        after=str(after),
        dataset=repo_id,
        instructions=told,
        learned=learned,
        **found,
    )


def _others(given: str | None, before: Path, after: Path) -> list[str]:
    """Instructions besides the dataset's: as given, or what the run was told to keep and what the policies remember."""
    from lerobot_craft.anchors.plan import parse_old_instructions
    from lerobot_craft.memory.format import memory_in, read_memory
    from lerobot_craft.training.run_settings import saved_old_instructions

    if given is not None:
        return parse_old_instructions(given)
    kept = saved_old_instructions(after)
    memories = [read_memory(place) for place in map(memory_in, (before, after)) if place is not None]
    return [
        *(() if kept is None else parse_old_instructions(kept)),
        *(instruction for memory in memories for instruction in memory.instructions),
    ]
