import pytest

from lerobot_craft.anchors.recipe import asks_for_documents


@pytest.mark.parametrize(
    "flags",
    [
        ["--retention_mode=hidden"],
        ["--retention_mode", "token_ce"],
        ["--hidden_layer=-2", "--num_samples=3"],
        ["--layers_to_save", "-2,-1"],
        ["--pooling=cls_token"],
        ["--per_token=true"],
        ["--retention_mode=action", "--retention_mode=hidden"],
        ["--retention_mode=hiden"],  # refused later, with the names of all modes
    ],
)
def test_hidden_states_and_labels_are_the_documents(flags):
    assert asks_for_documents(flags)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--num_samples=3"],
        ["--retention_mode=action"],
        ["--retention_mode", "action"],
        ["--retention_mode=action", "--hidden_layer=-2"],
        ["--old_instructions=pooling"],
        ["--old_instructions", "pooling"],
        ["--old_instructions", "retention_mode=hidden"],
    ],
)
def test_everything_else_is_not(flags):
    assert not asks_for_documents(flags)
