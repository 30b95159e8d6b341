import json
import os
import subprocess
import sys

import pytest

from lerobot_craft.doctor import Status
from lerobot_craft.doctor.probe import Probe
from lerobot_craft.doctor.probes.torch_and_video import _decode_pyav, _encode, _require_levels
from lerobot_craft.doctor.video import check_pyav, check_torchcodec, loading_failure

WORKS = {"version": "15.1.0", "codec": "libsvtav1", "ffmpeg": 7}
ABSENT = {"error": "No module named 'av'", "kind": "ModuleNotFoundError"}
BROKEN = {"error": "decoded grey levels [0.0] instead of [80]", "kind": "ValueError"}

# The shape of torchcodec's own message, one part per FFmpeg release.
NOT_INSTALLED = """FFmpeg version 8:
Traceback (most recent call last):
OSError: libavutil.so.60: cannot open shared object file: No such file or directory
OSError: Could not load this library: /somewhere/libtorchcodec_core8.so
"""
NOT_FITTING = """FFmpeg version 7:
Traceback (most recent call last):
OSError: /somewhere/libtorchcodec_core7.so: undefined symbol: _ZN3c105ErrorC2E
OSError: Could not load this library: /somewhere/libtorchcodec_core7.so
"""
UNLOADABLE = {"error": f"Could not load libtorchcodec. Likely causes:\n{NOT_INSTALLED}", "kind": "RuntimeError"}


@pytest.mark.parametrize(
    ("pyav", "torchcodec", "status"),
    [
        (WORKS, WORKS, "ok"),
        (WORKS, UNLOADABLE, "ok"),
        (ABSENT, WORKS, "warn"),
        (ABSENT, UNLOADABLE, "missing"),
        (BROKEN, UNLOADABLE, "missing"),
    ],
)
def test_without_any_decoder_there_is_no_video(pyav, torchcodec, status):
    check = check_pyav(pyav, torchcodec)
    assert check.status == status
    assert (check.remedy is None) is (status == "ok")


def test_torchcodec_without_ffmpeg_is_a_warning_that_installs_it(surroundings):
    check = check_torchcodec(UNLOADABLE, surroundings)
    assert check.status is Status.WARN
    assert check.value.startswith("finds no FFmpeg libraries")
    assert check.remedy.endswith("apt-get install -y ffmpeg")


def test_torchcodec_that_does_not_fit_torch_is_told_apart(surroundings):
    check = check_torchcodec({"error": NOT_INSTALLED + NOT_FITTING, "kind": "RuntimeError"}, surroundings)
    assert "undefined symbol" in check.value
    assert check.remedy.startswith("pip install --upgrade torch torchcodec")
    assert loading_failure("something else altogether") == "something else altogether"


def test_torchcodec_absent_or_wrong_is_a_warning(surroundings):
    assert check_torchcodec(WORKS, surroundings).status is Status.OK
    assert check_torchcodec(ABSENT, surroundings).remedy == "pip install .  # in a clone of CRaFT"
    assert "grey levels" in check_torchcodec(BROKEN, surroundings).value


def test_a_video_is_really_decoded():
    _, mp4 = _encode()
    levels = _decode_pyav(mp4)
    _require_levels(levels)
    with pytest.raises(ValueError, match="grey levels"):
        _require_levels([0.0] * len(levels))
    with pytest.raises(ValueError, match="argument 2 is longer"):
        _require_levels(levels[:-1])


def test_a_torchcodec_that_aborts_leaves_the_rest_of_the_report(tmp_path, surroundings):
    (tmp_path / "torchcodec.py").write_text("import os\nos.abort()\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": ""}  # buffered output dies with the process
    with Probe("torch_and_video.py", env=env, timeout_s=60) as probe:
        report = probe.report()
    assert "version" in report.topic("torch")
    assert "version" in report.topic("pyav")
    check = check_torchcodec(report.topic("torchcodec"), surroundings)
    assert check.status is Status.WARN
    assert "was killed by SIGABRT" in check.value


def test_a_broken_torch_is_a_finding(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with Probe("torch_and_video.py", env=env, timeout_s=60) as probe:
        report = probe.report()
    assert report.died is None
    assert report.topic("torch") == {"error": "libcudart.so.13: cannot open shared object file", "kind": "OSError"}


def test_the_real_message_of_a_real_failure_is_understood(surroundings):
    """Whatever torchcodec says on this machine when no FFmpeg can be found must read as just that."""
    script = (
        "import json, sys\n"
        "try:\n    import torchcodec\nexcept RuntimeError as error:\n    print(json.dumps(str(error)))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    if not out:
        pytest.skip("torchcodec loads here, so there is no message to read")
    assert loading_failure(json.loads(out)) is None
