"""What every adapter must satisfy, whoever wrote it: CRAFT_POLICY_CASES=package.module:CASES runs it on yours."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lerobot_craft.core import drift, pool_hidden_states, token_cross_entropy
from lerobot_craft.errors import CraftError
from tests.policies.case import pick_rows, rngs
from tests.policies.observing import (
    anchor_values,
    assert_close,
    assert_no_drift,
    attention_implementations,
    checkpointing,
    gradients,
)

# They add one number to all scores that a softmax compares, which it ignores: what gradient they get is rounding.
IGNORED_BY_SOFTMAX = ("self_attn.k_proj.bias", "pool.nets.bias")
LANGUAGE = ("observation.language.tokens", "observation.language.attention_mask")


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_unchanged_student_has_no_drift(subject, subjects, precision, checkpointed):
    if precision == "bfloat16":
        subject = subjects(subject.case, **subject.case.bfloat16)
    student = copy.deepcopy(subject.policy)
    bfloat16 = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with checkpointing(student, checkpointed), bfloat16:
        fixed = subject.draw()
        with torch.no_grad():
            teacher_values = anchor_values(subject, subject.policy, fixed)
        assert_no_drift(anchor_values(subject, student, fixed), teacher_values)


def test_a_changed_student_has_drift_at_every_layer_and_at_the_output(subject):
    student, fixed = copy.deepcopy(subject.policy), subject.draw()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.01)
    teacher_values = anchor_values(subject, subject.policy, fixed)
    for name, (values, mask) in anchor_values(subject, student, fixed).items():
        assert drift(values, teacher_values[name][0], mask=mask) > 0, name


def test_acting_in_between_changes_nothing(subject):
    fixed = subject.draw()
    before = anchor_values(subject, subject.policy, fixed)
    student = copy.deepcopy(subject.policy)  # acting leaves traces in a policy
    student.reset()
    student.predict_action_chunk({key: value for key, value in subject.batch.items() if key != "action"})
    assert_no_drift(anchor_values(subject, student, fixed), before)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_mode_before_does_not_matter_and_is_restored(subject, training):
    fixed = subject.draw()
    expected = anchor_values(subject, subject.policy, fixed)
    subject.policy.train(training)
    modes = {name: module.training for name, module in subject.policy.named_modules()}
    settings = attention_implementations(subject.policy)
    assert_no_drift(anchor_values(subject, subject.policy, subject.draw()), expected)
    assert {name: module.training for name, module in subject.policy.named_modules()} == modes
    assert attention_implementations(subject.policy) == settings


def test_several_draws_share_what_does_not_depend_on_them(subject):
    with subject.anchor_mode(), torch.no_grad():
        draws = subject.adapter.fix(subject.policy, subject.batch, rngs(len(subject)), 3)
        alone = [subject.adapter.output(subject.policy, subject.batch, fixed) for fixed in draws]
        together = subject.adapter.outputs(subject.policy, subject.batch, draws)
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.mask, other.mask)


def test_no_hook_stays_behind(subject):
    anchor_values(subject, subject.policy, subject.draw())
    for name, module in subject.policy.named_modules():
        assert not module._forward_pre_hooks, name
        assert not module._forward_hooks, name


def test_no_checkpointing_context_stays_behind(subject):
    weight = torch.nn.Parameter(torch.randn(3))
    gc.disable()
    try:
        with subject.anchor_mode(), checkpointing(subject.policy, True):
            subject.adapter.hidden(subject.policy, subject.batch, subject.backbone()[:1])
        assert torch.equal((weight * weight).grad_fn._saved_self, weight)
    finally:
        gc.enable()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointing"])
def test_hidden_states_and_their_gradients_are_those_of_the_policys_own_pass(subject, checkpointed):
    policy = subject.policy
    with subject.anchor_mode(), checkpointing(policy, checkpointed):
        for layer in {subject.backbone()[0], subject.backbone()[-1]}:
            tokens = subject.adapter.hidden(policy, subject.batch, [layer])[layer]
            own = subject.case.full_pass(policy, subject.batch)[layer][:, : tokens.hidden.shape[1]]
            torch.testing.assert_close(tokens.hidden[tokens.mask], own[tokens.mask], rtol=1e-6, atol=1e-6)
            expected = gradients(policy, (own, tokens.mask))
            for name, gradient in gradients(policy, (tokens.hidden, tokens.mask)).items():
                if not name.endswith(IGNORED_BY_SOFTMAX):
                    error = (gradient - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)
                    assert error < 1e-6, f"{name} at layer {layer}: {error:.1e}"


def test_nothing_runs_that_the_wanted_layer_does_not_need(subject):
    policy, layer = subject.policy, subject.backbone()[0]
    needed = set(subject.adapter.reached_parameters(policy, [layer]))
    ran = set()
    handles = []
    for name, module in policy.named_modules():
        if parameters := frozenset(f"{name}.{p}" for p, _ in module.named_parameters(recurse=False)):
            handles.append(module.register_forward_hook(lambda *_, names=parameters: ran.add(names)))
    with subject.anchor_mode():
        subject.adapter.hidden(policy, subject.batch, [layer])
    for handle in handles:
        handle.remove()
    assert ran
    assert not [parameters for parameters in ran if not parameters & needed]


def test_spans_hold_every_real_token_once(subject):
    with subject.anchor_mode():
        found = subject.adapter.hidden(subject.policy, subject.batch, subject.layers(), subject.draw())
    for layer, tokens in found.items():
        batch_size, length = tokens.mask.shape
        assert tokens.hidden.shape[:2] == (batch_size, length) == (len(subject), tokens.hidden.shape[1])
        spans = [*tokens.spans.image, tokens.spans.language, tokens.spans.state, tokens.spans.action]
        covered = torch.zeros(length, dtype=torch.long)
        for start, stop in filter(None, spans):
            assert 0 <= start < stop <= length
            covered[start:stop] += 1
        assert covered.max() == 1
        outside = (tokens.mask & (covered == 0)).sum(dim=1)
        expected = 0 if layer.stack else subject.case.tokens_outside_spans
        assert (outside == expected).all()


def test_a_row_does_not_depend_on_the_batch_around_it(subject):
    fixed = subject.draw()
    whole = anchor_values(subject, subject.policy, fixed)
    for row in range(len(subject)):
        alone = subject.preprocessed([row])
        with subject.anchor_mode():
            layer = subject.backbone()[-1]
            tokens = subject.adapter.hidden(subject.policy, alone, [layer])[layer]
            output = subject.adapter.output(subject.policy, alone, {k: pick_rows(v, [row]) for k, v in fixed.items()})
        hidden, mask = whole[f"layer {layer} alone"]
        assert_close(tokens.hidden[tokens.mask], hidden[row][mask[row]])  # alone, it may carry less padding
        values, mask = whole["output"]
        assert_close(output.values[output.mask], values[row][mask[row]])


def test_longer_padding_changes_nothing(subject):
    if not subject.adapter.reads_instruction:
        pytest.skip("this policy reads no instruction")
    if not subject.batch.keys() & set(LANGUAGE):
        pytest.skip("this policy reads the instruction itself, not padded tokens of it")
    fixed, layer = subject.draw(), subject.backbone()[-1]
    padded = {**subject.batch, **{key: F.pad(subject.batch[key], (0, 5)) for key in LANGUAGE}}
    with subject.anchor_mode():
        short, long = (subject.adapter.hidden(subject.policy, b, [layer])[layer] for b in (subject.batch, padded))
        outputs = [subject.adapter.output(subject.policy, batch, fixed) for batch in (subject.batch, padded)]
    assert_close(long.hidden[long.mask], short.hidden[short.mask])
    assert_close(outputs[1].values[outputs[1].mask], outputs[0].values[outputs[0].mask])


@pytest.mark.parametrize("pooling", ["mean_image_tokens", "mean_masked", "last_token", "none"])
def test_what_stands_at_padding_cannot_leak_into_drift(subject, pooling):
    layer = subject.backbone()[-1]
    with subject.anchor_mode():
        tokens = subject.adapter.hidden(subject.policy, subject.batch, [layer])[layer]
    if pooling == "mean_image_tokens" and not tokens.spans.image:
        pytest.skip("this policy has no cameras")
    padding = ~tokens.mask[..., None]
    spoilt = tokens.hidden.masked_fill(padding, float("nan"))
    teacher = pool_hidden_states(tokens.hidden.detach() + 0.1, tokens.mask, pooling, tokens.spans)
    drifts = []
    for hidden in (tokens.hidden, spoilt):
        pooled = pool_hidden_states(hidden, tokens.mask, pooling, tokens.spans)
        assert pooled.valid.any(dim=-1).all()
        drifts.append(drift(pooled.features, teacher.features, mask=pooled.valid))
    assert drifts[1] == drifts[0]
    parameters = list(subject.policy.parameters())
    found = torch.autograd.grad(drifts[1], parameters, allow_unused=True)
    assert all(torch.isfinite(gradient).all() for gradient in found if gradient is not None)


def test_a_draw_depends_on_its_own_row_and_seed_only(subject):
    adapter, policy, count = subject.adapter, subject.policy, len(subject)
    with subject.anchor_mode():
        first, second = adapter.fix(policy, subject.batch, rngs(count), draws=2)
        alone = [adapter.fix(policy, subject.preprocessed([i]), [rngs(count)[i]])[0] for i in range(count)]
        other = adapter.fix(policy, subject.batch, rngs(count, seed=1))[0]
    assert set(first) >= set(adapter.fixed_names)
    is_random = adapter.output_kind in ("velocity", "noise")
    for name in adapter.fixed_names:
        values = first[name]
        assert len(values) == count
        assert torch.equal(values, torch.cat([draw[name] for draw in alone])), name
        assert torch.equal(values, second[name]) != is_random, name
        assert torch.equal(values, other[name]) != is_random, name


def test_a_draw_without_demonstration_is_repeatable_row_by_row(subject):
    if not subject.adapter.reads_instruction:
        pytest.skip("frames under other instructions are for policies that read one")
    rows = range(len(subject))
    keys = [key for key in subject.batch if not key.startswith("action")]
    with subject.anchor_mode():
        together = subject.adapter.fix(subject.policy, {k: subject.batch[k] for k in keys}, rngs(len(rows)))[0]
        for row in rows:
            batch = subject.preprocessed([row])
            alone = subject.adapter.fix(subject.policy, {k: batch[k] for k in keys}, [rngs(len(rows))[row]])[0]
            for name, values in alone.items():
                # Own actions are sampled through the network, so the batch's arithmetic shows in the last digits.
                torch.testing.assert_close(values[0], together[name][row], rtol=2e-3, atol=1e-4)


def test_the_error_against_the_demonstration_is_the_policys_own_loss(subject):
    with subject.anchor_mode():
        loss, fixed = subject.case.training_loss(subject.policy, subject.batch)
        demonstration = subject.adapter.demonstration(subject.policy, subject.batch, fixed)
        output = subject.adapter.output(subject.policy, subject.batch, demonstration.fixed)
    assert torch.equal(output.mask & demonstration.mask, demonstration.mask)
    mask = demonstration.mask
    if subject.adapter.output_kind == "logits":
        error = F.cross_entropy(output.values[mask], demonstration.values[mask])
        per_row = token_cross_entropy(output.values, demonstration.values, mask=mask, reduction="none")
        torch.testing.assert_close((per_row * mask.sum(1)).sum() / mask.sum(), error)
    elif subject.adapter.output_kind == "actions":
        error = drift(output.values, demonstration.values, "l1", mask=mask)
    else:
        error = drift(output.values, demonstration.values, "mse", mask=mask)
    torch.testing.assert_close(error, loss, rtol=1e-4, atol=0)


def test_padded_actions_are_not_demonstrated(subject):
    if subject.adapter.output_kind == "logits":
        pytest.skip("tokens have a mask of their own")
    is_pad = torch.zeros_like(subject.batch["action_is_pad"])
    is_pad[0, -2:] = True
    batch = {**subject.batch, "action_is_pad": is_pad}
    with subject.anchor_mode():
        demonstration = subject.adapter.demonstration(subject.policy, batch, subject.draw())
    assert torch.equal(demonstration.mask, ~is_pad)


def test_exactly_the_declared_parameters_get_gradient(subject):
    policy, adapter, fixed = subject.policy, subject.adapter, subject.draw()
    by_stack = [adapter.resolve(policy, f"{stack}:all") for stack in adapter.stacks(policy)]
    chosen = {(stack[0],) for stack in by_stack} | {(stack[-1],) for stack in by_stack}
    chosen.add(tuple(stack[0] for stack in by_stack))  # of several stacks at once
    for layers in [None, *sorted(chosen)]:
        with subject.anchor_mode():
            if layers is None:
                found = [adapter.output(policy, subject.batch, fixed)]
            else:
                found = adapter.hidden(policy, subject.batch, layers, fixed).values()
            sizes = {n: g.abs().max().item() for n, g in gradients(policy, *(value[:2] for value in found)).items()}
        reached = {name for name, size in sizes.items() if size > 1e-7 * max(sizes.values())}
        declared = set(adapter.reached_parameters(policy, layers))
        unclear = {name for name in sizes if name.endswith(IGNORED_BY_SOFTMAX)}
        assert reached - unclear == declared - unclear, f"layers {layers}"


def test_layers_beyond_the_backbone_need_the_draw(subject):
    if not subject.adapter.fixed_names:
        pytest.skip("nothing is drawn for this policy")
    for layer in set(subject.layers()) - set(subject.backbone()):
        with pytest.raises(CraftError, match="depend on the noisy action"):
            subject.adapter.hidden(subject.policy, subject.batch, [layer])


def test_the_adapter_says_what_it_is(subject):
    adapter = subject.adapter
    assert adapter.output_kind in ("logits", "velocity", "noise", "actions")
    assert "" in adapter.stacks(subject.policy)
    if adapter.output_kind == "logits":
        fixed = subject.draw()
        labels, mask = adapter.token_labels(fixed)
        output = adapter.output(subject.policy, subject.batch, fixed)
        assert labels.shape == mask.shape == output.values.shape[:2]
        assert torch.equal(mask, output.mask)
    else:
        with pytest.raises(CraftError, match="token_ce is not defined"):
            adapter.token_labels({})
