import importlib

import pytest

from lerobot_craft.policies import adapter, adapter_for
from tests.examples.reading import EXAMPLES, frames_by_dataset
from tests.policies.case import ELSEWHERE, cases, make_subject
from tests.policies.test_adding_a_policy import INVARIANTS


@pytest.fixture(scope="module")
def own():
    """The example's module. It is imported once, because lerobot takes a type once; its adapter is known here only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        patch.setattr(adapter, "_registered", dict(adapter._registered))
        module = importlib.import_module("own_policy_adapter")
        adapter.register_adapter(module.NudgeAdapter)  # again, where the module was imported before
        yield module


@pytest.fixture(scope="module")
def subject(own, tmp_path_factory):
    (case,) = own.cases()
    return make_subject(case, tmp_path_factory.mktemp("nudge"))


def test_it_learns_and_keeps_through_the_public_commands(own, process_as_it_was, tmp_path, capsys):
    evaluation = own.learn_and_keep(tmp_path, small=True)
    assert [row.name for row in evaluation.rows] == ["before", "plain", "CRaFT"]
    assert frames_by_dataset(tmp_path / "anchors") == {"craft/old": 20, "craft/new": 4}
    assert "| CRaFT |" in capsys.readouterr().out


@pytest.mark.parametrize("invariant", INVARIANTS.values(), ids=INVARIANTS.keys())
def test_the_adapter_satisfies(own, subject, invariant):
    assert type(adapter_for(subject.policy.config)) is own.NudgeAdapter
    subject.policy.train()
    invariant(subject)


def test_the_invariants_find_the_case(own, monkeypatch):
    monkeypatch.setenv(ELSEWHERE, f"{own.__name__}:cases")
    assert [case.name for case in cases()] == ["nudge"]


@pytest.mark.slow  # another process that imports lerobot; test_the_adapter_satisfies is its short sibling
def test_the_invariants_run_as_the_example_runs_them(own):
    assert own.check_adapter() == 0


@pytest.mark.slow  # a minute of training
@pytest.mark.timeout(1200)
def test_at_full_size_plain_fine_tuning_forgets_and_craft_keeps(own, process_as_it_was, tmp_path):
    before, plain, craft = own.learn_and_keep(tmp_path / "out", small=False).rows
    assert before.rate("faucet-open") >= 0.8
    assert plain.rate("faucet-open") <= 0.3
    assert craft.rate("faucet-open") >= 0.8
    assert min(plain.rate("faucet-close"), craft.rate("faucet-close")) >= 0.6
