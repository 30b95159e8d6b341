"""The repeated parts of `lerobot-train`: update, meters, evaluation, writing and reading checkpoints, random streams.

lerobot 0.6.1 seeds all ranks alike, so the n-th sample of every rank gets the same noise, flow time and dropout, and it
saves only the main rank's state. Here the main rank draws as in lerobot, and every other rank has its own stream.
"""

import contextlib
import dataclasses
import hashlib
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

RngState = dict[str, Tensor]


def start_stream(seed: int | None, rank: int, step: int = 0) -> None:
    """Start this rank's own random stream; the main rank keeps its current one."""
    if rank == 0:
        return
    # Hashed, so that rank 1 of seed 0 is unrelated to rank 0 of seed 1.
    digest = hashlib.sha256(f"rank {seed or 0} {rank} {step}".encode()).digest()
    own = int.from_bytes(digest[:4])
    random.seed(own)
    np.random.seed(own)  # noqa: NPY002  # the generator that policies and augmentations use
    torch.manual_seed(own)  # all devices


def gather_streams() -> list[RngState]:
    """The generator states of all ranks; a collective."""
    from accelerate.utils import gather_object
    from lerobot.utils.random_utils import serialize_rng_state

    states: list[RngState] = gather_object([serialize_rng_state()])
    return states


def save_streams(directory: Path, states: Sequence[RngState]) -> None:
    """Write the states of all ranks except the main one, which lerobot writes, into a checkpoint."""
    from safetensors.torch import save_file

    for rank, state in enumerate(states):
        if rank > 0:
            save_file(state, _file(directory, rank))


def restore_stream(directory: Path, rank: int, seed: int | None, step: int) -> None:
    """Restore the generators from a checkpoint; a rank that is not in it starts a new stream."""
    from lerobot.utils.random_utils import deserialize_rng_state, load_rng_state
    from safetensors.torch import load_file

    if rank == 0:
        load_rng_state(_file(directory, rank).parent)
    elif _file(directory, rank).is_file():
        deserialize_rng_state(load_file(_file(directory, rank)))
    else:
        start_stream(seed, rank, step)


def _file(directory: Path, rank: int) -> Path:
    from lerobot.utils.constants import RNG_STATE, TRAINING_STATE_DIR

    main = Path(directory, TRAINING_STATE_DIR, RNG_STATE)
    return main.with_stem(f"{main.stem}_rank_{rank}") if rank else main


logger = logging.getLogger(__name__)

# lerobot's own packages, and plugins that it finds by name.
_FOUND_BY_LEROBOT = ("lerobot.", "lerobot_policy_", "lerobot_env_")


def make_tracker(frames: int, dataset: Any, accelerator: Any, step: int) -> Any:
    """The meters for the steps between two log lines; `frames` is the number per process and step."""
    from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

    meters = {
        "loss": AverageMeter("loss", ":.3f", reduction="mean"),
        "grad_norm": AverageMeter("grdn", ":.3f"),
        "lr": AverageMeter("lr", ":0.1e"),
        "update_s": AverageMeter("updt_s", ":.3f", reduction="max"),
        "dataloading_s": AverageMeter("data_s", ":.3f", reduction="max"),
        "samples_per_s": AverageMeter("smp/s", ":.0f"),
    }
    if torch.cuda.is_available():
        meters["gpu_mem_gb"] = AverageMeter("mem_gb", ":.2f", reduction="max")
    return MetricsTracker(
        frames, dataset.num_frames, dataset.num_episodes, meters, initial_step=step, accelerator=accelerator
    )


def update(tracker: Any, policy: nn.Module, batch: Any, optimizer: Any, **parts: Any) -> None:
    """One lerobot update: forward, backward, clip, optimizer, schedule; `parts` are its keyword arguments."""
    from lerobot.scripts.lerobot_train import update_policy

    update_policy(tracker, policy, batch, optimizer, **parts)


def bar_is_welcome() -> bool:
    """Whether to draw a progress bar: like lerobot, not in a Slurm job, where it would fill the log."""
    from lerobot.utils.utils import inside_slurm

    return not inside_slurm()


def make_wandb(cfg: Any, craft: dict[str, Any] | None) -> Any | None:
    """The wandb logger of lerobot, if enabled, with CRaFT's settings added."""
    if not (cfg.wandb.enable and cfg.wandb.project):
        return None
    from lerobot.common.wandb_utils import WandBLogger

    run = WandBLogger(cfg)
    if craft is not None:
        run._wandb.config.update({"craft": craft}, allow_val_change=True)
    return run


def weighter_stats(weighter: Any | None) -> dict[str, Any]:
    """Log entries of lerobot about its sample weights."""
    return {} if weighter is None else {f"sample_weighting/{name}": x for name, x in weighter.get_stats().items()}


def held_out_loss(policy: nn.Module, data: Any, to_batch: Any, accelerator: Any) -> float:
    """Mean loss over the held-out episodes and all ranks."""
    policy.eval()
    losses = []
    with torch.no_grad(), accelerator.autocast():
        for raw in data.held_out:
            loss, _ = policy.forward(to_batch(raw))
            losses.append(loss.item())
    policy.train()
    mean = torch.tensor(sum(losses) / max(len(losses), 1), device=accelerator.device)
    return float(accelerator.reduce(mean, reduction="mean").item())


def evaluate_in_env(cfg: Any, policy: nn.Module, processors: tuple[Any, Any], accelerator: Any, step: int) -> Any:
    """Rollouts by lerobot in `--env.*`: {"overall": {...}, suite: {...}}."""
    from lerobot.common.train_utils import get_step_identifier
    from lerobot.envs import close_envs, make_env, make_env_pre_post_processors
    from lerobot.scripts.lerobot_eval import eval_policy_all

    env_preprocessor, env_postprocessor = make_env_pre_post_processors(env_cfg=cfg.env, policy_cfg=cfg.policy)
    envs = make_env(cfg.env, n_envs=cfg.eval.batch_size, use_async_envs=cfg.eval.use_async_envs)
    try:
        with torch.no_grad(), accelerator.autocast():
            return eval_policy_all(
                envs=envs,
                policy=accelerator.unwrap_model(policy),
                env_preprocessor=env_preprocessor,
                env_postprocessor=env_postprocessor,
                preprocessor=processors[0],
                postprocessor=processors[1],
                n_episodes=cfg.eval.n_episodes,
                videos_dir=cfg.output_dir / "eval" / f"videos_step_{get_step_identifier(step, cfg.steps)}",
                max_episodes_rendered=4,
                start_seed=cfg.seed,
                max_parallel_tasks=cfg.env.max_parallel_tasks,
            )
    finally:
        close_envs(envs)


def write_checkpoint(
    directory: Path,
    step: int,
    cfg: Any,
    policy: nn.Module,
    optimizer: Any,
    scheduler: Any,
    processors: Any,
    world: int,
    frames: int,
    gathered: tuple[dict[str, Any], dict[str, Any]] | None = None,
) -> None:
    """Write all files of lerobot's checkpoint into an empty directory.

    `frames` is the number that each of the `world` processes takes in a step; lerobot needs it to resume the data.
    For a sharded policy, `gathered` holds the full states of policy and optimizer.
    """
    from lerobot.common.train_utils import save_checkpoint

    save_checkpoint(
        checkpoint_dir=directory,
        step=step,
        cfg=cfg,
        policy=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        preprocessor=processors[0],
        postprocessor=processors[1],
        num_processes=world,
        batch_size=frames,
        model_state_dict=None if gathered is None else gathered[0],
        optim_state_dict=None if gathered is None else gathered[1],
    )


def write_policy(directory: Path, cfg: Any, policy: nn.Module, processors: tuple[Any, Any]) -> None:
    """Write the policy's part of a checkpoint: what `--policy.path` reads."""
    policy.save_pretrained(directory)  # type: ignore[operator]
    if cfg.peft is not None:  # PEFT only saves its adapter
        policy.config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    for processor in processors:
        processor.save_pretrained(directory)


def read_training_state(directory: Path, optimizer: Any | None, scheduler: Any) -> int:
    """Restore the optimizer (if given), the schedule and the random generators from a checkpoint; returns its step."""
    from lerobot.common.train_utils import load_training_state

    step: int = load_training_state(directory, optimizer, scheduler, load_optimizer=optimizer is not None)[0]
    return step


def read_optimizer_state(directory: Path, optimizer: Any) -> None:
    """Restore an optimizer, or an object in its place, from a checkpoint."""
    from lerobot.optim import load_optimizer_state
    from lerobot.utils.constants import TRAINING_STATE_DIR

    load_optimizer_state(optimizer, directory / TRAINING_STATE_DIR)


@contextlib.contextmanager
def undisturbed_rng() -> Iterator[None]:
    """Restore the random generators (Python's, numpy's, torch's) on exit."""
    from lerobot.utils.random_utils import get_rng_state, set_rng_state

    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def should_save(step: int, cfg: Any) -> bool:
    """Whether to save a checkpoint after this step: every `save_freq`, and at the end."""
    from lerobot.common.train_utils import should_save_checkpoint

    return bool(cfg.save_checkpoint and should_save_checkpoint(step, cfg.save_freq, cfg.steps))


def push_checkpoint(directory: Path, cfg: Any) -> None:
    """Upload a checkpoint; call it if `--save_checkpoint_to_hub` is set."""
    from lerobot.common.train_utils import push_checkpoint_to_hub

    push_checkpoint_to_hub(directory, cfg.policy.repo_id, private=cfg.policy.private)


def push_policy(
    cfg: Any,
    policy: nn.Module,
    processors: tuple[Any, Any],
    dataset: Any,
    card: str | None,
    memory: Path | None = None,
) -> None:
    """Upload the trained policy; call it if `--policy.push_to_hub` is set. `card` replaces lerobot's own card.

    lerobot saves the policy again into a temporary directory and uploads that, so a memory needs a separate commit.
    """
    from huggingface_hub import HfApi, ModelCard

    peft = {"peft_model": policy} if cfg.policy.use_peft else {}
    if card is not None:
        pushed: Any = policy.get_base_model() if cfg.policy.use_peft else policy  # type: ignore[operator]
        pushed.generate_model_card = lambda *_, **__: ModelCard(card)
    policy.push_model_to_hub(cfg, dataset_meta=dataset.meta, **peft)  # type: ignore[operator]
    for processor in processors:
        processor.push_to_hub(cfg.policy.repo_id)
    if memory is not None:
        HfApi().upload_folder(
            repo_id=cfg.policy.repo_id,
            folder_path=memory,
            path_in_repo=memory.name,
            commit_message="Upload the memory of old tasks",
        )


def eval_flags(cfg: Any) -> dict[str, object]:
    """The flags of `lerobot-eval` that repeat this run's evaluation in the environment; few if it had none."""
    flags: dict[str, object] = _packages(cfg)
    if cfg.env is None:
        return flags
    flags |= {"env.type": cfg.env.type, **_settings(cfg.env)}
    flags |= {"eval.n_episodes": cfg.eval.n_episodes, "eval.batch_size": cfg.eval.batch_size}
    if cfg.rename_map:
        flags["rename_map"] = cfg.rename_map
    return flags if cfg.seed is None else flags | {"seed": cfg.seed}


def _packages(cfg: Any) -> dict[str, object]:
    """Flags that make lerobot import packages that it cannot find itself: a policy's, an environment's."""
    # Not `policy.discover_packages_path`: lerobot-eval would take it for a setting of the policy.
    homes = {"discover_packages_path": cfg.policy, "env.discover_packages_path": cfg.env}
    modules = {flag: _importable(type(config).__module__) for flag, config in homes.items() if config is not None}
    return {
        flag: module.rpartition(".")[0] or module
        for flag, module in modules.items()
        if module is not None and not f"{module}.".startswith(_FOUND_BY_LEROBOT)
    }


def _importable(module: str) -> str | None:
    """The name under which another process can import a module: a script's file name; None for a notebook."""
    if module != "__main__":
        return module
    file = getattr(sys.modules["__main__"], "__file__", None)
    return None if file is None else Path(file).stem


def _settings(env: Any) -> dict[str, object]:
    """The task and all plain, non-default settings of an environment."""
    default = {
        field.name: field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        for field in dataclasses.fields(env)
    }
    set_here = {
        name: value
        for name in default
        if isinstance(value := getattr(env, name), bool | int | float | str) and value != default[name]
    }
    task = {"task": env.task} if env.task is not None else {}
    return {f"env.{name}": value for name, value in (task | set_here).items()}
