"""Paths in, the page on disk."""

from collections.abc import Sequence
from pathlib import Path

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.matrix_table import matrix_table, scores_table
from lerobot_craft.evaluation.results import write_text
from lerobot_craft.evaluation.table import sequence_table, summary_table
from lerobot_craft.report.inputs import load_inputs
from lerobot_craft.report.page import render, together

REPORT_FILE = "report.html"


def default_output(paths: Sequence[Path]) -> Path:
    """In the first directory, or beside the first file."""
    return (paths[0] if paths[0].is_dir() else paths[0].parent) / REPORT_FILE


def write_report(paths: Sequence[Path], output: Path) -> str:
    """Write the page of what is at these paths to `output`, and return its tables of success as text."""
    inputs = load_inputs(paths)
    if output.resolve() in {path.resolve() for path in inputs.files}:
        raise CraftError(f"{output} is one of the results: choose another name with --output=FILE")
    if not output.parent.exists():
        raise CraftError(f"--output={output}: there is no directory {output.parent}. Make it first, or name another")
    found = together(inputs.sources)
    write_text(output, render(inputs, found))
    of_evaluations = [made(evaluation) for evaluation in inputs.evaluations for made in (matrix_table, scores_table)]
    tables = (summary_table(found.summary), sequence_table(found.sequences), *of_evaluations)
    return "\n\n".join(table for table in tables if table)
