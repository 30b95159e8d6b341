"""`craft eval` on two policies that each go to one corner, whatever they are told."""

import importlib.util
import shutil

import pytest

from lerobot_craft.cli import main
from lerobot_craft.cli.eval import run
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.matrix import read_evaluation
from lerobot_craft.lerobot_api import supported_version
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


LIBERO = ("--env.type=libero", "--env.task=libero_spatial", "--policy.device=cpu")
FROM_LIBERO = '--rename_map={"observation.images.image": "observation.images.top"}'


def test_cameras_of_other_names_end_in_one_sentence_with_the_flag_that_translates_them(policies, tmp_path, capsys):
    assert main(["eval", f"red={policies['red']}", *LIBERO, f"--output_dir={tmp_path / 'out'}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the environment libero has observation.images.image, observation.images.image2, the policy in " in said
    assert "reads observation.images.top: translate" in said
    # What it says to type must be what helps.
    assert said.rstrip().endswith(FROM_LIBERO.replace("=", "='", 1) + "'")


def test_a_map_that_leaves_the_policy_without_a_camera_is_said_before_anything_is_played(policies, tmp_path):
    backwards = '--rename_map={"observation.images.top": "observation.images.image"}'
    with pytest.raises(CraftError, match="translate the environment's names into the policy's with --rename_map"):
        run([f"red={policies['red']}", *LIBERO, backwards, f"--output_dir={tmp_path / 'out'}"])


@pytest.mark.skipif(importlib.util.find_spec("libero") is not None, reason="LIBERO is installed here")
def test_a_simulator_that_is_not_installed_ends_in_the_line_that_installs_it(policies, tmp_path, capsys):
    line = ["eval", f"red={policies['red']}", *LIBERO, FROM_LIBERO, f"--output_dir={tmp_path / 'out'}"]
    assert main(line) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the environment libero cannot be made here (No module named 'libero')" in said
    assert said.endswith(f"type pip install 'lerobot[libero]=={supported_version()}'")


def test_renamed_observations_reach_the_policy(policies, tmp_path):
    """A policy whose camera has another name succeeds as before, and only by the map."""
    renamed = shutil.copytree(policies["red"], tmp_path / "renamed")
    for file in renamed.glob("*.json"):
        file.write_text(file.read_text().replace("observation.images.top", "observation.images.front"))
    line = [f"red={renamed}", *SMALL, "--env.task=red", f"--output_dir={tmp_path / 'out'}"]
    with pytest.raises(CraftError, match=r"reads observation\.images\.front"):
        run(line)
    name = '--rename_map={"observation.images.top": "observation.images.front"}'
    assert run([*line, name]) == 0
    kept = read_evaluation(tmp_path / "out" / "evaluation.json")
    assert kept.rename_map == {"observation.images.top": "observation.images.front"}
    assert kept.rows[0].successes == {"red": [True, True]}
    with pytest.raises(CraftError, match="another rename_map already"):
        run([*line, '--rename_map={"a": "b"}'])


def test_success_before_and_after_goes_into_the_card_of_a_checkpoint(policies, craft_train, tmp_path, capsys):
    """From a real run to a real card: the teacher is known by its weights, wherever it lies."""
    from lerobot_craft.tiny.make import make_local_dataset

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
    assert str(tmp_path) not in text.split("## Command")[0], "the card goes to the Hub"
    assert f"| **teacher** | {policies['red'].name} |" in text
    assert "datasets:" not in text, "a dataset of this machine is not on the Hub"
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
