"""The one module that knows lerobot's inside, against the lerobot that is installed."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from lerobot_craft.doctor.probe import encode
from lerobot_craft.lerobot_api import supported_version

NOTICE = (
    "WARNING:lerobot.utils.import_utils:torchcodec cannot be loaded, so videos are decoded by pyav"
    " (`craft doctor` says why and how to mend it)"
)

BACKEND_SCRIPT = """
import logging, sys
from lerobot.utils.import_utils import get_safe_default_video_backend
from lerobot_craft.lerobot_api import quiet_video

logging.basicConfig(level=logging.INFO, force=True)  # lerobot logs while it is imported
get_safe_default_video_backend()
print("-- quiet --", file=sys.stderr)
quiet_video()
quiet_video()
print([get_safe_default_video_backend() for _ in range(3)])
logger = logging.getLogger("lerobot.utils.import_utils")
assert len(logger.filters) == 1
logger.warning("another %s", "warning")
logger.info("'torchcodec' is not available in your platform")
try:
    raise OSError("a real error")
except OSError:
    logger.exception("with its traceback")
"""
OTHERS = [
    "WARNING:lerobot.utils.import_utils:another warning",
    "INFO:lerobot.utils.import_utils:'torchcodec' is not available in your platform",
    "ERROR:lerobot.utils.import_utils:with its traceback",
    "Traceback (most recent call last):",
]

DATASET_SCRIPT = """
import sys
from pathlib import Path

import numpy as np
from lerobot_craft.lerobot_api import quiet_video

quiet_video()
from lerobot.datasets.lerobot_dataset import LeRobotDataset

root = Path(sys.argv[1])
features = {
    "observation.image": {"dtype": "video", "shape": (64, 64, 3), "names": ["height", "width", "channels"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
}
dataset = LeRobotDataset.create("local/grey", fps=10, features=features, root=root)
for level in range(0, 200, 40):
    image = np.full((64, 64, 3), level, np.uint8)
    dataset.add_frame({"observation.image": image, "action": np.zeros(2, np.float32), "task": "grow lighter"})
dataset.save_episode()
dataset.finalize()
print(round(float(LeRobotDataset("local/grey", root=root)[2]["observation.image"].mean()) * 255))
(video,) = root.rglob("*.mp4")
video.write_bytes(b"not a video")
print("-- corrupt --", file=sys.stderr)
try:
    LeRobotDataset("local/grey", root=root)[2]
except Exception as error:
    print(type(error).__name__)
"""


@pytest.fixture
def without_torchcodec(tmp_path):
    """An environment in which torchcodec is installed but cannot be loaded, FFmpeg or not."""
    package = tmp_path / "shadow" / "torchcodec"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('Could not load libtorchcodec.' + '\\n  line' * 50)\n")
    return {**os.environ, "PYTHONPATH": str(package.parent), "HF_HUB_OFFLINE": "1"}


def test_the_supported_release_is_the_one_installed():
    assert supported_version() == importlib.metadata.version("lerobot")


@pytest.mark.parametrize("torchcodec", [pytest.param("as installed", marks=pytest.mark.slow), "unloadable"])
def test_the_noise_becomes_one_line_and_the_rest_passes(torchcodec, without_torchcodec):
    env = without_torchcodec if torchcodec == "unloadable" else os.environ
    run = subprocess.run([sys.executable, "-c", BACKEND_SCRIPT], env=env, capture_output=True, text=True, check=True)
    before, after = run.stderr.split("-- quiet --\n")
    if run.stdout == "['torchcodec', 'torchcodec', 'torchcodec']\n":
        assert torchcodec == "as installed"
        expected = OTHERS
    else:
        assert run.stdout == "['pyav', 'pyav', 'pyav']\n"
        assert len(before.splitlines()) > 50, "lerobot no longer makes the noise that this test is about"
        expected = [NOTICE, *OTHERS]
    lines = after.splitlines()
    assert lines[: len(expected)] == expected
    assert lines[-1] == "OSError: a real error"


@pytest.mark.slow  # imports lerobot's dataset code, ten seconds and more
def test_a_video_dataset_is_made_and_read_quietly_and_a_corrupt_one_still_raises(tmp_path, without_torchcodec):
    command = [sys.executable, "-c", DATASET_SCRIPT, str(tmp_path / "grey")]
    run = subprocess.run(command, env=without_torchcodec, capture_output=True, text=True, check=True)
    level, error = run.stdout.split()
    assert abs(int(level) - 80) <= 2
    assert error == "InvalidDataError"
    quiet, corrupt = run.stderr.split("-- corrupt --\n")
    lines = [line for line in quiet.splitlines() if line.strip() and "Map:" not in line]  # the progress of `datasets`
    assert lines == [NOTICE]
    assert "moov atom not found" in corrupt  # what FFmpeg itself says about it


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="only Linux has it")
def test_a_process_that_recorded_a_video_shares_the_processor():
    encode()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
