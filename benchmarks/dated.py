"""A benchmark's report, with its date and the machine, as `benchmarks/results` keeps it."""

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def dated(benchmark: str, **measured: Any) -> dict[str, Any]:
    """What was measured, below what every report says."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).date().isoformat(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        **measured,
    }


def write(report: dict[str, Any], directory: Path, text: str = "") -> None:
    """Keep it under its name and date; `text`, if there is some, beside it as Markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{report['benchmark']}-{report['date']}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    if text:
        path.with_suffix(".md").write_text(text)
    print(f"\nwritten to {path}")
