from dataclasses import replace

import pytest

from lerobot_craft.doctor import Status, check
from lerobot_craft.doctor.check import (
    EXTRAS,
    INSTALL,
    Need,
    check_craft,
    check_extra,
    check_lerobot,
    check_python,
    check_requirements,
    installed_version,
    needs,
)

HERE = Need("torch", ">=2.7,<2.12", "2.11.0", fits=True)
GONE = Need("diffusers", ">=0.35", None, fits=False)
UNFIT = Need("torch", ">=2.7,<2.12", "2.12.0", fits=False)


@pytest.mark.parametrize(
    ("python", "status"), [((3, 12, 0), "ok"), ((3, 13, 2), "ok"), ((3, 11, 9), "missing"), ((2, 14, 0), "missing")]
)
def test_python(surroundings, python, status):
    assert check_python(replace(surroundings, python=python)).status == status


def test_an_old_python_is_fixed_by_a_newer_one(surroundings):
    check = check_python(replace(surroundings, python=(3, 10, 4)))
    assert check.value == "3.10.4 on Linux x86_64, older than 3.12"
    assert "--python 3.12" in check.remedy


@pytest.mark.parametrize(("distribution", "status"), [("0.1.0", "ok"), (None, "missing"), ("0.0.9", "warn")])
def test_craft(distribution, status):
    assert check_craft("0.1.0", distribution).status == status


@pytest.mark.parametrize(
    ("installed", "supported", "env", "failure", "status", "remedy"),
    [
        ("0.6.1", "0.6.1", {}, None, "ok", None),
        ("0.6.2", "0.6.1", {}, None, "missing", "pip install 'lerobot==0.6.1'"),
        (None, "0.6.1", {}, None, "missing", "pip install 'lerobot==0.6.1'"),
        (None, None, {}, None, "missing", INSTALL),
        ("0.6.1", None, {}, None, "warn", INSTALL),
        ("0.6.1", "0.6.1", {}, "bad magic", "missing", "pip install --force-reinstall --no-deps 'lerobot==0.6.1'"),
        (
            "0.6.1",
            "0.6.1",
            {"LEROBOT_HOME": "/data"},
            None,
            "missing",
            "export HF_LEROBOT_HOME=$LEROBOT_HOME && unset LEROBOT_HOME",
        ),
    ],
)
def test_lerobot(installed, supported, env, failure, status, remedy):
    check = check_lerobot(installed, supported, env, failure)
    assert (check.status, check.remedy) == (status, remedy)


def test_requirements():
    assert check_requirements([HERE]).status is Status.OK
    unfit = check_requirements([HERE, UNFIT])
    assert (unfit.status, unfit.value) == (Status.WARN, "torch 2.12.0 (needs >=2.7,<2.12)")
    gone = check_requirements([UNFIT, GONE])
    assert (gone.status, gone.value) == (Status.MISSING, "not installed: diffusers")
    assert check_requirements([]).status is Status.MISSING


def test_an_absent_extra_is_a_note_with_its_line():
    check = check_extra("diffusion", [GONE])
    assert (check.status, check.remedy) == (Status.NOTE, "pip install 'lerobot-craft[diffusion]'")
    assert check.value == "for diffusion: diffusers not installed"
    assert check_extra("diffusion", [UNFIT]).status is Status.WARN
    assert check_extra("diffusion", [HERE]).status is Status.OK


def test_the_needs_are_those_of_the_distribution():
    required = {need.name: need for need in needs()}
    # Named by craft, by lerobot, and by lerobot's extras one and two levels deep.
    assert {"safetensors", "lerobot", "draccus", "wandb", "accelerate", "datasets", "av"} <= set(required)
    assert required["torch"].installed == installed_version("torch")
    assert required["lerobot"].fits


def test_an_extra_needs_what_it_adds():
    added = {extra: {need.name for need in needs(extra)} for extra in EXTRAS}
    assert "transformers" in added["pi"] & added["smolvla"] & added["peft"]
    assert "diffusers" in added["diffusion"]
    assert "peft" in added["peft"]
    assert {"metaworld", "mujoco"} <= added["bench"]
    assert not {need.name for need in needs()} & added["pi"]


def test_every_extra_is_one_of_the_distribution():
    import importlib.metadata

    assert set(EXTRAS) == set(importlib.metadata.metadata("lerobot-craft").get_all("Provides-Extra")) - {"all"}


def test_of_two_lines_the_one_that_does_not_fit_decides():
    assert check._by_name([HERE, UNFIT, HERE])["torch"] is UNFIT


def test_a_line_names_the_clone_where_there_is_one_and_else_the_distribution(monkeypatch):
    monkeypatch.setattr(check, "_IS_CLONE", True)
    assert check.installing("pip install av CRAFT") == "pip install av .  # in a clone of CRaFT"
    monkeypatch.setattr(check, "_IS_CLONE", False)
    assert check.installing("pip install av CRAFT") == "pip install av lerobot-craft"
