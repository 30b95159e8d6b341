"""Results as a bench could have found them, made from a seed: for tests of statistics and of the page."""

import struct
import zlib
from dataclasses import dataclass, replace

import numpy as np

from lerobot_craft.evaluation.results import Anchors, Drift, Filmstrip, Knob, Run, Stage
from lerobot_craft.evaluation.summary import collect

SCENES = {
    "faucet": ("tuning", "faucet-open", "faucet-close"),
    "window": ("final", "window-open", "window-close"),
    "drawer": ("final", "drawer-open", "drawer-close"),
    "push": ("final", "push-red", "push-blue"),
}
OTHERS = ("reach", "button-press", "door-lock", "plate-slide")


@dataclass(frozen=True)
class Made:
    """A method as it is to come out: true success on old tasks, the same-scene one and the new one, and its drift."""

    method: str
    label: str
    frames: int
    old: float
    same: float
    new: float
    drift: float
    source: str | None = None
    overhead: float | None = None
    knob: Knob | None = None
    all_frames: bool = False


METHODS = (
    Made("naive", "plain fine-tuning", 0, 0.35, 0.01, 1.0, 0.5),
    Made("er", "replay", 20, 0.75, 0.6, 0.97, 0.2, "dataset", 1.6),
    Made("er", "replay", 100, 0.92, 0.97, 1.0, 0.08, "dataset", 1.6),
    Made("joint", "joint training", 9000, 0.99, 1.0, 0.99, 0.03, "dataset", 1.6, all_frames=True),
    Made("hidden_documents", "CRaFT hidden, pooled", 1000, 0.4, 0.02, 1.0, 0.45, "dataset", 1.7),
    Made("cross", "CRaFT cross", 0, 0.88, 0.99, 0.98, 0.09, "cross", 1.8),
    Made("craft", "CRaFT", 0, 0.92, 0.99, 0.98, 0.06, "cross", 1.8),
    Made("craft", "CRaFT", 20, 0.96, 1.0, 0.99, 0.04, "both", 1.9),
    Made("craft", "CRaFT", 100, 0.985, 1.0, 0.99, 0.02, "both", 1.9),
    Made("l2sp", "L2-SP", 0, 0.5, 0.05, 0.9, 0.3, None, 1.05, Knob("--craft.l2sp_weight", "0.01", ["faucet"])),
    Made("lwf", "LwF", 0, 0.9, 0.9, 0.1, 0.05, "cross", 1.8, Knob("--craft.initial_lambda", "3", ["faucet"])),
)


def made_runs(seeds=(0, 1, 2), policies=("smolvla", "pi0_fast"), methods=METHODS, scenes=SCENES, n_episodes=20):
    rng = np.random.default_rng(7)
    runs = []
    for policy in policies:
        for scenario in scenes:
            for seed in seeds:
                base = _base(rng, scenario, n_episodes)
                runs += [_run(rng, policy, scenario, seed, made, base, n_episodes) for made in methods]
    return runs


def with_episodes(runs, starts_by_seed=True):
    """The same rates, episode by episode: every start of a task is easier or harder, for all policies alike."""

    def outcomes(run, rates):
        strings = {}
        for task, rate in rates.items():
            key = zlib.crc32(f"{task} {run.seed if starts_by_seed else ''}".encode())
            hardness = np.random.default_rng(key).permutation(run.n_episodes)
            strings[task] = "".join("01"[int(start < round(rate * run.n_episodes))] for start in hardness)
        return strings

    return [
        replace(
            run,
            base_episodes=outcomes(run, run.base),
            after_episodes=outcomes(run, run.after),
            starts_by_seed=starts_by_seed,
        )
        for run in runs
    ]


def made_sequences(seeds=(0, 1), policy="smolvla", methods=METHODS, n_episodes=20):
    rng = np.random.default_rng(11)
    wanted = [made for made in methods if (made.method, made.frames) in {("naive", 0), ("er", 20), ("craft", 20)}]
    return [_sequence(rng, policy, seed, made, n_episodes) for seed in seeds for made in wanted]


def made_results(media=(), **kwargs):
    runs = [*made_runs(**kwargs), *made_sequences(seeds=kwargs.get("seeds", (0, 1)))]
    settings = {"episodes": 20, "seeds": [0, 1, 2]}
    return collect(
        runs, command="craft bench --scenario=window,drawer,push --seeds=0,1,2", settings=settings, media=media
    )


def png(width=96, height=48, colour=(40, 120, 200)):
    """A small true PNG: stripes, so that a picture that is upside down or cut shows."""
    rows = b"".join(
        b"\0" + b"".join(bytes(c // (1 + (x // 16) % 3) for c in colour) for x in range(width)) for _ in range(height)
    )

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def made_media(directory):
    for name, colour in {"before": (40, 120, 200), "plain": (220, 90, 40), "craft": (60, 170, 90)}.items():
        (directory / f"{name}.png").write_bytes(png(colour=colour, width=480, height=80))
    return [Filmstrip("rotate the faucet counter clockwise", "before.png", "plain.png", "craft.png")]


def _rate(rng, p, n):
    return rng.binomial(n, min(max(p, 0.0), 1.0)) / n


def _base(rng, scenario, n):
    _, same, new = SCENES[scenario]
    return {task: _rate(rng, 0.98, n) for task in (same, *OTHERS)} | {new: _rate(rng, 0.01, n)}


def _run(rng, policy, scenario, seed, made, base, n):
    role, same, new = SCENES[scenario]
    # A run as a whole is luckier or less lucky, and some tasks are more fragile than others.
    luck = rng.normal(0, 0.06)
    after = {
        task: _rate(rng, made.old + luck - (0.12 if task == "door-lock" and made.old < 0.95 else 0), n)
        for task in OTHERS
    }
    after |= {same: _rate(rng, made.same, n), new: _rate(rng, made.new, n)}
    drift = made.drift * float(rng.lognormal(0, 0.25))
    by_task = {task: drift * float(rng.lognormal(0, 0.5)) for task in (same, *OTHERS)}
    frames = made.frames + (len(scenario) * 10 if made.all_frames else 0)
    return Run(
        method=made.method,
        label=made.label,
        seed=seed,
        policy=policy,
        scenario=scenario,
        role=role,
        new_task=new,
        same_scene=[same],
        anchors=Anchors(made.source, frames, frames * 3_100, frames * 900, made.all_frames),
        base=base,
        after=after,
        stages=None,
        n_episodes=n,
        steps=400,
        train_seconds=38.0 * (made.overhead or 1.0) + float(rng.normal(0, 1)),
        step_overhead=made.overhead,
        drift=Drift(drift, 1.3 * float(rng.lognormal(0, 0.6)) * drift**0.3, by_task, {}),
        lambda_final=1.0 if made.source else None,
        eps_final=0.1 if made.source else None,
        knob=made.knob,
        command=f"craft train --policy.path=base --seed={seed} --craft.method={made.method} --steps=400",
    )


def _sequence(rng, policy, seed, made, n):
    learnt = ["window-close", "drawer-close", "faucet-close", "push-blue", "coffee-button"]
    base = {task: _rate(rng, 0.98, n) for task in ("window-open", "drawer-open", *OTHERS)}
    base |= {task: _rate(rng, 0.01, n) for task in learnt}
    stages = []
    for i, task in enumerate(learnt):
        keep = 1 - (1 - made.old) * (i + 1) / len(learnt)
        after = {t: _rate(rng, keep if t in OTHERS or t in learnt[:i] else 0.97 * keep, n) for t in base}
        after |= {t: _rate(rng, 0.02, n) for t in learnt[i + 1 :]} | {task: _rate(rng, made.new, n)}
        stages.append(Stage(task, after))
    first = _run(rng, policy, "window", seed, made, _base(rng, "window", n), n)
    # As a bench has it: frames of every task before the last.
    frames = made.frames * (len(base) - 1)
    return Run(
        **{
            **{name: getattr(first, name) for name in first.__dataclass_fields__},
            "scenario": "five tasks",
            "new_task": learnt[-1],
            "same_scene": [],
            "anchors": replace(first.anchors, frames=frames),
            "base": base,
            "after": stages[-1].after,
            "stages": stages,
            "drift": Drift(None, None),
        }
    )
