"""What training gets from a cache, and the caches that it refuses."""

import hashlib
import json
import shutil

import pytest
import torch

from lerobot_craft.anchors.loader import AnchorLoader, open_cache, retained_of
from lerobot_craft.anchors.verify import verify_cache
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import adapter_for
from tests.anchors.test_lies import edit_manifest, rewrite_shard


@pytest.fixture
def cache(build):
    return build("smolvla", retention_mode="action")


def rows(batch):
    return batch.columns["frame"].tolist()


def test_the_order_depends_on_the_seed_and_the_step_only(cache):
    loader, again = open_cache(cache), open_cache(cache)
    steps = [rows(loader.batch(step, 4, seed=3)) for step in range(12)]
    assert [rows(again.batch(step, 4, seed=3)) for step in range(5, 12)] == steps[5:]  # a resumed run
    assert [rows(again.batch(step, 4, seed=4)) for step in range(12)] != steps


def test_ranks_share_a_step(cache):
    loader = open_cache(cache)
    together = rows(loader.batch(5, 6, seed=0))
    shared = [rows(loader.batch(5, 3, seed=0, rank=rank, world_size=2)) for rank in range(2)]
    assert shared == [together[0::2], together[1::2]]


def test_draws_take_turns(build):
    loader = open_cache(build("pi0", retention_mode="action", num_draws=2))
    draws = [loader.batch(step, 9, seed=0).draw.tolist() for step in range(6)]
    assert draws == [[n] * 9 for n in (0, 0, 1, 1, 2, 2)]  # passes over 18 anchors; the values repeat after two


def test_few_old_frames_fill_half_of_every_batch_and_meet_fresh_noise(build):
    loader = open_cache(build("pi0", retention_mode="action", anchor_source="both", old_frames=3, num_draws=4))
    for step in range(6):
        batch = loader.batch(step, 8, seed=0)
        cross = batch.columns["cross"].bool()
        assert cross.tolist() == [False] * 4 + [True] * 4
        frames = list(zip(batch.columns["frame"][:4].tolist(), batch.draw[:4].tolist(), strict=True))
        assert len(set(frames)) == 4  # three frames in four places: the one that comes twice does so in another pass


def test_images_that_do_not_fit_into_memory_are_decoded_each_time(cache):
    kept = open_cache(cache)
    decoded = AnchorLoader(kept.store, decoded_bytes=0)
    for step in range(3):
        one, two = kept.batch(step, 5, seed=0), decoded.batch(step, 5, seed=0)
        assert torch.equal(one.raw["observation.images.top"], two.raw["observation.images.top"])


def test_the_wrong_kind_is_refused_with_the_command_that_mends_it(cache):
    with pytest.raises(CraftError, match=r"holds action anchors and training retains hidden.*--retention_mode=hidden"):
        open_cache(cache, retention_mode="hidden")


@pytest.mark.parametrize(
    ("part", "sentence"),
    [("weights", "another teacher"), ("stats", "--craft.normalization=keep"), ("tokenizers", "other tokenizers")],
)
def test_another_teacher_is_refused_by_what_differs(cache, teachers, part, sentence):
    present = dict(teachers("smolvla").fingerprint)
    open_cache(cache, teacher=present)
    with pytest.raises(CraftError, match=f"does not belong to this policy: .*{sentence}"):
        open_cache(cache, teacher=present | {part: "0" * 64})


def test_another_type_of_policy_is_refused(cache, teachers):
    with pytest.raises(CraftError, match="built by smolvla and this policy is act"):
        open_cache(cache, policy_config=teachers("act").config)


def test_changed_weights_are_another_teacher(cache, teachers, checkpoints):
    from lerobot_craft.anchors.teacher import fingerprint, load_teacher

    other = load_teacher(checkpoints("smolvla"))
    with torch.no_grad():
        next(other.policy.parameters()).view(-1)[0] += 1e-3
    changed = fingerprint(other.policy, other.preprocessor, other.postprocessor)
    with pytest.raises(CraftError, match="its weights differ"):
        open_cache(cache, teacher=changed)


@pytest.fixture
def reference(build):
    """A cache whose images stay in the dataset `local/old`, and who is called by whoever opens it."""
    return build("smolvla", inputs="reference", retention_mode="action")


@pytest.fixture
def called(monkeypatch, tmp_path):
    """Every try to reach another machine, none of which succeeds; and no dataset is known by its name."""
    tries = []

    def refuse(*arguments, **_):
        tries.append(arguments)
        raise OSError("there is no internet here")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("lerobot.utils.constants.HF_LEROBOT_HOME", tmp_path / "lerobot")
    monkeypatch.setattr("lerobot.utils.constants.HF_LEROBOT_HUB_CACHE", tmp_path / "lerobot" / "hub")
    return tries


def refer_to(cache, **changes):
    edit_manifest(cache, lambda content: content["datasets"][0].update(changes))


def images(cache, config, **options):
    return open_cache(cache, policy_config=config, **options).take(torch.arange(2)).raw["observation.images.top"]


def test_a_moved_dataset_is_found_among_those_that_the_user_names(reference, anchor_data, teachers, tmp_path):
    config = teachers("smolvla").config
    before = images(reference, config)
    assert before.shape == (2, 1, 3, 64, 64)
    refer_to(reference, root=str(tmp_path / "gone"))
    named = [("local/new", str(anchor_data / "new")), ("my/own", str(anchor_data / "old"))]
    assert torch.equal(images(reference, config, named=named), before)  # by what it is, not by its name
    with pytest.raises(CraftError, match=r"'local/old', which is not on .*gone.* nor anywhere else on this machine"):
        images(reference, config, named=named[:1])


def test_a_named_dataset_that_is_another_one_changes_nothing(reference, anchor_data, teachers):
    config = teachers("smolvla").config
    named = [("local/old", str(anchor_data / "new"))]
    assert torch.equal(images(reference, config, named=named), images(reference, config))


def test_a_manifest_cannot_make_us_download(reference, teachers, called):
    refer_to(reference, root=None, repo_id="somebody/dataset")
    sentence = "'somebody/dataset', which is not on this machine: get it with `hf download --repo-type dataset somebody"
    with pytest.raises(CraftError, match=sentence):
        images(reference, teachers("smolvla").config)
    assert called == []


@pytest.mark.parametrize("name", ["$(touch x)/y", "../../etc", "", "a/b/c", "/dev/zero", "x" * 1000])
def test_a_name_that_is_none_is_refused_too(reference, teachers, called, name):
    refer_to(reference, root=None, repo_id=name, revision="/dev/zero")
    with pytest.raises(CraftError, match="which is not on this machine: get it with `hf download") as refusal:
        images(reference, teachers("smolvla").config)
    assert called == []
    assert "dataset $(" not in str(refusal.value), "it is a line to copy into a shell"
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("missing", ["meta/info.json", "meta/tasks.parquet", "meta/episodes", "data"])
def test_an_incomplete_directory_is_not_completed_from_the_hub(
    reference, anchor_data, teachers, called, tmp_path, missing
):
    root = shutil.copytree(anchor_data / "old", tmp_path / "elsewhere")
    (root / missing).rename(tmp_path / "kept_back")
    refer_to(reference, root=str(root))
    with pytest.raises(CraftError, match="incomplete" if missing == "data" else "not on .*elsewhere"):
        images(reference, teachers("smolvla").config)
    assert called == []


def test_a_directory_elsewhere_is_opened_only_if_it_is_the_dataset(reference, anchor_data, teachers, monkeypatch):
    opened = []
    monkeypatch.setattr("lerobot_craft.anchors.observations.open_dataset", lambda *place, **_: opened.append(place))
    refer_to(reference, root=str(anchor_data / "new"))
    with pytest.raises(CraftError, match="'local/old' is not the one that the cache refers to"):
        images(reference, teachers("smolvla").config)
    assert opened == []


def snapshot(place, name):
    """Where `hf download` would put a dataset of the Hub."""
    repository = place / f"datasets--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return repository / "snapshots" / ("0" * 40)


@pytest.mark.parametrize("place", ["lerobot", "lerobot/hub", "hub"])
def test_a_copy_that_is_on_this_machine_is_found(reference, anchor_data, teachers, called, tmp_path, place):
    config = teachers("smolvla").config
    before = images(reference, config)
    root = tmp_path / place / "me/old" if place == "lerobot" else snapshot(tmp_path / place, "me/old")
    shutil.copytree(anchor_data / "old", root)
    refer_to(reference, root=None, repo_id="me/old")
    assert torch.equal(images(reference, config), before)
    assert called == []


def test_frames_and_datasets_that_are_not_there_are_refused(reference, teachers):
    config = teachers("smolvla").config
    for column, number, sentence in [
        ("frame", -1, "frames that 'local/old' does not have"),
        ("frame", 10**6, "frames that 'local/old' does not have"),
        ("dataset", -1, "datasets that it does not name"),
        ("dataset", 1, "datasets that it does not name"),
        ("instruction", -1, "instructions that it does not have"),
    ]:
        kept = {}

        def change(tensors, column=column, number=number, kept=kept):
            kept[column] = tensors[column].clone()
            tensors[column][3] = number

        rewrite_shard(reference, change)
        with pytest.raises(CraftError, match=sentence):
            open_cache(reference, policy_config=config)
        rewrite_shard(reference, lambda tensors, kept=kept: tensors.update(kept))
    open_cache(reference, policy_config=config)


def test_more_frames_than_the_dataset_has_are_refused_whatever_the_manifest_says(reference, teachers):
    refer_to(reference, total_frames=10**6)
    with pytest.raises(CraftError, match="not the one that the cache refers to"):
        open_cache(reference, policy_config=teachers("smolvla").config)


CAMERA = "observation.images.top"
IMAGE_LIES = {
    "without it": (lambda features: features.pop(CAMERA), "'observation.images.top' is missing"),
    "another one": (lambda features: features.update({"x": features[CAMERA]}), "'local/old' has no images 'x'"),
    "smaller": (lambda features: features[CAMERA].update(shape=[1, 3, 32, 32]), r"of the shape \(1, 3, 32, 32\)"),
    # Silently, one image would be taken for two.
    "two for one": (lambda features: features[CAMERA].update(shape=[2, 3, 64, 64]), r"of the shape \(2, 3, 64, 64\)"),
}


@pytest.mark.parametrize("lie", IMAGE_LIES)
def test_images_are_what_the_cache_says(reference, teachers, lie):
    change, sentence = IMAGE_LIES[lie]
    edit_manifest(reference, lambda content: change(content["input_features"]))
    with pytest.raises(CraftError, match=sentence):
        verify_cache(reference, teachers("smolvla"))


def test_a_column_of_inputs_that_nobody_declares_is_refused(cache):
    edit_manifest(cache, lambda content: content["input_features"].pop("observation.state"))
    with pytest.raises(CraftError, match=r"does not say what the column 'input\.observation\.state' is"):
        open_cache(cache)


FLAT = {"instruction": torch.float32, "cross": torch.int64, "frame": torch.float64, "dataset": torch.bool}


@pytest.mark.parametrize("column", FLAT)
def test_what_anchors_refer_to_has_its_type(reference, column):
    def retype(tensors):
        tensors[column] = tensors[column].to(FLAT[column])

    for shard in range(3):
        rewrite_shard(reference, retype, shard)
    name = str(FLAT[column]).removeprefix("torch.")
    edit_manifest(reference, lambda content: content["columns"][column].update(dtype=name))
    with pytest.raises(CraftError, match=f"no column '{column}', or of another type"):
        open_cache(reference)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_is_refused_in_any_row(build, teachers, value):
    cache = build("act", retention_mode="action", num_anchors=40)
    reproduced = torch.linspace(0, 39, 32).round().long().tolist()  # what the check before the first step looks at
    row = next(row for row in range(39, 0, -1) if row not in reproduced)

    def poison(tensors):
        tensors["target"][row % 8, 0, 0, 0] = value

    open_cache(cache)
    rewrite_shard(cache, poison, row // 8)
    with pytest.raises(CraftError, match=rf"shard-0000{row // 8}\.safetensors: row {row % 8} holds NaN .* 'target'"):
        open_cache(cache)


@pytest.mark.parametrize("column", ["own_error.mse", "fixed.x_t"])
def test_that_holds_for_every_column_of_the_teacher(build, column):
    cache = build("smolvla", retention_mode="action")

    def poison(tensors):
        tensors[column][5].fill_(float("nan"))

    rewrite_shard(cache, poison, 1)
    with pytest.raises(CraftError, match=f"shard-00001.safetensors: row 5 holds NaN or infinity in '{column}'"):
        open_cache(cache)


@pytest.mark.parametrize("kind", ["action", "hidden"])
def test_a_forged_unit_of_the_budget_is_refused(build, kind):
    cache = build("smolvla", retention_mode=kind)
    honest = open_cache(cache).manifest.scales[0].values["mse"]
    for forged in (0, -1, 1e308, float("nan"), 2 * honest):
        edit_manifest(cache, lambda content, forged=forged: content["scales"][0]["values"].update(mse=forged))
        with pytest.raises(CraftError, match=r"manifest\.json: .*(scales\[0\]\.values\.mse|NaN)"):
            open_cache(cache)
    edit_manifest(cache, lambda content: content["scales"][0]["values"].update(mse=honest))
    open_cache(cache)
    if kind == "hidden":
        edit_manifest(cache, lambda content: next(iter(content["values"]["layer_scales"].values())).update(mse=1e308))
        with pytest.raises(CraftError, match=r"values\.layer_scales\..*mse"):
            open_cache(cache)


def test_the_logarithm_of_an_empty_tail_is_allowed_and_nothing_else(build):
    cache = build("pi0_fast", retention_mode="action")
    rewrite_shard(cache, lambda tensors: tensors["target"][0, -1].fill_(float("-inf")))
    open_cache(cache)
    rewrite_shard(cache, lambda tensors: tensors["target"][-1, -1].fill_(float("inf")))
    with pytest.raises(CraftError, match=r"shard-00000\.safetensors: row 7 holds"):
        open_cache(cache)


def test_draws_and_layers_are_those_of_the_columns(build, teachers):
    teacher = teachers("smolvla")
    adapter = adapter_for(teacher.config)
    lies = {
        "action": [{"num_draws": 10**9}, {"num_draws": 2}],
        "hidden": [{"layers_to_save": ["0", "1"], "layer_scales": {"0": {}, "1": {}}}, {"pooling": "none"}],
    }
    for kind, changes in lies.items():
        cache = build("smolvla", kind, retention_mode=kind)
        assert retained_of(open_cache(cache).manifest, adapter, teacher.policy).mode == kind
        kept = json.loads((cache / "manifest.json").read_text())["values"]
        for change in changes:
            edit_manifest(cache, lambda content, change=change, kept=kept: content.update(values=kept | change))
            with pytest.raises(CraftError, match=r"not built for the .* values of this smolvla, or its"):
                retained_of(open_cache(cache).manifest, adapter, teacher.policy)


def test_tokens_are_reproduced_once_however_many_draws_there_were(build, teachers):
    teacher = teachers("pi0_fast")
    cache = build("pi0_fast", retention_mode="action", num_draws=3)
    edit_manifest(cache, lambda content: content["values"].update(num_draws=10**9))
    assert retained_of(open_cache(cache).manifest, adapter_for(teacher.config), teacher.policy).draws == 1


def test_verify_computes_anchors_again(cache, teachers):
    """A cache whose checksums hold but whose values are wrong: only the teacher can tell."""
    from safetensors.torch import load_file, save_file

    verify_cache(cache, teachers("smolvla"))
    shard = cache / "shard-00001.safetensors"
    tensors = load_file(shard)
    tensors["target"][3, 0, 0, 0] += 0.5
    save_file(tensors, shard)
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["shards"][1] |= {"sha256": hashlib.sha256(shard.read_bytes()).hexdigest(), "bytes": shard.stat().st_size}
    text = json.dumps(manifest)
    (cache / "manifest.json").write_text(text)
    (cache / "manifest.sha256").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n")
    verify_cache(cache)  # the bytes are what the manifest says
    with pytest.raises(CraftError, match="no longer says what"):
        verify_cache(cache, teachers("smolvla"))
