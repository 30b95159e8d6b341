import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when transformers is imported

import pytest

from tests.policies.case import cases, make_subject


@pytest.fixture(scope="session")
def subjects(tmp_path_factory):
    """Policies by case and config overrides, each made once. Tests leave them as they found them."""
    made = {}

    def of(case, **overrides):
        key = (case.name, *sorted(overrides.items()))
        if key not in made:
            made[key] = make_subject(case, tmp_path_factory.mktemp(case.name), **overrides)
        return made[key]

    return of


@pytest.fixture(scope="session")
def named(subjects):
    """Policies of ours by the name of their case."""

    def of(name, **overrides):
        from tests.policies.lerobot_cases import CASES

        return subjects({case.name: case for case in CASES}[name], **overrides)

    return of


@pytest.fixture(scope="session", params=cases(), ids=str)
def subject(request, subjects):
    """Every policy that must satisfy the invariants."""
    return subjects(request.param)


@pytest.fixture(autouse=True)
def _all_trainable(request):
    """All parameters trainable and in train mode, before each test that takes a subject."""
    if "subject" in request.fixturenames:
        subject = request.getfixturevalue("subject")
        subject.policy.train()
        subject.policy.requires_grad_(True)
