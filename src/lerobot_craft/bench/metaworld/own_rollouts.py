"""A policy's own episodes, including failed ones, recorded as a LeRobotDataset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lerobot_craft.bench.metaworld.environment import CAMERA
from lerobot_craft.bench.metaworld.recording import TAIL, Episode, write_dataset
from lerobot_craft.bench.metaworld.simulation import Simulation
from lerobot_craft.bench.metaworld.tasks import IMAGE_SIDES, View
from lerobot_craft.lerobot_api.rollouts import Player, seeded


def record_own(
    root: Path, player: Player, tasks: Sequence[str], episodes: int, seed: int, view: View
) -> dict[str, list[bool]]:
    """Let a policy play each task, write all episodes to `root`, and return which succeeded.

    Args:
        root: Output directory; must not exist.
        player: The policy; it must predict and execute whole chunks.
        tasks: Names in `TASKS`.
        episodes: Episodes per task.
        seed: Seed of the first start state, and of the policy's noise.
        view: What the policy observes.
    """
    with seeded(seed):
        found = {task: _play(player, task, range(seed, seed + episodes), view) for task in tasks}
    write_dataset(root, f"craft/{root.name}", {task: made for task, (made, _) in found.items()}, view)
    return {task: reached for task, (_, reached) in found.items()}


def _play(player: Player, task: str, starts: Sequence[int], view: View) -> tuple[list[Episode], list[bool]]:
    """One episode per start, in parallel; each ends a few frames after success, or at the task's limit."""
    takes = [_Take(task, start, view) for start in starts]
    player.policy.reset()  # type: ignore[operator]
    while at_work := [take for take in takes if not take.is_over]:
        chunks = _chunks(player, at_work)  # [B, T, A]
        for take, chunk in zip(at_work, chunks, strict=True):
            take.act(chunk)
    return [take.episode() for take in takes], [take.reached for take in takes]


def _chunks(player: Player, takes: "Sequence[_Take]") -> np.ndarray[Any, Any]:
    images = np.stack([take.picture() for take in takes])  # [B, side, side, 3]
    raw = {
        "observation.state": torch.from_numpy(np.stack([take.simulation.state() for take in takes])),
        f"observation.images.{CAMERA}": torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255,
        "task": [take.simulation.task.instruction for take in takes],
    }
    predicted = player.policy.predict_action_chunk(player.preprocessor(raw))  # type: ignore[operator]
    chunks: np.ndarray[Any, Any] = player.postprocessor(predicted).cpu().numpy()
    return chunks


class _Take:
    """An episode that is being played and recorded."""

    def __init__(self, task: str, start: int, view: View) -> None:
        self.simulation = Simulation(task, view)
        self.simulation.reset(start)
        self.reached = False
        self._left = self.simulation.task.max_steps
        self._states: list[Any] = []
        self._actions: list[Any] = []
        self._images: list[Any] = []

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def picture(self) -> Any:
        view = self.simulation.view
        side = IMAGE_SIDES[view]
        return self.simulation.image(side) if view == "seen" else np.zeros((side, side, 3), np.uint8)

    def act(self, chunk: np.ndarray[Any, Any]) -> None:
        for action in chunk:
            if self.is_over:
                return
            self._states.append(self.simulation.state())
            self._actions.append(np.clip(action, -1.0, 1.0).astype(np.float32))
            if self.simulation.view == "seen":
                self._images.append(self.picture())
            success = self.simulation.step(action)
            self._left -= 1
            if success and not self.reached:
                self.reached, self._left = True, min(self._left, TAIL)

    def episode(self) -> Episode:
        images = np.stack(self._images) if self._images else None
        return Episode(np.stack(self._states), np.stack(self._actions), images)
