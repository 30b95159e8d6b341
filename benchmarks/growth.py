"""How a step of `craft train` grows with anchors, old tasks, parameters and processes. `make bench-growth` runs this.

Each point is a pair of real runs of a small lerobot pi0_fast, plain fine-tuning and CRaFT (actions, as many anchors as
samples in every step), which take their steps in turns within one process. The ratio of the two is what CRaFT costs:
it should not grow with the number of anchors or old tasks, and stay the same as parameters and processes grow. The
points of several processes are commands of their own, one thread per process, plain and CRaFT in turns; their time is
`update_s` of their logs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from anchors import make_teacher
from dated import RESULTS, dated, write
from lerobot_craft.tiny.make import make_local_dataset
from parity import quietly
from stepwise_run import Run, Variant

NEW_TASK = "push the blue cube to the left"
PLAIN = Variant("plain fine-tuning", {"method": "naive"})
CRAFT = Variant("CRaFT", {"retention_mode": "action"}, "action")
WIDTHS, ANCHORS, TASKS, PROCESSES = (64, 128, 192, 256), (8, 32, 128), (1, 3, 12), (1, 2)
DEFAULT = {"width": 128, "anchors": 32, "tasks": 3}
POINTS = [
    *(("anchors", DEFAULT | {"anchors": n}) for n in ANCHORS),
    *(("old tasks", DEFAULT | {"tasks": n}) for n in TASKS),
    *(("width", DEFAULT | {"width": n}) for n in WIDTHS),
]


def instructions(number: int) -> list[str]:
    """Old tasks in the words that the small tokenizer knows."""
    objects = ("drawer", "red button", "button", "red drawer")
    return [f"{verb} the {thing}" for thing, verb in product(objects, ("open", "close", "press"))][:number]


def prepared(root: Path, point: dict[str, int], options: argparse.Namespace) -> argparse.Namespace:
    """Data and a teacher in a directory; the options of its runs."""
    tasks = instructions(point["tasks"])
    make_local_dataset(root / "old", tasks, episodes_per_task=max(3, point["anchors"] // (10 * len(tasks)) + 1))
    make_local_dataset(root / "new", [NEW_TASK], image_size=32, seed=1)
    own = argparse.Namespace(**(vars(options) | {"width": point["width"], "anchors": point["anchors"]}))
    make_teacher("pi0_fast", root, own)
    return own


def step_ratio(root: Path, point: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    own = prepared(root, point, options)
    plain, craft = (Run(variant, root / variant.name, root, own) for variant in (PLAIN, CRAFT))
    for run in (plain, craft):
        run.take(2)
    pairs = []
    for repeat in range(options.repeats):
        order = (plain, craft) if repeat % 2 else (craft, plain)
        times = {id(run): run.take(options.steps) for run in order}
        pairs.append((times[id(craft)], times[id(plain)]))
    ratios = [own_time / beside for own_time, beside in pairs]
    return {
        "parameters": sum(p.numel() for p in plain.policy.parameters()),
        "plain_seconds": median(beside for _, beside in pairs),
        "ratio_median": median(ratios),
        "ratio_range": (min(ratios), max(ratios)),
        "operations_ratio": craft.operations() / plain.operations(),
    }


def launched(root: Path, processes: int, variant: Variant, options: argparse.Namespace) -> float:
    """Seconds of an update in a run of several processes: the median of its logged steps after the first ones."""
    output = root / f"{variant.name}-{processes}"
    flags: dict[str, object] = {
        "policy.path": root / "pi0_fast",
        "policy.push_to_hub": "false",
        "dataset.repo_id": "local/new",
        "dataset.root": root / "new",
        "output_dir": output,
        "steps": options.launched_steps,
        "batch_size": options.batch,
        "num_workers": 0,
        "log_freq": 1,
        "save_checkpoint": "false",
        "env_eval_freq": 0,
        "craft.enabled": "true",
        "craft.anchor_batch_size": options.batch,
        "craft.old_dataset.repo_id": "local/old",
        "craft.old_dataset.root": root / "old",
        "craft.num_anchors": DEFAULT["anchors"],
        "craft.probe_anchors": 0,
        "craft.anchor_source": "dataset",
        **{f"craft.{name}": value for name, value in variant.craft.items()},
    }
    launch = [
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        "--cpu",
        f"--num_processes={processes}",
    ]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, "-m", "lerobot_craft", "train"]
    told = [f"--{name}={value}" for name, value in flags.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *told], env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise RuntimeError(f"the run of {processes} processes failed: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return float(median(line["update_s"] for line in lines[3:] if "update_s" in line))


def over_processes(root: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prepared(root, DEFAULT, options)
    for processes in PROCESSES:
        plain, craft = (launched(root, processes, variant, options) for variant in (PLAIN, CRAFT))
        yield {"what": "processes", "value": processes, "plain_seconds": plain, "ratio_median": craft / plain}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as directory, quietly():
        for number, (what, point) in enumerate(POINTS):
            root = Path(directory) / str(number)
            value = point["tasks" if what == "old tasks" else what]
            rows.append({"what": what, "value": value, **step_ratio(root, point, options)})
        if options.launched_steps:
            rows += over_processes(Path(directory) / "processes", options)
    return rows


def as_markdown(report: dict[str, Any]) -> str:
    lines = [
        f"# How a step of training grows, {report['date']}\n",
        f"pi0_fast, batches of {report['batch']} and as many anchors, {report['repeats']} repeats in turns, "
        f"{report['threads']} threads.\n",
        "| grows | to | parameters | plain step, s | CRaFT / plain (range) | operations |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        low, high = row.get("ratio_range", (None, None))
        spread = "" if low is None else f" ({low:.2f}-{high:.2f})"
        arithmetic = f"{row['operations_ratio']:.2f}x" if "operations_ratio" in row else ""
        size = f"{row['parameters']:,}" if "parameters" in row else ""
        lines.append(
            f"| {row['what']} | {row['value']} | {size} | {row['plain_seconds']:.3f} "
            f"| {row['ratio_median']:.2f}x{spread} | {arithmetic} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"depth": 4, "image_size": 112, "batch": 4, "repeats": 5, "steps": 4, "launched_steps": 20}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    random.seed(0)
    settings = {name: value for name, value in vars(options).items() if name != "output_dir"}
    report = dated("growth", **settings, rows=measure(options))
    text = as_markdown(report)
    print(text)
    write(report, options.output_dir, text)


if __name__ == "__main__":
    main()
