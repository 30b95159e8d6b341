from pathlib import Path

import pytest

from lerobot_craft.doctor import Surroundings


@pytest.fixture
def surroundings():
    """A plain Linux container: root, apt, no GPU, nothing set. Tests change what they are about."""
    return Surroundings(
        env={},
        system="Linux",
        machine="x86_64",
        python=(3, 12, 1),
        is_root=True,
        tools=frozenset({"apt-get"}),
        here=Path("/project"),
        home=Path("/home/someone"),
    )
