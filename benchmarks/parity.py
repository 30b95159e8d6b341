"""What `craft train` costs where CRaFT is off, against stock `lerobot-train`. `make bench-training` runs this.

Both commands run whole, from their flags on, on the same small policy and data with the same seed: they train the same
bits (tests/parity). They take their steps in turns, one each, so that step i of one and step i of the other meet the
same noise, and their ratio is taken step by step: of the time that passed and of the processor's, which other work on
the machine disturbs less. `craft train` is held against the mean of two `lerobot-train`, and the second of these
against the first: that ratio is 1 but for noise. Intervals are those of the median, 95 %, as if steps were independent:
where they are wider than the target is far from 1, the target is neither met nor missed. The policies are tiny on
purpose: the shorter a step, the more of it is overhead. Target: at most 1.02.
"""

import argparse
import contextlib
import io
import itertools
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dated import RESULTS, dated, write
from lerobot_craft.cli.train import run as craft_train
from lerobot_craft.tiny.__main__ import make_all

STOCK, CRAFT, STOCK_AGAIN = "lerobot-train", "craft train --craft.enabled=false", "lerobot-train, again"
WARM_UP = 6  # steps
TARGET = 1.02


class Seconds(NamedTuple):
    """Of one step."""

    passed: float
    of_processor: float


class Turns:
    """Training commands in threads of their own, of which one runs at a time; each stops after its optimizer's step."""

    def __init__(self, commands: dict[str, Callable[[], object]]) -> None:
        self._mine = threading.local()
        self._go = {name: threading.Semaphore(0) for name in commands}
        self._stopped = {name: threading.Semaphore(0) for name in commands}
        self._failed: dict[str, BaseException] = {}
        self._threads = {
            # When one has failed, the others wait for good: daemons do not keep the process from ending.
            name: threading.Thread(target=self._run, args=(name, command), daemon=True)
            for name, command in commands.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, name: str, command: Callable[[], object]) -> None:
        self._mine.name = name
        self._go[name].acquire()
        try:
            command()
        except BaseException as error:
            self._failed[name] = error
        finally:
            self._stopped[name].release()

    def stop_here(self, *_: object) -> None:
        """For an optimizer's hook: this thread waits until its next turn."""
        self._stopped[self._mine.name].release()
        self._go[self._mine.name].acquire()

    def step(self, name: str) -> Seconds:
        """Let one command go on to the end of its next step: the time that took."""
        began, used = time.perf_counter(), time.process_time()
        self._go[name].release()
        self._stopped[name].acquire()
        taken = Seconds(time.perf_counter() - began, time.process_time() - used)
        self._raise_what_failed(name)
        return taken

    def finish(self) -> None:
        """Let all commands run to their end, one after the other."""
        for name, thread in self._threads.items():
            self._go[name].release()
            thread.join()
            self._raise_what_failed(name)

    def _raise_what_failed(self, name: str) -> None:
        if name in self._failed:
            raise self._failed[name]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the commands' lines and bars; lerobot's commands replace the root logger's handlers."""
    root = logging.getLogger()
    handlers, level, argv = list(root.handlers), root.level, sys.argv
    silence = io.StringIO()
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            yield
    finally:
        root.handlers[:], sys.argv = handlers, argv
        root.setLevel(level)


def stock_train(flags: list[str]) -> None:
    from lerobot.scripts import lerobot_train

    sys.argv = ["lerobot-train", *flags]
    lerobot_train.main()


def step_times(policy_type: str, root: Path, options: argparse.Namespace) -> dict[str, list[Seconds]]:
    """Every step after the first ones, by command."""
    make_all(root, policy_type)
    flags = [
        f"--policy.path={root / 'teacher'}",
        "--policy.push_to_hub=false",
        "--policy.device=cpu",
        "--dataset.repo_id=local/new",
        f"--dataset.root={root / 'new'}",
        f"--steps={options.steps + WARM_UP}",
        f"--batch_size={options.batch}",
        "--log_freq=10",
        "--num_workers=0",
        "--save_checkpoint=false",
        "--env_eval_freq=0",
        "--wandb.enable=false",
        "--seed=7",
    ]
    turns = Turns(
        {
            STOCK: lambda: stock_train([*flags, f"--output_dir={root / 'stock'}"]),
            CRAFT: lambda: craft_train([*flags, f"--output_dir={root / 'craft'}", "--craft.enabled=false"]),
            STOCK_AGAIN: lambda: stock_train([*flags, f"--output_dir={root / 'again'}"]),
        }
    )
    times: dict[str, list[Seconds]] = {STOCK: [], CRAFT: [], STOCK_AGAIN: []}
    hook = register_optimizer_step_post_hook(turns.stop_here)
    try:
        # A step finds the processor's caches as the one before left them: everybody follows everybody.
        orders = itertools.cycle(itertools.permutations(times))
        for order in itertools.islice(orders, options.steps + WARM_UP):
            for name in order:
                times[name].append(turns.step(name))
        turns.finish()
    finally:
        hook.remove()
    return {name: taken[WARM_UP:] for name, taken in times.items()}


def measure(policy_type: str, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    with quietly():
        times = step_times(policy_type, root, options)
    rows = []
    for name, beside in {CRAFT: (STOCK, STOCK_AGAIN), STOCK_AGAIN: (STOCK,)}.items():
        row: dict[str, Any] = {"command": name, "against": beside}
        for clock in Seconds._fields:
            seconds = {command: [getattr(step, clock) for step in steps] for command, steps in times.items()}
            references = [mean(step) for step in zip(*(seconds[command] for command in beside), strict=True)]
            ratios = [own / reference for own, reference in zip(seconds[name], references, strict=True)]
            row[clock] = {
                "seconds_median": median(seconds[name]),
                "ratio_median": median(ratios),
                "ratio_interval": interval_of_median(ratios),
            }
        rows.append(row)
    return {"policy": policy_type, "rows": rows}


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """95 %, by order statistics: how many of n values lie below the median is binomial."""
    ordered, n = sorted(values), len(values)
    left_out = max(0, int(n / 2 - 1.96 * n**0.5 / 2))
    return ordered[left_out], ordered[n - 1 - left_out]


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        ratios = [
            "{:.3f}x [{:.3f}, {:.3f}]".format(row[clock]["ratio_median"], *row[clock]["ratio_interval"])
            for clock in Seconds._fields
        ]
        milliseconds = f"{1e3 * row['passed']['seconds_median']:.1f}"
        print(f"| {' | '.join([result['policy'], row['command'], milliseconds, *ratios])} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="smolvla,pi0_fast")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # small policies gain nothing from a second
    print(f"{options.steps} steps of {options.batch} samples each, in turns, 1 thread.")
    print("Ratios to lerobot-train are medians over the steps [95 % interval of the median].\n")
    print("| policy | command | ms per step | step time | processor time |\n|---|---|---|---|---|")
    results = []
    for policy_type in options.policies.split(","):
        with tempfile.TemporaryDirectory() as root:
            results.append(measure(policy_type, Path(root), options))
        show(results[-1])
    report = dated("parity", steps=options.steps, batch=options.batch, target=TARGET, results=results)
    write(report, options.output_dir)


if __name__ == "__main__":
    main()
