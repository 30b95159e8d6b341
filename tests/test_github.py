"""What a code host reads: issue forms and CI."""

import re
from pathlib import Path

import pytest
import yaml

HOME = Path(__file__).parents[1] / ".github"
FORMS = sorted(path for path in (HOME / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_is_whole(form):
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= content.keys()
    questions = [field for field in content["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in questions}) == len(questions) > 2
    for field in questions:
        assert field["attributes"]["label"]
        assert all(isinstance(option, str | dict) for option in field["attributes"].get("options", []))


def test_the_forms_that_there_are():
    assert [form.stem for form in FORMS] == ["bug", "policy", "result"]


def test_ci_types_what_a_person_types():
    workflow = yaml.safe_load((HOME / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make test", "make docs"]
    targets = re.findall(r"^([a-z0-9-]+):", (HOME.parent / "Makefile").read_text(), re.MULTILINE)
    assert {command.removeprefix("make ") for command in commands} <= set(targets)
    assert "://" not in (HOME / "workflows" / "ci.yml").read_text()
