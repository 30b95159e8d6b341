"""What lerobot would not write is refused, column by column."""

from types import SimpleNamespace

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.preload import _images, episode_bounds, numbers


def stand_in(**columns):
    """A dataset with nothing but a table, for what lerobot would not write."""
    from datasets import Dataset

    meta = SimpleNamespace(features={"state": {"shape": (2,)}, "speed": {"shape": (1,)}}, episodes=None)
    return SimpleNamespace(repo_id="local/broken", meta=meta, hf_dataset=Dataset.from_dict(columns))


@pytest.mark.parametrize(
    ("name", "column"), [("speed", [1.0, None]), ("state", [[1.0, 2.0], [3.0, None]]), ("state", [[1.0, 2.0], [3.0]])]
)
def test_a_value_that_is_not_there_is_refused(name, column):
    with pytest.raises(CraftError, match=f"{name} of local/broken has no value"):
        numbers(stand_in(**{name: column}), name)


def picture(mode, width):
    from PIL import Image

    return Image.new(mode, (width, 4))


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([("RGB", 4), ("RGB", 5)], "are not all of one size"),
        ([("RGB", 4), ("L", 4)], "are not all of one size"),
        ([("I;16", 4)], "are stored as I;16, and --craft.preload keeps L, RGB, RGBA only"),
    ],
)
def test_images_that_cannot_be_kept_are_refused(images, said):
    with pytest.raises(CraftError, match=said):
        _images(stand_in(camera=[picture(*form) for form in images]), "camera")


@pytest.mark.parametrize(
    ("index", "episode"),
    [([0, 2, 1, 3], [0, 0, 0, 1]), ([0, 1, 3], [0, 0, 1]), ([3, 0, 1, 2], [0, 0, 0, 1]), ([0, 1, 1, 3], [0, 0, 0, 1])],
    ids=["swapped", "missing", "of another episode", "twice"],
)
def test_frames_out_of_order_are_refused(index, episode):
    dataset = stand_in(index=index, episode_index=episode)
    dataset.meta.episodes = FirstAndLast([0, 3], [3, 4])
    with pytest.raises(CraftError, match="are not in the order of their episodes"):
        episode_bounds(dataset)


class FirstAndLast:
    """Episodes' first frames, and those after their last ones."""

    def __init__(self, first, end):
        self._columns = {"dataset_from_index": first, "dataset_to_index": end}

    def __getitem__(self, name):
        return self._columns[name]

    def __len__(self):
        return len(self._columns["dataset_from_index"])
