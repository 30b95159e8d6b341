"""docs/lerobot-seams.md lists every import of lerobot in lerobot_api/, file by file, and none that is gone."""

import ast
import re
from pathlib import Path

import lerobot_craft.lerobot_api
from tests.docs.pages import ROOT, section, table_rows

HERE = Path(lerobot_craft.lerobot_api.__file__).parent
ROWS = table_rows(section((ROOT / "docs" / "lerobot-seams.md").read_text(), "Every import"))[1:]


def imported():
    """(file, name) of everything that lerobot_api imports from lerobot."""
    for path in HERE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lerobot":
                yield from ((path.name, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((path.name, alias.name) for alias in node.names if alias.name.startswith("lerobot."))


def listed():
    for places, names, *_ in ROWS:
        files = re.findall(r"`(\w+\.py)`", places)
        yield from ((file, name) for file in files for name in re.findall(r"`([\w.]+)`", names))


def test_every_import_of_lerobot_has_a_row():
    assert sorted(set(imported()) - set(listed())) == []


def test_no_row_names_what_is_imported_no_more():
    known = set(imported())
    for places, names, *_ in ROWS:
        files = re.findall(r"`(\w+\.py)`", places)
        gone = [name for name in re.findall(r"`([\w.]+)`", names) if not any((file, name) in known for file in files)]
        assert gone == [], f"{places}: {gone}"
