"""`craft train` in two processes is `craft train` in one with batches twice as large."""

import json
import subprocess
import sys

import pytest

from lerobot_craft.tiny.checkpoints import make_checkpoint
from tests.warm_process import environment

SAME = ("loss", "task_norm", "retention_loss", "retention_norm", "dot", "cos", "merged_norm", "lambda", "action_drift")


@pytest.fixture
def policy(anchor_data, tmp_path):
    """One whose loss is the mean over samples and draws nothing: no dropout, no latent, no padded actions."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.utils.feature_utils import dataset_to_policy_features

    meta = LeRobotDataset("local/old", root=anchor_data / "old").meta
    features = dataset_to_policy_features(meta.features)
    return make_checkpoint(
        "act",
        tmp_path / "policy",
        output_features={"action": features.pop("action")},
        input_features=features,
        dataset_stats=meta.stats,
        chunk_size=1,
        n_action_steps=1,
        dropout=0.0,
        use_vae=False,
    )


@pytest.fixture
def run(policy, train_flags, anchor_data, tmp_path):
    """Function that trains in so many processes and returns the run's directory."""

    def run(processes, batch_size, anchor_batch_size):
        output = tmp_path / f"run_{processes}"
        flags = [
            *train_flags("act", output, policy__path=policy, steps=4, batch_size=batch_size),
            "--craft.enabled=true",
            "--craft.retention_mode=action",
            f"--craft.anchor_batch_size={anchor_batch_size}",
            "--craft.retention_freq=1",
            "--craft.initial_lambda=3",
            "--craft.epsilon_start=0.001",
            "--craft.epsilon_end=0.001",
            "--craft.num_anchors=18",
            "--craft.old_dataset.repo_id=local/old",
            f"--craft.old_dataset.root={anchor_data / 'old'}",
            f"--craft.anchor_cache_dir={tmp_path / f'cache_{processes}'}",
            "--craft.log_craft_metrics_freq=1",
        ]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launch if processes > 1 else []), "-m", "lerobot_craft", "train", *flags]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return output

    return run


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow  # three processes that import lerobot
@pytest.mark.timeout(900)
def test_two_processes_are_one_with_batches_twice_as_large(run):
    one, two = run(1, batch_size=4, anchor_batch_size=6), run(2, batch_size=2, anchor_batch_size=3)
    files = [sorted(str(path.relative_to(r)) for path in r.rglob("*") if path.is_file()) for r in (one, two)]
    assert files[0] == files[1], "one set of files, whoever wrote it"
    first, *later = zip(metrics(one), metrics(two), strict=True)
    for alone, together in later:
        assert alone["conflict"] == together["conflict"]
        assert {name: together[name] for name in SAME} == pytest.approx({name: alone[name] for name in SAME}, rel=0.01)
    # At the first step the student is the teacher: the direction of the anchors' gradient is that of rounding errors.
    for name in ("loss", "task_norm"):
        assert first[1][name] == pytest.approx(first[0][name], rel=1e-5)
    assert metrics(two)[-1]["retention_loss"] > 1e-3, "something had to be retained"
