"""Weights & Biases, offline: its own files hold what CRaFT measured beside what lerobot logs."""

import json
import subprocess
import sys

import pytest

from tests.warm_process import environment


def craft(*argv, home):
    """A process of its own: wandb keeps its state in the process, and ends with it."""
    command = [sys.executable, "-m", "lerobot_craft", *argv]
    changes = {"CRAFT_HOME": str(home), "WANDB_MODE": "offline"}
    done = subprocess.run(command, env=environment(**changes), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def records(file):
    """Everything in a `.wandb` file, by wandb's own reader."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    try:
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record
    finally:
        store.close()


def history(file):
    """Logged rows."""
    rows = (record.history for record in records(file) if record.WhichOneof("record_type") == "history")
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def settings(file):
    """The run's config, later values over earlier ones."""
    updates = {}
    for record in records(file):
        config = record.run.config if record.WhichOneof("record_type") == "run" else record.config
        updates |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in config.update}
    return updates


@pytest.mark.slow  # two processes, each of which imports lerobot
@pytest.mark.timeout(600)
def test_an_offline_run_holds_crafts_metrics_and_goes_on_under_its_name(train_flags, anchor_data, tmp_path):
    run = tmp_path / "run"
    flags = train_flags("smolvla", run, steps=4, save_freq=2, wandb__enable="true", wandb__mode="offline")
    own = [
        "--craft.enabled=true",
        "--craft.retention_mode=action",
        "--craft.retention_freq=1",
        "--craft.old_dataset.repo_id=local/old",
        f"--craft.old_dataset.root={anchor_data / 'old'}",
        "--craft.anchor_source=dataset",
        "--craft.num_anchors=24",
        "--craft.anchor_batch_size=3",
        "--craft.log_craft_metrics_freq=2",
    ]
    said = craft("train", *flags, *own, home=tmp_path / "home")
    (first,) = (run / "wandb").glob("offline-run-*/*.wandb")
    rows = history(first)
    assert [row["train/craft/step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert {
            f"train/craft/{name}" for name in ("lambda", "epsilon", "retention_loss", "conflict", "cos")
        } <= row.keys()
        assert {"train/loss", "train/grad_norm", "train/lr"} <= row.keys()
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row, line in zip(rows, logged, strict=True):
        assert {name: row.get(f"train/craft/{name}", row.get(f"train/{name}")) for name in line} == line
    for line in logged[1::2]:  # the drift on frames that are kept out of training, at every second step
        assert "action_drift" in line
        assert [name for name in line if name.startswith("cos/")]
    assert "real frames kept out of training" in said
    assert settings(first)["craft"]["retention_mode"] == "action"

    resumed = run / "checkpoints/000002/pretrained_model/train_config.json"
    craft("train", f"--config_path={resumed}", "--resume=true", home=tmp_path / "home")
    (second,) = set((run / "wandb").glob("offline-run-*/*.wandb")) - {first}
    assert second.name == first.name, "the same run goes on"
    assert [row["train/craft/step"] for row in history(second)] == [3, 4]
    assert [row["train/loss"] for row in history(second)] == [row["train/loss"] for row in rows[2:]]
