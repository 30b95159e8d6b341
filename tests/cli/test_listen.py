"""`craft listen` on small policies: one that hears, a copy of it that is deaf, and what is typed wrongly."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.cli import main
from lerobot_craft.cli.listen import run
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.listening import read_listening
from lerobot_craft.memory.format import write_memory
from tests.anchor_fixtures import NEW_TASKS, OLD_TASKS

WEIGHTS = "model.safetensors"


@pytest.fixture
def frames(anchor_data, tmp_path):
    """Flags of a small run on the new task's frames."""
    return [
        "--dataset.repo_id=local/new",
        f"--dataset.root={anchor_data / 'new'}",
        "--frames=6",
        "--policy.device=cpu",
        f"--output_dir={tmp_path / 'out'}",
    ]


@pytest.fixture
def told(frames):
    """With the old instructions."""
    return [*frames, f"--instructions={'; '.join(OLD_TASKS)}"]


@pytest.fixture
def deaf(checkpoints, tmp_path):
    """A copy of the small pi0_fast to which every word is the same."""
    copy = tmp_path / "deaf"
    shutil.copytree(checkpoints("pi0_fast"), copy)
    weights = load_file(copy / WEIGHTS)
    for name, value in weights.items():
        if "embed_tokens" in name:
            value.copy_(value.mean(dim=0, keepdim=True).expand_as(value))
    save_file(weights, copy / WEIGHTS, {"format": "pt"})
    return copy


def test_a_policy_that_did_not_change_still_listens(checkpoints, told, tmp_path, capsys):
    place = str(checkpoints("pi0_fast"))
    assert run([place, place, *told]) == 0
    found = read_listening(tmp_path / "out" / "listening.json")
    assert found.instructions == [*OLD_TASKS, *NEW_TASKS]
    assert found.learned == NEW_TASKS
    assert found.frames == 6
    assert found.apart_if_kept == found.apart_now
    assert max(map(max, found.apart_if_kept)) > 0
    assert found.moved == [0.0] * 4
    assert "Every instruction still does its own thing" in capsys.readouterr().out


def test_a_deaf_policy_is_found_out_and_the_page_shows_it(checkpoints, deaf, told, tmp_path, capsys):
    assert run([str(checkpoints("pi0_fast")), str(deaf), *told]) == 0
    found = read_listening(tmp_path / "out" / "listening.json")
    heard = [pair[1].value for task in OLD_TASKS if (pair := found.swallowed_by(task)) is not None]
    assert heard
    assert min(heard) > 0.5  # how many words there are can still be heard
    assert "does what" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "out"), f"--output={tmp_path / 'page.html'}"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Does it still listen?" in page
    assert all(instruction in page for instruction in OLD_TASKS)


def test_both_policies_draw_the_same_noise(checkpoints, told, tmp_path):
    place = str(checkpoints("smolvla"))
    assert run([place, place, *told]) == 0
    found = read_listening(tmp_path / "out" / "listening.json")
    assert found.moved == [0.0] * 4
    assert min(found.variation) > 0


def test_instructions_are_those_that_the_policy_was_told_to_keep(checkpoints, frames, tmp_path):
    kept = tmp_path / "kept"
    shutil.copytree(checkpoints("pi0_fast"), kept)
    (kept / "craft_config.json").write_text(json.dumps({"old_instructions": "open the drawer; press it"}))
    assert run([str(checkpoints("pi0_fast")), str(kept), *frames]) == 0
    found = read_listening(tmp_path / "out" / "listening.json")
    assert found.instructions == ["open the drawer", "press it", *NEW_TASKS]


def test_instructions_are_those_that_the_policy_remembers(checkpoints, memories, frames, tmp_path):
    before = shutil.copytree(checkpoints("smolvla"), tmp_path / "before")
    write_memory(memories("smolvla"), before / MEMORY_FOLDER)
    assert run([str(before), str(checkpoints("smolvla")), *frames]) == 0
    found = read_listening(tmp_path / "out" / "listening.json")
    assert found.instructions == [*OLD_TASKS, *NEW_TASKS]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda line: line[1:], "compares two checkpoints"),
        (lambda line: [x for x in line if "repo_id" not in x], "give frames to act in"),
        (lambda line: [x for x in line if "instructions" not in x], "it takes two to tell apart"),
        (lambda line: [*line, "--frames=0"], "--frames must be at least 1; got 0"),
        (lambda line: [*line, "--frame=3"], "frame"),
    ],
)
def test_what_is_typed_wrongly_is_said(checkpoints, told, change, complaint):
    place = str(checkpoints("pi0_fast"))
    with pytest.raises(CraftError, match=complaint):
        run(change([place, place, *told]))


def test_a_policy_without_instructions_cannot_listen(checkpoints, told):
    place = str(checkpoints("act"))
    with pytest.raises(CraftError, match="act reads no instruction"):
        run([place, place, *told])
