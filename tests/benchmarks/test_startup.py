import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "startup.py"


@pytest.mark.slow  # five processes that import lerobot
@pytest.mark.timeout(600)
def test_it_times_three_commands_to_their_first_step(tmp_path, capfd):
    main = runpy.run_path(str(SCRIPT))["main"]
    main(["--repeats=1", "--anchors=50", "--megabytes=1", f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("startup-*.json"))
    stock, off, craft = report["rows"].values()
    assert stock["beyond_median"] == 0
    assert off["beyond_median"] == pytest.approx(off["seconds_median"] - stock["seconds_median"])
    assert 0 < report["reading"]["cache_seconds"] < craft["seconds_median"]
    assert "| craft train, action retention | " in capfd.readouterr().out


def test_a_command_that_takes_no_step_is_no_measurement(tmp_path):
    seconds = runpy.run_path(str(SCRIPT))["seconds_to_first_step"]
    seconds.__globals__["FIRST_STEP"] = ""  # torch, which takes seconds to import
    with pytest.raises(RuntimeError, match="no step was taken"):
        seconds("print('hello')", [], tmp_path / "log")
