import os
import time

import pytest

from lerobot_craft.doctor import Status
from lerobot_craft.doctor.machine import check_torchcodec
from lerobot_craft.doctor.probe import Probe, decode_pyav, encode, one_line, require_levels


@pytest.fixture
def probe(tmp_path):
    def start(code: str, timeout_s: float = 30.0) -> Probe:
        script = tmp_path / "probe_under_test.py"
        script.write_text(code)
        return Probe("any", env=os.environ, timeout_s=timeout_s, script=str(script))

    return start


def test_topics_are_read_and_noise_is_not(probe):
    with probe("""print('{"noise": 1}'); print('craft-probe {"a": {"x": 1}}'); print("craft-prob")""") as child:
        report = child.report()
    assert (report.topics, report.died) == ({"a": {"x": 1}}, None)


def test_what_was_found_before_a_crash_is_kept(probe):
    code = """import os; print('craft-probe {"a": {"x": 1}}', flush=True); os.abort()"""
    with probe(code) as child:
        report = child.report()
    assert report.topic("a") == {"x": 1}
    assert report.topic("b")["error"] == "was killed by SIGABRT"


def test_an_exception_is_told_by_its_last_line(probe):
    with probe("raise RuntimeError('no GL')") as child:
        assert child.report().died == "RuntimeError: no GL"


def test_a_probe_that_hangs_is_given_up(probe):
    with probe("import time; time.sleep(60)", timeout_s=0.5) as child:
        assert child.report().died == "gave no answer within 0.5 s"


def test_leaving_kills_the_child(probe):
    with probe("import time; time.sleep(60)") as child:
        started = time.monotonic()
    assert time.monotonic() - started < 30
    assert child._process.returncode == -9


def test_the_current_directory_shadows_nothing(probe, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    monkeypatch.chdir(tmp_path)
    with probe("import json") as child:
        assert child.report().died is None


def test_a_reason_fits_a_line():
    assert one_line("  first\nsecond") == "first"
    assert len(one_line("x" * 1000)) == 160


def test_a_video_is_really_decoded():
    _, mp4 = encode()
    levels = decode_pyav(mp4)
    require_levels(levels)
    with pytest.raises(ValueError, match="grey levels"):
        require_levels([0.0] * len(levels))
    with pytest.raises(ValueError, match="argument 2 is longer"):
        require_levels(levels[:-1])


def test_a_torchcodec_that_aborts_leaves_the_rest_of_the_report(tmp_path, surroundings):
    (tmp_path / "torchcodec.py").write_text("import os\nos.abort()\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": ""}  # buffered output dies with the process
    with Probe("torch_and_video", env=env, timeout_s=60) as probe:
        report = probe.report()
    assert "version" in report.topic("torch")
    assert "version" in report.topic("pyav")
    check = check_torchcodec(report.topic("torchcodec"), surroundings)
    assert check.status is Status.WARN
    assert "was killed by SIGABRT" in check.value


def test_a_broken_torch_is_a_finding(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with Probe("torch_and_video", env=env, timeout_s=60) as probe:
        report = probe.report()
    assert report.died is None
    assert report.topic("torch") == {"error": "libcudart.so.13: cannot open shared object file", "kind": "OSError"}
