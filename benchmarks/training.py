"""What a step of `craft train` costs, by what is retained and who the teacher is. `make bench-training` runs this.

Real runs of a small lerobot pi0_fast, opened from flags as the command does, take their steps in turns within one
process. Each ratio is to plain fine-tuning (`--craft.method=naive`; for LoRA, plain LoRA) right beside it, with as many
anchors as task samples in a step:

- step time, and floating-point operations: what the time would be if nothing else took any;
- peak memory: the most that torch's allocator held in a step beyond what it held before, less that of plain
  fine-tuning, and what a run holds all the time (a frozen teacher, anchors' images);
- after the same few steps with the same seed, L_ret in the budget's unit, which is each loss's own, and the drift of
  the actions on all anchors, which can be compared. The teacher's weights are random: this shows what each loss holds
  on to, not which one keeps skills.

The claim under test: hidden retention trains 1.5 times as fast as the token-level mode.
"""

import argparse
import os
import random
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


from anchors import TASKS, make_teacher
from dated import RESULTS, dated, write
from engines import TorchJD, TwoClones, WeightedSum
from lerobot_craft.anchors.loader import open_cache
from lerobot_craft.tiny.make import make_local_dataset
from overhead import Limit, Measured, limits, overhead_table
from parity import quietly
from stepwise_run import Run, Variant

POLICY, NEW_TASK = "pi0_fast", "push the blue cube to the left"
PLAIN, PLAIN_LORA = "plain fine-tuning", "plain LoRA"
HIDDEN, TOKEN_LEVEL, ACTION = "hidden, layer -2", "token_ce", "action"
CLAIM = 1.5
LORA = {"peft.method_type": "LORA", "peft.r": 8, "peft.target_modules": r".*language_model.*\.(q_proj|v_proj)"}

# The teacher's actions on old frames, once each: what the other modes have, so that the passes can be compared.
ON_OLD_FRAMES: dict[str, object] = {
    "retention_mode": "action",
    "anchor_source": "dataset",
    "drawn_states": 0,
    "walked_states": 0,
    "num_draws": 1,
}


def hidden(name: str, cache: str | None = None, **flags: Any) -> Variant:
    other = flags.pop("other", {})
    return Variant(name, {"retention_mode": "hidden", **flags}, cache, other=other)


MODES = [
    hidden(HIDDEN, "hidden"),
    Variant(TOKEN_LEVEL, {"retention_mode": "token_ce"}, "token_ce"),
    Variant(ACTION, ON_OLD_FRAMES, ACTION),
]
GROUPS = {
    "modes": [
        Variant(PLAIN, {"method": "naive"}),
        *MODES,
        hidden("hidden, layer -2, every token", "tokens", per_token=True),
        *(Variant(v.name, v.craft, v.cache, k=5) for v in MODES),
    ],
    "layers": [
        hidden("hidden, layers -1", "one", layers_to_save="-1"),
        hidden("hidden, layers -2,-1", "two", layers_to_save="-2,-1"),
        hidden("hidden, layers -3,-2,-1", "three", layers_to_save="-3,-2,-1"),
        hidden("hidden, layers -2,-1, cosine", "two", layers_to_save="-2,-1", loss_type="cosine"),
        hidden("hidden, layers -2,-1, l1", "two", layers_to_save="-2,-1", loss_type="l1"),
    ],
    "teachers": [
        hidden("hidden, layer -2, online teacher: frozen copy", teacher="online"),
        Variant("action, online teacher: frozen copy", {**ON_OLD_FRAMES, "teacher": "online"}),
        Variant(PLAIN_LORA, {"method": "naive"}, other=LORA),
        hidden("LoRA, hidden, layer -2", "hidden", other=LORA),
        hidden("LoRA, hidden, layer -2, online teacher: adapter off", teacher="online", other=LORA),
    ],
    "engines": [
        Variant(f"action, {name}", ON_OLD_FRAMES, ACTION, engine=engine)
        for name, engine in {
            "no surgery: weighted sum": WeightedSum,
            "two clones": TwoClones,
            "torchjd PCGrad": TorchJD,
        }.items()
    ],
}


@dataclass(frozen=True)
class Row(Measured):
    """One variant; ratios are to plain fine-tuning of the same kind, timed right before or after."""

    seconds_median: float
    time_ratio_range: tuple[float, float]

    def markdown(self) -> str:
        """The row as people see it."""
        low, high = self.time_ratio_range
        held = sum(size for what, size in self.outcome["held_bytes"].items() if "mapped" not in what)
        loss, size = self.outcome["retention_loss"], self.outcome.get("cache_bytes_per_anchor")
        cells = [
            self.name,
            str(self.k),
            f"{self.time_ratio_median:.2f}x ({low:.2f}-{high:.2f})",
            f"{self.operations_ratio:.2f}x",
            f"{self.peak_bytes_beyond_plain / 1e6:+.1f}",
            f"{self.outcome['retention_gradient_bytes'] / 1e6:.1f}",
            f"{held / 1e6:.1f}",
            "-" if size is None else f"{size:,.0f}",
            "-" if loss is None else f"{loss:.3g}",
            f"{self.outcome['action_drift']:.2g}",
        ]
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| retained | K | step time, median (range) | operations | peak MB beyond plain | retention gradient MB | held MB "
    "| cache bytes per anchor | L_ret | drift of actions |\n|---|---|---|---|---|---|---|---|---|---|"
)


def plain_of(variant: Variant) -> str:
    return PLAIN_LORA if variant.other else PLAIN


def measure(root: Path, options: argparse.Namespace) -> tuple[list[Row], dict[str, float]]:
    """All rows, and the share of a step that anchors' data take."""
    variants = {f"{v.name}, K={v.k}": v for group in options.groups.split(",") for v in GROUPS[group]}
    runs = {name: Run(v, root / f"run{i}", root, options) for i, (name, v) in enumerate(variants.items())}
    # Plain runs to be timed beside are others than those of the table, which all take the same number of steps.
    plain = {v.name: Run(v, root / v.name, root, options) for v in variants.values() if v.name == plain_of(v)}
    action = runs[f"{ACTION}, K=1"]
    batches = options.anchors // options.batch
    data = {"first visit": action.anchor_data_seconds(batches), "later": action.anchor_data_seconds(5 * batches)}
    for run in [*runs.values(), *plain.values()]:
        run.take(run.k)  # the first step allocates the optimizer's state
    memory = {name: run.peak_bytes() for name, run in runs.items()}
    operations = {name: run.operations() for name, run in runs.items()}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(options.repeats):
        for name in random.sample(list(runs), len(runs)):
            works = [runs[name], plain[plain_of(variants[name])]]
            order = (0, 1) if repeat % 2 else (1, 0)
            times = {which: works[which].take(works[0].k) for which in order}
            pairs[name].append((times[0], times[1]))
    actions = open_cache(root / "anchors" / ACTION)
    rows = []
    for name, variant in variants.items():
        reference = f"{plain_of(variant)}, K=1"
        ratios = [own / beside for own, beside in pairs[name]]
        rows.append(
            Row(
                name=variant.name,
                k=variant.k,
                seconds_median=median(own for own, _ in pairs[name]),
                time_ratio_median=median(ratios),
                time_ratio_range=(min(ratios), max(ratios)),
                operations_ratio=operations[name] / operations[reference],
                peak_bytes=memory[name],
                peak_bytes_beyond_plain=memory[name] - memory[reference],
                outcome=runs[name].outcome(actions),
            )
        )
    step = next(row.seconds_median for row in rows if (row.name, row.k) == (ACTION, 1))
    return rows, {when: seconds / step for when, seconds in data.items()}


def verdict(rows: list[Row]) -> dict[str, float]:
    """How much faster hidden retention is than the token-level mode: whole steps, and the anchors' part alone."""
    found = {}
    for k in (1, 5):
        of = {row.name: row for row in rows if row.k == k}
        slow, fast = of[TOKEN_LEVEL], of[HIDDEN]
        found[f"step_k{k}"] = slow.time_ratio_median / fast.time_ratio_median
        found[f"step_k{k}_by_operations"] = slow.operations_ratio / fast.operations_ratio
        if k == 1:
            found["anchor_pass"] = (slow.time_ratio_median - 1) / (fast.time_ratio_median - 1)
            found["anchor_pass_by_operations"] = (slow.operations_ratio - 1) / (fast.operations_ratio - 1)
    return found


def as_markdown(report: dict[str, Any], rows: list[Row], found: list[Limit]) -> str:
    v = report["hidden_against_token_ce"]
    return "\n".join(
        [
            f"# What a step of training costs, {report['date']}\n",
            f"{POLICY}, {report['parameters']:,} parameters, {report['tokens']}; {report['batch']} samples and as many "
            f"anchors per step, {report['repeats']} interleaved repeats, {report['threads']} threads, "
            f"{report['date']}.",
            f"L_ret and the drift of the actions are those after {rows[0].outcome['steps']} steps (K=5: five times "
            f"as many) at learning rate {report['lr']:g}.\n",
            HEADER,
            *(row.markdown() for row in rows),
            f"\nhidden (layer -2) against token_ce, K=1: steps {v['step_k1']:.2f}x as fast (by operations "
            f"{v['step_k1_by_operations']:.2f}x), the anchors' part alone {v['anchor_pass']:.2f}x (by operations "
            f"{v['anchor_pass_by_operations']:.2f}x); K=5: {v['step_k5']:.2f}x ({v['step_k5_by_operations']:.2f}x). "
            f"The claim was {CLAIM}x.\n",
            overhead_table(found),
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 192, "depth": 6, "image_size": 224, "anchors": 16, "batch": 2, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--groups", default=",".join(GROUPS), help="modes is needed, for the others are compared with it"
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    random.seed(0)
    with tempfile.TemporaryDirectory() as directory, quietly():
        root = Path(directory)
        make_local_dataset(root / "old", TASKS, image_size=96)
        make_local_dataset(root / "new", [NEW_TASK], image_size=96, seed=1)
        teacher = make_teacher(POLICY, root, options)
        rows, data = measure(root, options)
    config: Any = teacher.config
    image_tokens = (config.image_resolution[0] // config.sizes.patch_size) ** 2
    parameters = sum(p.numel() for p in teacher.policy.parameters())
    weights = sum(p.nbytes for p in teacher.policy.parameters())
    found = limits(rows, data, weights, PLAIN, PLAIN_LORA)
    report = dated(
        "training",
        parameters=parameters,
        tokens=f"{image_tokens} image tokens, prompts of {config.tokenizer_max_length} and up to "
        f"{config.max_action_tokens} action tokens",
        **{name: value for name, value in vars(options).items() if name != "output_dir"},
        rows=[asdict(row) for row in rows],
        hidden_against_token_ce=verdict(rows),
        limits=[limit.to_json() for limit in found],
    )
    text = as_markdown(report, rows, found)
    print(text)
    write(report, options.output_dir, text)


if __name__ == "__main__":
    main()
