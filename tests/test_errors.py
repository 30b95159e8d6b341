"""Errors name settings; whoever shows them knows the flags."""

import pickle

import pytest

from lerobot_craft.cli.flags import spelled
from lerobot_craft.errors import CraftError, setting

ERROR = CraftError(f"{setting('old_dataset.root')}=x is not there: give {setting('memory')}")


def test_an_error_names_settings_by_themselves():
    assert str(ERROR) == "old_dataset.root=x is not there: give memory"


def test_a_command_shows_its_flags():
    assert ERROR.told("--{}".format) == "--old_dataset.root=x is not there: give --memory"
    with pytest.raises(CraftError, match=r"^--craft\.old_dataset\.root=x is .* give --craft\.memory$") as refusal:
        _raise(ERROR.text)
    assert refusal.value.told("--{}".format) == str(refusal.value), "spelled once"


@spelled("--craft.{}".format)
def _raise(text):
    raise CraftError(text)


def test_settings_survive_another_error_and_another_process():
    again = CraftError(f"file: {ERROR.text}")
    assert again.told(str.upper) == "file: OLD_DATASET.ROOT=x is not there: give MEMORY"
    assert pickle.loads(pickle.dumps(ERROR)).told(str.upper) == ERROR.told(str.upper)  # noqa: S301
