"""Policies of lerobot's full size, run by the real commands on a CPU. `make bench-full-size`.

Nothing is downloaded: the weights are random. They show that a full-size policy starts, trains, is saved, resumed and
played, what it needs in memory beside what `craft train --estimate` says, and what a step with CRaFT takes of a plain
one. They show nothing of skills.

Every command is a process of its own. Its log says when each step ended; the kernel says, every 5 ms, how much
anonymous memory is resident: the most of it before the first step, and from then on. (Pages of files, such as
libraries, do not count: the kernel takes them back when it likes, and sooner in a slow run.) A run of the same kind on
a tiny policy, less its own estimate, is what libraries and data hold; the rest is the policy's. What was measured stays
in `--scratch_dir` until the report is written, so that a run that was interrupted resumes, with another number of steps
too: each row says its own. This measures some of it again: `--again="CRaFT,resumed,episode,CRaFT LoRA" --keep`.
"""

import argparse
import contextlib
import ctypes
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies import make_pre_post_processors
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from dated import RESULTS, dated, write
from lerobot_craft.anchors.teacher import check_weights, fingerprint
from lerobot_craft.cli import main as craft
from lerobot_craft.io.files import sha256_of
from lerobot_craft.lerobot_api import quiet_video
from lerobot_craft.lerobot_api.pretrained import load_policy, load_policy_config, weightless_policy
from lerobot_craft.lerobot_api.processors import load_processors
from lerobot_craft.tiny import TinySizes
from lerobot_craft.tiny.make import chunks_of, make_checkpoint_for, make_local_dataset, safe_stats
from lerobot_craft.tiny.recipes import write_config
from lerobot_craft.tiny.tokenizers import fit_action_tokenizer, make_text_tokenizer

OLD_TASKS, NEW_TASKS = ("open the door", "close the door"), ("push the cube",)
CAMERAS = ("observation.images.top", "observation.images.wrist")
STATE_DIM, ACTION_DIM, CHUNK = 7, 4, 50  # those of `--env.type=craft_metaworld`
PACKAGE = "--discover_packages_path=lerobot_craft.tiny"
TARGETS = ".*(language_model|text_model|lm_expert|gemma_expert).*_proj"
LORA = ("--peft.method_type=LORA", "--peft.r=16", f"--peft.target_modules={TARGETS}")
# Few anchors, and no drift of kept-out frames: a run measures it 25 times, which is a lot of ten steps.
CRAFT = (
    *("--craft.enabled=true", "--craft.num_anchors=8", "--craft.old_frames=4", "--craft.num_draws=1"),
    *("--craft.probe_anchors=0", "--craft.dual_rule=ascent", "--craft.remember=4"),
    "--craft.walked_states=0",  # the episodes of these data are shorter than a chunk of actions
)
ONLINE = ("--craft.teacher=online",)
WEIGHTS = "model.safetensors"
GIB = 2**30
BLOCK = 2**24  # numbers that are drawn at a time
# Every tensor of 64 KiB and more has pages of its own and gives them back at once: then what is resident is what lives.
# It costs time, of all runs alike; what is only timed goes without.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
STEP = re.compile(r"\b(?:step:|Step )(\d+)[ /]")  # the line of a step: lerobot's, and that of a run with CRaFT


@dataclass(frozen=True)
class Case:
    """A policy of the table.

    Attributes:
        batch_size: Of new samples, and of anchors.
        runs: Flags by the name of a run: the plain ones, then as many with CRaFT, each compared with the plain one
            in its place.
        flags: Of all of its runs.
        depth: Layers of its language model; None where it is not to be chosen.
        kill: The run that is killed and resumed, and played at the end.
    """

    batch_size: int
    runs: dict[str, tuple[str, ...]]
    kill: str
    flags: tuple[str, ...] = ()
    depth: int | None = None


CASES = {
    "smolvla": Case(
        1, {"plain": (), "plain LoRA": LORA, "CRaFT": CRAFT, "CRaFT LoRA": (*LORA, *CRAFT, *ONLINE)}, kill="CRaFT"
    ),
    "pi0_fast": Case(
        1,
        {"plain LoRA": LORA, "CRaFT LoRA": (*LORA, *CRAFT, *ONLINE)},
        kill="CRaFT LoRA",
        flags=("--policy.gradient_checkpointing=true", "--policy.dtype=bfloat16"),
        depth=18,
    ),
}


# ---------------------------------------------------------------- checkpoints and data


def make_inputs(root: Path, policy_type: str, depth: int | None, tiny: bool) -> None:
    """Datasets `old` and `new`, the teacher and a tiny one for the baseline; what is there stays."""
    quiet_video()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    for name, tasks, seed in (("old", OLD_TASKS, 0), ("new", NEW_TASKS, 1)):
        made_once(root / name, partial(make_dataset, tasks=tasks, seed=seed, tiny=tiny))
    old = LeRobotDataset("local/old", root=root / "old")
    directory = directory_of(root, policy_type, depth)
    made_once(directory / "small", lambda path: make_tiny(path, policy_type, old))
    make = make_tiny if tiny else make_full
    made_once(directory / "teacher", lambda path: make(path, policy_type, old, depth))


def directory_of(root: Path, policy_type: str, depth: int | None) -> Path:
    return root / (policy_type if depth == CASES[policy_type].depth else f"{policy_type}-{depth}-layers")


def made_once(path: Path, make: Callable[[Path], object]) -> None:
    """Make a directory unless it is whole. (Where it stays: checkpoints name their tokenizers by path.)"""
    done = path.with_name(f"{path.name}.made")
    if done.exists():
        return
    if path.exists():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    done.touch()


def make_dataset(path: Path, tasks: Sequence[str], seed: int, tiny: bool) -> None:
    size = (48, 64) if tiny else (480, 640)
    make_local_dataset(path, tasks, 8 // len(tasks), 20, CAMERAS, size, STATE_DIM, ACTION_DIM, seed)


def make_tiny(path: Path, policy_type: str, old: Any, depth: int | None = None) -> None:
    words = [*OLD_TASKS, *NEW_TASKS]
    make_checkpoint_for(policy_type, path, old, instructions=words, chunk_size=10)


def make_full(path: Path, policy_type: str, old: Any, depth: int | None) -> None:
    """A checkpoint with random weights, which never are in memory all at once."""
    images = {name: PolicyFeature(FeatureType.VISUAL, (3, 480, 640)) for name in CAMERAS}
    settings: dict[str, Any] = {
        "input_features": {**images, "observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,))},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
    }
    if policy_type == "pi0_fast":
        words = [*OLD_TASKS, *NEW_TASKS]
        make_text_tokenizer(path / "text", words, num_action_tokens=1024)
        stats = safe_stats(old.meta.stats)["action"]
        chunks = (chunks_of(old, CHUNK) - stats["mean"]) / stats["std"]
        fit_action_tokenizer(path / "fast", chunks, vocab_size=1024)
        settings |= {
            "dtype": "bfloat16",
            "text_tokenizer_name": str(path / "text"),
            "action_tokenizer_name": str(path / "fast"),
            "fast_skip_tokens": 0,
            "validate_action_token_prefix": False,
        }
    write_config(policy_type, path, **settings)
    if depth is not None and depth != CASES[policy_type].depth:
        set_depth(path / "config.json", depth)
    config: Any = PreTrainedConfig.from_pretrained(path)
    config.pretrained_path = None
    if policy_type == "smolvla":  # what lerobot reads before the policy's own weights
        vlm = path / "vlm"
        with torch.device("meta"):
            backbone = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(vlm)).to(torch.bfloat16)
        write_weights(backbone, vlm / WEIGHTS, seed=1)
    write_weights(weightless_policy(config, None), path / WEIGHTS, seed=0)
    for part in make_pre_post_processors(config, dataset_stats=safe_stats(old.meta.stats)):
        part.save_pretrained(path)


def set_depth(config: Path, depth: int) -> None:
    """Lerobot's pi0_fast with fewer layers in its language model, and everything else at its full size."""
    sizes = TinySizes(
        width=2048,
        depth=depth,
        mlp_dim=16_384,
        num_heads=8,
        num_kv_heads=1,
        head_dim=256,
        vocab_size=257_152,
        vision_width=1152,
        vision_depth=27,
        vision_heads=16,
        vision_mlp_dim=4304,
    )
    content = json.loads(config.read_text()) | {"type": "pi0_fast_tiny", "sizes": vars(sizes)}
    config.write_text(json.dumps(content, indent=2))


def write_weights(module: nn.Module, path: Path, seed: int) -> None:
    """Random weights for a module on the meta device, written tensor by tensor: a file may be larger than memory."""
    state: dict[str, Tensor] = dict(module.named_parameters())
    state |= {name: tensor for name, tensor in module.named_buffers() if name in module.state_dict()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in state.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    generator = torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for name, tensor in state.items():
            for length in map(len, torch.empty(tensor.numel(), device="meta").split(BLOCK)):
                file.write(random_block(name, tensor, length, generator).view(torch.uint8).numpy().data)


def random_block(name: str, like: Tensor, length: int, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(length, dtype=like.dtype)
    if like.dim() == 1 and name.endswith("weight"):  # scales of norms
        return torch.ones(length, dtype=like.dtype)
    return torch.randn(length, generator=generator).mul_(0.02).to(like.dtype)


# ---------------------------------------------------------------- commands, each a process of its own


@dataclass
class Watched:
    """What was seen of a process from outside.

    Attributes:
        seconds: From its start to its end.
        steps: When each step's line came, in seconds from the start.
        worked: What the processor had worked for it by then, in seconds: where others share a core, only that tells.
        starting_bytes: Anonymous memory at most, up to the first step's line.
        stepping_bytes: The same, from there to the last step's.
        opened: How often the weights file was opened.
    """

    seconds: float = 0.0
    steps: dict[int, float] = field(default_factory=dict)
    worked: dict[int, float] = field(default_factory=dict)
    starting_bytes: int = 0
    stepping_bytes: int = 0
    opened: int = 0

    @property
    def first_step_seconds(self) -> float:
        """From the start of the process."""
        return next(iter(self.steps.values()), self.seconds)


def of_a_step(times: dict[int, float]) -> float:
    """Median of the steps after the first."""
    return median(after - before for before, after in itertools.pairwise(times.values()))


def watch(
    arguments: Sequence[str], log: Path, environment: dict[str, str], weights: Path, kill_after: int | None = None
) -> Watched:
    """Run a command to its end, or to the kill that follows a step's line."""
    seen, began = Watched(), time.perf_counter()
    command = [sys.executable, *arguments]
    surroundings = os.environ | environment
    with (
        log.open("w", buffering=1) as file,  # by lines: people look on
        openings(weights) as opened,
        subprocess.Popen(  # noqa: S603  # our own flags
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=surroundings
        ) as process,
        most_memory(process.pid) as most,
    ):
        for line in process.stdout or ():
            file.write(line)
            found = STEP.search(line)
            step = int(found[1]) if found else 0
            if step < 1 or step in seen.steps or process.poll() is not None:
                continue
            seen.steps[step] = time.perf_counter() - began
            seen.worked[step] = processor_seconds(process.pid)
            if len(seen.steps) == 1:
                seen.starting_bytes = most()
            else:
                seen.stepping_bytes = max(seen.stepping_bytes, most())
            if step == kill_after:
                process.send_signal(signal.SIGKILL)
        code = process.wait()
        seen.opened = opened()
    seen.seconds = time.perf_counter() - began
    if code != (0 if kill_after is None else -signal.SIGKILL):
        raise RuntimeError(f"{' '.join(arguments)} ended with {code}: {log.read_text()[-3000:]}")
    return seen


def processor_seconds(pid: int) -> float:
    """What all threads of a process have worked until now."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def most_memory(pid: int) -> Iterator[Callable[[], int]]:
    """A function that says how much anonymous memory a process has had at most since it was called last, in bytes."""
    lock, ended, seen = threading.Lock(), threading.Event(), 0

    def look() -> None:
        nonlocal seen
        with lock:
            seen = max(seen, anonymous_bytes(pid))

    def since() -> int:
        nonlocal seen
        look()
        with lock:
            found, seen = seen, 0
        return found

    def watch_on() -> None:
        while not ended.wait(0.005):
            look()

    thread = threading.Thread(target=watch_on)
    thread.start()
    try:
        yield since
    finally:
        ended.set()
        thread.join()


def anonymous_bytes(pid: int) -> int:
    """What a process holds now that is no page of a file; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(kib) * 1024 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE))


@contextlib.contextmanager
def openings(path: Path) -> Iterator[Callable[[], int]]:
    """How often a file is opened within the block, by whoever opens it (Linux's inotify)."""
    libc, opens, closes = ctypes.CDLL(None), 0x20, 0x18
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    # With the closings: equal events in a row are handed over as one.
    libc.inotify_add_watch(descriptor, os.fsencode(path), opens | closes)

    def count() -> int:
        try:
            events = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return 0
        return sum(mask & opens > 0 for _, mask, _, _ in struct.iter_unpack("iIII", events))

    try:
        yield count
    finally:
        os.close(descriptor)


class Bench:
    """The commands of one policy; what one has measured is kept as a file, and not measured again."""

    def __init__(self, root: Path, policy_type: str, steps: int, depth: int | None, threads: int) -> None:
        self.case = CASES[policy_type]
        self.root, self.steps, self.depth = root, steps, depth
        self.directory = directory_of(root, policy_type, depth)
        self.teacher = self.directory / "teacher"
        self.environment = {
            "OMP_NUM_THREADS": str(threads),
            "CRAFT_HOME": str(root / "home"),
            "PYTHONUNBUFFERED": "1",
        }

    def flags(self, name: str, policy: Path, output: Path | None = None, save_every: int = 0) -> list[str]:
        """The flags of `craft train`."""
        return [
            *("train", f"--policy.path={policy}", "--policy.device=cpu", "--policy.push_to_hub=false", PACKAGE),
            *("--dataset.repo_id=local/new", f"--dataset.root={self.root / 'new'}", "--num_workers=0", "--log_freq=1"),
            *(f"--steps={self.steps}", f"--batch_size={self.case.batch_size}", "--env_eval_freq=0"),
            "--craft.preload=true",  # else lerobot decodes the pictures of a whole window of actions for each sample
            *(f"--save_freq={save_every or self.steps}", f"--save_checkpoint={str(save_every > 0).lower()}"),
            *(self.case.flags if policy == self.teacher else ()),
            *self.case.runs[name],
            *([f"--output_dir={output}"] if output else []),
        ]

    def train(self, name: str, policy: Path, output: Path, save_every: int = 0) -> Watched:
        """A run from the beginning; what a former attempt has left is removed."""
        shutil.rmtree(output, ignore_errors=True)
        flags = self.flags(name, policy, output, save_every)
        flags = ["-m", "lerobot_craft", *flags]
        return watch(flags, self.directory / f"{output.name}.log", self.environment | ALLOCATOR, policy / WEIGHTS)

    def command(self, arguments: Sequence[str], log: str, weights: Path, kill_after: int | None = None) -> Watched:
        """Any command of this policy; what it says goes into a file."""
        return watch(arguments, self.directory / f"{log}.log", self.environment, weights, kill_after)

    def stages(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """What is measured, by name, in the order in which a person would do it."""
        yield from (("remember", self.remember), ("start_up", self.start_up))
        for name in self.case.runs:
            yield name, partial(self.row, name)
            yield f"{name}: estimate", partial(self.estimate, name, self.teacher)
            yield f"{name}: beside", partial(self.beside, name)
            if name == self.case.kill:
                yield from (("resumed", self.resumed), ("episode", self.episode))

    def measure(self, again: Sequence[str] = (), *, only_kept: bool = False) -> dict[str, Any]:
        """All stages; those that a run which was interrupted has kept are not measured again, unless they are named."""
        kept = self.directory / f"measured-{self.environment['OMP_NUM_THREADS']}-threads"
        kept.mkdir(exist_ok=True)
        for name in again:
            (kept / f"{name}.json").unlink(missing_ok=True)
        found: dict[str, Any] = {}
        for name, stage in self.stages():
            path = kept / f"{name}.json"
            if not path.exists() and not only_kept:
                print(f"{self.directory.name}: {name}", flush=True)
                path.write_text(json.dumps(stage()))
            if path.exists():
                found[name] = json.loads(path.read_text())
        rows = {name: found.pop(name) for name in self.case.runs if name in found}
        names, half = list(self.case.runs), len(self.case.runs) // 2
        for plain, other in zip(names[:half], names[half:], strict=True):
            if {plain, other} <= rows.keys():
                worked = rows[plain]["step_processor_seconds"]
                rows[other]["step_ratio"] = rows[other]["step_processor_seconds"] / worked
        for name, row in rows.items():
            row["estimate"] = found.pop(f"{name}: estimate", None)
            beside = found.pop(f"{name}: beside", None)
            if row["estimate"] and beside:
                row["beside_bytes"] = beside["bytes"]
                row["measured_bytes"] = row["stepping_bytes"] - row["beside_bytes"]
                row["estimate_to_measured"] = row["estimate"]["total_bytes"] / row["measured_bytes"]
        return {
            "parameters": sum_of_parameters(self.teacher / WEIGHTS),
            "file_bytes": (self.teacher / WEIGHTS).stat().st_size,
            "depth": self.depth,
            "full_depth": self.case.depth,
            "batch_size": self.case.batch_size,
            **found,
            "rows": rows,
        }

    def remember(self) -> dict[str, Any]:
        """Frames of the old tasks into the teacher, and into the tiny one."""
        seconds = {}
        for policy in (self.directory / "small", self.teacher):
            old = ["--dataset.repo_id=local/old", f"--dataset.root={self.root / 'old'}", "--frames_per_task=8"]
            command = ["-m", "lerobot_craft", "remember", str(policy), *old, PACKAGE]
            seconds[policy.name] = self.command(command, "remember", policy / WEIGHTS).seconds
        return {"seconds": seconds["teacher"], "tiny_seconds": seconds["small"]}

    def start_up(self) -> dict[str, Any]:
        """What a start does with the weights, each timed in a process that does nothing else."""
        out = self.directory / "start-up.json"
        self.command(
            [__file__, f"--time_start_up={self.teacher}", f"--output={out}"], "start-up", self.teacher / WEIGHTS
        )
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def beside(self, name: str) -> dict[str, Any]:
        """What is resident in such a run beside its policy: libraries and data."""
        small = self.directory / "small"
        seen = self.train(name, small, self.directory / "run-small")
        return {"bytes": seen.stepping_bytes - self.estimate(name, small)["total_bytes"]}

    def estimate(self, name: str, policy: Path) -> dict[str, Any]:
        """What `craft train --estimate` says."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = craft([*self.flags(name, policy), "--estimate", "--estimate.json=true"])
        if code:
            raise RuntimeError(f"no estimate of {name}: {said.getvalue()}")
        found: dict[str, Any] = json.loads(said.getvalue())
        del found["notes"]
        return found

    def row(self, name: str) -> dict[str, Any]:
        """A run of the table, from the beginning to the end."""
        output = self.directory / ("run" if name == self.case.kill else "run-else")
        seen = self.train(name, self.teacher, output, self.steps // 2 if name == self.case.kill else 0)
        if name != self.case.kill:
            shutil.rmtree(output, ignore_errors=True)  # a plain run that saves nothing leaves none
        return {
            "steps": self.steps,
            "first_step_seconds": seen.first_step_seconds,
            "first_step_processor_seconds": next(iter(seen.worked.values())),
            "step_seconds": of_a_step(seen.steps),
            "step_processor_seconds": of_a_step(seen.worked),
            "seconds": seen.seconds,
            "starting_bytes": seen.starting_bytes,
            "stepping_bytes": seen.stepping_bytes,
            "weights_file_opened": seen.opened,
        }

    def resumed(self) -> dict[str, Any]:
        """The run again, killed after the step that follows its checkpoint, and resumed: the same weights?"""
        output, half = self.directory / "run-killed", self.steps // 2
        shutil.rmtree(output, ignore_errors=True)
        flags = self.flags(self.case.kill, self.teacher, output, half)
        self.command(["-m", "lerobot_craft", *flags], "killed", self.teacher / WEIGHTS, kill_after=half + 1)
        config = output / "checkpoints" / "last" / "pretrained_model" / "train_config.json"
        command = ["-m", "lerobot_craft", "train", f"--config_path={config}", "--resume=true", PACKAGE]
        seen = self.command(command, "resumed", weights_of(config.parent))
        same = sha256_of(weights_of(self.last(output))) == sha256_of(weights_of(self.last(self.directory / "run")))
        checkpoint = sum(file.stat().st_size for file in self.last(output).parent.rglob("*") if file.is_file())
        shutil.rmtree(output)
        return {
            "to_the_bit": same,
            "killed_after": half + 1,
            "first_step_seconds": seen.first_step_seconds,
            "starting_bytes": seen.starting_bytes,
            "checkpoint_bytes": checkpoint,
            "weights_file_opened": seen.opened,
        }

    @staticmethod
    def last(output: Path) -> Path:
        """The policy of a run's last checkpoint."""
        return output / "checkpoints" / "last" / "pretrained_model"

    def episode(self) -> dict[str, Any]:
        """One chunk of the policy in stock lerobot-eval."""
        policy, output = self.last(self.directory / "run"), self.directory / "episode"
        command = [
            *("-m", "lerobot.scripts.lerobot_eval", f"--policy.path={policy}", "--policy.device=cpu", PACKAGE),
            *("--env.discover_packages_path=lerobot_craft.bench.metaworld", "--env.type=craft_metaworld"),
            *("--env.task=reach-red", f"--env.episode_length={CHUNK}", "--eval.n_episodes=1", "--eval.batch_size=1"),
            f"--output_dir={output}",
        ]
        shutil.rmtree(output, ignore_errors=True)
        seen = self.command(command, "episode", weights_of(policy))
        played = json.loads((output / "eval_info.json").read_text())["overall"]["n_episodes"]
        return {"seconds": seen.seconds, "episodes": played, "steps": CHUNK}


def weights_of(policy: Path) -> Path:
    """The file that a run has trained: an adapter's or the policy's."""
    adapter = policy / "adapter_model.safetensors"
    return adapter if adapter.exists() else policy / WEIGHTS


def sum_of_parameters(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def time_start_up(teacher: Path, output: Path) -> None:
    """What each of the steps takes in which a start looks at all weights: time, of the processor, bytes of the disk.

    The first one finds nothing of the file in memory; what it reads, the kernel may keep for the next.
    """
    took: dict[str, dict[str, float]] = {}

    def timed[Result](name: str, step: Callable[[], Result]) -> Result:
        began, worked, read = time.perf_counter(), time.process_time(), bytes_from_disk()
        result = step()
        took[name] = {
            "seconds": time.perf_counter() - began,
            "processor_seconds": time.process_time() - worked,
            "bytes_from_disk": bytes_from_disk() - read,
        }
        return result

    config = load_policy_config(teacher, ["--device=cpu"])
    forget_file(teacher / WEIGHTS)
    policy = timed("lerobot makes the policy and reads the file", lambda: load_policy(config))
    timed("comparing the policy with the file", lambda: check_weights(policy, teacher))
    processors = load_processors(config)
    timed("fingerprint of the policy in memory", lambda: fingerprint(policy, *processors))
    timed("SHA-256 of the file (at a resume)", lambda: sha256_of(teacher / WEIGHTS))
    output.write_text(json.dumps(took))


def bytes_from_disk() -> int:
    """What this process has had the kernel read from a disk until now."""
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[1])  # type: ignore[index]


def forget_file(path: Path) -> None:
    """Have the kernel keep nothing of a file in memory, as after a start of the machine."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---------------------------------------------------------------- report


def as_markdown(report: dict[str, Any]) -> str:
    lines = [
        f"On a CPU, {report['threads_of_runs']} thread(s), {report['date']}.\n",
        "| policy | run | steps | to the first step, s | of the processor | a step, s | of the processor | times plain "
        "| estimate, GiB | measured, GiB | estimate / measured | at most before the first step, GiB |",
        "|" + 12 * "---|",
    ]
    for policy_type, found in report["policies"].items():
        depth = "" if found["depth"] == found["full_depth"] else f", {found['depth']} of {found['full_depth']} layers"
        policy = f"{policy_type}, {found['parameters'] / 1e9:.2f} B{depth}, batches of {found['batch_size']}"
        for name, row in found["rows"].items():
            cells = [
                *(policy, name, str(row["steps"])),
                *(f"{row['first_step_seconds']:.0f}", f"{row['first_step_processor_seconds']:.0f}"),
                *(f"{row['step_seconds']:.1f}", f"{row['step_processor_seconds']:.1f}"),
                f"{row['step_ratio']:.2f}" if "step_ratio" in row else "",
                f"{row['estimate']['total_bytes'] / GIB:.2f}" if row["estimate"] else "",
                *(
                    ("", "")
                    if "measured_bytes" not in row
                    else (f"{row['measured_bytes'] / GIB:.2f}", f"{row['estimate_to_measured']:.3f}")
                ),
                f"{row['starting_bytes'] / GIB:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["\n| policy | start-up | seconds | of the processor | GiB from the disk |", "|---|---|---|---|---|"]
    for policy_type, found in report["policies"].items():
        lines += [
            f"| {policy_type}, {found['file_bytes'] / GIB:.2f} GiB | {name} | {took['seconds']:.1f} "
            f"| {took['processor_seconds']:.1f} | {took['bytes_from_disk'] / GIB:.2f} |"
            for name, took in found.get("start_up", {}).items()
        ]
    for policy_type, found in report["policies"].items():
        lines.append("")
        for name, row in found["rows"].items():
            lines.append(f"- {policy_type}, {name}: the weights file was opened {row['weights_file_opened']} times.")
        if "resumed" in found:
            resumed = found["resumed"]
            lines.append(
                f"- {policy_type}: killed after step {resumed['killed_after']} and resumed, the weights are "
                f"{'equal to the bit' if resumed['to_the_bit'] else 'NOT equal'}; a checkpoint has "
                f"{resumed['checkpoint_bytes'] / GIB:.2f} GiB."
            )
        if "episode" in found:
            played = found["episode"]
            lines.append(
                f"- {policy_type}: `lerobot-eval` played {played['episodes']} episode of {played['steps']} steps in "
                f"{played['seconds']:.0f} s."
            )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=",".join(CASES), help="one or several, with commas")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--depth", type=int, help="layers of pi0_fast's language model, where 18 do not fit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="tiny policies: to try the script")
    parser.add_argument("--again", default="", help="stages, with commas, that are measured although they were before")
    parser.add_argument("--report", action="store_true", help="measure nothing: write what was measured so far")
    parser.add_argument("--note", default="", help="into the report: what else the machine did")
    parser.add_argument("--scratch_dir", type=Path, default=Path("outputs/full_size"))
    parser.add_argument("--keep", action="store_true", help="do not remove --scratch_dir at the end")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--time_start_up", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.time_start_up:
        time_start_up(options.time_start_up, options.output)
        return
    if options.steps < 4:
        parser.error("--steps must be at least 4: the run is killed after its first half")
    root, policies = options.scratch_dir.resolve(), {}
    for policy_type in options.policy.split(","):
        depth = CASES[policy_type].depth and (options.depth or CASES[policy_type].depth)
        if not options.report:
            make_inputs(root, policy_type, depth, options.tiny)
        bench = Bench(root, policy_type, options.steps, depth, options.threads)
        policies[policy_type] = bench.measure(options.again.split(","), only_kept=options.report)
    report = dated("full-size", threads_of_runs=options.threads, note=options.note, policies=policies)
    print(as_markdown(report))
    write(report, options.output_dir)
    if not (options.keep or options.report):
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
