import pytest

pytest.register_assert_rewrite("tests.faults.runs")


@pytest.fixture
def run_flags(train_flags, anchor_data, tmp_path):
    """Flags of a run under the constraint, with everything that has a state: dropout, multipliers, anchor order."""

    def flags(policy_type, output_dir, **changes):
        return [
            *train_flags(policy_type, output_dir, **{"batch_size": 8, **changes}),
            "--craft.enabled=true",
            "--craft.retention_mode=action",
            f"--craft.anchor_cache_dir={tmp_path / 'cache'}",
            "--craft.old_dataset.repo_id=local/old",
            f"--craft.old_dataset.root={anchor_data / 'old'}",
            "--craft.num_anchors=18",
            "--craft.anchor_batch_size=4",
            "--craft.retention_freq=2",
            "--craft.dual_rule=pi",
            "--craft.lambda_smoothing=0.5",
            "--craft.epsilon_start=0.001",
            "--craft.epsilon_end=0.0001",
            "--craft.log_craft_metrics_freq=4",
        ]

    return flags
