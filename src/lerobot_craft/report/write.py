"""Results files in, the page on disk."""

from collections.abc import Sequence
from pathlib import Path

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import write_text
from lerobot_craft.evaluation.table import sequence_table, summary_table
from lerobot_craft.report.page import load_sources, render, together


def write_report(results: Sequence[Path], output: Path) -> str:
    """Write the page of these results files to `output` and return the tables of all their runs as text."""
    if output.resolve() in {path.resolve() for path in results}:
        raise CraftError(f"{output} is one of the results: choose another name with --output=FILE")
    sources = load_sources(results)
    found = together(sources)
    write_text(output, render(sources, found))
    tables = (summary_table(found.summary), sequence_table(found.sequences))
    return "\n\n".join(table for table in tables if table)
