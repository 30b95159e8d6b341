"""How long until the first step: `craft train` against `lerobot-train`, process start included. `make bench-startup`.

Both are started anew on the same small policy and data, in turns, with the anchors' cache built beforehand, and timed
from the start of the process to the end of the first optimizer step. What `craft train` may take beyond: 2 s, and the
time of verifying the cache, which is measured apart, with the speed of its checksums beside that of a bare read.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from dated import RESULTS, dated, write
from lerobot_craft.anchors.loader import open_cache
from lerobot_craft.io.files import sha256_of
from lerobot_craft.tiny.__main__ import make_all

STOCK, OFF, CRAFT = "lerobot-train", "craft train, CRaFT off", "craft train, action retention"
LIMIT_SECONDS = 2.0
SAID = "the first step is done"
# Ends the process at once: what follows the first step is no part of starting up.
FIRST_STEP = f"""
import os, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: (print({SAID!r}, flush=True), os._exit(0)))
"""
RUN_STOCK = "from lerobot.scripts.lerobot_train import main; main()"
RUN_CRAFT = "from lerobot_craft.cli import main; main(sys.argv[1:])"


def seconds_to_first_step(code: str, flags: list[str], log: Path) -> float:
    """Of a process of its own; what it says goes into a file."""
    began = time.perf_counter()
    with log.open("w") as file:
        command = [sys.executable, "-c", FIRST_STEP + code, *flags]
        subprocess.run(command, stdout=file, stderr=file, check=True)  # noqa: S603  # our own flags
    passed = time.perf_counter() - began
    if SAID not in log.read_text():
        raise RuntimeError(f"no step was taken: {log.read_text()[-2000:]}")
    return passed


def commands(root: Path) -> dict[str, tuple[str, list[str]]]:
    common = [
        f"--policy.path={root / 'teacher'}",
        "--policy.push_to_hub=false",
        "--dataset.repo_id=local/new",
        f"--dataset.root={root / 'new'}",
        "--steps=2",
        "--batch_size=4",
        "--num_workers=0",
        "--save_checkpoint=false",
        "--env_eval_freq=0",
        "--dataset.use_imagenet_stats=false",
    ]
    anchors = ["--craft.enabled=true", f"--craft.anchor_cache_dir={root / 'cache'}"]
    return {
        STOCK: (RUN_STOCK, common),
        OFF: (RUN_CRAFT, ["train", *common]),
        CRAFT: (RUN_CRAFT, ["train", *common, *anchors, "--craft.old_instructions=open the drawer; close the drawer"]),
    }


def reading(cache: Path, file: Path, megabytes: int, repeats: int) -> dict[str, float]:
    """Opening and verifying a cache as a run does at its start; the checksum of a large file against a bare read."""
    file.write_bytes(os.urandom(1_000_000) * megabytes)
    opening, pairs = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        open_cache(cache)
        opening.append(time.perf_counter() - began)
        began = time.perf_counter()
        sha256_of(file)
        verified = time.perf_counter()
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 20):
                continue
        pairs.append((verified - began, time.perf_counter() - verified))
    return {
        "cache_bytes": sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()),
        "cache_seconds": median(opening),
        "checksum_gigabytes_per_second": megabytes / 1e3 / median(own for own, _ in pairs),
        "bare_read_gigabytes_per_second": megabytes / 1e3 / median(bare for _, bare in pairs),
    }


def as_markdown(report: dict[str, Any]) -> str:
    lines = [
        f"SmolVLA of a tiny size, {report['repeats']} starts in turns, {report['date']}.\n",
        "| command | to the first step, s, median | beyond lerobot-train, s, median (range) | limit, s |",
        "|---|---|---|---|",
    ]
    for name, row in report["rows"].items():
        low, high = row["beyond_range"]
        beyond = f"{row['beyond_median']:+.1f} ({low:+.1f} to {high:+.1f})"
        limit = "" if name == STOCK else f"{LIMIT_SECONDS:.0f}"
        lines.append(f"| {name} | {row['seconds_median']:.1f} | {beyond} | {limit} |")
    read = report["reading"]
    lines.append(
        f"\nOpening and verifying the cache of {report['anchors']:,} anchors ({read['cache_bytes'] / 1e6:.1f} MB): "
        f"{1e3 * read['cache_seconds']:.0f} ms. Checksums: {read['checksum_gigabytes_per_second']:.1f} GB/s; a bare "
        f"read of a file in the system's memory: {read['bare_read_gigabytes_per_second']:.1f} GB/s.\n"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--anchors", type=int, default=2000, help="of the cache whose reading is timed")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the file whose checksum is timed")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_all(root, "smolvla")
        runs = commands(root)
        code, flags = runs[CRAFT]
        large = [flag.replace(str(root / "cache"), str(root / "large")) for flag in flags]
        seconds_to_first_step(code, [*large, f"--craft.num_anchors={options.anchors}"], root / "log")
        seconds_to_first_step(code, flags, root / "log")  # builds the cache
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.repeats):
            for name, (code, flags) in runs.items():
                times[name].append(seconds_to_first_step(code, flags, root / "log"))
        read = reading(root / "large", root / "file", options.megabytes, options.repeats)
    beyond = {name: [own - stock for own, stock in zip(times[name], times[STOCK], strict=True)] for name in runs}
    report = dated(
        "startup",
        repeats=options.repeats,
        limit_seconds=LIMIT_SECONDS,
        rows={
            name: {
                "seconds_median": median(times[name]),
                "beyond_median": median(beyond[name]),
                "beyond_range": (min(beyond[name]), max(beyond[name])),
            }
            for name in runs
        },
        anchors=options.anchors,
        reading=read,
    )
    print(as_markdown(report))
    write(report, options.output_dir)


if __name__ == "__main__":
    main()
