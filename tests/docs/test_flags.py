"""docs/flags.md against the code: every flag has its line and its default."""

import pytest

from lerobot_craft.cli import bench, cache, demo, doctor, report
from tests.docs.known_flags import defaults_of, options_of, shown
from tests.docs.pages import ROOT, section, table_rows

PAGE = (ROOT / "docs" / "flags.md").read_text()
DOCUMENTS = "Defaults with hidden states or tokens"


def told(text):
    """{flag: default} of the tables in a part of the page; each flag once, with a default and a meaning."""
    rows = [row for row in table_rows(text) if row[0].startswith("`--")]
    flags = {row[0].strip("`"): row[1] for row in rows}
    assert len(flags) == len(rows), "a flag is there twice"
    return flags


def as_flag(field):
    return cache.flag_of(field.removeprefix("--"))


def as_shown(flags):
    return {flag: shown(default) for flag, default in flags.items()}


def test_every_flag_of_craft_train_with_its_default():
    from lerobot_craft.training.config import CraftConfig
    from lerobot_craft.training.estimate import EstimateConfig

    text = section(PAGE, "craft train").replace(section(PAGE, DOCUMENTS), "")
    known = defaults_of(CraftConfig, "craft.") | {"--estimate": None} | defaults_of(EstimateConfig, "estimate.")
    assert len(known) > 60
    assert told(text) == as_shown(known)


def test_what_hidden_states_change():
    from lerobot_craft.training.config import CraftConfig, DocumentsConfig

    usual, documents = (defaults_of(cls, "craft.") for cls in (CraftConfig, DocumentsConfig))
    changed = {flag: default for flag, default in documents.items() if default != usual[flag]}
    assert told(section(PAGE, DOCUMENTS)) == as_shown(changed)


def test_every_flag_of_cache_build_with_its_default():
    from lerobot_craft.anchors.recipe import BuildConfig

    known = {as_flag(field): default for field, default in defaults_of(BuildConfig).items()}
    assert told(section(PAGE, "craft cache build")) == as_shown(known)


def test_every_flag_of_eval_with_its_default():
    from lerobot_craft.lerobot_api.env_flags import EvalFlags

    flags = told(section(PAGE, "craft eval"))
    assert flags.pop("--env.type") == "required"
    assert flags.pop("--env.discover_packages_path") == "unset"
    own = {flag: default for flag, default in defaults_of(EvalFlags).items() if not flag.startswith("--env.")}
    assert flags == as_shown(own)


def test_every_flag_of_listen_with_its_default():
    from lerobot_craft.evaluation.acting import ListenFlags

    assert told(section(PAGE, "craft listen")) == as_shown(defaults_of(ListenFlags))


def test_every_flag_of_remember_with_its_default():
    from lerobot_craft.lerobot_api.env_flags import RememberFlags

    flags = told(section(PAGE, "craft remember"))
    for flag in ("--env.type", "--env.discover_packages_path", "--list", "--verify", "--forget"):
        assert flags.pop(flag) == "unset"
    own = {flag: default for flag, default in defaults_of(RememberFlags).items() if not flag.startswith("--env.")}
    assert flags == as_shown(own)


@pytest.mark.parametrize("verb", [bench, demo, report, doctor], ids=lambda verb: verb.__name__.rpartition(".")[2])
def test_every_option_of_the_other_verbs_with_its_default(verb):
    title = f"craft {verb.__name__.rpartition('.')[2]}"
    assert told(section(PAGE, title)) == as_shown(options_of(verb.run))


def test_the_options_of_tiny():
    from lerobot_craft.tiny.__main__ import main

    assert told(section(PAGE, "python -m lerobot_craft.tiny")) == as_shown(options_of(main))


def test_every_line_says_what_its_flag_means():
    empty = [row[0] for row in table_rows(PAGE.replace(section(PAGE, DOCUMENTS), "")) if not row[-1]]
    assert empty == []


def test_every_verb_has_a_section():
    from lerobot_craft.cli import VERBS

    assert [verb for verb in VERBS if f"\n## craft {verb}" not in PAGE] == []
