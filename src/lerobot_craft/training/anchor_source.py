"""Where training's anchors come from: a cache that is there, one that is built now, or the teacher at every visit.

The same anchors under several retention modes (`--craft.retention_mode=hidden+action`): one cache for each mode.

All are built by one plan, so anchor i is the same frame under the same instruction in each. Modes thus never meet in a
cache, and everything that reads one knows a single mode.
"""

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from filelock import BaseFileLock, FileLock, Timeout
from torch import Tensor
from tqdm import tqdm

from lerobot_craft.anchors.build import Job, Ranks, build_cache, is_finished, prepare, share
from lerobot_craft.anchors.loader import AnchorBatch, open_cache
from lerobot_craft.anchors.manifest import MANIFEST_FILE, Manifest
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.plan import parse_old_instructions
from lerobot_craft.anchors.recipe import OLD_DATASET, BuildConfig, DatasetFlags, digest, num_anchors
from lerobot_craft.anchors.retained import Retained
from lerobot_craft.core.ranks import main_decides
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import plain_errors
from lerobot_craft.lerobot_api.datasets import lerobot_home
from lerobot_craft.policies import adapter_for, unwrapped
from lerobot_craft.policies.taps import KnownImages
from lerobot_craft.training.anchor_batches import CachedAnchors, OnlineAnchors, adapter_off
from lerobot_craft.training.config import LOSS_TYPES, CraftConfig
from lerobot_craft.training.methods.method import Context, Cost


def check_values(context: Context, held: Retained, directory: Path) -> None:
    """Refuse a cache of other values, such as of other layers, than those that the flags ask for."""
    adapter = adapter_for(context.teacher.config)
    if wanted := held.disagreements(context.config, adapter, unwrapped(context.policy)):
        raise CraftError(
            f"{directory} holds {held}, and training asks for {' and '.join(wanted)}: leave these flags out to use "
            "what the cache holds, or build another one with `craft cache build`"
        )


def check_origin(config: CraftConfig, source: str, manifest: Manifest, directory: Path) -> None:
    """Refuse a cache of other anchors than the flags would build: one that is there is not built again."""
    if not config.names_an_origin:
        return
    differing = []
    if source != manifest.anchor_source:
        differing.append(f"--craft.anchor_source={source}, it has {manifest.anchor_source} anchors")
    if config.old_instructions is not None:
        asked = parse_old_instructions(config.old_instructions)
        if set(asked) != set(manifest.instructions):
            differing.append(f"--craft.old_instructions, it has {'; '.join(manifest.instructions)}")
    if source != "cross":
        known = {record.repo_id for record in manifest.datasets}
        names = [repo_id for repo_id, _ in config.old_dataset.addresses(OLD_DATASET)]
        if any(name not in known for name in names):
            differing.append(f"--craft.old_dataset.repo_id, it has frames of {', '.join(sorted(known))}")
    if differing:
        raise CraftError(
            f"{directory} holds other anchors than the flags ask for ({', and for '.join(differing)}): leave these "
            "flags out to use it as it is, or give another --craft.anchor_cache_dir"
        )


def check_loss_type(context: Context, retained: Retained) -> None:
    """Refuse a loss that cannot compare what is retained."""
    allowed = retained.loss_types(adapter_for(context.teacher.config))
    loss_type = context.config.loss_type
    if loss_type is None or loss_type in allowed:
        return
    can_be_given = [loss for loss in allowed if loss in LOSS_TYPES]
    remedy = f"use {', '.join(can_be_given)}" if can_be_given else "leave it out"
    raise CraftError(
        f"--craft.loss_type={loss_type} cannot compare what --craft.retention_mode={retained.mode} keeps: {remedy}"
    )


logger = logging.getLogger(__name__)

HOME_VARIABLE = "CRAFT_HOME"
_DIGITS = 16  # of a recipe's digest, as the name of a directory
_TURN = 60.0  # seconds that the main rank waits for another run before it tells the others that it still does


class Anchors(Protocol):
    """What a method draws its anchors from.

    Attributes:
        retained: Which of the policy's values are retained.
        tasks: The old instructions, which are the constraint groups, in the order of `AnchorBatch.instruction`.
        num_anchors: How many there are.
        instructions: int64 [num_anchors], the task of each.
        cross: bool [num_anchors], which are frames of the new task under an old instruction.
        directory: Of the cache; None for an online teacher.
        source: Where their inputs come from: `dataset`, `cross` or `both`.
        stored_bytes: Of the cache on disk; 0 for an online teacher.
        images: What an untrained vision tower makes of their images.
    """

    retained: Retained
    tasks: Sequence[str]
    num_anchors: int
    instructions: Tensor
    cross: Tensor
    directory: Path | None
    source: str
    stored_bytes: int
    images: KnownImages

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> AnchorBatch:
        """The anchors of the n-th anchor step, counted from 0; a function of the arguments and the run's seed."""

    def hold_out(self, indices: Tensor) -> None:
        """Leave these anchors out of all steps."""

    def take(self, indices: Tensor) -> AnchorBatch:
        """Chosen anchors."""

    def actions(self, indices: Tensor) -> AnchorBatch | None:
        """Chosen anchors with the teacher's actions instead of what is retained; None where it cannot be asked."""

    def units(self, loss_type: str) -> list[float]:
        """Per task, the drift that counts as 1 against the budget."""

    def layer_scales(self, loss_type: str) -> dict[str, float] | None:
        """The spread of each layer of hidden states, for relative drift; None for other values."""

    def costs(self) -> list[Cost]:
        """Memory beyond plain fine-tuning."""

    def identity(self) -> dict[str, Any]:
        """What must be the same after a resume, as JSON values."""


def open_anchors(context: Context) -> Anchors:
    """The anchors that `--craft.*` asks for; a cache that is not there yet is built first.

    Raises:
        CraftError: There is neither a cache nor an origin of anchors, or what is there is not what was asked for.
    """
    anchors = _open_online(context) if context.config.teacher == "online" else _open_cached(context)
    check_loss_type(context, anchors.retained)
    return anchors


def _open_online(context: Context) -> Anchors:
    if not _has_an_origin(context):
        raise CraftError(
            "--craft.teacher=online reads its anchors from datasets: give those of the old tasks as "
            "--craft.old_dataset.repo_id, or only their instructions as --craft.old_instructions"
        )
    if context.config.anchor_cache_dir is not None:
        logger.warning("--craft.teacher=online asks the teacher itself: --craft.anchor_cache_dir is not read")
    return OnlineAnchors(context, _job(context, Path()))


def _open_cached(context: Context) -> Anchors:
    given = context.config.anchor_cache_dir
    if given is not None and main_decides((given / MANIFEST_FILE).exists):
        anchors = _opened(context, given)
        reads_instruction = adapter_for(context.teacher.config).reads_instruction
        check_origin(context.config, context.config.source(reads_instruction), anchors.manifest, given)
        return anchors
    if not _has_an_origin(context):
        raise CraftError(_neither(given))
    job = _job(context, given or Path())
    directory = given or _home() / "anchors" / digest(job.recipe())[:_DIGITS]
    if not context.resumed:
        _build(context, job, directory)
    elif not is_finished(job, directory):
        raise CraftError(
            f"the anchors of this run are not in {directory} any more, and a policy that was trained since cannot "
            "make them again: give the directory where they are as --craft.anchor_cache_dir, or start a new run"
        )
    return _opened(context, directory)


def _job(context: Context, directory: Path) -> Job:
    new = context.train.dataset
    new_dataset = DatasetFlags(new.repo_id, str(new.root or ""), new.revision)
    settings = context.config.anchor_settings()
    build = BuildConfig(**settings, output_dir=directory, new_dataset=new_dataset, seed=context.seed)
    remembered = context.remembered
    if remembered is None:
        return prepare(build, context.teacher, new_episodes=new.episodes)
    build = _with_room(build, len(remembered.held or ()), context)
    return prepare(build, context.teacher, remembered.old_frames(context.teacher.config), new_episodes=new.episodes)


def _with_room(build: BuildConfig, remembered: int, context: Context) -> BuildConfig:
    """The number of anchors that has room for all frames of a memory, unless the flags say how many there are."""
    if remembered == 0:
        return build
    adapter = adapter_for(context.teacher.config)
    usual = num_anchors(None, None, adapter)
    of_datasets = usual // 2 if build.old_dataset.repo_id else 0
    source = build.source(adapter.reads_instruction, has_memory=True)
    if source == "both" and build.old_frames is None:
        wanted = remembered + of_datasets
        return replace(build, old_frames=wanted if build.num_anchors is None else min(wanted, build.num_anchors // 2))
    if source == "dataset" and build.num_anchors is None:
        return replace(build, num_anchors=remembered + of_datasets)
    return build


def _has_an_origin(context: Context) -> bool:
    return context.config.names_an_origin or context.remembered is not None


def _build(context: Context, job: Job, directory: Path) -> None:
    ranks = Ranks(context.accelerator.process_index, context.accelerator.num_processes)
    with _alone(directory, ranks):
        if is_finished(job, directory):
            logger.info("anchors of an earlier run are used: %s", directory)
            return
        logger.info("building %d anchors in %s; a later run with the same flags finds them", len(job.plan), directory)
        with (
            adapter_off(context.policy),
            tqdm(total=share(job, ranks), desc="anchors", unit="anchor", disable=not ranks.is_main) as bar,
        ):
            build_cache(job, directory, ranks=ranks, progress=bar.update)


@contextmanager
def _alone(directory: Path, ranks: Ranks) -> Iterator[None]:
    """While no other run builds here: a sweep starts many runs with the same anchors at once."""
    whole = directory.resolve()
    lock = FileLock(whole.with_name(f".{whole.name}.lock"))
    if ranks.is_main:
        with plain_errors(whole.parent):
            whole.parent.mkdir(parents=True, exist_ok=True)
    if not main_decides(lambda: _acquired(lock, 0.0)):
        logger.info("another run is building the anchors in %s: waiting for it", directory)
        # In turns: the other run may take longer than ranks wait for each other.
        while not main_decides(lambda: _acquired(lock, _TURN)):
            pass
    try:
        yield
    finally:
        lock.release()


def _acquired(lock: BaseFileLock, within: float) -> bool:
    with plain_errors(Path(lock.lock_file).parent):
        try:
            lock.acquire(timeout=within)
        except Timeout:
            return False
    return True


def _opened(context: Context, directory: Path) -> CachedAnchors:
    config, teacher = context.config, context.teacher
    size = sum(shard.bytes for shard in Manifest.load(directory).shards)
    verify = context.accelerator.is_local_main_process  # once on each machine
    with tqdm(total=size, desc="checksums", unit="B", unit_scale=True, disable=not verify) as bar:
        loader = open_cache(
            directory,
            teacher=None if context.resumed else teacher.fingerprint,
            retention_mode=config.retention_mode,
            verify=verify,
            policy_config=teacher.config,
            progress=bar.update,
        )
    anchors = CachedAnchors(context, loader)
    check_values(context, anchors.retained, directory)
    return anchors


def _home() -> Path:
    home = os.environ.get(HOME_VARIABLE)
    return Path(home).expanduser() if home else lerobot_home() / "craft"


def _neither(directory: Path | None) -> str:
    where = "there are no anchors" if directory is None else f"{directory} holds no finished cache of anchors"
    return (
        f"{where}, and nothing says what to make them from. Give the policy a memory with `craft remember CHECKPOINT "
        "--dataset.repo_id=NAME`; or name the old tasks here: their frames with --craft.old_dataset.repo_id, or only "
        "their instructions with --craft.old_instructions='...; ...'. A cache of `craft cache build` is given as "
        "--craft.anchor_cache_dir"
    )


class SeveralAnchors:
    """Anchors of the first mode, or of actions where they are among them, and beside them those of the others.

    Attributes:
        each: By mode, in the order of the flag.
    """

    def __init__(self, each: Sequence[Anchors]) -> None:
        self.each = each
        self._first = next((anchors for anchors in each if anchors.retained.mode == Action.mode), each[0])
        for other in each:
            same = list(other.tasks) == list(self._first.tasks) and other.instructions.equal(self._first.instructions)
            if not same or not other.cross.equal(self._first.cross):
                raise CraftError(
                    f"{other.directory} and {self._first.directory} hold different anchors: modes that are retained "
                    "together need caches that were built with the same flags"
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    @property
    def stored_bytes(self) -> int:
        """The sum over all caches."""
        return sum(anchors.stored_bytes for anchors in self.each)

    def hold_out(self, indices: Tensor) -> None:
        """Leave these anchors out of all steps, under every mode."""
        for anchors in self.each:
            anchors.hold_out(indices)

    def costs(self) -> list[Cost]:
        """One entry per mode."""
        return [
            Cost(f"{cost.what} ({anchors.retained.mode})", cost.bytes)
            for anchors in self.each
            for cost in anchors.costs()
        ]

    def identity(self) -> dict[str, Any]:
        """By mode."""
        return {anchors.retained.mode: anchors.identity() for anchors in self.each}


def mode_of(anchors: Anchors) -> str:
    """What is retained, as `--craft.retention_mode` names it."""
    return "+".join(a.retained.mode for a in (anchors.each if isinstance(anchors, SeveralAnchors) else [anchors]))


def open_all(context: Context) -> tuple[Anchors, list[Anchors]]:
    """What the method holds as one, and the anchors of each mode that `--craft.retention_mode` names."""
    each = [open_anchors(dataclasses.replace(context, config=own)) for own in context.config.by_mode()]
    return (each[0] if len(each) == 1 else SeveralAnchors(each)), each  # type: ignore[return-value]  # delegates the rest
