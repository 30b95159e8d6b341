import runpy

import pytest

from tests.examples.reading import EXAMPLES


@pytest.fixture
def example(process_as_it_was, monkeypatch, tmp_path):
    """Function that runs an example with arguments, in an empty directory: what its `main` returns."""
    monkeypatch.chdir(tmp_path)
    return lambda name, *arguments: runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))
