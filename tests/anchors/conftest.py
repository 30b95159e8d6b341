import shutil

import pytest

from tests.anchors.teacher_checkpoints import save_act, save_vla


@pytest.fixture(scope="session")
def act_as_saved(tmp_path_factory):
    return save_act(tmp_path_factory.mktemp("act"))


@pytest.fixture
def act(act_as_saved, tmp_path):
    """A copy of the ACT checkpoint that a test may damage."""
    return shutil.copytree(act_as_saved, tmp_path / "act")


@pytest.fixture(scope="session")
def pi0_fast_as_saved(tmp_path_factory):
    return save_vla("pi0_fast", tmp_path_factory.mktemp("pi0_fast"))


@pytest.fixture
def pi0_fast(pi0_fast_as_saved, tmp_path):
    """A copy of the pi0_fast checkpoint that a test may damage; its tokenizers stay where they were."""
    return shutil.copytree(pi0_fast_as_saved, tmp_path / "pi0_fast")
