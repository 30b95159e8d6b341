"""Everything a run needs before its first step, made in lerobot's order, and checked."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lerobot_craft.anchors.recipe import OLD_DATASET, num_anchors, num_draws
from lerobot_craft.anchors.teacher import (
    Teacher,
    check_weights,
    fingerprint,
    fingerprint_of_weights,
    normalizer_stats,
    require_weights,
)
from lerobot_craft.core.parameters import MasterWeights, Sharded
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import train_parts as parts
from lerobot_craft.lerobot_api.datasets import open_instructions, open_metadata
from lerobot_craft.lerobot_api.features import dimension_names
from lerobot_craft.lerobot_api.preload import check_numbers
from lerobot_craft.lerobot_api.processors import Processor, normalization_modes, policy_batch
from lerobot_craft.lerobot_api.train_steps import read_training_state, undisturbed_rng
from lerobot_craft.memory.format import Memory, read_memory, write_memory
from lerobot_craft.policies import adapter_for, unwrapped
from lerobot_craft.training.accumulation import check_accumulation
from lerobot_craft.training.action_drift import ActionProbe, make_probe
from lerobot_craft.training.anchor_batches import adapter_off
from lerobot_craft.training.checkpoints import check_files, load_craft_state
from lerobot_craft.training.config import CraftConfig, Normalization
from lerobot_craft.training.methods.method import Context, Method
from lerobot_craft.training.methods.registry import make_method
from lerobot_craft.training.normalization import as_stats, check_features, make_processors, warning_lines
from lerobot_craft.training.run_memory import BEFORE, Carried, Remembered, find_memory, make_carried, open_remembered
from lerobot_craft.training.start_checks import check_wording
from lerobot_craft.training.weights import check_sharding, make_masters, read_sharded_optimizer, shard_policy

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """What the loop works with.

    Attributes:
        cfg: lerobot's settings.
        craft: CRaFT's settings.
        accelerator: accelerate's.
        method: What is added to plain fine-tuning.
        policy: As accelerate prepared it.
        optimizer: As accelerate prepared it.
        scheduler: As accelerate prepared it; None where there is none.
        processors: Pre- and postprocessor.
        data: The new task's batches.
        weighter: lerobot's sample weights; None where there are none.
        origin: Checkpoint directory and fingerprint of the policy before fine-tuning; None without CRaFT.
        step: Steps that were taken already.
        start_s: Seconds that the method took before the first step.
        probe: Measures the drift of the actions; None where nothing is known to measure it on.
        masters: Float32 copies of bfloat16 weights; None where they were not asked for.
        command: The line that started the run, for whoever finds its checkpoint.
        before: The memory of the policy before fine-tuning; None where there is none.
        remembered: What of it is held and measured; None where nothing is.
        carried: The memory of the run's checkpoints; None where they have none, and on other ranks than the main one.
    """

    cfg: Any
    craft: CraftConfig
    accelerator: Any
    method: Method
    policy: nn.Module
    optimizer: Any
    scheduler: Any
    processors: tuple[Processor, Processor]
    data: parts.Data
    weighter: Any | None
    origin: "Origin | None"
    step: int
    start_s: float = 0.0
    probe: ActionProbe | None = None
    masters: MasterWeights | None = None
    command: str = ""
    before: Memory | None = None
    remembered: Remembered | None = None
    carried: Carried | None = None

    @property
    def student(self) -> nn.Module:
        """The policy without the wrapper of accelerate or of sharding; PEFT's is still there."""
        if isinstance(self.policy, Sharded):
            return self.policy.module
        module: nn.Module = self.accelerator.unwrap_model(self.policy)
        return module

    @property
    def step_frames(self) -> int:
        """New frames that this process takes in a step."""
        return self.craft.new_samples(self.cfg.batch_size) * self.craft.accumulate

    def to_batch(self, raw: Any) -> dict[str, Any]:
        """What the policy sees of a batch of the data loader."""
        return policy_batch(raw, self.data.dataset.meta.camera_keys, self.processors[0])


@dataclass(frozen=True)
class Origin:
    """The policy before fine-tuning."""

    path: str
    fingerprint: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint's `craft_state.json`."""
        return {"path": self.path, "fingerprint": self.fingerprint}


def open_session(cfg: Any, craft: CraftConfig, accelerator: Any, command: str = "") -> Session:
    """Make all parts, in the order in which lerobot-train does; with CRaFT on, check each as soon as it is there."""
    if craft.shard:
        check_sharding(cfg, craft, accelerator)
    check_accumulation(cfg, craft)
    if craft.enabled and cfg.resume:  # before anything slow happens
        check_files(cfg.checkpoint_path)
    elif craft.enabled:
        require_weights(Path(cfg.policy.pretrained_path))
    parts.seed_everything(cfg, accelerator)
    dataset, held_out = parts.make_datasets(cfg, accelerator)
    if craft.enabled:
        check_features(cfg.policy, dataset.meta.features, cfg.rename_map)
        if not cfg.dataset.streaming:
            check_numbers(dataset, cfg.policy, cfg.rename_map, "--dataset.episodes")
    policy = parts.make_student(cfg, dataset)
    if craft.enabled:
        craft = _settled(cfg, craft, accelerator.num_processes)
    processors = _processors(cfg, craft, policy, dataset, accelerator)
    origin = _origin(cfg, policy, processors) if craft.enabled else None
    policy = parts.wrap_peft(policy, cfg)
    method = make_method(craft)
    if craft.enabled:
        method.freeze(unwrapped(policy), craft, cfg.policy)
        if not any(parameter.requires_grad for parameter in policy.parameters()):
            raise CraftError("there is nothing to train: every parameter is frozen")
    optimizer, scheduler = parts.make_optimizer(cfg, policy)
    masters = None if craft.shard else make_masters(cfg, craft, optimizer, policy)
    weighter = parts.make_sample_weighter(cfg, policy, accelerator.device)
    step = 0
    if cfg.resume and cfg.dataset.image_transforms.enable:
        logger.warning("image transforms draw ahead of the steps: a resumed run sees other ones than one that went on")
    if cfg.resume:
        # Of a sharded run the optimizer's state is read once there are parts to put it into.
        step = read_training_state(cfg.checkpoint_path, None if craft.shard else optimizer, scheduler)
    data = parts.make_data(
        cfg,
        dataset,
        held_out,
        accelerator,
        step,
        preload=craft.preload,
        samples=craft.new_samples(cfg.batch_size),
        micro_batches=craft.accumulate,
    )
    began = time.perf_counter()
    probe = before = remembered = carried = None
    if origin is not None:
        if not cfg.resume:
            craft = _worded(cfg, craft, policy, processors, origin, dataset)
        before, remembered = _memory(cfg, craft, origin, open_instructions(dataset))
        if accelerator.is_main_process and not cfg.resume:
            _compare_rates(craft, before, cfg.dataset.repo_id, float(dataset.meta.fps))
        _start(method, cfg, craft, policy, processors, origin, optimizer, accelerator, remembered)
        with undisturbed_rng():
            probe = make_probe(method, cfg.output_dir)
            method.watch(probe)
            if accelerator.is_main_process:
                carried = make_carried(cfg, craft, cfg.policy, before, dataset)
                if before is not None and not cfg.resume:
                    write_memory(before, cfg.output_dir / BEFORE)
    start_s = time.perf_counter() - began
    if craft.shard:
        wrapped: nn.Module = shard_policy(policy, optimizer, accelerator)
        masters = make_masters(cfg, craft, optimizer, policy)
        if cfg.resume:
            read_sharded_optimizer(cfg.checkpoint_path, optimizer)
        _, optimizer, scheduler = parts.prepare(accelerator, None, optimizer, scheduler, data)
    else:
        wrapped, optimizer, scheduler = parts.prepare(accelerator, policy, optimizer, scheduler, data)
    if craft.enabled:
        method.prepared()
    return Session(
        cfg,
        craft,
        accelerator,
        method,
        wrapped,
        optimizer,
        scheduler,
        processors,
        data,
        weighter,
        origin,
        step,
        start_s,
        probe,
        masters,
        command,
        before,
        remembered,
        carried,
    )


def _settled(cfg: Any, craft: CraftConfig, ranks: int) -> CraftConfig:
    """What was left open, as this run has it. Checkpoints keep it: a resumed run of another length has its anchors."""
    adapter = adapter_for(cfg.policy)
    craft = craft.divided(cfg.batch_size)
    visits = cfg.steps // craft.retention_freq * craft.anchor_batch_size * craft.accumulate * ranks
    draws = num_draws(craft.num_draws, visits, num_anchors(craft.num_anchors, craft.old_frames, adapter))
    return dataclasses.replace(craft, num_draws=draws)


def _worded(
    cfg: Any,
    craft: CraftConfig,
    policy: nn.Module,
    processors: tuple[Processor, Processor],
    origin: Origin,
    dataset: Any,
) -> CraftConfig:
    """The settings with the old instructions as the policy before fine-tuning knows them."""
    teacher = Teacher(unwrapped(policy), *processors, cfg.policy, origin.fingerprint)
    with undisturbed_rng(), adapter_off(policy):
        return check_wording(cfg, craft, Path(origin.path), teacher, dataset)


def _memory(
    cfg: Any, craft: CraftConfig, origin: Origin, new_tasks: Sequence[str]
) -> tuple[Memory | None, Remembered | None]:
    """The memory of the policy before fine-tuning, and what of it is held.

    A resumed run reads the copy in its own directory, or the first checkpoint's, and checks that it is the same.
    """
    places = [find_memory(craft.memory, Path(origin.path))]
    wanted = None
    if cfg.resume:
        wanted = load_craft_state(cfg.checkpoint_path).get("memory")
        if wanted is None:
            return None, None
        places = [cfg.output_dir / BEFORE, *places]
    for place in places:
        if place is None or not place.is_dir():
            continue
        memory = read_memory(place)
        if wanted in (None, memory.fingerprint()):
            return memory, open_remembered(craft, memory, place, new_tasks)
    if wanted is not None:
        raise CraftError(
            f"the memory that this run began with is neither in {cfg.output_dir / BEFORE} nor in {origin.path}: copy "
            "it back, or start a new run"
        )
    return None, None


def _compare_rates(craft: CraftConfig, memory: Memory | None, new: str, fps: float) -> None:
    """Say so where old data were recorded at another rate than the new: a policy's actions have no unit of time."""
    old = {f"the memory's {source.repo_id}": source.fps for source in (memory.sources if memory is not None else ())}
    for repo_id, root in craft.old_dataset.addresses(OLD_DATASET):
        old[repo_id] = float(open_metadata(repo_id, root, craft.old_dataset.revision, named=OLD_DATASET).fps)
    for name, old_fps in old.items():
        if old_fps != fps:
            logger.warning(
                "%s has %g frames per second and the new data %s have %g: one action lasts %.3g s in the old tasks and "
                "%.3g s in the new. The policy cannot tell, so at either rate the robot does the other tasks %.3g "
                "times too fast or too slowly. Resample one of the datasets, or run each task at its own rate.",
                *(name, old_fps, new, fps, 1 / old_fps, 1 / fps, max(fps, old_fps) / min(fps, old_fps)),
            )


def _start(
    method: Method,
    cfg: Any,
    craft: CraftConfig,
    policy: nn.Module,
    processors: tuple[Processor, Processor],
    origin: Origin,
    optimizer: Any,
    accelerator: Any,
    remembered: Remembered | None,
) -> None:
    teacher = Teacher(unwrapped(policy), *processors, cfg.policy, origin.fingerprint)
    context = Context(
        craft, cfg, policy, teacher, origin.path, optimizer, accelerator, resumed=cfg.resume, remembered=remembered
    )
    # The same seed gives the same batches and the same noise with and without CRaFT.
    with undisturbed_rng():
        method.start(context)
    if cfg.resume:
        state = load_craft_state(cfg.checkpoint_path)
        method.load_state_dict(state["method"])


def _processors(
    cfg: Any, craft: CraftConfig, policy: nn.Module, dataset: Any, accelerator: Any
) -> tuple[Processor, Processor]:
    policy_of_stats: Normalization = craft.normalization if craft.enabled else "replace"  # type: ignore[assignment]
    processors = make_processors(cfg, policy, policy_of_stats, dataset.meta.stats, accelerator.device)
    if policy_of_stats == "keep" and not cfg.resume and accelerator.is_main_process:
        preprocessor = processors[0]
        new, modes = as_stats(dataset.meta.stats, cfg.rename_map), normalization_modes(preprocessor)
        names = dimension_names(dataset.meta.features, cfg.rename_map)
        for line in warning_lines(normalizer_stats(preprocessor), new, modes, names):
            logger.warning("normalization=keep: %s", line)
    return processors


def _origin(cfg: Any, policy: nn.Module, processors: tuple[Processor, Processor]) -> Origin:
    path = Path(cfg.policy.pretrained_path)
    if cfg.resume:
        saved = load_craft_state(cfg.checkpoint_path)["origin"]
        if cfg.peft is None:
            check_weights(policy, path)
        elif fingerprint_of_weights(policy) != saved["fingerprint"]["weights"]:
            # The checkpoint holds an adapter alone. Without its weights the pi0 family goes on with random ones.
            raise CraftError(
                f"below its adapter this run began with the weights of {saved['path']}, and what is there now is "
                "something else: the adapter fits no other weights. Put them back there, or start a new run"
            )
        return Origin(saved["path"], saved["fingerprint"])
    check_weights(policy, path)
    return Origin(str(path.resolve()), fingerprint(policy, *processors))
