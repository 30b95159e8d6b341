"""Statistics kept, merged and replaced: by hand, against lerobot's own sums, and in the six policies' processors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lerobot_craft.anchors.teacher import fingerprint, normalizer_stats
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.pretrained import load_policy_config
from lerobot_craft.lerobot_api.processors import normalization_modes
from lerobot_craft.training.normalization import as_stats, check_features, make_processors, stats_for
from tests.anchor_fixtures import POLICIES

CPU = torch.device("cpu")
STATE, CAMERA = "observation.state", "observation.images.top"
MODES = {STATE: "MEAN_STD", "action": "QUANTILES", CAMERA: "IDENTITY"}


def stats_of(rows, *only):
    """What lerobot would write of these rows [N, D]."""
    known = {"mean": rows.mean(0), "std": rows.std(0), "min": rows.min(0), "max": rows.max(0)}
    known |= {f"q{percent:02}": np.percentile(rows, percent, axis=0) for percent in (1, 10, 50, 90, 99)}
    known["count"] = np.array([len(rows)])
    return {name: torch.as_tensor(known[name], dtype=torch.float32) for name in only or known}


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return rng.normal(0, 1, (300, 3)), rng.normal([1, 0, -4], [0.1, 3, 1], (100, 3))


def test_keep_is_the_teachers_and_replace_is_the_new(rows):
    teacher, new = ({STATE: stats_of(part)} for part in rows)
    assert stats_for("keep", teacher, new, MODES) is teacher
    assert stats_for("replace", teacher, new, MODES) is new


def test_merged_mean_and_std_are_those_of_all_rows(rows):
    merged = stats_for("merge", *({STATE: stats_of(part)} for part in rows), MODES)[STATE]
    together = stats_of(np.concatenate(rows))
    for stat in ("mean", "std", "min", "max", "count"):
        torch.testing.assert_close(merged[stat], together[stat], rtol=1e-5, atol=1e-6)


def test_merged_means_agree_with_lerobots_own_aggregation(rows):
    from lerobot.datasets.compute_stats import aggregate_stats

    parts = [{STATE: stats_of(part)} for part in rows]
    merged = stats_for("merge", *parts, MODES)[STATE]
    lerobots = aggregate_stats([{STATE: {k: v.double().numpy() for k, v in part[STATE].items()}} for part in parts])
    for stat in ("mean", "std", "min", "max", "count", "q50"):
        np.testing.assert_allclose(merged[stat].numpy(), lerobots[STATE][stat], rtol=1e-5, atol=1e-6)


def test_merged_quantiles_hold_the_range_of_both(rows):
    one, other = (stats_of(part) for part in rows)
    merged = stats_for("merge", {"action": one}, {"action": other}, MODES)["action"]
    for low in ("q01", "q10"):
        assert torch.equal(merged[low], torch.minimum(one[low], other[low]))
    for high in ("q90", "q99"):
        assert torch.equal(merged[high], torch.maximum(one[high], other[high]))


def test_without_counts_both_sides_weigh_the_same_and_the_user_is_told(rows, caplog):
    one, other = stats_of(rows[0], "mean", "std"), stats_of(rows[1])
    merged = stats_for("merge", {STATE: one}, {STATE: other}, MODES)[STATE]
    torch.testing.assert_close(merged["mean"], (one["mean"] + other["mean"]) / 2)
    assert "count the same" in caplog.text
    assert STATE in caplog.text
    assert set(merged) == {"mean", "std"}, "what one side lacks would describe the other alone"


def test_a_feature_of_one_side_is_taken_as_it_is(rows):
    one, other = (stats_of(part) for part in rows)
    merged = stats_for("merge", {STATE: one, "index": one}, {"action": other, "index": other, "extra": other}, MODES)
    assert set(merged) == {STATE, "action", "index"}
    assert torch.equal(merged[STATE]["mean"], one["mean"])
    assert torch.equal(merged["action"]["mean"], other["mean"])
    assert torch.equal(merged["index"]["mean"], one["mean"]), "not normalized: of no interest"


@pytest.mark.parametrize("policy", ["keep", "merge"])
def test_another_number_of_dimensions_is_refused(rows, policy):
    one, other = stats_of(rows[0]), stats_of(rows[1][:, :2])
    with pytest.raises(CraftError, match=r"observation.state has 2 dimensions in the new dataset and 3"):
        stats_for(policy, {STATE: one}, {STATE: other}, MODES)


def test_merging_without_the_modes_statistics_is_refused(rows):
    one, other = stats_of(rows[0]), stats_of(rows[1], "mean", "std", "count")
    with pytest.raises(CraftError, match=r"no q01 and q99.*recompute_stats"):
        stats_for("merge", {"action": one}, {"action": other}, MODES)


def test_flat_image_statistics_join_those_with_axes():
    one = {CAMERA: {"mean": torch.zeros(3, 1, 1), "std": torch.ones(3, 1, 1), "count": torch.ones(1, 1, 1)}}
    other = {CAMERA: {"mean": torch.ones(3), "std": torch.ones(3), "count": torch.ones(1)}}
    merged = stats_for("merge", one, other, {CAMERA: "MEAN_STD"})[CAMERA]
    assert torch.equal(merged["mean"], torch.full((3, 1, 1), 0.5))


def test_the_datasets_statistics_get_the_policys_names():
    stats = as_stats({"observation.joints": {"mean": np.arange(2)}}, {"observation.joints": STATE})
    assert stats[STATE]["mean"].tolist() == [0, 1]
    assert as_stats(None) == {}


@pytest.fixture(scope="module")
def new_data(anchor_data):
    from lerobot_craft.lerobot_api.datasets import open_metadata

    return open_metadata("local/new", anchor_data / "new")


@pytest.fixture
def student(teachers, checkpoints, new_data):
    """Function from a policy type to lerobot's settings and the policy, after `make_policy` had the new features."""
    from lerobot.utils.feature_utils import dataset_to_policy_features

    def made(policy_type, **settings):
        config = load_policy_config(checkpoints(policy_type))
        config.output_features = {"action": dataset_to_policy_features(new_data.features)["action"]}
        cfg = SimpleNamespace(policy=config, resume=False, rename_map={}, **settings)
        return cfg, SimpleNamespace(config=config)

    return made


@pytest.mark.parametrize("policy_type", POLICIES)
def test_keep_leaves_the_teachers_fingerprint(policy_type, student, teachers, new_data):
    teacher = teachers(policy_type)
    processors = make_processors(*student(policy_type), "keep", new_data.stats, CPU)
    assert fingerprint(teacher.policy, *processors) == teacher.fingerprint


@pytest.mark.parametrize("policy_type", POLICIES)
def test_merge_changes_the_statistics_alone_and_on_both_sides(policy_type, student, teachers, new_data):
    teacher = teachers(policy_type)
    before, after = make_processors(*student(policy_type), "merge", new_data.stats, CPU)
    present = fingerprint(teacher.policy, before, after)
    assert {part for part in present if present[part] != teacher.fingerprint[part]} == {"stats"}
    old, new = normalizer_stats(teacher.preprocessor)["action"], as_stats(new_data.stats)["action"]
    for processor in (before, after):
        merged = normalizer_stats(processor)["action"]
        assert torch.equal(merged["max"], torch.maximum(old["max"], new["max"].float()))
        assert merged["count"].sum() == old["count"].sum() + new["count"].sum()
    action = torch.zeros(1, 4)
    assert not torch.equal(after(action), teacher.postprocessor(action)), "the merged ones are used, not only held"


@pytest.mark.parametrize("policy_type", ["pi0_fast", "act"])
def test_replace_takes_the_new_data(policy_type, student, new_data):
    before, after = make_processors(*student(policy_type), "replace", new_data.stats, CPU)
    for processor in (before, after):
        torch.testing.assert_close(
            normalizer_stats(processor)["action"]["mean"], as_stats(new_data.stats)["action"]["mean"].float()
        )


@pytest.mark.parametrize("policy", ["keep", "merge", "replace"])
def test_a_resumed_run_goes_on_with_the_checkpoints_statistics(policy, student, teachers, new_data):
    cfg, policy_at_hand = student("act")
    cfg.resume = True
    before, _ = make_processors(cfg, policy_at_hand, policy, new_data.stats, CPU)
    assert torch.equal(
        normalizer_stats(before)["action"]["mean"], normalizer_stats(teachers("act").preprocessor)["action"]["mean"]
    )


def test_renamed_data_meet_the_kept_processors(student, teachers, new_data):
    cfg, policy_at_hand = student("act")
    cfg.rename_map = {"observation.joints": STATE}
    before, _ = make_processors(cfg, policy_at_hand, "keep", new_data.stats, CPU)
    raw = {"observation.joints": torch.ones(1, 4), CAMERA: torch.ones(1, 3, 64, 64)}
    teachers_own = teachers("act").preprocessor({STATE: torch.ones(1, 4), CAMERA: torch.ones(1, 3, 64, 64)})
    assert torch.equal(before(raw)[STATE], teachers_own[STATE])


def test_relative_actions_do_not_go_with_kept_statistics(student, new_data):
    cfg, policy_at_hand = student("pi0")
    cfg.policy.use_relative_actions = True
    with pytest.raises(CraftError, match="use_relative_actions=true, but the teacher"):
        make_processors(cfg, policy_at_hand, "keep", new_data.stats, CPU)


def test_modes_are_those_of_the_policy(teachers):
    assert normalization_modes(teachers("pi0_fast").preprocessor) == {
        CAMERA: "IDENTITY",
        STATE: "MIN_MAX",
        "action": "MIN_MAX",
    }


def test_the_policys_own_dataset_is_accepted(teachers, new_data):
    check_features(teachers("smolvla").config, new_data.features, {})


@pytest.mark.parametrize(("policy_type", "refused"), [("act", True), ("pi0", False)])
def test_a_missing_camera_is_refused_unless_the_policy_masks_it(policy_type, refused, checkpoints, new_data, caplog):
    config = load_policy_config(checkpoints(policy_type))
    config.input_features["observation.images.side"] = config.input_features[CAMERA]
    if refused:
        with pytest.raises(CraftError, match=r"has no observation.images.side, which this act reads"):
            check_features(config, new_data.features, {})
    else:
        check_features(config, new_data.features, {})
        assert "the policy masks these cameras" in caplog.text


def test_a_policy_without_an_adapter_is_left_to_lerobots_own_check_of_cameras(new_data):
    from lerobot.policies.vqbet.configuration_vqbet import VQBeTConfig
    from lerobot.utils.feature_utils import dataset_to_policy_features

    features = dataset_to_policy_features(new_data.features)
    inputs = {STATE: features[STATE], CAMERA: features[CAMERA], "observation.images.side": features[CAMERA]}
    config = VQBeTConfig(device="cpu", input_features=inputs, output_features={"action": features["action"]})
    check_features(config, new_data.features, {})
