import os
import time

import pytest

from lerobot_craft.doctor.probe import Probe, one_line


@pytest.fixture
def probe(tmp_path):
    def start(code: str, timeout_s: float = 30.0) -> Probe:
        script = tmp_path / "probe_under_test.py"
        script.write_text(code)
        return Probe(str(script), env=os.environ, timeout_s=timeout_s)

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
