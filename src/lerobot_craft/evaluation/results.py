"""`results.json`, schema 2: what was run, what came out, and the summary of it. Read strictly, written atomically."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import read_bytes, write_atomically
from lerobot_craft.io.strict_json import StrictJSONError, decode, parse_object, to_json

SCHEMA = 2

Role = Literal["tuning", "final"]
# What the policy observes: the object's place in its state, or the object in the picture only.
View = Literal["told", "seen"]
# What the user has of the old tasks: nothing, their instructions, episodes of the policy itself, frames of the old
# data, or all of the old data.
Tier = Literal["nothing", "instructions", "rollouts", "frames", "everything"]

_RATE_ROUNDING = 1e-9


def policy_name(policy: str, view: View) -> str:
    """A policy's name, and what it observes if that is not the default."""
    return policy if view == "told" else f"{policy}, object only in the picture"


@dataclass(frozen=True)
class Anchors:
    """What a method kept of the old tasks.

    Attributes:
        source: Where anchors come from (`dataset`, `cross`, `both`); None for a method without any.
        frames: Frames of old data that the method needs, in all.
        bytes: Size of those frames as stored in their dataset: what a user must still have.
        cached_bytes: Size of what was computed from them, the anchor cache.
        all_frames: Whether it takes every old frame there is, as joint training does. Its number then differs between
            scenarios without being another setting.
    """

    source: str | None
    frames: int
    bytes: int
    cached_bytes: int
    all_frames: bool = False


@dataclass(frozen=True)
class Drift:
    """Distance from the teacher on old tasks at the end of training; None if not measured."""

    action: float | None
    hidden: float | None
    action_by_task: dict[str, float] = field(default_factory=dict)
    hidden_by_task: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Knob:
    """A method's one setting, as typed, and the scenarios on which its value was chosen."""

    flag: str
    value: str
    swept_on: list[str]


@dataclass(frozen=True)
class Stage:
    """One task of a sequence, and success on every task after it was learnt."""

    task: str
    after: dict[str, float]


@dataclass(frozen=True)
class Run:
    """One fine-tuning of one base policy, and success before and after.

    Attributes:
        method: Name on the command line; `label` is the name for people.
        role: `tuning` for scenarios on which settings were chosen, `final` for those kept for the final table.
        new_task: What was learnt; the last task of a sequence.
        same_scene: The old tasks that share the new one's scene: none, some or all of them.
        base: Success rate of every task before fine-tuning, the new ones included.
        after: The same tasks afterwards.
        stages: None, or one entry per task of a sequence, in order.
        n_episodes: Episodes behind each rate.
        step_overhead: Time of a step over one of plain fine-tuning; None for plain fine-tuning itself.
        command: The command that repeats the run.
        trunk: Scenarios of one trunk share their base policies, seed by seed; None if the scenario has its own.
        view: What the policy observes.
        tier: What the method was given of the old tasks; None in files that do not say.
        rollouts: The base policy's own episodes per old task that the method was given.
        blind: Success rate of the base policy with a black picture, by task; empty if not measured.
        base_episodes: `base`, episode by episode: "1" or "0" per start state, in order; empty if not kept.
        after_episodes: The same of `after`, from the same start states.
        starts_by_seed: Whether every seed drew its own start states. If not, all seeds share those of a task.
    """

    method: str
    label: str
    seed: int
    policy: str
    scenario: str
    role: Role
    new_task: str
    same_scene: list[str]
    anchors: Anchors
    base: dict[str, float]
    after: dict[str, float]
    stages: list[Stage] | None
    n_episodes: int
    steps: int
    train_seconds: float
    step_overhead: float | None
    drift: Drift
    lambda_final: float | None
    eps_final: float | None
    knob: Knob | None
    command: str
    trunk: str | None = None
    view: View = "told"
    tier: Tier | None = None
    rollouts: int = 0
    blind: dict[str, float] = field(default_factory=dict)
    base_episodes: dict[str, str] = field(default_factory=dict)
    after_episodes: dict[str, str] = field(default_factory=dict)
    starts_by_seed: bool = False

    @property
    def new_tasks(self) -> list[str]:
        """What was learnt, in order."""
        return [self.new_task] if self.stages is None else [stage.task for stage in self.stages]

    @property
    def old_tasks(self) -> list[str]:
        """What the policy came with."""
        new = self.new_tasks
        return [task for task in self.base if task not in new]

    @property
    def elsewhere(self) -> list[str]:
        """Old tasks that do not share the new task's scene."""
        return [task for task in self.old_tasks if task not in self.same_scene]

    @property
    def base_policy(self) -> tuple[str, View, str, int]:
        """Identifies the base policy: runs with the same value began with the same one."""
        return self.policy, self.view, self.trunk or self.scenario, self.seed

    @property
    def frames(self) -> int | None:
        """Old frames as a setting of the method, per task in a sequence; None if it takes all.

        0 for rollouts: their number is the setting, not their length.
        """
        if self.rollouts:
            return 0
        if self.anchors.all_frames:
            return None
        if self.stages is None:
            return self.anchors.frames
        before_the_last = len(self.base) - 1  # tasks whose frames are there when the last one is learnt
        # Rounded up: the datasets may have had fewer frames than were asked for.
        return math.ceil(self.anchors.frames / before_the_last)


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; bounds are None for a value by definition, such as the loss of a base policy."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Summary:
    """One row of the table: a method at one setting, over scenarios and seeds.

    Attributes:
        method: As in `Run`; `base` is the policy before fine-tuning.
        frames: Old frames; None if the method takes all.
        n_bases: Different base policies.
        n_episodes: Episodes per task and run; the smallest number if runs differ.
        n_starts: Different start states per task: episodes, times seeds if each drew its own.
        resamples_starts: Whether the intervals resample start states as well, which takes single episodes.
        old_mean: Success on old tasks afterwards: mean over scenarios of the mean over seeds of the mean over tasks.
        same_scene: The same over old tasks that share the new task's scene; None without any.
        elsewhere: The same over the other old tasks; None without any.
        blind: Success of base policies on old tasks with a black picture; None for methods, or if not measured.
        forgotten: Success on old tasks before minus after.
        kept: Success on old tasks after over before, a ratio of means; None if it was 0 before.
        worst: Lowest ratio of after over before of a single task of a scenario, over its seeds; None for base policies.
        worst_task: That task, with its scenario if the row has several.
        new_vs_plain: Success on the new task minus that of plain fine-tuning from the same base policies and start
            states, after as many steps; None without such runs.
        train_seconds: Mean over runs, as are `step_overhead`, `bytes` and `cached_bytes`.
    """

    method: str
    label: str
    policy: str
    view: View
    role: Role
    tier: Tier | None
    rollouts: int
    frames: int | None
    n_runs: int
    n_seeds: int
    n_scenarios: int
    n_bases: int
    scenarios: list[str]
    n_episodes: int
    n_starts: int
    resamples_starts: bool
    old_mean: Estimate
    same_scene: Estimate | None
    elsewhere: Estimate | None
    new: Estimate
    blind: Estimate | None
    forgotten: Estimate
    kept: Estimate | None
    worst: float | None
    worst_task: str | None
    new_vs_plain: Estimate | None
    train_seconds: float | None
    step_overhead: float | None
    bytes: int
    cached_bytes: int
    knob: Knob | None


@dataclass(frozen=True)
class SequenceSummary:
    """One method over sequences of tasks, in LIBERO's scores (`evaluation.continual` has the definitions).

    `frames` are old frames of each task; None if the method takes all. The other fields are as in
    `Summary`.
    """

    method: str
    label: str
    policy: str
    view: View
    role: Role
    tier: Tier | None
    rollouts: int
    frames: int | None
    n_runs: int
    n_seeds: int
    scenarios: list[str]
    n_episodes: int
    nbt_all: Estimate
    nbt_new: Estimate | None
    fwt_new: Estimate
    auc_all: Estimate
    auc_new: Estimate
    final_base: Estimate
    final_all: Estimate
    knob: Knob | None


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of drift with lost success, its 95 % interval (None from too few runs), and pairs."""

    rho: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Correlations:
    """Which drift foretells forgetting, for one policy; None if there are too few pairs or no spread."""

    action_per_run: Correlation | None
    hidden_per_run: Correlation | None
    action_per_task: Correlation | None
    hidden_per_task: Correlation | None


@dataclass(frozen=True)
class Filmstrip:
    """The same prompt from the same start, as PNG files beside `results.json`; None for one that was not filmed."""

    caption: str
    before: str | None
    plain: str | None
    craft: str | None


@dataclass(frozen=True)
class Results:
    """Everything that one bench or demo found. `evaluation.summary.collect` makes one from its runs."""

    schema: int
    craft_version: str
    created: str
    command: str
    settings: dict[str, Any]
    runs: list[Run]
    summary: list[Summary]
    sequences: list[SequenceSummary]
    correlations: dict[str, Correlations]
    media: list[Filmstrip]


def write_results(path: Path, results: Results) -> None:
    """Write `results.json` atomically: a reader sees the former file or this one."""
    try:
        data = to_json(results)
    except StrictJSONError as error:
        raise CraftError(f"{path} was not written: {error}.") from error
    write_atomically(path, data)


def write_text(path: Path, text: str) -> None:
    """Write a text that is made from results, atomically as well."""
    write_atomically(path, text.encode())


def read_results(path: Path) -> Results:
    """Read a `results.json`; anything unknown, missing, doubled or out of range is refused with the field's name."""
    try:
        results = read_versioned(path, Results, SCHEMA)
    except StrictJSONError as error:
        raise CraftError(
            f"{path} is no results file of this release: {error}. Write it again with `craft bench`, which runs cells "
            "of another release again."
        ) from error
    try:
        check_runs(results.runs)
    except CraftError as error:
        raise CraftError(f"{path}: {error}") from error
    return results


def read_versioned[Content](path: Path, cls: type[Content], schema: int) -> Content:
    """Read a JSON file strictly into a dataclass with a field `schema`: the number of the file's format.

    Raises:
        StrictJSONError: It has another schema, or a field that is unknown, missing, doubled or of another type.
    """
    content = parse_object(read_bytes(path))
    if content.get("schema") != schema:
        raise StrictJSONError(f"schema: this release reads schema {schema}, the file has {content.get('schema')!r}")
    return decode(cls, content)


def check_runs(runs: Iterable[Run]) -> None:
    """Refuses rates outside [0, 1] or other than their episodes', tasks measured on one side, and runs given twice."""
    seen: set[object] = set()
    for i, run in enumerate(runs):
        where = f"runs[{i}] ({run.label}, {run.scenario}, seed {run.seed})"
        if problem := _problem(run) or _tier_problem(run) or _episodes_problem(run):
            raise CraftError(f"{where}: {problem}.")
        knob = None if run.knob is None else (run.knob.flag, run.knob.value)
        given = (run.tier, run.rollouts, run.frames)
        key = (run.policy, run.view, run.scenario, run.seed, run.role, run.method, run.label, given, knob)
        if key in seen:
            raise CraftError(f"{where} is there twice: it would count twice. Remove one of them.")
        seen.add(key)


def _problem(run: Run) -> str | None:
    if run.n_episodes < 1:
        return f"n_episodes is {run.n_episodes}, expected at least 1"
    if set(run.base) != set(run.after):
        return f"base and after differ in the task {sorted(set(run.base) ^ set(run.after))[0]!r}"
    if missing := [task for task in run.new_tasks if task not in run.after]:
        return f"the new task {missing[0]!r} has no success rate"
    if not run.old_tasks:
        return "there is no old task in it"
    if strange := [task for task in run.same_scene if task not in run.old_tasks]:
        return f"the same-scene task {strange[0]!r} is none of the old tasks"
    if len(set(run.same_scene)) < len(run.same_scene):
        return f"same_scene names a task twice ({', '.join(run.same_scene)})"
    if run.stages is not None and (not run.stages or any(set(stage.after) != set(run.base) for stage in run.stages)):
        return "a sequence needs stages, and every stage a success rate for each task"
    if strange := sorted(set(run.blind) - set(run.base)):
        return f"blind has the task {strange[0]!r}, which base has not"
    tables = [run.base, run.after, run.blind, *(stage.after for stage in run.stages or ())]
    for task, rate in (item for table in tables for item in table.items()):
        if not 0 <= rate <= 1:
            return f"the success rate of {task!r} is {rate}, expected a number from 0 to 1"
    return None


def _tier_problem(run: Run) -> str | None:
    if run.rollouts < 0:
        return f"rollouts is {run.rollouts}, expected at least 0"
    if (run.tier == "rollouts") != (run.rollouts > 0):
        return f"rollouts is {run.rollouts} in the tier {run.tier!r}; only the tier 'rollouts' has any, and it has some"
    if run.tier in ("nothing", "instructions") and run.frames != 0:
        return f"the tier {run.tier!r} has no old frames, but anchors.frames is {run.anchors.frames}"
    return None


def _episodes_problem(run: Run) -> str | None:
    tables = {"base": (run.base, run.base_episodes), "after": (run.after, run.after_episodes)}
    for name, (rates, episodes) in tables.items():
        if episodes and set(episodes) != set(rates):
            return f"{name} and {name}_episodes differ in the task {sorted(set(rates) ^ set(episodes))[0]!r}"
        for task, outcomes in episodes.items():
            if set(outcomes) - {"0", "1"} or len(outcomes) != run.n_episodes:
                return f"{name}_episodes of {task!r} is {outcomes!r:.80}, expected {run.n_episodes} characters 0 or 1"
            rate = outcomes.count("1") / run.n_episodes
            if abs(rate - rates[task]) > _RATE_ROUNDING:
                return f"{name} has {rates[task]} for {task!r}, but {name}_episodes has {rate}"
    return None
