"""`craft eval`: success of checkpoints on tasks, as a matrix with intervals."""

import importlib
import importlib.util
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lerobot_craft import __version__
from lerobot_craft.cli.flags import parse_flags, take_policy_flags, whole_flag
from lerobot_craft.errors import CraftError
from lerobot_craft.io.argv import split
from lerobot_craft.lerobot_api import policy_in

if TYPE_CHECKING:
    from lerobot_craft.evaluation.evaluate import Candidate
    from lerobot_craft.evaluation.matrix import Evaluation
    from lerobot_craft.lerobot_api.env_flags import EvalFlags

_USAGE = """usage: craft eval [NAME=]CHECKPOINT ... --env.type=TYPE --env.task=A,B [flags]

Success of every checkpoint on every task, from the same start states, by lerobot's own rollouts. A checkpoint is what
--policy.path takes, or the output directory of a training, whose last one counts. What is played is kept in
OUTPUT_DIR/evaluation.json: the same command goes on after an interruption, and one with more checkpoints plays
only those.

  craft eval before=outputs/base after=outputs/new --env.type=craft_metaworld --env.task=faucet-open,faucet-close
  craft eval base=A one=B two=C --env.type=libero --env.task=libero_spatial --learned=libero_spatial/3,libero_spatial/7

--policy.x=y changes a setting of all policies, such as --policy.device=cuda. --update_card=true writes success before
and after into the README.md of each checkpoint that `craft train` made; the policy before is known by its weights.
--rename_map='{"observation.images.image": "observation.images.top"}' translates the environment's names of
observations into the policies', as in lerobot-eval.

flags:
"""
_PLUGINS = "--env.discover_packages_path"
REPORT_FILE = "report.html"


def run(argv: list[str]) -> int:
    """Play the missing episodes, print the matrix, write the page, and return 0."""
    named = [argument for argument in argv if not argument.startswith("-")]
    policy, rest = take_policy_flags([whole_flag(argument) for argument in argv if argument.startswith("-")])
    register_plugins([*policy.plugins, *(split(flag)[1] or "" for flag in rest if flag.startswith(_PLUGINS))])
    from lerobot_craft.lerobot_api.env_flags import EvalFlags

    if not {"-h", "--help"}.isdisjoint(rest):
        print(_USAGE, flush=True)
    elif not any(flag.startswith("--env.type=") for flag in rest):
        raise CraftError("say where to evaluate: --env.type=TYPE --env.task=A,B (`craft eval --help` has examples)")
    settings = parse_flags(EvalFlags, [flag for flag in rest if not flag.startswith(_PLUGINS)], "craft eval")
    candidates = _candidates(named if policy.path is None else [*named, policy.path])
    cards = _cards(candidates) if settings.update_card else {}
    evaluation = _evaluate(settings, candidates, policy.overrides, shlex.join(["craft", "eval", *argv]))
    _show(evaluation, settings.output_dir)
    _fill_in(cards, evaluation)
    return 0


def register_plugins(plugins: Sequence[str]) -> None:
    """Register our policies and environment, and those of the packages named on the command line."""
    import lerobot_craft.tiny  # noqa: F401
    from lerobot_craft.lerobot_api.pretrained import load_plugin

    if importlib.util.find_spec("metaworld") is not None:
        importlib.import_module("lerobot_craft.bench.metaworld.configuration")
    for package in plugins:
        load_plugin(package)


def _candidates(named: Sequence[str]) -> "list[Candidate]":
    from lerobot_craft.evaluation.evaluate import Candidate

    if not named:
        raise CraftError("say what to evaluate: craft eval CHECKPOINT ... (`craft eval --help` has examples)")
    found = []
    for argument in named:
        name, place = split(argument)
        path = Path(argument if place is None else place)
        found.append(Candidate(argument.rstrip("/") if place is None else name, policy_in(path)))
    doubled = [one.name for i, one in enumerate(found) if one.name in {other.name for other in found[:i]}]
    if doubled:
        raise CraftError(f"two checkpoints are called {doubled[0]}: name them apart, NAME=CHECKPOINT")
    return found


def _cards(candidates: "Sequence[Candidate]") -> dict[str, Path]:
    """Model cards that `craft train` wrote, by checkpoint name; if there are none, an error before the rollouts."""
    from lerobot_craft.training.card_sections import CARD_FILE, teacher_of

    places = {
        candidate.name: [candidate.checkpoint / CARD_FILE, candidate.checkpoint / "pretrained_model" / CARD_FILE]
        for candidate in candidates
    }
    found = {name: card for name, cards in places.items() for card in cards if teacher_of(card) is not None}
    if not found:
        raise CraftError(
            f"--update_card: none of these checkpoints has a {CARD_FILE} with the section that `craft train "
            "--craft.enabled=true` puts there; leave out --update_card"
        )
    return found


def _fill_in(cards: dict[str, Path], evaluation: "Evaluation") -> None:
    from lerobot_craft.evaluation.matrix import before_and_after
    from lerobot_craft.training.card_sections import fill_in, teacher_of

    for name, card in cards.items():
        fill_in(card, before_and_after(evaluation, evaluation.row(name), teacher_of(card) or ""))
        print(card)


def _evaluate(
    settings: "EvalFlags", candidates: "Sequence[Candidate]", overrides: Sequence[str], command: str
) -> "Evaluation":
    from lerobot_craft.evaluation.evaluate import evaluate, side_by_side
    from lerobot_craft.evaluation.matrix import SCHEMA, Evaluation, rate_of
    from lerobot_craft.evaluation.table import format_estimate
    from lerobot_craft.lerobot_api.env_flags import env_as_json

    learned = [task.strip() for task in settings.learned.split(",") if task.strip()]
    if learned and len(learned) != len(candidates) - 1:
        raise CraftError(
            f"--learned names {len(learned)} tasks for {len(candidates)} checkpoints: give one for each but the first, "
            "which is the policy before the sequence"
        )
    if settings.eval.n_episodes < 1 or settings.eval.batch_size < 0:
        raise CraftError("--eval.n_episodes must be at least 1, --eval.batch_size at least 0")
    asked = Evaluation(
        schema=SCHEMA,
        craft_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        env=env_as_json(settings.env),
        rename_map=settings.rename_map,
        n_episodes=settings.eval.n_episodes,
        batch_size=settings.eval.batch_size or side_by_side(settings.eval.n_episodes),
        seed=settings.seed,
        learned=learned,
        rows=[],
    )

    def told(evaluation: Evaluation, name: str, task: str) -> None:
        print(f"{name}, {task}: {format_estimate(rate_of(evaluation.row(name), task))}", flush=True)

    return evaluate(asked, candidates, settings.env, settings.output_dir, overrides, told)


def _show(evaluation: "Evaluation", output_dir: Path) -> None:
    from lerobot_craft.evaluation.matrix import EVALUATION_FILE, matrix_table, scores_table
    from lerobot_craft.evaluation.results import write_text
    from lerobot_craft.report.page import render_evaluation

    write_text(output_dir / REPORT_FILE, render_evaluation(evaluation))
    tables = [table for table in (matrix_table(evaluation), scores_table(evaluation)) if table]
    print("\n" + "\n\n".join(tables))
    print(f"\n{output_dir / EVALUATION_FILE}\n{output_dir / REPORT_FILE}")
