"""docs/troubleshooting.md quotes sentences that the code really says."""

import ast
import functools
import re
from pathlib import Path

import lerobot
import pytest

import lerobot_craft
from tests.docs.pages import ROOT, section

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
LEROBOTS = section(PAGE, "From lerobot itself")
GAP = "…"


def quoted(text):
    return re.findall(r"^> (.+)$", text, re.MULTILINE)


def part_of(node):
    match node:
        case ast.Constant(value):
            return str(value)
        case ast.FormattedValue(ast.Call(ast.Name("setting"), [ast.Constant(name)])):
            return f"--{name}"
    return GAP


@functools.cache
def sentences(root):
    """Every string in the code below a directory; what is put into it when it runs is left open, but for settings."""
    found = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(map(part_of, node.values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_said(sentence, root):
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in sentence.split(GAP)), re.DOTALL)
    return any(pattern.search(said) for said in sentences(root))


@pytest.mark.parametrize("sentence", quoted(PAGE.replace(LEROBOTS, "")))
def test_craft_says_it(sentence):
    assert is_said(sentence, Path(lerobot_craft.__file__).parent)


@pytest.mark.parametrize("sentence", quoted(LEROBOTS))
def test_lerobot_says_it(sentence):
    assert is_said(sentence, Path(lerobot.__file__).parent / "configs")


def test_a_quotation_is_enough_to_recognise():
    assert len(quoted(PAGE)) > 40
    assert [sentence for sentence in quoted(PAGE) if len(re.sub(r"\W", "", sentence)) < 15] == []
    assert not is_said("craft … has no mood for this …", Path(lerobot_craft.__file__).parent)
