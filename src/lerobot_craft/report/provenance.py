"""How the numbers were made: sample sizes, intervals, the rule for settings, and the commands."""

from collections.abc import Iterable, Sequence

from lerobot_craft.evaluation.results import Results, Run
from lerobot_craft.report.markup import Child, Markup, element, fragment
from lerobot_craft.report.tables import table


def how_measured(runs: Sequence[Run]) -> Markup:
    """What stands behind the numbers, as a list of plain statements."""
    statements: list[Child] = [_sample(runs)]
    statements.append(
        "An old mean is the mean over scenarios of the mean over seeds of the mean over tasks. Same scene are the old "
        "tasks that share the new one's scene, elsewhere the others. Kept of before is the mean after over the mean "
        "before; the worst single task is the lowest such ratio of one task of one scenario, over its seeds."
    )
    statements.append(
        f"Intervals are 95 %: the wider of Wilson's over all episodes (Newcombe's for differences) and a hierarchical "
        f"bootstrap that draws scenarios, seeds and tasks anew. {_starts(runs)} With few scenarios and seeds they are "
        "rough, and one run alone cannot show how runs differ."
    )
    statements.append(_tuning(runs))
    if any(run.stages is not None for run in runs):
        statements.append(
            "NBT, FWT and AUC are LIBERO's (Liu et al. 2023). Stages are measured at their end only, so FWT is the "
            "success right after learning; the last task cannot be forgotten and is no part of NBT. All tasks include "
            "those the policy came with; a lower NBT is better."
        )
    if any(run.drift.action is not None or run.drift.hidden is not None for run in runs):
        statements.append(
            "Drift is the distance from the teacher on old tasks at the end of training. Its rank correlation with "
            "lost success uses all runs that learnt one task; the interval draws whole groups of one scenario and "
            "seed."
        )
    return element("ul", [element("li", statement) for statement in statements])


def _sample(runs: Sequence[Run]) -> str:
    episodes = sorted({run.n_episodes for run in runs})
    counted = str(episodes[0]) if len(episodes) == 1 else f"{episodes[0]} to {episodes[-1]}"
    scenarios, policies = _names(run.scenario for run in runs), _names(run.policy for run in runs)
    return (
        f"{len(runs)} run{'' if len(runs) == 1 else 's'}: scenarios {scenarios}; policies {policies}; "
        f"seeds {_names(str(run.seed) for run in runs)}; n = {counted} episodes per task and run."
    )


def _starts(runs: Sequence[Run]) -> str:
    shared = "Every seed drew its own start states." if all(run.starts_by_seed for run in runs) else ""
    shared = shared or "Seeds share the start states of a task."
    if not all(run.base_episodes and run.after_episodes for run in runs):
        return shared
    return (
        f"{shared} The bootstrap draws start states too; differences are paired by base policy and start state, and "
        "Wilson's and Newcombe's intervals count each start state once."
    )


def _tuning(runs: Sequence[Run]) -> str:
    tuning, final = (list(dict.fromkeys(r.scenario for r in runs if r.role == role)) for role in ("tuning", "final"))
    swept = dict.fromkeys(name for run in runs if run.knob for name in run.knob.swept_on)
    labels = dict.fromkeys(run.label for run in runs if run.knob and run.knob.swept_on)
    parts = ["No setting was swept: those in brackets are defaults or were given."]
    if swept:
        parts = [f"The settings in brackets of {', '.join(labels)} were chosen on {', '.join(swept)}."]
    if tuning:
        parts.append(f"Scenarios used for tuning: {', '.join(tuning)}.")
    if final:
        leaked = [name for name in final if name in swept]
        parts.append(f"Kept for the final table: {', '.join(final)}.")
        if leaked:
            parts.append(f"Careful: {', '.join(leaked)} also served for choosing a setting, so those rows flatter.")
    return " ".join(parts)


def commands(sources: Sequence[Results]) -> Markup:
    """The lines that made these results, and each run's own."""
    lines = list(dict.fromkeys(results.command for results in sources))
    rows: list[list[Child]] = [
        [f"{run.label}, {run.scenario}, {run.policy}, seed {run.seed}", element("code", run.command)]
        for results in sources
        for run in results.runs
    ]
    settings: list[list[Child]] = [
        [name, element("code", str(value))] for results in sources for name, value in results.settings.items()
    ]
    return fragment(
        [element("pre", element("code", line)) for line in lines],
        _folded("The settings", table(("setting", "value"), settings, "As given.")) if settings else None,
        _folded("The command of every run", table(("run", "command"), rows, "Each line repeats one run.")),
    )


def _folded(title: str, content: Markup) -> Markup:
    return element("details", element("summary", title), content)


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
