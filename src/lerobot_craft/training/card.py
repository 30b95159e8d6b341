"""The model card of a checkpoint, `README.md` in the Hub's format: what was to be kept, under which budget, how.

It says nothing that a clock measured, so a run that was killed and resumed writes the card of one that was not, but
for the command. lerobot writes no card into a checkpoint; where it pushes a policy, this one stands in for its own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.recipe import OLD_DATASET, DatasetFlags
from lerobot_craft.io.text import count, human_bytes, number
from lerobot_craft.training.card_sections import NOT_EVALUATED, memory_section, success_section
from lerobot_craft.training.journal import RunFile
from lerobot_craft.training.lines import drift_interval
from lerobot_craft.training.outcomes import NEAR, Outcome

_SOURCES = {
    "dataset": "frames of old data",
    "cross": "the old instructions, in frames of the new task and where the teacher's own actions lead from there",
    "both": "frames of old data, and the old instructions near these or in frames of the new task",
}
_ABOUT_DRIFT = (
    "Drift is the distance from the teacher on the anchors, mean of the last anchor steps. A drift within the budget "
    "is no proof that a skill is kept: rollouts are."
)
_HUB_CACHE = "models--"  # how huggingface_hub names the directory of a model that it downloaded
_HUB_DATASET = re.compile(r"(?!local/)\w[\w.-]*/\w[\w.-]*")  # OWNER/NAME; `local` by custom owns what is not uploaded


@dataclass(frozen=True)
class HubFacts:
    """What the front matter takes from lerobot's settings; None is left out, nothing is guessed."""

    license: str | None
    tags: Sequence[str]
    datasets: Sequence[str] = ()


def hub_facts(cfg: Any, old_dataset: DatasetFlags) -> HubFacts:
    """Of `--policy.license`, `--policy.tags`, and the datasets that the Hub may have under their names.

    A dataset with a directory of its own is left out: nothing says that it is on the Hub, and a link would be dead.
    """
    used = [(cfg.dataset.repo_id, cfg.dataset.root), *old_dataset.addresses(OLD_DATASET)]
    named = dict.fromkeys(name for name, root in used if not root and _HUB_DATASET.fullmatch(name))
    return HubFacts(cfg.policy.license, cfg.policy.tags or (), list(named))


def model_card(
    run: RunFile, step: int, epsilon: float | None, retained: Sequence[Outcome], hub: HubFacts, note: str = ""
) -> str:
    """The card of the checkpoint at `step`.

    Args:
        run: What the run is.
        step: Of the checkpoint.
        epsilon: The budget there; None for a method without one.
        retained: All old tasks together, then each, up to this step.
        hub: For the front matter.
        note: What else was done to the weights.
    """
    budget = epsilon if run.anchors is not None else None
    outcomes = _outcome_table(budget, retained)
    parts = (
        f"---\n{_front_matter(run, hub)}---",
        f"# {run.policy}, fine-tuned on {_text(_without_place(run.dataset))}",
        f"A [LeRobot](https://github.com/huggingface/lerobot) policy of type `{run.policy}` after {step} of "
        f"{count(run.steps, 'step')} of fine-tuning by `craft train` (CRaFT {run.craft_version}, method "
        f"`{run.method}`). {note + ' ' if note else ''}It loads in stock LeRobot.",
        "## Retention",
        _facts(run, budget, retained),
        outcomes,
        outcomes and _ABOUT_DRIFT,
        "### Pictures that travel with the weights",
        memory_section(run.memory),
        "### Success before and after",
        success_section(run.fingerprint, NOT_EVALUATED),
        "## Command",
        f"{_fenced(run.command)}\n\nThe line that started or resumed the run; `train_config.json` and "
        "`craft_config.json` beside this file have every setting.",
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def hub_name(path: str) -> str | None:
    """The name on the Hub of a checkpoint that huggingface_hub downloaded to this path; None for any other."""
    found = [part.removeprefix(_HUB_CACHE) for part in Path(path).parts if part.startswith(_HUB_CACHE)]
    return found[-1].replace("--", "/", 1) if found else None


def teacher_name(path: str) -> str:
    """What others may read of where a teacher lies: its name on the Hub, else of its training, else of its directory.

    The card is uploaded: where a directory is on its author's machine tells a reader nothing, and too much.
    """
    return hub_name(path) or _training_name(Path(path))


def _training_name(path: Path) -> str:
    """`X` of `X/checkpoints/000200/pretrained_model`, of which the other names say nothing."""
    names = path.parts[1:] if path.is_absolute() else path.parts
    kept = names[:-1] if names[-1:] == ("pretrained_model",) else names
    kept = kept[:-2] if kept[-2:-1] == ("checkpoints",) else kept
    return (kept or names or ("unnamed",))[-1]


def _without_place(dataset: str) -> str:
    """The last part of a dataset's name where it is a directory, which lerobot takes too."""
    return Path(dataset).name if Path(dataset).is_absolute() else dataset


def _front_matter(run: RunFile, hub: HubFacts) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="lerobot",
        pipeline_tag="robotics",
        license=hub.license,
        base_model=hub_name(run.teacher),
        datasets=list(hub.datasets) or None,
        tags=list(dict.fromkeys(["robotics", "lerobot", "craft", run.policy, *hub.tags])),
    )
    return str(data.to_yaml()).rstrip("\n") + "\n"


def _facts(run: RunFile, budget: float | None, retained: Sequence[Outcome]) -> str:
    rows = [
        ("teacher", teacher_name(run.teacher)),
        ("its fingerprint", f"`{run.fingerprint}` (SHA-256 of weights, statistics, tokenizers and processors)"),
    ]
    if run.anchors is not None:
        size = human_bytes(run.anchors.bytes) if run.anchors.bytes else "none stored, the teacher is online"
        source = _SOURCES.get(run.anchors.source, run.anchors.source)
        rows.append(("anchors", f"{run.anchors.number} of {count(len(run.tasks), 'old task')}, from {source}; {size}"))
        rows.append(("retained", str(run.mode)))
    else:
        rows.append(("anchors", "none of old tasks"))
    if budget is not None:
        rows.append(("budget", f"drift at most {number(budget)} ({run.budget_unit})"))
        rows.append(("budget met", _met(budget, retained)))
    if run.measured_on is not None:
        rows.append(("drift of the actions", run.measured_on.replace("`", "")))
    return _table(("", ""), [(f"**{name}**", value if "`" in value else _text(value)) for name, value in rows])


def _met(budget: float, retained: Sequence[Outcome]) -> str:
    judged = [outcome for outcome in retained if outcome.verdict(budget) is not None]
    tasks = [outcome for outcome in judged if outcome.task is not None] or judged
    if not judged:
        return "not measured"
    if over := sum(outcome.is_over(budget) for outcome in tasks):
        return f"no: {over} of {count(len(tasks), 'constraint')} over it"
    if not all(outcome.verified for outcome in tasks):
        return "unverified: no real old frame was kept out of training to measure on"
    near = sum(outcome.verdict(budget) == NEAR for outcome in tasks)
    said = "yes" if len(tasks) == 1 else f"yes, by {len(tasks) - near} of {len(tasks)} old tasks"
    return f"{said}; {near} too near to tell" if near else said


def _outcome_table(budget: float | None, retained: Sequence[Outcome]) -> str:
    measured = [outcome for outcome in retained if outcome.visits or outcome.action_drift is not None]
    rows = [
        (
            "all old tasks" if outcome.task is None else _text(outcome.task),
            drift_interval(outcome).replace("[", "\\[").replace("]", "\\]"),
            "-" if outcome.drift is None else number(outcome.drift),
            outcome.verdict(budget) or "-",
        )
        for outcome in measured
    ]
    verified = any(outcome.verified for outcome in measured)
    drift = "drift on kept-out frames" if verified else "drift of the actions"
    return _table(("old task", drift, "drift on trained anchors", "budget"), rows) if rows else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _text(value: str) -> str:
    """Words of a user's, as words: neither markup nor another cell of a table."""
    plain = escape(" ".join(value.split()), quote=False)
    return re.sub(r"([\\|`*_\[\]])", r"\\\1", plain)


def _fenced(code: str) -> str:
    longest = max((len(run) for run in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{code}\n{fence}"
