"""A new user's first hour, typed and recorded, as a page (docs/first-hour.md).

It makes two datasets with lerobot's own writer (two cameras of different sizes, AV1 video, 14 named joints, 17 frames
per second) and a small SmolVLA that learned one of them. Then it types what a user would type, and keeps what was
printed and how long it took. Every command is a process of its own.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FPS, JOINTS, SIDE = 17, 14, 64
CAMERAS = {"observation.images.overhead-2": (48, 64), "observation.images.wrist_RGB.left": (64, 64)}  # [height, width]
OLD = ("Put the cup (red, 2nd from left) on the shelf.", 'Don\'t stop; open drawer "3"!')
NEW = ("Put the cup (blue, 2nd from left) on the shelf!",)
INTERRUPT_AFTER = 0.4  # of the steps
HEAD, TAIL, WIDTH, LINE = (
    6,
    18,
    200,
    100,
)  # lines of an output that are kept, and characters of a line; of a command in one line
TRANSCRIPT = Path("transcript.json")  # of the commands that are done
_BAR = re.compile(r"^[^|]{0,40}?\d+%\|")
_LOG = re.compile(r"^(INFO|WARNING) \S+ \S+ +\S+ ")

PAGE = """# The first hour

What a new user types and sees, from a clone to a policy that learned a task and kept the old ones. This regenerates the
page:

```
python scripts/first_hour.py --directory=outputs/first_hour
```

Typed on {date}, on {cpus} with a load of {load:.0f}: other work ran beside it, so a quiet machine is faster. Times
include the start of Python and of lerobot. Progress bars are left out, and long outputs are cut at `[...]`.

The data were made for this page with lerobot's own writer: two cameras of different sizes, AV1 video, {joints} named
joints, {fps} frames per second, instructions with punctuation. The policy is a SmolVLA of 0.5 million parameters. The
page shows the way and the times, not how well a real policy is kept: that is in the [results](results.md).

{steps}
"""


def commands(base_steps: int, steps: int) -> list[tuple[str, str]]:
    """What is typed, each with a sentence on why."""
    fast, slow = (
        f"--policy.optimizer_lr={rate} --policy.scheduler_warmup_steps=10 --policy.scheduler_decay_steps="
        for rate in ("1e-3", "3e-4")
    )
    new = (
        "--policy.path=outputs/before --policy.push_to_hub=false --dataset.repo_id=local/new --dataset.root=data/new "
        f"--steps={steps} --batch_size=8 --log_freq={max(1, steps // 6)} --num_workers=0 {slow}{steps}"
    )
    before = (
        "craft train --policy.path=data/start --policy.push_to_hub=false --dataset.repo_id=local/old "
        f"--dataset.root=data/old --steps={base_steps} --batch_size=16 --log_freq={max(1, base_steps // 4)} "
        f"--num_workers=0 --craft.preload=true {fast}{base_steps} --output_dir=outputs/before"
    )
    return [
        ("Get it. `make setup` (not timed here) installs into `.venv`.", f"git clone --quiet {ROOT} lerobot-craft"),
        ("What does this machine lack?", "craft doctor"),
        ("A policy that can do the old tasks. Skip this if you have one.", before),
        (
            "Give it a memory of the old tasks.",
            "craft remember outputs/before --dataset.repo_id=local/old --dataset.root=data/old",
        ),
        ("How much memory does the run need?", f"craft train --estimate {new} --craft.enabled=true"),
        (
            "Learn the new task. Interrupted with Ctrl-C on the way.",
            f"craft train {new} --craft.enabled=true --output_dir=outputs/kept",
        ),
        ("Resume.", "craft train --output_dir=outputs/kept --resume=true"),
        (
            "Does the policy still listen to its old instructions?",
            "craft listen outputs/before outputs/kept --dataset.repo_id=local/new --dataset.root=data/new",
        ),
        ("One page with all of it.", "craft report outputs/kept"),
    ]


def make_data() -> None:
    """`data/old`, `data/new` and `data/start`, a SmolVLA with random weights for them."""
    from lerobot_craft.lerobot_api import quiet_video

    quiet_video()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from lerobot_craft.tiny.make import make_checkpoint_for

    _record(Path("data/old"), OLD, episodes=6, seed=0)
    _record(Path("data/new"), NEW, episodes=4, seed=1)
    old = LeRobotDataset("local/old", root="data/old")
    make_checkpoint_for("smolvla", Path("data/start"), old, instructions=(*OLD, *NEW), chunk_size=8)


def _record(root: Path, instructions: tuple[str, ...], episodes: int, seed: int) -> None:
    """Episodes in turn; the joints swing at a pace that only the instruction tells, before pictures of a moving cup."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    names = [f"{arm}_joint-{number}.pos" for arm in ("left", "right") for number in range(JOINTS // 2)]
    vector = {"dtype": "float32", "shape": (JOINTS,), "names": names}
    pictures = {
        camera: {"dtype": "video", "shape": (*size, 3), "names": ["height", "width", "channels"]}
        for camera, size in CAMERAS.items()
    }
    features = {**pictures, "observation.state": dict(vector), "action": dict(vector)}
    dataset = LeRobotDataset.create(f"local/{root.name}", fps=FPS, features=features, root=root, use_videos=True)
    rng = np.random.default_rng(seed)
    for number in range(episodes):
        task = instructions[number % len(instructions)]
        pace = 1 + (*OLD, *NEW).index(task)
        length = 40 + number % 3
        phase = rng.uniform(0, 0.3) + 0.4 * np.arange(JOINTS)
        swing = np.sin(2 * np.pi * pace * np.arange(length + 1)[:, None] / 40 + phase).astype(np.float32)
        for frame in range(length):
            seen = {camera: _picture(size, frame / length) for camera, size in CAMERAS.items()}
            values = {"observation.state": swing[frame], "action": swing[frame + 1]}
            dataset.add_frame({**seen, **values, "task": task})
        dataset.save_episode()
    dataset.finalize()


def _picture(size: tuple[int, int], phase: float) -> np.ndarray:
    picture = np.full((*size, 3), 90, dtype=np.uint8)
    left = int(phase * (size[1] - 12))
    picture[size[0] // 2 - 6 : size[0] // 2 + 6, left : left + 12] = (200, 40, 40)
    return picture


def typed(command: str, interrupt_after: int) -> tuple[str, float]:
    """Run one command; its output, and seconds. Ctrl-C when `outputs/kept` has logged so many steps (0: never)."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", newline="") as said:  # "": a progress bar's returns stay what they are
        child = subprocess.Popen(f"exec {command}", shell=True, stdout=said, stderr=said, start_new_session=True)  # noqa: S602
        while interrupt_after and child.poll() is None:
            if _last_step() >= interrupt_after:
                os.killpg(child.pid, signal.SIGINT)
                break
            time.sleep(0.05)
        child.wait()
        seconds = time.monotonic() - began
        said.seek(0)
        output = said.read()
    expected = 130 if interrupt_after else 0
    if child.returncode != expected:
        raise SystemExit(f"{command}\nended with {child.returncode}, not {expected}:\n{output}")
    return output, seconds


def _last_step() -> int:
    """The step of the run that will be interrupted, read from its log."""
    metrics = Path("outputs/kept/metrics.jsonl")
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []  # whole ones
    return int(json.loads(lines[-1])["step"]) if lines else 0


def trimmed(said: str, here: Path) -> str:
    """As a terminal shows it in the end, without places of this machine, and without the middle."""
    for place, name in ((f"{here}/", ""), (str(here), "."), (str(ROOT), "lerobot-craft"), (str(Path.home()), "~")):
        said = said.replace(place, name)
    lines = [line.rstrip("\r ").split("\r")[-1].rstrip() for line in said.split("\n")]
    lines = [_LOG.sub("", line) for line in lines if line.strip() and not _BAR.match(line)]
    lines = [line if len(line) <= WIDTH else f"{line[:WIDTH]} ..." for line in lines]
    return "\n".join(lines if len(lines) <= HEAD + TAIL else [*lines[:HEAD], "[...]", *lines[-TAIL:]])


def shown(why: str, command: str, said: str, seconds: float) -> str:
    """One command as the page has it."""
    line = command.replace(str(ROOT), "REPOSITORY")
    if len(line) > LINE:
        line = line.replace(" --", " \\\n    --")
    output = f"```text\n{said}\n```\n\n" if said else ""
    return f"{why}\n\n```\n{line}\n```\n\n{output}{seconds:.0f} s."


def main() -> int:
    """Spend the hour, write the page, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, required=True, help="where the hour is spent; an hour that was interrupted is resumed"
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "first-hour.md")
    parser.add_argument("--base_steps", type=int, default=800, help="steps of the policy that can do the old tasks")
    parser.add_argument("--steps", type=int, default=60, help="steps on the new task")
    options = parser.parse_args()
    # A shell's background job ignores Ctrl-C, and so would every command that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    page, here = options.page.resolve(), options.directory.resolve()
    here.mkdir(parents=True, exist_ok=True)
    os.chdir(here)
    os.environ |= {"HF_HUB_OFFLINE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    os.environ |= {"CRAFT_HOME": str(here / "craft_home"), "HF_LEROBOT_HOME": str(here / "lerobot_home")}
    done = json.loads(TRANSCRIPT.read_text()) if TRANSCRIPT.exists() else []
    if not done:
        make_data()
    for why, command in commands(options.base_steps, options.steps)[len(done) :]:
        interrupted = "Ctrl-C" in why
        said, seconds = typed(command, int(INTERRUPT_AFTER * options.steps) if interrupted else 0)
        done.append({"why": why, "command": command, "said": trimmed(said, here), "seconds": seconds})
        TRANSCRIPT.write_text(json.dumps(done, indent=2))
        sys.stdout.write(f"{seconds:6.0f} s  {command[:100]}\n")
        sys.stdout.flush()
    parts = [shown(**step) for step in done]
    parts.append(f"All of it: {sum(step['seconds'] for step in done) / 60:.0f} minutes.")
    cpus = f"{os.cpu_count()} CPU cores"
    page.write_text(
        PAGE.format(
            date=time.strftime("%Y-%m-%d"),
            cpus=cpus,
            load=os.getloadavg()[2],
            joints=JOINTS,
            fps=FPS,
            steps="\n\n".join(parts),
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
