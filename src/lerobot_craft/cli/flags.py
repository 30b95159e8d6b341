"""Flags: lerobot's grammar, recipes that keep them in a file, and the names and help of `craft train`'s.

Importing torch and lerobot takes ten seconds and more. A misspelled flag is found, and `--help` answers, before that.
The sources are those of the installed packages, so a flag is known here exactly if it exists.

Recipes: flags of `craft train` kept in a file, named by `--config_path`.

lerobot reads a run's whole configuration from `--config_path`, and knows neither a `craft` section nor policy settings
beside `--policy.path`. So a file with a `craft` section is read here, as what it is: flags that somebody else typed. A
file without one, such as the `train_config.json` of a checkpoint, is left to lerobot.
"""

import ast
import contextlib
import difflib
import importlib.util
import io
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from lerobot_craft.errors import CraftError
from lerobot_craft.io.argv import in_place, read_flags, split, take_flags, value_of
from lerobot_craft.lerobot_api import policy_in

_POLICY = "--policy."
_FIELD = re.compile(r"^`([\w.]+)`")  # how draccus names one
_OPTION = re.compile(r"--([a-z_][\w.]*)")
_PLUGINS = "discover_packages_path"
_DAMAGED = "The file is damaged or was edited: copy the checkpoint again; a run takes changes as flags"


@dataclass(frozen=True)
class PolicyFlags:
    """The policy's part of the command line.

    Attributes:
        path: `--policy.path`, the checkpoint directory.
        overrides: Other `--policy.x=y`, as `--x=y`.
        plugins: Packages that register policy types, from `--policy.discover_packages_path` or, as in lerobot's
            commands with `--policy.path`, `--discover_packages_path`.
    """

    path: str | None
    overrides: tuple[str, ...]
    plugins: tuple[str, ...]


def take_policy_flags(argv: Sequence[str]) -> tuple[PolicyFlags, list[str]]:
    """Split off the policy's flags, written `--policy.x=y` or `--policy.x y`."""
    taken, rest = take_flags(argv, lambda name: name.startswith((_POLICY, f"--{_PLUGINS}")))
    found = {name.removeprefix(_POLICY).removeprefix("--"): value for name, value in taken}
    path = found.pop("path", None)
    plugins = tuple(name for name in found.pop(_PLUGINS, "").split(",") if name)
    return PolicyFlags(path, tuple(f"--{name}={value}" for name, value in found.items()), plugins), rest


def whole_flag(flag: str) -> str:
    """Require a flag to contain its value: a word of its own would be taken for a checkpoint."""
    if split(flag)[1] is None and flag not in ("-h", "--help"):
        raise CraftError(f"{flag} needs a value: write {flag}=VALUE")
    return flag


def parse_flags[Config](
    config_class: type[Config],
    argv: Sequence[str],
    program: str,
    saved: Path | None = None,
    flag_of: Callable[[str], str] = "--{}".format,
) -> Config:
    """Parse a dataclass from `--field=value`, over the values of a saved file if given; `--help` prints them and exits.

    Error messages and the help show the flags that `flag_of` gives the fields.
    """
    import draccus
    from draccus.utils import DraccusException
    from yaml import YAMLError  # draccus parses values as YAML and does not catch its errors

    if saved is not None:
        _check_saved(config_class, saved)
    said, complaint = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaint):
            config: Config = draccus.parse(config_class, config_path=saved, args=list(argv), prog=program)
        return config
    except (DraccusException, YAMLError) as error:
        if saved is not None and argv:
            parse_flags(config_class, (), program, saved)  # names the file if it is to blame
        if saved is not None and not argv:
            raise CraftError(f"{saved}: {_first_line(error)}. {_DAMAGED}") from error
        reason = _FIELD.sub(lambda field: f"`{flag_of(field[1])}`", _first_line(error))
        raise CraftError(f"{reason} (`{program} --help` lists the flags)") from error
    except SystemExit as stop:
        if stop.code in (0, None):
            print(_with_flags(said.getvalue(), flag_of), end="")
            raise
        reason = _with_flags(complaint.getvalue().strip().rpartition("error: ")[2], flag_of)
        raise CraftError(f"{reason} (`{program} --help` lists the flags)") from stop


@contextlib.contextmanager
def spelled(flag_of: Callable[[str], str]) -> Iterator[None]:
    """Errors from within show the flags that `flag_of` gives the settings that they name."""
    try:
        yield
    except CraftError as error:
        error.args = (error.told(flag_of),)
        raise


def _with_flags(text: str, flag_of: Callable[[str], str]) -> str:
    """What argparse says of fields, with the flags that they have here."""
    return _OPTION.sub(lambda option: flag_of(option[1]), text)


def _check_saved(config_class: type, saved: Path) -> None:
    """Refuse a file that holds no settings, or null for one that has to be set: draccus takes null for any type."""
    try:
        content = json.loads(saved.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CraftError(f"{saved} is no JSON ({_first_line(error)}). {_DAMAGED}") from error
    if not isinstance(content, dict):
        raise CraftError(f"{saved} holds {content!r:.80} and no settings. {_DAMAGED}")
    for name, hint in get_type_hints(config_class).items():
        if name in content and content[name] is None and NoneType not in get_args(hint):
            raise CraftError(f"{saved}: {name} is null, and it has to have a value. {_DAMAGED}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]  # several types


SHIPPED = Path(__file__).parents[1] / "recipes"
_CONFIG_PATH = "--config_path"
_OF_LEROBOT = "train_config.json"


def with_recipe(argv: Sequence[str]) -> list[str]:
    """The same flags, with those of a recipe in place of its `--config_path`; a flag that is typed too wins."""
    place = value_of(_CONFIG_PATH, argv)
    recipe = None if place is None else _read(place)
    if recipe is None:
        return list(argv)
    (_, *others), rest = take_flags(argv, _CONFIG_PATH.__eq__)
    rest += [f"{name}={value}" for name, value in others]
    typed = {split(word)[0].removeprefix("--") for word in rest}
    return [*(flag for name, flag in _flags(recipe) if not _is_typed(name, typed)), *rest]


def _read(place: str) -> dict[str, Any] | None:
    """The recipe of this name; None for what is lerobot's to read, and to complain of."""
    path = _find(place)
    if path.suffix != ".json" or path.name == _OF_LEROBOT:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError as error:
        raise CraftError(f"{_CONFIG_PATH}={place} cannot be read as JSON ({error}): correct the file") from error
    return found if isinstance(found, dict) and "craft" in found else None


def _find(place: str) -> Path:
    """A file of this machine, or the recipe of that name that comes with the package."""
    path = Path(place)
    if path.parts[:-1] != (SHIPPED.name,) or path.is_file():
        return path
    shipped = sorted(recipe.name for recipe in SHIPPED.glob("*.json"))
    if path.name not in shipped:
        raise CraftError(
            f"{_CONFIG_PATH}={place}: there is no such file, and no recipe of that name; the recipes are "
            + ", ".join(f"{SHIPPED.name}/{name}" for name in shipped)
        )
    return SHIPPED / path.name


def _flags(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, flag) of every setting; text stands as it is, everything else as JSON, which lerobot's flags read."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flags(value, f"{name}.")
        else:
            yield name, f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def _is_typed(name: str, typed: set[str]) -> bool:
    """Whether the command line has this flag, or a group that holds it: `--peft={...}` for `peft.r`."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in typed for length in range(1, len(parts) + 1))


_OWN = Path(__file__).parents[1]
_ALWAYS = ("help", "config_path", "discover_packages_path", "estimate")
_WIDTH = 100
_OF_POLICY = "policy."
# The name that a configuration of a policy is registered by, its class and its bases.
_CONFIGURATION = re.compile(r'^(?:@\w+\.register_subclass\("(\w+)"\)\n)?(?:@.*\n)*class (\w+)\(([^)]*)\)', re.MULTILINE)

# The flags of a first run, with help for beginners; the rest follows by group.
_FIRST = {
    "policy.path": "The policy to fine-tune: a checkpoint directory, or a name on the Hub.",
    "dataset.repo_id": "The new task's dataset.",
    "dataset.root": "Its directory on this machine. Unset: lerobot's home, then the Hub.",
    "output_dir": "Where the run writes.",
    "steps": "Training steps.",
    "batch_size": "New frames per step (and rank).",
    "craft.enabled": "true: keep what the policy can do. false: plain lerobot-train.",
    "craft.old_instructions": "What to keep: instructions with ; between them, or a file with one per line.",
    "craft.old_dataset.repo_id": "What to keep, if you have old data: datasets separated by commas.",
    "resume": "true: continue from the last checkpoint of --output_dir, or start if there is none.",
}
# The first flag of each group of CRaFT's settings, in file order, and the group's title.
_CRAFT_GROUPS = {
    "enabled": "method",
    "anchor_cache_dir": "anchors in training",
    "memory": "memory of the old tasks",
    "anchor_source": "where anchors come from",
    "hidden_layer": "what is retained, in detail",
    "lambda_per_task": "multipliers",
    "epsilon_start": "budget",
    "use_grad_projection": "gradients",
    "replay_frames": "other methods",
    "log_craft_metrics_freq": "metrics",
    "shard": "several processes, precision",
}


class Flag(NamedTuple):
    """A flag: name without dashes, default as in the source, help, and the class of its type."""

    name: str
    default: str
    help: str
    type: str


def train_flags() -> dict[str, Flag]:
    """Flags of CRaFT, of the estimate and of lerobot, by name; those of a policy or environment are not listed."""
    anchors, dataset = (_fields(_OWN / "anchors" / "recipe.py", name) for name in ("AnchorConfig", "DatasetFlags"))
    own = _fields(_OWN / "training" / "config.py", "CraftConfig")
    both = {flag.name: flag for flag in (*own, *anchors)}
    craft = [both[name] for name in in_place([flag.name for flag in own], [flag.name for flag in anchors])]
    estimate = _fields(_OWN / "training" / "estimate.py", "EstimateConfig")
    found = list(_nested(craft, "craft.", {"DatasetFlags": dataset}))
    found += _nested(estimate, "estimate.", {})
    if (spec := importlib.util.find_spec("lerobot")) is not None and spec.submodule_search_locations:
        configs = Path(spec.submodule_search_locations[0]) / "configs"
        groups = ("DatasetConfig", "WandBConfig", "EvalConfig", "PeftConfig", "JobConfig")
        inner = {name: _fields(configs / "default.py", name) for name in groups}
        found += _nested(_fields(configs / "train.py", "TrainPipelineConfig"), "", inner)
    return {flag.name: flag for flag in found}


def check_names(argv: Sequence[str], aliases: Mapping[str, str]) -> None:
    """Refuse a flag that does not exist, and suggest the one probably meant.

    Flags of an environment or optimizer depend on its type, which may come from a plugin: draccus checks them. It also
    checks those of a policy whose type neither lerobot nor this package has.
    """
    known = train_flags()
    of_policy = _policy_flags(argv)
    groups = {name for name, flag in known.items() if flag.type}
    heads = {name.rpartition(".")[0] for name in known} - {"", "craft"}  # a whole group, as YAML
    for argument in argv:
        name, value = split(argument)
        is_flag = name.startswith("--") and len(name) > 2
        if not is_flag and not (argument.startswith("craft.") and value is not None):
            continue
        name = name.removeprefix("--")
        if name in known or name in heads or name in _ALWAYS or f"--{name}" in aliases:
            continue
        if name.endswith("discover_packages_path"):
            continue
        if of_policy is not None and name.startswith(_OF_POLICY):
            if f"{_OF_POLICY}{name.split('.')[1]}" in of_policy:
                continue
        elif any(name.startswith(f"{group}.") for group in groups):
            continue
        meant = _nearest(name, [*known, *(of_policy or ())])
        advice = f"did you mean --{meant}? " if meant else ""
        raise CraftError(f"unrecognized arguments: {argument}: {advice}(`craft train --help` lists the flags)")


def help_text() -> str:
    """All flags: those of a first run, then by group."""
    known = train_flags()
    first = [known.get(name, Flag(name, "", "", ""))._replace(help=text) for name, text in _FIRST.items()]
    title = ""
    grouped: dict[str, list[Flag]] = {}
    for flag in known.values():
        head, _, rest = flag.name.partition(".")
        if head == "craft":
            title = _CRAFT_GROUPS.get(rest, title)
            grouped.setdefault(f"craft: {title}", []).append(flag)
        else:
            named = "craft train --estimate" if head == "estimate" else f"lerobot-train: {head}"
            grouped.setdefault(named if rest else "flags of lerobot-train", []).append(flag)
    grouped = {"the flags of a first run": first, **grouped}
    return "\n\n".join(f"{title}:\n{_lines(flags)}" for title, flags in grouped.items())


def _nested(fields: Sequence[Flag], prefix: str, classes: Mapping[str, Sequence[Flag]]) -> Iterator[Flag]:
    """The fields with their prefix; a known dataclass is replaced by its fields."""
    for flag in fields:
        name = f"{prefix}{flag.name}"
        if flag.type in classes:
            for inner in classes[flag.type]:
                yield inner._replace(name=f"{name}.{inner.name}", help=inner.help or flag.help)
        else:
            yield flag._replace(name=name)


def _fields(source: Path, class_name: str) -> list[Flag]:
    """The fields of a dataclass, with the comment above or after each as help."""
    text = source.read_text(encoding="utf-8")
    lines = text.splitlines()
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found: list[Flag] = []
    for node in next(classes).body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        default = "required" if node.value is None else ast.unparse(node.value)
        if "init=False" in default:
            continue
        kind = _class_of(node.annotation)
        above = _comment_above(lines, node.lineno - 1)
        behind = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
        found.append(Flag(node.target.id, "" if default.startswith("field(") else default, above or behind, kind))
    return found


def _comment_above(lines: Sequence[str], row: int) -> str:
    words: list[str] = []
    while row > 0 and lines[row - 1].strip().startswith("#"):
        row -= 1
        words.insert(0, lines[row].strip().lstrip("# "))
    return " ".join(words)


def _class_of(annotation: ast.expr) -> str:
    """The dataclass in an annotation such as `X` or `m.X | None`; empty for plain values."""
    text = ast.unparse(annotation).removesuffix(" | None").rpartition(".")[2]
    return text if text[:1].isupper() and text not in ("Path", "Any") else ""


def _policy_flags(argv: Sequence[str]) -> set[str] | None:
    """The flags of the run's policy; None where its type is not known before lerobot is imported: a plugin, the Hub."""
    values = dict(read_flags(argv))
    path, policy_type = values.get("policy.path", values.get("policy.pretrained_path")), values.get("policy.type")
    if path is not None:
        try:
            policy_type = json.loads((policy_in(Path(path)) / "config.json").read_text(encoding="utf-8"))["type"]
        except (OSError, ValueError, LookupError, TypeError):  # not here, or damaged: whoever loads it says so
            return None
    found = importlib.util.find_spec("lerobot")
    roots = [*(found.submodule_search_locations or ())] if found is not None else []
    files = [file for root in roots for file in Path(root).glob("policies/*/configuration_*.py")]
    files += [Path(root) / "configs" / "policies.py" for root in roots]
    classes: dict[str, tuple[Path, list[str]]] = {}
    chosen = "PreTrainedConfig" if path is None and policy_type is None and "config_path" not in values else None
    for file in (*files, *(_OWN / "tiny").glob("*.py")):
        for registered, name, bases in _CONFIGURATION.findall(file.read_text(encoding="utf-8")):
            classes[name] = file, [base.strip() for base in bases.split(",")]
            chosen = name if registered and registered == policy_type else chosen
    if chosen is None:
        return None
    flags, waiting = {f"{_OF_POLICY}{name}" for name in ("path", "type")}, [chosen]
    while waiting:
        if (name := waiting.pop()) in classes:
            file, bases = classes[name]
            flags |= {f"{_OF_POLICY}{flag.name}" for flag in _fields(file, name)}
            waiting += bases
    return flags


def _nearest(name: str, known: Sequence[str]) -> str | None:
    near = difflib.get_close_matches(name, [*known, *_ALWAYS, f"{_OF_POLICY}path"], n=1, cutoff=0.75)
    if near:
        return near[0]
    # The prefix is missing or wrong.
    by_end = {full.rpartition(".")[2]: full for full in reversed(known)}
    near = difflib.get_close_matches(name.rpartition(".")[2], by_end, n=1, cutoff=0.75)
    return by_end[near[0]] if near else None


def _lines(flags: Sequence[Flag]) -> str:
    shown = []
    for flag in flags:
        if flag.type:
            shown.append(f"  --{flag.name}.*\n      `craft train --{flag.name}.type=X --help` lists those of a type.")
            continue
        words = {"": "", "None": " (unset)", "required": " (required)"}
        default = words.get(flag.default, f" ({_as_typed(flag.default)})")
        text = textwrap.fill(flag.help, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
        shown.append(f"  --{flag.name}{default}" + (f"\n{text}" if flag.help else ""))
    return "\n".join(shown)


def _as_typed(default: str) -> str:
    """A default as typed on the command line."""
    words = {"True": "true", "False": "false", "''": "empty"}
    return words.get(default, default.strip("'\"").replace("_", "") if default[:1].isdigit() else default.strip("'\""))
