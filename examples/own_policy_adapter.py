"""A policy of one's own, its adapter, and what that is good for: it learns a new task and keeps the old one.

`NudgePolicy` is a lerobot policy that neither lerobot nor CRaFT has heard of: the words of the instruction and the
state go through three blocks and become a chunk of actions. `NudgeAdapter` is all that CRaFT must know of it
(docs/adding-a-policy.md). At the end the invariants that every adapter must satisfy are run on it; they are tests, so
that part needs pytest and a clone.
"""

import argparse
import os
import subprocess
import sys
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.optim import AdamConfig
from lerobot.policies import PreTrainedPolicy
from lerobot.processor import make_default_pre_post_processors
from torch import Tensor, nn

from lerobot_craft.bench.metaworld.recording import record
from lerobot_craft.cli import main as craft
from lerobot_craft.core import TokenSpans
from lerobot_craft.evaluation.matrix import Evaluation, read_evaluation
from lerobot_craft.policies import Batch, Demonstration, Fixed, Layer, Output, PolicyAdapter, Tokens, register_adapter
from lerobot_craft.policies.taps import taps, valid_everywhere

OLD, NEW = "faucet-open", "faucet-close"


@PreTrainedConfig.register_subclass("nudge")
@dataclass
class NudgeConfig(PreTrainedConfig):  # type: ignore[misc]  # lerobot is untyped here
    """From its name lerobot concludes `NudgePolicy` and `make_nudge_pre_post_processors`, in the same file."""

    width: int = 128
    chunk_size: int = 8
    n_action_steps: int = 8
    lr: float = 1e-3
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {"STATE": NormalizationMode.MEAN_STD, "ACTION": NormalizationMode.IDENTITY}
    )
    observation_delta_indices = None
    reward_delta_indices = None
    action_delta_indices = property(lambda self: list(range(self.chunk_size)))

    def get_optimizer_preset(self) -> AdamConfig:
        return AdamConfig(lr=self.lr)

    def get_scheduler_preset(self) -> None:
        return None

    def validate_features(self) -> None:
        pass


make_nudge_pre_post_processors = make_default_pre_post_processors


class NudgePolicy(PreTrainedPolicy):  # type: ignore[misc]
    """(state, instruction) -> chunk of actions, trained by their absolute error."""

    config_class = NudgeConfig
    name = "nudge"

    def __init__(self, config: NudgeConfig, **kwargs: Any) -> None:
        super().__init__(config)
        width = config.width
        self.words = nn.Embedding(256, width)
        self.state_proj = nn.Linear(config.robot_state_feature.shape[0], width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(width, config.chunk_size * config.action_feature.shape[0])
        self.reset()

    def predict(self, batch: Batch) -> Tensor:
        rows = [[zlib.crc32(word.encode()) % 256 for word in text.split()] for text in batch["task"]]
        words = torch.stack([self.words(torch.tensor(row, device=self.config.device)).sum(dim=0) for row in rows])
        token = (words + self.state_proj(batch["observation.state"]))[:, None]  # [B, 1, D]
        for block in self.blocks:
            token = block(token)
        chunk: Tensor = self.head(token).unflatten(2, (self.config.chunk_size, -1))[:, 0]  # [B, H, A]
        return chunk

    def forward(self, batch: Batch) -> tuple[Tensor, None]:
        error = (self.predict(batch) - batch["action"]).abs()
        return error[~batch["action_is_pad"]].mean(), None

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch, **kwargs: Any) -> Tensor:
        return self.predict(batch)

    def select_action(self, batch: Batch, **kwargs: Any) -> Tensor:
        if not self.queue:
            self.queue.extend(self.predict_action_chunk(batch)[:, : self.config.n_action_steps].unbind(dim=1))
        return self.queue.popleft()

    def get_optim_params(self) -> Any:
        return self.parameters()

    def reset(self) -> None:
        self.queue: deque[Tensor] = deque()


@register_adapter  # for this process; an installed package declares an entry point instead
class NudgeAdapter(PolicyAdapter):
    """Where hidden states pass, what the output is, what is random in it (nothing), what it is computed from."""

    policy_type = "nudge"
    output_kind = "actions"
    reads_instruction = True
    train_mode = True  # no dropout: training draws nothing at random
    fixed_names = ()

    def stacks(self, policy: Any) -> dict[str, int]:
        return {"": len(policy.blocks)}

    def hidden(
        self, policy: Any, batch: Batch, layers: Sequence[Layer], fixed: Fixed | None = None
    ) -> dict[Layer, Tokens]:
        after = [*policy.blocks[1:], policy.head]  # what enters these is what leaves the layers
        with taps({layer: after[layer.index] for layer in layers}, stop=True) as seen:
            policy.predict(batch)
        spans = TokenSpans(language=(0, 1))  # the one token; the state is in it too
        return {layer: Tokens(seen[layer], valid_everywhere(seen[layer]), spans) for layer in layers}

    def fix(self, policy: Any, batch: Batch, rngs: Sequence[np.random.Generator], draws: int = 1) -> list[Fixed]:
        return [{} for _ in range(draws)]

    def output(self, policy: Any, batch: Batch, fixed: Fixed) -> Output:
        chunk = policy.predict(batch)
        return Output(chunk, valid_everywhere(chunk))

    def demonstration(self, policy: Any, batch: Batch, fixed: Fixed) -> Demonstration:
        if batch.get("action") is None:  # a new frame under an old instruction: nobody showed that
            return Demonstration(*self.output(policy, batch, fixed), fixed)
        return Demonstration(batch["action"], ~batch["action_is_pad"], fixed)

    def reaches(self, policy: Any, layers: Sequence[Layer] | None) -> list[str]:
        count = len(policy.blocks) if layers is None else max(layer.index for layer in layers) + 1
        reached = ["words", "state_proj", *(f"blocks.{i}" for i in range(count))]
        return [*reached, "head"] if layers is None else reached


def learn_and_keep(out: Path, *, small: bool) -> Evaluation:
    """Train on the old task, then on the new one: plainly, and with CRaFT; success of all three on both."""
    demonstrations, base_steps, steps, anchors, episodes = (2, 2, 2, 24, 1) if small else (25, 1500, 600, 1000, 20)
    old, new = record(out / "old", [OLD], demonstrations, seed=0), record(out / "new", [NEW], demonstrations, seed=1)
    common = ["--batch_size=64", "--num_workers=0", "--seed=0", "--policy.push_to_hub=false", "--craft.preload=true"]

    def train(name: str, data: Path, steps: int, *flags: str) -> str:
        where = [f"--dataset.repo_id=craft/{data.name}", f"--dataset.root={data}", f"--output_dir={out / name}"]
        if craft(["train", *where, f"--steps={steps}", f"--log_freq={max(1, steps // 5)}", *common, *flags]) != 0:
            sys.exit("`craft train` failed")
        return f"--policy.path={out / name}/checkpoints/last/pretrained_model"

    base = train("base", old, base_steps, "--policy.type=nudge", "--policy.device=cpu")
    train("plain", new, steps, base, "--craft.enabled=true", "--craft.method=naive")
    keep = [f"--craft.num_anchors={anchors}", "--craft.old_frames=20", f"--craft.anchor_cache_dir={out / 'anchors'}"]
    keep += ["--craft.old_dataset.repo_id=craft/old", f"--craft.old_dataset.root={old}"]
    train("craft", new, steps, base, "--craft.enabled=true", *keep)
    env = ["--env.type=craft_metaworld", f"--env.task={OLD},{NEW}", f"--eval.n_episodes={episodes}"]
    env += ["--env.episode_length=10"] if small else []
    rows = [f"before={out / 'base'}", f"plain={out / 'plain'}", f"CRaFT={out / 'craft'}"]
    if craft(["eval", *rows, *env, f"--output_dir={out / 'eval'}"]) != 0:
        sys.exit("`craft eval` failed")
    return read_evaluation(out / "eval" / "evaluation.json")


def cases() -> list[Any]:
    """What the invariants must be told: how a small one is made, three rows of data, and its own pass and loss."""
    from tests.policies.case import PolicyCase

    def build(directory: Path, **overrides: Any) -> tuple[NudgePolicy, Any]:
        features = {"observation.state": PolicyFeature(FeatureType.STATE, (7,))}
        action = {"action": PolicyFeature(FeatureType.ACTION, (4,))}
        config = NudgeConfig(device="cpu", input_features=features, output_features=action, **overrides)
        return NudgePolicy(config), lambda batch: batch

    def rows() -> dict[str, Any]:
        rng = torch.Generator().manual_seed(0)
        state, action = torch.rand(3, 7, generator=rng), torch.rand(3, 8, 4, generator=rng)
        task = ["open it", "rotate the faucet", "close"]
        return {"observation.state": state, "task": task, "action": action, "action_is_pad": torch.zeros(3, 8).bool()}

    def full_pass(policy: NudgePolicy, batch: Batch) -> dict[Layer, Tensor]:
        seen: list[Tensor] = []
        hooks = [block.register_forward_hook(lambda _m, _a, out: seen.append(out)) for block in policy.blocks]
        policy.forward(batch)
        for hook in hooks:
            hook.remove()
        return {Layer("", i): hidden for i, hidden in enumerate(seen)}

    return [PolicyCase("nudge", build, rows, full_pass, lambda policy, batch: (policy.forward(batch)[0], {}))]


def check_adapter() -> int:
    """Run the invariants of all adapters on this one, as docs/adding-a-policy.md says; pytest's exit code."""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CRAFT_POLICY_CASES": f"{Path(__file__).stem}:cases"}
    command = [sys.executable, "-m", "pytest", "-q", "-rN", "tests/policies/test_invariants.py"]
    return subprocess.run(command, cwd=here.parent, env=environment, check=False).returncode  # noqa: S603


def main(arguments: list[str] | None = None) -> int:
    """Both parts; 0 if the adapter holds the invariants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="every stage with hardly any work; no number means much")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/own_policy_adapter"), help="must not exist")
    options = parser.parse_args(arguments)
    learn_and_keep(options.output_dir, small=options.small)
    print("\nThe invariants of every adapter, on this one:", flush=True)
    return check_adapter()


if __name__ == "__main__":
    sys.exit(main())
