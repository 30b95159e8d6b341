"""The parts of `lerobot-train`, in its order: accelerator, data, policy, optimizer.

Each function draws random numbers exactly as lerobot's script does, so a loop built from them is bit-identical.
"""

import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import frame_table, require_metadata
from lerobot_craft.lerobot_api.foreign_code import refuse_foreign_code
from lerobot_craft.lerobot_api.preload import SamplesInMemory, as_it_is, preloaded
from lerobot_craft.lerobot_api.pretrained import autocast_name, in_short, plain_making

# accelerate's names; on CPUs accelerate ignores the variables that its launcher sets.
_SHARDING = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
    "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
}


def check_launch(cfg: Any, accelerator: Any, *, enabled: bool) -> None:
    """Refuse settings that would be silently wrong.

    Args:
        cfg: lerobot's settings.
        accelerator: The `Accelerator`.
        enabled: Whether CRaFT is on; if off, everything lerobot-train supports is allowed.

    Raises:
        CraftError: Says what was requested, why it is not supported, and what is.
    """
    for kind, variable in _SHARDING.items():
        if accelerator.distributed_type == kind or os.environ.get(variable, "false").lower() in ("1", "true"):
            raise CraftError(
                f"accelerate is set to {kind}, which does not carry lerobot's policies (docs/scaling.md): run "
                "`accelerate launch --multi_gpu ...`, and where a policy does not fit on one device add "
                "--craft.shard=true (FSDP2)"
            )
    if (steps := accelerator.gradient_accumulation_steps) != 1:
        raise CraftError(
            f"accelerate is set to accumulate gradients over {steps} steps, which lerobot 0.6.1 does not do (it would "
            f"only divide the loss by {steps}): give --gradient_accumulation_steps=1 to accelerate launch, and "
            f"--craft.accumulate={steps} to craft train"
        )
    if not enabled:
        return
    if str(accelerator.state.dynamo_plugin.backend.value) != "NO":
        raise CraftError(
            "accelerate is set to compile the whole policy, which leaves out the hooks that anchors are read by: give "
            "--dynamo_backend=no to accelerate launch, and --policy.compile_model=true where the policy has it"
        )
    if getattr(cfg.policy, "compile_model", False) and cfg.policy.type == "diffusion":
        raise CraftError(
            "--policy.compile_model=true renames the weights of a diffusion policy (unet._orig_mod...), so its "
            "checkpoint would not be one of the policy that was given: give --policy.compile_model=false"
        )


logger = logging.getLogger(__name__)

# How long ranks wait for one that builds anchors, evaluates, saves or uploads. torch's limit: 10 to 30 minutes.
RANKS_WAIT = timedelta(hours=2)
_OTHER_CAMERAS = "Feature mismatch"
_WORLD_SIZE = "WORLD_SIZE"  # set by torchrun and `accelerate launch`


def several_processes() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get(_WORLD_SIZE, "1")) > 1


def make_accelerator(cfg: Any) -> Any:
    """The `Accelerator` with the device and precision of the policy's config.

    With several processes, each waits up to `RANKS_WAIT` for the others. Everything else is as in lerobot-train.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
    from lerobot.utils.utils import init_logging

    by_dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
    precision = by_dtype.get(getattr(cfg.policy, "dtype", None) or "")
    if not hasattr(cfg.policy, "dtype") and getattr(cfg.policy, "use_amp", False):
        precision = autocast_name(cfg.policy)
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    if several_processes():
        handlers.append(InitProcessGroupKwargs(timeout=RANKS_WAIT))
    accelerator = Accelerator(
        step_scheduler_with_optimizer=False,  # otherwise accelerate steps the schedule once per process
        mixed_precision=precision,
        kwargs_handlers=handlers,
        cpu=cfg.policy.device == "cpu",
    )
    init_logging(accelerator=accelerator)
    return accelerator


def seed_everything(cfg: Any, accelerator: Any) -> None:
    """Set seeds and cuDNN switches."""
    from lerobot.utils.random_utils import set_seed

    if cfg.seed is not None:
        set_seed(cfg.seed, accelerator=accelerator)
    torch.backends.cudnn.deterministic = bool(cfg.cudnn_deterministic)
    torch.backends.cudnn.benchmark = not cfg.cudnn_deterministic
    torch.backends.cuda.matmul.allow_tf32 = True


def make_datasets(cfg: Any, accelerator: Any) -> tuple[Any, Any | None]:
    """The new task's dataset and its held-out part; the main process goes first, because it may download."""
    from lerobot.datasets.factory import make_train_eval_datasets

    if cfg.dataset.root is not None and Path(cfg.dataset.root).is_dir() and not cfg.dataset.streaming:
        require_metadata(cfg.dataset.repo_id, Path(cfg.dataset.root))
    try:
        with accelerator.main_process_first():
            dataset, held_out = make_train_eval_datasets(cfg)
    except (OSError, ValueError, KeyError) as error:
        lost = cfg.dataset.root is not None and not Path(cfg.dataset.root).is_dir()
        reason = f"there is no directory {cfg.dataset.root}, and from the Hub: " if lost else ""
        raise CraftError(
            f"the dataset {cfg.dataset.repo_id} cannot be opened ({reason}{in_short(error)}): check --dataset.repo_id "
            "and --dataset.root"
        ) from error
    if not cfg.dataset.streaming:
        frame_table(dataset)  # refuses frames with an unlisted instruction or episode
    return dataset, held_out


def make_student(cfg: Any, dataset: Any) -> nn.Module:
    """The policy to train, on its device, with the dataset's features."""
    from lerobot.policies import make_policy

    refuse_foreign_code(cfg.policy)
    with plain_making(cfg.policy, cfg.dataset.repo_id):
        try:
            policy: nn.Module = make_policy(cfg=cfg.policy, ds_meta=dataset.meta, rename_map=cfg.rename_map)
        except ValueError as error:
            said = str(error).splitlines()
            if not said or not said[0].startswith(_OTHER_CAMERAS):
                raise
            raise CraftError(
                f"the policy {cfg.policy.pretrained_path} and the dataset {cfg.dataset.repo_id} have different cameras "
                f"({'; '.join(line.removeprefix('- ') for line in said[1:3])}): translate the dataset's names into the "
                'policy\'s with --rename_map=\'{"NAME IN THE DATASET": "NAME IN THE POLICY"}\''
            ) from error
    return policy


def wrap_peft(policy: nn.Module, cfg: Any) -> nn.Module:
    """The policy with the adapters of `--peft.*`; a resumed policy already has them."""
    if cfg.peft is None or hasattr(policy, "disable_adapter"):
        return policy
    try:
        wrapped: nn.Module = policy.wrap_with_peft(peft_cli_overrides=dataclasses.asdict(cfg.peft))  # type: ignore[operator]
    except (ImportError, ValueError) as error:
        raise CraftError(f"--peft: {error}") from error
    return wrapped


def make_optimizer(cfg: Any, policy: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Optimizer and learning-rate schedule from the policy's preset or the flags."""
    from lerobot.optim.factory import make_optimizer_and_scheduler

    optimizer, scheduler = make_optimizer_and_scheduler(cfg, policy)
    return optimizer, scheduler


def make_sample_weighter(cfg: Any, policy: nn.Module, device: torch.device) -> Any | None:
    """Weights per sample from lerobot, if requested."""
    if cfg.sample_weighting is None:
        return None
    from lerobot.utils.sample_weighting import make_sample_weighter as make

    return make(
        cfg.sample_weighting, policy, device, dataset_root=cfg.dataset.root, dataset_repo_id=cfg.dataset.repo_id
    )


@dataclass
class Data:
    """The loop's data, and the position in it."""

    dataset: Any
    loader: Any
    held_out: Any | None = None
    epoch: int = 0
    mid_epoch: bool = False
    draws_once: bool = False  # at the first epoch only, as with persistent workers
    on_host: bool = False  # batches stay there until `to_device` takes a part of one

    def batches(self, restore_rng: Callable[[], None] | None = None) -> Iterator[Any]:
        """An endless stream; in a resumed run `restore_rng` sets the random state of the checkpoint.

        A data loader draws a seed for its workers at the start of each epoch (with persistent workers, once). A resumed
        epoch started before the checkpoint, so its draw must be undone. An epoch that starts here draws as usual.
        """
        from lerobot.utils.utils import cycle

        stream = cycle(self.loader)
        began_before = self.mid_epoch or self.draws_once
        if restore_rng is not None and not began_before:
            restore_rng()
        first = next(stream)
        if self.draws_once:
            # Preloaded data have no persistent workers, so later epochs would draw: let them use a separate generator.
            getattr(self.loader, "base_dataloader", self.loader).generator = torch.Generator()
        if restore_rng is not None and began_before:
            restore_rng()
        yield first
        yield from stream


def make_data(
    cfg: Any,
    dataset: Any,
    held_out: Any | None,
    accelerator: Any,
    step: int,
    *,
    preload: bool = False,
    samples: int | None = None,
    micro_batches: int = 1,
) -> Data:
    """Data loaders as in lerobot-train, positioned after `step` steps.

    Args:
        cfg: lerobot's settings.
        dataset: The new task's dataset.
        held_out: Its held-out part, or None.
        accelerator: The `Accelerator`.
        step: Steps already taken.
        preload: Read everything into memory first: the same batches, faster.
        samples: Of a micro-batch; None: `--batch_size`.
        micro_batches: How many make up a step. They come as one batch, on the host: the same samples, and the same
            place in the data after a resume, as if it were not divided.
    """
    sampler, epoch, start = None, 0, 0
    frames = (samples or cfg.batch_size) * micro_batches
    if not cfg.dataset.streaming:
        sampler, epoch, start = _sampler(cfg, dataset, accelerator, step, frames)
    samples, kept_back = dataset, None if held_out is None else _capped(held_out, cfg.max_eval_samples)
    if preload:
        samples, kept_back = preloaded(samples, kept_back)
    loader = _loader(cfg, samples, accelerator, frames, sampler=sampler, shuffle=False)
    if kept_back is not None:
        kept_back = _loader(cfg, kept_back, accelerator, cfg.batch_size)
    draws_once = cfg.num_workers > 0 and cfg.persistent_workers
    on_host = micro_batches > 1
    return Data(dataset, loader, kept_back, epoch, mid_epoch=start > 0, draws_once=draws_once, on_host=on_host)


def prepare(
    accelerator: Any, policy: nn.Module | None, optimizer: Any, scheduler: Any, data: Data
) -> tuple[Any, Any, Any]:
    """Pass everything to accelerate except an already sharded policy; the data's loaders are replaced in place."""
    accelerator.wait_for_everyone()
    given = (policy, optimizer, data.loader, scheduler, data.held_out)
    prepared = accelerator.prepare(*given, device_placement=[None, None, False, None, None] if data.on_host else None)
    policy, optimizer, data.loader, scheduler, data.held_out = prepared
    # accelerate's loader passes its own epoch count to the sampler; it starts at 0 even in a resumed run.
    data.loader.iteration = data.epoch
    return policy, optimizer, scheduler


def to_device(raw: Any, accelerator: Any) -> Any:
    """A part of a batch that the loader left on the host, as accelerate moves whole ones."""
    from accelerate.utils import send_to_device

    return send_to_device(raw, accelerator.device, non_blocking=True)


def _sampler(cfg: Any, dataset: Any, accelerator: Any, step: int, frames: int) -> tuple[Any, int, int]:
    from lerobot.common.train_utils import load_training_batch_size, load_training_num_processes
    from lerobot.datasets import EpisodeAwareSampler, compute_sampler_state

    try:
        sampler = EpisodeAwareSampler(
            dataset.meta.episodes["dataset_from_index"],
            dataset.meta.episodes["dataset_to_index"],
            episode_indices_to_use=dataset.episodes,
            drop_n_last_frames=getattr(cfg.policy, "drop_n_last_frames", 0),
            shuffle=True,
            seed=cfg.seed if cfg.seed is not None else 0,
            absolute_to_relative_idx=dataset.absolute_to_relative_idx,
        )
    except ValueError as error:
        raise CraftError(f"the dataset {cfg.dataset.repo_id} has no frame to train on: {error}") from error
    if step == 0:
        return sampler, 0, 0
    processes = load_training_num_processes(cfg.checkpoint_path) or accelerator.num_processes
    batch_size = load_training_batch_size(cfg.checkpoint_path) or frames
    if (processes, batch_size) != (accelerator.num_processes, frames):
        logger.warning(
            "the checkpoint was written by %d processes with batches of %d, this run has %d and %d: the data go on at "
            "the right place, but not sample by sample as they would have",
            *(processes, batch_size, accelerator.num_processes, frames),
        )
    state = compute_sampler_state(step, len(sampler), batch_size, processes)
    sampler.load_state_dict(state)
    return sampler, state["epoch"], state["start_index"]


def _leave_signals_to_the_run(_: int) -> None:
    """In a data worker: ignore Ctrl-C and SIGTERM, which reach the whole process group; the run finishes its step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _loader(cfg: Any, dataset: Any, accelerator: Any, batch_size: int, **options: Any) -> DataLoader[Any]:
    from lerobot.utils.collate import lerobot_collate_fn

    whole: Any = dataset.dataset if isinstance(dataset, Subset) else dataset
    in_memory = isinstance(whole, SamplesInMemory)
    collate_fn: Any = as_it_is if in_memory else lerobot_collate_fn if whole.meta.has_language_columns else None
    workers = cfg.num_workers > 0 and not in_memory
    return DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=cfg.num_workers if workers else 0,
        pin_memory=accelerator.device.type == "cuda",
        collate_fn=collate_fn,
        worker_init_fn=_leave_signals_to_the_run if workers else None,
        prefetch_factor=cfg.prefetch_factor if workers else None,
        persistent_workers=cfg.persistent_workers and workers,
        multiprocessing_context=cfg.dataloader_multiprocessing_context if workers else None,
        **options,
    )


def _capped(dataset: Any, samples: int) -> Any:
    """At most `samples` held-out frames: the first ones of each task, in equal parts."""
    if samples <= 0 or not hasattr(dataset, "hf_dataset"):
        return dataset
    task = dataset.hf_dataset.data.column("task_index").to_numpy()
    tasks = sorted(set(task.tolist()))
    share = max(1, samples // len(tasks))
    return Subset(dataset, [frame for t in tasks for frame in (task == t).nonzero()[0][:share].tolist()])


def checkpoint_directory(cfg: Any, step: int) -> Path:
    """The checkpoint directory of a step."""
    from lerobot.common.train_utils import get_step_checkpoint_dir

    directory: Path = get_step_checkpoint_dir(cfg.output_dir, cfg.steps, step)
    return directory


@contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Use around a training: lerobot replaces the root logger's handlers, accelerate keeps one device and precision."""
    from accelerate.state import AcceleratorState

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        AcceleratorState._reset_state(reset_partial_state=True)
