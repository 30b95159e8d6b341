from pathlib import Path

import pytest

from tests.examples.reading import craft_config, differ, frames_by_dataset, started_from, weights

OUT = Path("outputs/two_tasks")


def test_every_stage_runs_and_the_table_is_the_end(example, capsys):
    evaluation = example("two_tasks", "--small")
    assert [row.name for row in evaluation.rows] == ["before", "plain", "CRaFT"]
    assert evaluation.tasks == ["faucet-open", "faucet-close"]
    assert frames_by_dataset(OUT / "anchors") == {"craft/old": 20, "craft/new": 4}
    assert craft_config(OUT / "plain")["method"] == "naive"
    assert craft_config(OUT / "craft")["method"] == "craft"
    assert (
        started_from(OUT / "craft")
        == started_from(OUT / "plain")
        == str(OUT / "base/checkpoints/last/pretrained_model")
    )
    assert differ(weights(OUT / "plain"), weights(OUT / "craft"))
    printed = capsys.readouterr().out
    assert printed.count("$ craft train ") == 3
    assert "| CRaFT |" in printed.rpartition("n = 1 episodes per task")[2]


@pytest.mark.slow  # minutes of training; the test above runs the same stages
@pytest.mark.timeout(1200)
def test_at_full_size_plain_fine_tuning_forgets_and_craft_keeps(example):
    evaluation = example("two_tasks")
    before, plain, craft = evaluation.rows
    assert before.rate("faucet-open") >= 0.8
    assert plain.rate("faucet-open") <= 0.3
    assert craft.rate("faucet-open") >= 0.8
    assert min(plain.rate("faucet-close"), craft.rate("faucet-close")) >= 0.6
