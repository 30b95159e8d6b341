from pathlib import Path

import pytest

from tests.examples.reading import LAST, craft_config, differ, weights

OUT = Path("outputs/lora_online_teacher")
ADAPTER = "adapter_model.safetensors"


def test_every_stage_runs_and_only_the_adapter_is_trained(example, capsys):
    evaluation = example("lora_online_teacher", "--small")
    assert [row.name for row in evaluation.rows] == ["before", "LoRA", "LoRA with CRaFT"]
    assert craft_config(OUT / "craft")["teacher"] == "online"
    assert {path.name for path in OUT.iterdir()} == {
        "base",
        "craft",
        "eval",
        "new",
        "old",
        "plain",
        "start",
    }  # no cache
    assert not (OUT / "craft" / LAST / "model.safetensors").exists()
    trained = weights(OUT / "craft", ADAPTER)
    assert all("lora_" in name for name in trained)
    assert differ(weights(OUT / "plain", ADAPTER), trained)
    printed = capsys.readouterr().out
    assert "| LoRA with CRaFT |" in printed.rpartition("n = 1 episodes per task")[2]
    assert "The adapter that was trained: " in printed


@pytest.mark.slow  # minutes of training; the test above runs the same stages
@pytest.mark.timeout(1200)
def test_at_full_size_plain_lora_forgets_and_craft_keeps(example):
    evaluation = example("lora_online_teacher")
    before, plain, craft = evaluation.rows
    assert before.rate("faucet-open") >= 0.8
    assert plain.rate("faucet-open") <= 0.3
    assert craft.rate("faucet-open") >= 0.8
    assert min(plain.rate("faucet-close"), craft.rate("faucet-close")) >= 0.6
