"""Time and memory of one constrained step, against the ways it is usually done. `make bench-surgery` runs this.

Every method computes the gradients of the same two losses of the same model and leaves one merged gradient in
`.grad`. Methods take turns in one process, each timed right beside the baseline, so that their ratio survives a noisy
machine; the absolute times do not mean much. The baseline against itself shows what noise is left. Memory is what
torch's allocator held at its peak beyond the parameters, with inputs so short that activations vanish beside the
gradients: in units of one gradient copy.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torchjd.aggregation import Aggregator, PCGrad, UPGrad
from torchjd.autojac import backward as jacobian_backward
from torchjd.autojac import jac_to_grad

from dated import RESULTS, dated, write
from lerobot_craft.core import Dual, Multipliers, RetentionStep, drift

LAMBDA = 1.0
BASELINE = "weighted sum of the losses"


class Transformer(nn.Module):
    """A plain encoder: a next-token loss for the task, hidden states of its last layer for retention."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def features(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]."""
        hidden: Tensor = self.blocks(self.embedding(tokens))
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, 256]."""
        logits: Tensor = self.head(self.features(tokens))
        return logits


class Problem:
    """One model, one task batch, one anchor batch of the same size."""

    def __init__(self, model: Transformer, batch: int, length: int) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        vocabulary, width = model.embedding.weight.shape
        self.tokens, self.anchors = torch.randint(vocabulary, (2, batch, length))
        self.labels = torch.randint(256, (batch, length))
        self.target = torch.randn(batch, length, width)

    def task_loss(self) -> Tensor:
        """A scalar."""
        return nn.functional.cross_entropy(self.model(self.tokens).transpose(1, 2), self.labels)

    def anchor_drift(self) -> Tensor:
        """One value per anchor."""
        return drift(self.model.features(self.anchors), self.target, reduction="none")

    def clear(self) -> None:
        """Forget all gradients."""
        for p in self.parameters:
            p.grad = None


def weighted_sum(problem: Problem) -> None:
    (problem.task_loss() + LAMBDA * problem.anchor_drift().mean()).backward()


def craft(problem: Problem) -> None:
    optimizer = torch.optim.SGD(problem.parameters)  # never stepped: the optimizer is no part of the comparison
    step = RetentionStep(problem.parameters, optimizer, Multipliers(Dual(initial_lambda=LAMBDA)))
    step.backward(problem.task_loss, problem.anchor_drift)


def two_clones(problem: Problem) -> None:
    """Clone the task gradient, clone the retention gradient, project and merge into a third."""
    gradients: list[list[Tensor]] = []
    for loss in (problem.task_loss, lambda: problem.anchor_drift().mean()):
        problem.clear()
        loss().backward()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in problem.parameters])
    task, retention = gradients
    dot = sum((t * r).sum() for t, r in zip(task, retention, strict=True))
    squared = sum((r * r).sum() for r in retention)
    scale = float(dot / squared) if dot < 0 else 0.0
    for p, t, r in zip(problem.parameters, task, retention, strict=True):
        p.grad = t - scale * r + LAMBDA * r


def torchjd(aggregator: Callable[[], Aggregator], lean: bool) -> Callable[[Problem], None]:
    def run(problem: Problem) -> None:
        losses = [problem.task_loss(), problem.anchor_drift().mean()]
        jacobian_backward(losses, inputs=problem.parameters, parallel_chunk_size=1 if lean else None)
        jac_to_grad(problem.parameters, aggregator(), optimize_gramian_computation=lean)

    return run


METHODS: dict[str, Callable[[Problem], None]] = {
    BASELINE: weighted_sum,
    "CRaFT": craft,
    "two clones": two_clones,
    "torchjd PCGrad": torchjd(PCGrad, lean=False),
    "torchjd PCGrad, leanest settings": torchjd(PCGrad, lean=True),
    "torchjd UPGrad, leanest settings": torchjd(UPGrad, lean=True),
}


def seconds(method: Callable[[Problem], None], problem: Problem) -> float:
    problem.clear()
    started = time.perf_counter()
    method(problem)
    return time.perf_counter() - started


def gradient_copies(method: Callable[[Problem], None], problem: Problem) -> float:
    """Peak of live memory beyond the parameters, over the size of one gradient."""
    problem.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        method(problem)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    problem.clear()
    return float(peak / sum(p.nbytes for p in problem.parameters))


@dataclass(frozen=True)
class Row:
    """One method. Ratios are to the weighted sum of the losses, timed right before or after."""

    method: str
    time_ratio_median: float
    time_ratio_range: tuple[float, float]
    seconds_median: float
    peak_gradient_copies: float

    def markdown(self) -> str:
        """The row as people see it."""
        low, high = self.time_ratio_range
        ratio = f"{self.time_ratio_median:.2f}x ({low:.2f}-{high:.2f})"
        return f"| {self.method} | {ratio} | {self.peak_gradient_copies:.2f} |"


def measure(model: Transformer, options: argparse.Namespace) -> list[Row]:
    problem = Problem(model, options.batch, options.length)
    short = Problem(model, batch=1, length=1)
    copies = {name: gradient_copies(method, short) for name, method in METHODS.items()}
    for method in METHODS.values():
        seconds(method, problem)  # warm up
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for repeat in range(options.repeats):
        for i in torch.randperm(len(METHODS)).tolist():
            name = list(METHODS)[i]
            pairs[name].append(against_baseline(METHODS[name], problem, baseline_first=repeat % 2 == 0))
        print(f"repeat {repeat + 1}/{options.repeats}", flush=True)
    rows = []
    for name, timed in pairs.items():
        ratios = [own / baseline for own, baseline in timed]
        own_median = median(own for own, _ in timed)
        rows.append(Row(name, median(ratios), (min(ratios), max(ratios)), own_median, copies[name]))
    return rows


def against_baseline(
    method: Callable[[Problem], None], problem: Problem, *, baseline_first: bool
) -> tuple[float, float]:
    """Seconds of the method and of the baseline right beside it, so that both meet the same noise."""
    if baseline_first:
        baseline = seconds(METHODS[BASELINE], problem)
        return seconds(method, problem), baseline
    own = seconds(method, problem)
    return own, seconds(METHODS[BASELINE], problem)


def report(model: Transformer, rows: list[Row], options: argparse.Namespace) -> None:
    result = dated(
        "surgery",
        parameters=sum(p.numel() for p in model.parameters()),
        tokens_per_loss=options.batch * options.length,
        repeats=options.repeats,
        rows=[asdict(row) for row in rows],
    )
    print(
        f"\n{result['parameters']:,} parameters, {result['tokens_per_loss']} tokens per loss, "
        f"{options.repeats} interleaved repeats, {result['threads']} threads\n"
    )
    print("| method | time, median (range) | peak gradient copies |\n|---|---|---|")
    print(*(row.markdown() for row in rows), sep="\n")
    write(result, options.output_dir)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Transformer(options.vocabulary, options.width, options.layers)
    report(model, measure(model, options), options)


if __name__ == "__main__":
    main()
