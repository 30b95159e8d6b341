import json
from dataclasses import asdict

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.training.journal import RUN_FILE, read_run_file, write_run_file
from tests.report.made_training import RECORD


def test_what_is_written_is_read_back(tmp_path):
    write_run_file(tmp_path, RECORD)
    assert read_run_file(tmp_path) == RECORD


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": 2}, "schema: this release reads 1, the file has 2"),
        ({"steps": "many"}, "steps: expected int, got str"),
        ({"extra": 1}, "extra: unknown field"),
    ],
)
def test_another_content_is_refused_by_its_field(change, complaint, tmp_path):
    (tmp_path / RUN_FILE).write_text(json.dumps(asdict(RECORD) | change))
    with pytest.raises(CraftError, match=complaint):
        read_run_file(tmp_path)
