import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when transformers is imported
# Small models: a second thread costs more than it gives. Of processes that tests start too: bits depend on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

pytest_plugins = [
    "tests.anchor_fixtures",
    "tests.faults.tally",
    "tests.memory_fixtures",
    "tests.train_fixtures",
    "tests.warm_process",
]

# One seed for all: a failure on one machine is a failure on every machine.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("repeatable")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _shares_the_processor():
    """No test may leave a real-time process behind, as the AV1 encoder does: on two cores all later ones would wait."""
    yield
    if hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        pytest.fail("this test left a real-time process behind: record videos within lerobot_api.ordinary_priority")
