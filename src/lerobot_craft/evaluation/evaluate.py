"""Rollouts of checkpoints, task by task, from the same start states for all; each entry is kept once it is played."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.teacher import check_weights, fingerprint, identity
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.matrix import EVALUATION_FILE, Evaluation, Row, read_evaluation, write_evaluation
from lerobot_craft.io.files import plain_errors
from lerobot_craft.lerobot_api.rollouts import Player, load_player, play, ready

_SIDE_BY_SIDE = 25  # environments; more take memory and are hardly faster


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to evaluate.

    Attributes:
        name: Its name in tables.
        checkpoint: What `--policy.path` takes.
    """

    name: str
    checkpoint: Path


type Progress = Callable[[Evaluation, str, str], None]  # what there is, and what was just played: row, task


def evaluate(
    asked: Evaluation,
    candidates: Sequence[Candidate],
    env: Any,
    output_dir: Path,
    overrides: Sequence[str] = (),
    progress: Progress = lambda evaluation, name, task: None,
) -> Evaluation:
    """Play every task with every candidate, and keep the results in `output_dir`.

    Args:
        asked: Settings of the evaluation, without rows.
        candidates: In the order of the rows.
        env: Configuration of the environment with all tasks.
        output_dir: Gets `evaluation.json`; one of the same settings that exists is completed.
        overrides: Settings of every policy, as on lerobot's command line without `policy.`.
        progress: Called after each task of each candidate.
    """
    path = output_dir / EVALUATION_FILE
    evaluation = asked.going_on_from(read_evaluation(path)) if path.exists() else asked
    with plain_errors(output_dir):  # before hours of rollouts, not after
        output_dir.mkdir(parents=True, exist_ok=True)
    for candidate in candidates:
        player = _load(candidate, env, overrides, asked.rename_map)
        identified = identity(fingerprint(player.policy, player.preprocessor, player.postprocessor))
        evaluation = evaluation.with_row(Row(candidate.name, str(candidate.checkpoint), identified, {}))
        # New environments for each policy: some have another start state after every reset.
        with ready(player, env, evaluation.batch_size) as stages:
            _check_learned(asked.learned, list(stages))
            for task, stage in stages.items():
                if task not in evaluation.row(candidate.name).successes:
                    successes = stage.play(evaluation.n_episodes, evaluation.seed)
                    evaluation = evaluation.with_entry(candidate.name, task, successes)
                    write_evaluation(path, evaluation)
                progress(evaluation, candidate.name, task)
    evaluation = evaluation.in_order([candidate.name for candidate in candidates])
    write_evaluation(path, evaluation)
    return evaluation


def success(
    player: Player, tasks: Sequence[str], env_of: Callable[[str], Any], *, episodes: int, seed: int
) -> dict[str, list[bool]]:
    """Success of each episode of each task.

    Args:
        player: From `lerobot_api.rollouts.load_player`.
        tasks: Names of tasks.
        env_of: Configuration of the environment with one of them.
        episodes: For each task; episode i starts from the state of `seed + i`.
        seed: Seed of the first start state, and of the policy's own noise.
    """
    batch_size = side_by_side(episodes)
    return {task: play(player, env_of(task), episodes=episodes, batch_size=batch_size, seed=seed) for task in tasks}


def side_by_side(episodes: int) -> int:
    """How many episodes are played at once: equal batches, so that few are played for nothing."""
    return math.ceil(episodes / math.ceil(episodes / _SIDE_BY_SIDE))


def _load(candidate: Candidate, env: Any, overrides: Sequence[str], rename_map: Mapping[str, str]) -> Player:
    player = load_player(candidate.checkpoint, env, overrides, rename_map)
    if not hasattr(player.policy, "peft_config"):  # an adapter's weights are not all in its own directory
        check_weights(player.policy, candidate.checkpoint)
    return player


def _check_learned(learned: Sequence[str], tasks: Sequence[str]) -> None:
    for task in learned:
        if task not in tasks:
            raise CraftError(f"--learned: {task} is none of the environment's tasks, which are {', '.join(tasks)}")
