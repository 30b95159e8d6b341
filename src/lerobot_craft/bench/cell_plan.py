"""Which cells a bench consists of."""

from collections.abc import Iterator, Sequence

from lerobot_craft.bench.base_policies import BenchPolicy, policy_named
from lerobot_craft.bench.cells import Base, Cell, Demos, Film, Rollouts, Run, Trial
from lerobot_craft.bench.compared_methods import method_named
from lerobot_craft.bench.method_definition import Method
from lerobot_craft.bench.scenarios import Scenario, find_scenario, trunk_of
from lerobot_craft.bench.settings import BenchSettings
from lerobot_craft.errors import CraftError


def plan_cells(settings: BenchSettings) -> list[Cell]:
    """Every cell of a bench, once, after the cells it needs; a cell's number is its position."""
    cells: dict[str, Cell] = {}
    runs = plan_runs(settings)
    for last in (*runs, *map(trial_of, runs), *(plan_films(runs) if settings.film else ())):
        for cell in last.chain():
            cells.setdefault(cell.digest, cell)
    # Cells that others wait for come first; the sort is stable, so stages stay in order.
    order = [Demos, Base, Rollouts, Run, Trial, Film]
    return sorted(cells.values(), key=lambda cell: order.index(type(cell)))


def trial_of(run: Run) -> Trial:
    """The evaluation of a run's base policy before fine-tuning."""
    base = run.base
    return Trial(base.settings, base.scenario, base)


def plan_films(runs: Sequence[Run]) -> list[Film]:
    """Films of each run's base policy and of the fine-tuned policy."""
    films = [Film(run.settings, run.scenario, filmed) for run in runs for filmed in (run.base, run)]
    return list({film.digest: film for film in films}.values())


def plan_runs(settings: BenchSettings) -> list[Run]:
    """Every run, or the last stage of a sequence. Two methods may share a cell: both are listed."""
    runs: dict[tuple[str, str], Run] = {}
    for scenario in map(find_scenario, settings.scenarios):
        for policy in (policy_named(name, settings.view) for name in settings.policies):
            _check_policy(policy, scenario, settings)
            trunk = trunk_of(scenario)
            demos = Demos(settings, trunk, trunk.old, settings.old_episodes or policy.old_episodes)
            for seed in settings.seeds:
                base = Base(settings, trunk, policy, seed, demos)
                for method in map(method_named, settings.methods):
                    runs |= {(method.name, run.digest): run for run in _runs_of(method, base, scenario)}
    if not runs:
        raise CraftError("nothing is left to run: these --methods need old frames (--anchors) or another --policy")
    return list(runs.values())


def _runs_of(method: Method, base: Base, scenario: Scenario) -> Iterator[Run]:
    settings = base.settings
    if not _exists_for(method, base.policy):
        return
    episodes = settings.new_episodes or base.policy.new_episodes
    new = [Demos(settings, base.scenario, (task,), episodes) for task in scenario.new]
    for asked in settings.knob_values(method):
        # A sweep and a table share the cell of a knob's default value.
        knob = None if method.knob is not None and asked == method.knob.value else asked
        for frames in method.counts(settings.anchors, instructions=base.policy.reads_instruction):
            run = None
            for demos in new:
                run = Run(settings, scenario, base, demos, method, frames, knob, before=run)
            if run is not None:
                yield run
        if method.takes_old_frames:
            for number in settings.rollouts:
                own = Rollouts(settings, base.scenario, base, number)
                yield Run(settings, scenario, base, new[0], method, 0, knob, rollouts=own)


def _exists_for(method: Method, policy: BenchPolicy) -> bool:
    if method.needs_instructions and not policy.reads_instruction:
        return False
    return not method.policies or policy.name in method.policies


def _check_policy(policy: BenchPolicy, scenario: Scenario, settings: BenchSettings) -> None:
    if settings.rollouts and len(scenario.new) > 1:
        raise CraftError(
            f"--rollouts are of the base policy, and {scenario.name} teaches several tasks one after the other: leave "
            "out --rollouts, or give a --scenario with one new task"
        )
    if not policy.reads_instruction and scenario.pairs:
        one, other = scenario.pairs[0]
        raise CraftError(
            f"{policy.name} reads no instruction, so it cannot tell {one} from {other}, which share a scene: give a "
            f"--scenario without such a pair (apart), or another --policy than {policy.name}"
        )
