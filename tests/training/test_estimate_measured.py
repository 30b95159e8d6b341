"""The estimate beside what the system gave to a real run of a policy of some ten million parameters."""

import json
import os
import subprocess
import sys

import pytest

from lerobot_craft.tiny import TinySizes
from tests.anchor_fixtures import NEW_TASKS, OLD_TASKS
from tests.training.peak_of_run import ENVIRONMENT

MEDIUM = TinySizes(
    width=256, depth=8, mlp_dim=1024, head_dim=32, vision_width=128, vision_depth=4, vision_mlp_dim=512
)  # fmt: skip
CRAFT = [
    *("--craft.enabled=true", "--craft.anchor_source=dataset", "--craft.num_anchors=8", "--craft.probe_anchors=0"),
    *("--craft.old_dataset.repo_id=local/old", "--craft.anchor_batch_size=16", "--craft.retention_freq=1"),
]
RUNS = {
    "plain": [],
    "action": CRAFT,
    "hidden": [*CRAFT, "--craft.retention_mode=hidden"],
    "lora": ["--peft.method_type=LORA", "--peft.r=8", "--peft.target_modules=.*language_model.*_proj"],
}


@pytest.mark.timeout(900)
@pytest.mark.slow  # a minute each: start-up, a warm-up run and steps that are large enough to be measured
@pytest.mark.skipif(sys.platform != "linux", reason="reads the high-water mark of resident memory from /proc")
@pytest.mark.parametrize("name", RUNS)
def test_the_estimate_is_within_ten_percent_of_the_measured_peak(name, anchor_data, checkpoints, tmp_path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from lerobot_craft.tiny.make import make_checkpoint_for

    old = LeRobotDataset("local/old", root=anchor_data / "old")
    medium = make_checkpoint_for(
        "pi0_fast",
        tmp_path / "medium",
        old,
        instructions=[*OLD_TASKS, *NEW_TASKS],
        chunk_size=8,
        sizes=MEDIUM,
        image_resolution=(112, 112),
    )

    def flags(checkpoint, run, batch_size):
        roots = [f"--craft.old_dataset.root={anchor_data / 'old'}"] if RUNS[name][:1] == CRAFT[:1] else []
        return [
            *(f"--policy.path={checkpoint}", "--policy.device=cpu", "--dataset.repo_id=local/new", "--steps=2"),
            *(f"--dataset.root={anchor_data / 'new'}", f"--output_dir={tmp_path / run}", "--num_workers=0"),
            *(f"--batch_size={batch_size}", "--save_checkpoint=false", "--seed=7", *RUNS[name], *roots),
        ]

    def run(*arguments):
        environment = {**os.environ, **ENVIRONMENT, "HF_HUB_OFFLINE": "1", "CRAFT_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    estimated = json.loads(
        run("lerobot_craft", "train", "--estimate", "--estimate.json=true", *flags(medium, "run", 16))
    )
    said = run(
        "tests.training.peak_of_run",
        *flags(checkpoints("pi0_fast"), "warm", 2),
        "--",
        *flags(medium, "run", 16),
    )
    measured = json.loads(said.splitlines()[-1])
    assert estimated["total_bytes"] == pytest.approx(max(measured["peaks"]), rel=0.1)
