"""Rooms and the direction in which they may see each other: docs and CONTRIBUTING say it, this checks it."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import lerobot_craft

ROOT = Path(lerobot_craft.__file__).parent
# What each room may import of this package; a room that is not listed here must be added with a thought.
MAY_IMPORT = {
    "errors": set(),
    "io": {"errors"},
    "core": {"errors"},
    "lerobot_api": {"errors"},
    "policies": {"errors", "core"},
    "anchors": {"errors", "io", "core", "lerobot_api", "policies"},
    "memory": {"errors", "io", "lerobot_api", "policies", "anchors"},
    "tiny": {"errors", "lerobot_api"},
    "doctor": {"errors", "lerobot_api"},
    "training": {"errors", "io", "core", "lerobot_api", "policies", "anchors", "memory", "evaluation"},
    "evaluation": {"errors", "io", "anchors", "lerobot_api", "policies"},
    "report": {"errors", "io", "evaluation", "training"},
    "bench": {
        "errors",
        "io",
        "anchors",
        "memory",
        "doctor",
        "evaluation",
        "lerobot_api",
        "policies",
        "tiny",
        "training",
    },
    "cli": {
        *("errors", "io", "lerobot_api", "doctor", "anchors", "memory", "tiny", "training"),
        *("evaluation", "report", "bench"),
    },
    "__main__": {"cli"},
}
# An adapter is knowledge of one policy's inside, `tiny` builds policies, and the bench's simulator is lerobot's kind of
# environment and dataset; all else goes through lerobot_api.
KNOWS_LEROBOT = {"lerobot_api", "policies", "tiny", "bench/metaworld"}


def room_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    """Dotted names that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = [p for p in sorted(ROOT.rglob("*.py")) if p.name != "__init__.py" or p.parent != ROOT]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    room = room_of(path)
    assert room in MAY_IMPORT, f"the room {room} is new: say in MAY_IMPORT what it may see"
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "lerobot_craft" and rest:
            seen = rest.split(".")[0]
            assert seen in MAY_IMPORT[room] | {room, "__version__"}, f"{room} must not see {seen}"
        if package == "lerobot":
            knows = any(path.is_relative_to(ROOT / place) for place in KNOWS_LEROBOT)
            assert knows, f"{room} calls lerobot itself: that belongs into lerobot_api/"


def test_no_two_modules_have_one_name():
    names = Counter(path.stem for path in FILES if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name, count in names.items() if count > 1] == []


def modules_after(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_core_does_not_load_lerobot():
    loaded = modules_after("import lerobot_craft.core")
    assert "torch" in loaded
    assert not {m for m in loaded if m.split(".")[0] in {"lerobot", "transformers", "torchjd", "cooper", "cvxpy"}}


def test_the_package_itself_loads_nothing():
    assert "torch" not in modules_after("import lerobot_craft")
