"""`craft eval` on two policies that each go to one corner, whatever they are told."""

import shutil

import pytest

from lerobot_craft.cli.eval import run
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.matrix import read_evaluation
from tests.tiny.test_stock_commands import REACH, make_policy_that_goes_to

SMALL = (*REACH, "--eval.n_episodes=2", "--policy.device=cpu")


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Checkpoint of the policy that goes to a corner."""
    place = tmp_path_factory.mktemp("policies")
    return {corner: make_policy_that_goes_to(corner, "smolvla", place / corner) for corner in ("red", "blue")}


@pytest.fixture
def line(policies, tmp_path):
    """The command line of both policies on both corners."""
    rows = [f"{corner}er={policy}" for corner, policy in policies.items()]
    return [*rows, *SMALL, "--env.task=red,blue", f"--output_dir={tmp_path / 'out'}"]


def test_a_matrix_with_intervals_scores_and_a_page(line, tmp_path, capsys):
    assert run([*line, "--learned=blue"]) == 0
    printed = capsys.readouterr().out
    assert "| reder | 1.00 [0.34, 1.00] | 0.00 [0.00, 0.66] | 0.50 |" in printed
    assert "| blueer | 0.00 [0.00, 0.66] | 1.00 [0.34, 1.00] | 0.50 |" in printed
    assert "| NBT, all tasks | 1.00 ± " in printed  # the first corner is lost
    kept = read_evaluation(tmp_path / "out" / "evaluation.json")
    assert [row.successes for row in kept.rows] == [
        {"red": [True, True], "blue": [False, False]},
        {"red": [False, False], "blue": [True, True]},
    ]
    assert "What the checkpoints can do" in (tmp_path / "out" / "report.html").read_text()


def test_what_is_played_is_not_played_again(line, tmp_path, monkeypatch):
    from lerobot_craft.lerobot_api.rollouts import Stage

    played = []
    real = Stage.play

    def play(stage, episodes, seed):
        if len(played) == 3:
            raise KeyboardInterrupt
        played.append(seed)
        return real(stage, episodes, seed)

    monkeypatch.setattr(Stage, "play", play)
    with pytest.raises(KeyboardInterrupt):
        run(line)
    assert sum(len(row.successes) for row in read_evaluation(tmp_path / "out" / "evaluation.json").rows) == 3
    played.clear()
    assert run(line) == 0
    assert len(played) == 1
    played.clear()
    assert run(line) == 0
    assert played == []


def test_a_training_stands_for_its_last_checkpoint(policies, tmp_path):
    from lerobot_craft.cli.eval import _candidates

    steps = tmp_path / "training" / "checkpoints"
    shutil.copytree(policies["red"], steps / "000002" / "pretrained_model")
    (steps / "last").symlink_to("000002")
    (candidate,) = _candidates([f"{tmp_path / 'training'}/"])
    assert candidate.name == str(tmp_path / "training")
    assert candidate.checkpoint.resolve() == steps / "000002" / "pretrained_model"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "say what to evaluate"),
        (["a=x", "a=y"], "two checkpoints are called a"),
        (["x", "--learned=red"], "--learned names 1 tasks for 1 checkpoints"),
        (["x", "--eval.n_episodes=0"], "n_episodes must be at least 1"),
        (["x", "--seed"], "--seed needs a value: write --seed=VALUE"),
        (["x", "--env.type=nothing"], "invalid choice: 'nothing'"),
        (["x", "--sed=3"], "--sed=3"),
        (["nowhere"], "no checkpoint directory nowhere"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments, complaint, tmp_path):
    with pytest.raises(CraftError, match=complaint):
        run([*SMALL, f"--output_dir={tmp_path}", *arguments])


def test_success_before_and_after_goes_into_the_card_of_a_checkpoint(policies, craft_train, tmp_path, capsys):
    """From a real run to a real card: the teacher is known by its weights, wherever it lies."""
    from lerobot_craft.tiny.datasets import make_local_dataset

    new = make_local_dataset(tmp_path / "new", ["go to blue"], 1, 6, state_dim=2, action_dim=2)
    trained = tmp_path / "trained"
    flags = f"--policy.path={policies['red']} --policy.device=cpu --policy.push_to_hub=false --output_dir={trained}"
    data = f"--dataset.repo_id=local/new --dataset.root={new} --steps=1 --batch_size=2 --num_workers=0"
    assert craft_train(*flags.split(), *data.split(), "--craft.enabled=true", "--craft.method=naive") == 0
    card = trained / "checkpoints" / "last" / "pretrained_model" / "README.md"
    card.write_text(card.read_text().replace("## Command", "A line of the owner's.\n\n## Command"))
    teacher = shutil.copytree(policies["red"], tmp_path / "elsewhere")
    capsys.readouterr()
    line = [*SMALL, "--env.task=red", f"--output_dir={tmp_path / 'out'}", "--update_card=true"]
    assert run([f"first={teacher}", f"second={trained}", *line]) == 0
    assert capsys.readouterr().out.rstrip().endswith(str(card))
    text = card.read_text()
    assert "| before fine-tuning | 1.00 [0.34, 1.00] |\n| this checkpoint | 1.00 [0.34, 1.00] |" in text
    assert "Success in `reach`, n = 2 episodes per task" in text
    assert "Not evaluated" not in text
    assert "A line of the owner's." in text
    assert not (teacher / "README.md").exists()


def test_a_card_that_is_not_there_is_said_before_anything_is_played(line, tmp_path):
    with pytest.raises(CraftError, match="--update_card: none of these checkpoints has a README"):
        run([*line, "--update_card=true"])
    assert not (tmp_path / "out").exists()


def test_an_environment_must_be_named():
    with pytest.raises(CraftError, match="say where to evaluate"):
        run(["checkpoint"])


def test_a_task_that_is_not_there_is_named(line):
    with pytest.raises(CraftError, match="--learned: green is none of the environment's tasks, which are red, blue"):
        run([*line, "--learned=green"])


def test_a_place_that_cannot_be_written_is_said_before_anything_is_played(line, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(CraftError, match="out: "):
        run(line)
