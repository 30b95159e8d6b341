"""docs/layout.md against the tree: rooms, what each may import, and every path that it names."""

import re

from tests.docs.pages import ROOT, section, table_rows
from tests.test_architecture import MAY_IMPORT

PAGE = (ROOT / "docs" / "layout.md").read_text()
PACKAGE = ROOT / "src" / "lerobot_craft"
PATH = re.compile(r"`((?:[\w.]+/)+(?:\w+\.py)?|\.?\w+)`")


def named(cell):
    return set(re.findall(r"`(\w+)`", cell))


def test_the_table_of_rooms_is_what_the_code_is_held_to():
    rows = [row for row in table_rows(section(PAGE, "Rooms")) if len(row) == 3][1:]
    told = {row[0].strip("`"): named(row[2]) for row in rows}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert told == {room: MAY_IMPORT[room] - {"errors"} for room in rooms}


def test_what_a_change_opens_is_there():
    rows = table_rows(section(PAGE, "For this change, open this file"))[1:]
    paths = [path for row in rows for path in PATH.findall(" ".join(row[1:])) if "/" in path]
    assert len(paths) >= len(rows) - 1
    assert [path for path in paths if not (PACKAGE / path).exists()] == []


def test_the_directories_beside_the_package_are_there():
    rows = [row for row in table_rows(section(PAGE, "Rooms")) if len(row) == 2][1:]
    assert len(rows) > 4
    assert [row[0] for row in rows if not (ROOT / row[0].strip("`")).is_dir()] == []
