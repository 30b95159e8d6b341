import numpy as np
import pytest

from lerobot_craft.tiny.for_dataset import action_chunks, safe_stats


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    from lerobot_craft.lerobot_api.datasets import open_dataset
    from lerobot_craft.tiny.datasets import make_local_dataset

    root = tmp_path_factory.mktemp("data") / "old"
    make_local_dataset(root, ("open it", "close it"), image_size=16)
    return open_dataset("local/old", root)


def test_a_chunk_ends_with_its_episode(dataset):
    chunks = action_chunks(dataset, 4)
    actions = np.stack([np.asarray(action) for action in dataset.hf_dataset["action"]])
    assert chunks.shape == (len(actions), 4, actions.shape[1])
    end = int(dataset.meta.episodes["dataset_to_index"][0])
    np.testing.assert_array_equal(chunks[0], actions[:4])
    np.testing.assert_array_equal(chunks[end - 2], actions[[end - 2, end - 1, end - 1, end - 1]])


def test_statistics_can_be_divided_by():
    stats = {"observation.state": {"mean": [1.0, 2.0], "std": [0.0, 0.5], "min": [1.0, 0.0], "max": [1.0, 2.0]}}
    safe = safe_stats(stats)["observation.state"]
    np.testing.assert_allclose(safe["std"], [0.01, 0.5])
    np.testing.assert_allclose(safe["min"], [0.999, -0.101], rtol=1e-6)
    np.testing.assert_allclose(safe["max"], [1.001, 2.101], rtol=1e-6)
    assert safe["mean"] == [1.0, 2.0]
    assert stats["observation.state"]["std"] == [0.0, 0.5]
