"""The public names: all there, typed, documented, and none of them imported before it is used."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lerobot_craft

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
# The functions that the original CRaFT notes name, and the class of their flags.
SPECIFIED = {
    "CraftConfig",
    "compute_dot",
    "compute_hidden_retention_loss",
    "extract_student_hidden_features",
    "identify_image_tokens",
    "merge_grads",
    "pool_hidden_states",
    "project_if_conflict",
    "update_lambda",
}


@pytest.mark.parametrize("name", lerobot_craft.__all__)
def test_a_public_name_is_importable_and_documented(name):
    found = getattr(lerobot_craft, name)
    assert inspect.getdoc(found)
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")


def test_every_specified_function_is_public():
    assert set(lerobot_craft.__all__) >= SPECIFIED


@pytest.mark.parametrize("name", sorted(SPECIFIED))
def test_a_specified_function_has_types(name):
    signature = inspect.signature(getattr(lerobot_craft, name))
    kinds = [parameter.annotation for parameter in signature.parameters.values()]
    assert inspect.Signature.empty not in [*kinds, signature.return_annotation]


@pytest.mark.parametrize("name", sorted(SPECIFIED - {"CraftConfig", "update_lambda"}))
def test_a_specified_function_says_its_shapes(name):
    assert re.search(r"\[(B|T|shape)", inspect.getdoc(getattr(lerobot_craft, name)))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'retain'"):
        _ = lerobot_craft.retain


def test_nothing_is_imported_before_it_is_used():
    code = "import lerobot_craft, sys; sys.exit('torch' in sys.modules or 'lerobot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_loop_on_the_page_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    retention_loss = float(ran.stdout.split()[0])
    assert 0 < retention_loss < 10
