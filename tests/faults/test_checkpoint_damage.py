"""A thousand ways to damage a checkpoint or a memory: a resume refuses each with a sentence, or has the same bits."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.memory.format import write_memory
from lerobot_craft.training.checkpoints import CRAFT_STATE
from lerobot_craft.training.journal import METRICS_FILE
from tests.faults.runs import assert_same_run, digests, resume_flags, saved_steps

POLICY = "smolvla"  # the smallest of them: a trial copies a whole run and hashes its weights
STEPS, SAVED = 3, 2
CHECKPOINT, LAST = Path("checkpoints") / f"{SAVED:06d}", Path("checkpoints") / "last"
# What a resume reads beside its checkpoint: the run's memory, the one that it began with, and the frames kept out.
BESIDE = ("craft_memory/*", "craft_memory_before/*", "action_probe.safetensors")
RECORDS_LOST = "resumed: same weights and states, and it said that its logs begin anew"
DEADLINE_S = 300.0  # of one resume, on a busy machine


def put(path: Path, data: bytes) -> None:
    """In place: other names of the same file see it too, as on a disk that fails."""
    with path.open("r+b") as file:
        file.truncate()
        file.write(data)


def flip(path, rng, others):
    data = bytearray(path.read_bytes())
    for bit in rng.sample(range(8 * len(data)), rng.choice((1, 1, 2, 8))):
        data[bit // 8] ^= 1 << bit % 8
    put(path, data)


def truncate(path, rng, others):
    put(path, path.read_bytes()[: rng.randrange(path.stat().st_size)])


def empty(path, rng, others):
    put(path, b"")


def remove(path, rng, others):
    path.unlink()


def remove_with_its_neighbors(path, rng, others):
    for file in path.parent.iterdir():
        if file.is_file() or file.is_symlink():
            file.unlink()


def put_a_directory(path, rng, others):
    path.unlink()
    path.mkdir()


def put_a_link(path, rng, others):
    """To nothing, or to itself."""
    path.unlink()
    path.symlink_to(rng.choice(("nothing", path.name)))


def put_a_pipe(path, rng, others):
    path.unlink()
    os.mkfifo(path)


def swap(path, rng, others):
    """With the same file of another checkpoint, or with another file beside it."""
    data = path.read_bytes()
    beside = [file for file in path.parent.iterdir() if file.is_file()]
    candidates = [file for file in others if file.is_file() and file.read_bytes() != data]
    put(path, rng.choice(candidates or [file for file in beside if file.read_bytes() != data]).read_bytes())


def change_json(path, rng, others):
    """Another value under a key, or none: valid JSON of another content."""
    content = json.loads(path.read_text())
    holder, key = rng.choice(list(_places(content)))
    value = holder[key]
    if isinstance(holder, dict) and rng.random() < 0.25:
        del holder[key]
    else:
        values = [None, [], {}, "", "x", -1, 0, 1e308, 10**30, True, [value], {"x": value}]
        values += [value + 1, -value] if type(value) in (int, float) else []
        holder[key] = rng.choice([other for other in values if other != value])
    put(path, json.dumps(content, indent=4).encode())


def _places(content):
    """Every place of a value in nested JSON, as its holder and its key."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield content, key
        yield from _places(value)


GOOD = ("refused", "resumed: same bits", RECORDS_LOST)
IN_PLACE = (flip, flip, truncate, empty, swap)
CHANGES = {*(mutation.__name__ for mutation in IN_PLACE), "change_json"}
MUTATIONS = (*IN_PLACE, remove, remove, remove_with_its_neighbors, put_a_directory, put_a_link, put_a_pipe)


def damage_link(path, rng):
    """`last` is lost, leads nowhere, in a circle or to the checkpoint before, or is a file or a directory."""
    kind = rng.choice(("removed", "nowhere", "circle", "before", "file", "directory"))
    path.unlink()
    match kind:
        case "nowhere":
            path.symlink_to("000099")
        case "circle":
            path.symlink_to("last")
        case "before":
            path.symlink_to(f"{SAVED - 1:06d}")
        case "file":
            path.write_text(CHECKPOINT.name)
        case "directory":
            shutil.copytree(path.with_name(CHECKPOINT.name), path)
    return kind


class Trials:
    """A run that ended after its second checkpoint; each trial damages it in one place and resumes it."""

    def __init__(self, flags, start, warm_process, tmp_path):
        self.run, self._start, self._warm, self._tmp = tmp_path / "run", start, warm_process, tmp_path
        self._whole, self._ended = tmp_path / "whole", tmp_path / "ended"
        log = tmp_path / "log"
        assert warm_process.run(["train", *flags(self.run)], log) == 0, log.read_text()[-3000:]
        self.run.rename(self._whole)
        _copy_with_links(self._whole, self._ended)
        shutil.rmtree(self._ended / "checkpoints" / f"{STEPS:06d}")
        (self._ended / LAST).unlink()
        (self._ended / LAST).symlink_to(CHECKPOINT.name)
        beside = [path for pattern in BESIDE for path in self._ended.glob(pattern)]
        found = (path for path in (*(self._ended / CHECKPOINT).rglob("*"), *beside) if path.is_file())
        self.files = sorted(path.relative_to(self._ended) for path in found)
        state = json.loads((self._ended / CHECKPOINT / CRAFT_STATE).read_text())
        self.listed = {CHECKPOINT / name for name in state["files"]}

    def outcome(self, number):
        """The trial of this number: the place, what was done there, and what came of it."""
        rng = random.Random(number)  # noqa: S311  # the same each time
        self.ended()
        places = [LAST, *self.files]
        place = places[number % len(places)]
        if place == LAST:
            kind = damage_link(self.run / LAST, rng)
        else:
            mutation = change_json if place.suffix == ".json" and rng.random() < 0.5 else rng.choice(MUTATIONS)
            inside = [part for part in place.parts if part not in (*CHECKPOINT.parts, "pretrained_model")]
            before = self.run / CHECKPOINT.with_name(f"{SAVED - 1:06d}") / place.relative_to(CHECKPOINT, walk_up=True)
            mutation(self.run / place, rng, [self._start.joinpath(*inside), before])
            kind = mutation.__name__
        by_link = rng.choice((True, False))
        found = self.resumed(rng.choice((f"--output_dir={self.run}", self.config_flag(by_link=by_link))))
        shutil.rmtree(self.run)
        return place, kind, found

    def config_flag(self, *, by_link):
        """By the link `last`, or by the checkpoint's own name."""
        return f"--config_path={self.run / (LAST if by_link else CHECKPOINT) / 'pretrained_model/train_config.json'}"

    def ended(self):
        """The run as it was before any damage."""
        _copy_with_links(self._ended, self.run)

    def resumed(self, named):
        """What comes of resuming the run."""
        before, log = _contents(self.run), self._tmp / "log_resumed"
        command = self._warm.start(["train", named, "--resume=true"], log)
        until = time.monotonic() + DEADLINE_S
        while command.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        if command.exit_code is None:
            command.send_signal(signal.SIGKILL)
            command.wait()
            return f"{named} waits for ever: {log.read_text()[-1000:]}"
        said = log.read_text()
        if command.exit_code not in (0, 2) or "Traceback" in said:
            return f"{named} fails: {said[-2000:]}"
        if command.exit_code == 2:
            sentence = said[said.rindex("craft: ") :]
            if (after := _contents(self.run)) != before:
                return f"{named} is refused, and wrote {dict(after.items() ^ before.items()).keys()}: {sentence}"
            return "refused" if str(self.run) in sentence else f"{named} is refused, but what is? {sentence}"
        try:
            if f"{self.run / METRICS_FILE} is missing: it begins anew" in said:  # logs of a run, not of a checkpoint
                assert _without_card(digests(self.run)) == _without_card(digests(self._whole))
                return RECORDS_LOST
            assert_same_run(self.run, self._whole)
        except (AssertionError, OSError, ValueError) as error:
            return f"{named} has other bits: {error}"
        return "resumed: same bits"


def _without_card(found):
    """What a model card says of a run is read from its records."""
    return {name: digest for name, digest in found.items() if Path(name).name != "README.md"}


def _copy_with_links(source, target):
    """A copy in which a file that has several names keeps them: checkpoints of a run share their memory."""
    copied = {}

    def copy(one, other):
        first = copied.setdefault(Path(one).stat().st_ino, other)
        shutil.copyfile(one, other) if first == other else os.link(first, other)

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def _contents(directory):
    """What would show that something was written: links by where they lead, files by size and time."""
    found = {}
    for path in directory.rglob("*"):
        status = path.lstat()
        kind = str(path.readlink()) if path.is_symlink() else (status.st_mode, status.st_size, status.st_mtime_ns)
        found[str(path.relative_to(directory))] = kind if not path.is_dir() or path.is_symlink() else None
    return found


@pytest.fixture
def trials(train_flags, checkpoints, memories, warm_process, tmp_path):
    start = shutil.copytree(checkpoints(POLICY), tmp_path / "start")
    write_memory(memories(POLICY), start / MEMORY_FOLDER)

    def flags(output_dir):
        craft = {"enabled": "true", "num_anchors": 20, "num_draws": 1, "remember": 4, "retention_freq": 1}
        ours = [f"--craft.{name}={value}" for name, value in craft.items()]
        return [*train_flags(POLICY, output_dir, steps=STEPS, save_freq=1, policy__path=start), *ours]

    return Trials(flags, start, warm_process, tmp_path)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(30), id="some"),
        # slow: a thousand in all, half an hour. In hundreds, so that a part of them can be run and counted.
        *(pytest.param(range(n, n + 100), id=f"from {n}", marks=pytest.mark.slow) for n in range(0, 1000, 100)),
    ],
)
def test_damage_is_refused_or_the_resumed_run_has_the_same_bits(trials, tally, numbers):
    outcomes = [trials.outcome(number) for number in numbers]
    if len(numbers) == 100:
        for _, _, found in outcomes:
            tally.add("damage to a checkpoint", found)
    assert [outcome for outcome in outcomes if outcome[2] not in GOOD] == []
    changed = {found for place, kind, found in outcomes if place in trials.listed and kind in CHANGES}
    assert changed == {"refused"}, "of a file that a run resumes from"
    assert {found for place, _, found in outcomes if place.name == "README.md"} == {"resumed: same bits"}


@pytest.mark.timeout(600)
def test_a_copy_that_followed_links_is_refused_before_it_trains(trials):
    for by_link in (True, False):
        trials.ended()
        (trials.run / LAST).unlink()
        shutil.copytree(trials.run / CHECKPOINT, trials.run / LAST)
        assert trials.resumed(trials.config_flag(by_link=by_link)) == "refused"
        shutil.rmtree(trials.run)


@pytest.mark.timeout(600)
def test_without_its_logs_a_run_is_resumed_to_the_same_weights(trials):
    trials.ended()
    remove_with_its_neighbors(trials.run / METRICS_FILE, None, ())
    assert trials.resumed(f"--output_dir={trials.run}") == RECORDS_LOST


@pytest.mark.timeout(300)
def test_weights_that_lerobot_would_replace_by_random_ones_are_refused(run_flags, craft_train, tmp_path, capfd):
    run = tmp_path / "run"
    assert craft_train(*run_flags("pi0", run, steps=2, save_freq=1, batch_size=2)) == 0
    before = digests(run)
    put(run / "checkpoints/000002/pretrained_model/model.safetensors", b"")
    damaged = digests(run)
    assert craft_train(*resume_flags(run), "--steps=3") == 2
    *_, said, way_on = capfd.readouterr().err.splitlines()
    assert "last/pretrained_model/model.safetensors is not what was saved" in said
    assert "000001/pretrained_model/train_config.json" in way_on
    assert digests(run) == damaged != before, "nothing was written"
    assert saved_steps(run) == [1, 2]
