"""The pages as tests read them: fenced blocks, prose, headings, tables, and the command lines that people copy."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/results/*.md", ".github/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
SHELL = ("", "sh", "bash")

_FENCE = re.compile(r"^(?P<mark>`{3,})(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=mark)$", re.MULTILINE | re.DOTALL)
# `RUN=(--a=b` or `RUN="--a=b`, to the closing mark at the end of a line.
_VARIABLE = re.compile(r'^(\w+)=(?:\((.*?)\)|"(.*?)")$', re.MULTILINE | re.DOTALL)
_USE = re.compile(r'"?\$\{?(\w+)(?:\[@\]\})?"?')


class Fence(NamedTuple):
    """A fenced block."""

    language: str
    code: str


def name(path: Path) -> str:
    """A page's name in a test report."""
    return str(path.relative_to(ROOT))


def fences(text: str) -> list[Fence]:
    """All fenced blocks of a page, in order."""
    return [Fence(found["language"].strip(), found["code"]) for found in _FENCE.finditer(text)]


def prose(text: str) -> str:
    """A page without its code, fenced or not."""
    return re.sub(r"`[^`\n]+`", "", _FENCE.sub("", text))


def headings(text: str) -> list[tuple[int, str]]:
    """(level, title) of every heading."""
    found = re.findall(r"^(#{1,6}) (.+?)\s*$", _FENCE.sub("", text), re.MULTILINE)
    return [(len(marks), title) for marks, title in found]


def section(text: str, title: str) -> str:
    """What stands below a heading, down to the next one of its level or above."""
    marks, rest = re.split(rf"^(#+) {re.escape(title)}$", text, maxsplit=1, flags=re.MULTILINE)[1:]
    return re.split(rf"^#{{1,{len(marks)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def table_rows(text: str) -> list[list[str]]:
    """Cells of every row of every table, headers included."""
    lines = [line for line in _FENCE.sub("", text).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]


def shell_lines(text: str, languages: tuple[str, ...] = SHELL) -> Iterator[str]:
    """Every line of the page's shell blocks as the shell sees it: continued lines joined, variables put in."""
    for line, _ in _with_variables(text, languages):
        yield line


def flag_lists(text: str) -> list[str]:
    """What the page puts into variables, where it is a list of flags."""
    bodies = [body for _, made in _with_variables(text, SHELL) for body in made.values()]
    return list(dict.fromkeys(body for body in bodies if body.startswith("--")))


def _with_variables(text: str, languages: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    known: dict[str, str] = {}

    def value(use: re.Match[str]) -> str:
        return known.get(use[1], use[0])

    for language, code in fences(text):
        if language not in languages:
            continue
        code = code.replace("\\\n", " ")
        made = {name: " ".join((array or quoted).split()) for name, array, quoted in _VARIABLE.findall(code)}
        known |= made
        yield from (("", {name: body}) for name, body in made.items())
        yield from ((_USE.sub(value, line), {}) for line in _VARIABLE.sub("", code).splitlines())
