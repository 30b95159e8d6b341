from types import SimpleNamespace

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.features import dimension_names, require_features, unread_cameras

TOP, SIDE, STATE = "observation.images.top", "observation.images.side", "observation.state"


def feature(kind, *shape):
    return SimpleNamespace(type=SimpleNamespace(value=kind), shape=shape)


def policy(**settings):
    return SimpleNamespace(
        type="pi0",
        input_features={
            TOP: feature("VISUAL", 3, 64, 64),
            SIDE: feature("VISUAL", 3, 64, 64),
            STATE: feature("STATE", 6),
        },
        output_features={"action": feature("ACTION", 7)},
        **settings,
    )


def dataset(*absent, **shapes):
    features = {TOP: (48, 48, 3), SIDE: (48, 48, 3), STATE: (6,), "action": (7,), "index": (1,)}
    shapes = {name: shapes.get(name.rpartition(".")[2], shape) for name, shape in features.items()}
    return {name: {"dtype": "float32", "shape": shape} for name, shape in shapes.items() if name not in absent}


def required(present, config=None, **options):
    options = {"masks_missing_cameras": False, "actions": True, **options}
    return require_features(config or policy(), present, dataset="me/mugs", **options)


def test_a_dataset_with_everything_lacks_nothing():
    assert required(dataset()) == []


def test_some_cameras_may_lack_where_the_policy_masks_them_but_not_all():
    assert required(dataset(SIDE), masks_missing_cameras=True) == [SIDE]
    for absent, masks in (([SIDE], False), ([TOP, SIDE, STATE], True), ([STATE], True)):
        with pytest.raises(CraftError, match=f"me/mugs has no {', '.join(absent)}, which this pi0 reads"):
            required(dataset(*absent), masks_missing_cameras=masks)


def test_empty_cameras_are_no_features_of_data():
    config = policy()
    config.input_features["observation.images.empty_camera_0"] = feature("VISUAL", 3, 64, 64)
    assert required(dataset(), config) == []


def test_actions_are_asked_for_only_where_they_are_needed():
    assert required(dataset("action"), actions=False) == []
    with pytest.raises(CraftError, match="has no action"):
        required(dataset("action"))


def test_the_remedy_renames_what_is_there():
    present = dataset(SIDE) | {"observation.images.wrist": {"shape": (48, 48, 3)}}
    with pytest.raises(CraftError) as refusal:
        required(present, rename_map={})
    assert f"""--rename_map='{{"observation.images.wrist": "{SIDE}"}}'""" in str(refusal.value)
    assert required(present, rename_map={"observation.images.wrist": SIDE}) == []
    with pytest.raises(CraftError) as refusal:
        required(present)
    assert "rename_map" not in str(refusal.value), "there is no such flag"


def test_actions_cannot_be_renamed():
    """lerobot's step renames observations only."""
    with pytest.raises(CraftError, match="has no action") as refusal:
        required({**dataset("action"), "controls": {"shape": (7,)}}, rename_map={"controls": "action"})
    assert "rename_map" not in str(refusal.value)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ({"state": (8,)}, r"observation.state has shape \[8\] instead of \[6\]"),
        ({"action": (6,)}, r"action has shape \[6\] instead of \[7\]"),
    ],
)
def test_another_robots_vectors_are_refused(shapes, sentence):
    with pytest.raises(CraftError, match=sentence):
        required(dataset(**shapes))
    with pytest.raises(CraftError, match=sentence):
        required(dataset(**shapes), policy(max_state_dim=32, max_action_dim=32))


def test_a_policy_of_no_robot_in_particular_takes_what_is_narrower():
    config = policy(max_state_dim=6, max_action_dim=7)
    assert required(dataset(state=(5,), action=(2,)), config) == []
    with pytest.raises(CraftError, match="another robot"):
        required(dataset(state=(9,)), config)


def test_a_camera_that_the_policy_does_not_read_is_named_as_the_dataset_does():
    wrist = "observation.images.wrist"
    present = {TOP: {"dtype": "video"}, wrist: {"dtype": "image"}, STATE: {"dtype": "float32"}}
    assert unread_cameras(policy(), present) == [wrist]
    assert unread_cameras(policy(), present, {wrist: SIDE}) == []


def test_dimensions_are_named_where_the_dataset_names_each_of_them():
    present = {
        STATE: {"shape": (2,), "names": {"motors": ["shoulder", "gripper"]}},
        "action": {"shape": (2,), "names": ["shoulder", "gripper"]},
        TOP: {"shape": (64, 64, 3), "names": ["height", "width", "channels"]},
        "odd": {"shape": (2,), "names": ["only one"]},
        "none": {"shape": (1,), "names": None},
    }
    names = ["shoulder", "gripper"]
    assert dimension_names(present, {"action": "act"}) == {STATE: names, "act": names}
