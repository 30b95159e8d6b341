"""Batches of anchors for training: by seed, the same after a resume, split over ranks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lerobot_craft.anchors.build import INPUT
from lerobot_craft.anchors.columns import Column, Columns, Ragged
from lerobot_craft.anchors.files import Progress
from lerobot_craft.anchors.images import decode_images, is_image_shape
from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.anchors.order import by_origin, visit
from lerobot_craft.anchors.retained import Retained, RetentionMode
from lerobot_craft.anchors.store import AnchorStore
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch, dataset_fingerprint, open_dataset, read_batches
from lerobot_craft.lerobot_api.policies import autocast_dtype
from lerobot_craft.policies import PolicyAdapter, adapter_for
from lerobot_craft.teacher.fingerprint import compare

DECODED_BYTES = 2**30
_LARGEST_IMAGE = 2**31  # values of one anchor's images; more is no image


@dataclass(frozen=True)
class AnchorBatch:
    """Some anchors: what the teacher saw, before any preprocessor, and what it made of it."""

    raw: RawBatch  # observations and `task`, as a data loader would collate them; images uint8
    columns: Columns  # the teacher's values
    instruction: Tensor  # int64 [B]: index into the manifest's instructions, which are the constraint groups
    draw: int | Tensor = 0  # which of the stored draws this visit uses, int64 [B] or for all; counted without end

    def __len__(self) -> int:
        return len(self.instruction)


class AnchorLoader:
    """A cache as an endless stream of batches.

    Images are decoded when first drawn and then kept, up to a gigabyte: from the second pass on a batch is copied
    from memory.
    """

    def __init__(self, store: AnchorStore, datasets: Sequence[Any] = (), decoded_bytes: int = DECODED_BYTES) -> None:
        self.store = store
        features = store.manifest.input_features
        self._images = {name: _Images(len(store), f.shape) for name, f in features.items() if f.codec == "png"}
        size = sum(images.nbytes for images in self._images.values())
        self._keep_decoded = size <= decoded_bytes
        self._datasets = datasets
        compressed = {f"{INPUT}{name}" for name in self._images}
        self._without_images = set(store.bytes_by_column()) - compressed
        self._origins = by_origin(_dense(store.take(torch.arange(len(store)), ["cross"])["cross"]))

    @property
    def manifest(self) -> Manifest:
        """What the cache says about itself."""
        return self.store.manifest

    def batch(self, step: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> AnchorBatch:
        """The batch of a step; a function of its arguments, so that a resumed run goes on in the same order."""
        indices, passes, _ = visit(self._origins, batch_size, seed, step, rank, world_size)
        return self.take(indices, draw=passes)

    def take(self, indices: Tensor, draw: int | Tensor = 0) -> AnchorBatch:
        """Chosen anchors."""
        columns = self.store.take(indices, self._without_images)
        raw: RawBatch = {
            name: self._image(name, indices, columns) if name in self._images else _dense(columns.pop(f"{INPUT}{name}"))
            for name in self.manifest.input_features
        }
        instruction = _dense(columns.pop("instruction")).long()
        raw["task"] = [self.manifest.instructions[index] for index in instruction.tolist()]
        return AnchorBatch(raw, columns, instruction, draw)

    def _image(self, name: str, indices: Tensor, columns: Columns) -> Tensor:
        images = self._images[name]
        if not self._keep_decoded:
            return self._decode(name, indices, columns, torch.arange(len(indices)))
        missing = (~images.present.index_select(0, indices)).nonzero().squeeze(1)
        if len(missing):
            images.put(indices[missing], self._decode(name, indices, columns, missing))
        return images.pixels.index_select(0, indices)  # whole rows: several times faster than indexing

    def _decode(self, name: str, indices: Tensor, columns: Columns, rows: Tensor) -> Tensor:
        if self.manifest.inputs == "reference":
            return self._read(name, _dense(columns["dataset"])[rows], _dense(columns["frame"])[rows])
        column = self.store.take(indices[rows], [f"{INPUT}{name}"])[f"{INPUT}{name}"]
        if not isinstance(column, Ragged):
            raise CraftError(f"the cache has no compressed images in {INPUT}{name}: rebuild it")
        return decode_images(column, self.manifest.input_features[name].shape)

    def _read(self, name: str, dataset: Tensor, frame: Tensor) -> Tensor:
        images = torch.empty((len(frame), *self.manifest.input_features[name].shape), dtype=torch.uint8)
        for index in dataset.unique().tolist():
            rows = (dataset == index).nonzero().squeeze(1)
            (batch,) = read_batches(self._datasets, [(index, frame[rows].tolist())])
            images[rows] = batch[name]
        return images


class _Images:
    """Decoded images of all anchors, filled as they are drawn."""

    def __init__(self, num_anchors: int, shape: Sequence[int]) -> None:
        self.present = torch.zeros(num_anchors, dtype=torch.bool)
        self.nbytes = num_anchors * torch.Size(shape).numel()
        self._shape = (num_anchors, *shape)
        self._pixels: Tensor | None = None

    @property
    def pixels(self) -> Tensor:
        """uint8 [anchors, *shape]; memory is taken when it is first needed."""
        if self._pixels is None:
            self._pixels = torch.empty(self._shape, dtype=torch.uint8)
        return self._pixels

    def put(self, indices: Tensor, images: Tensor) -> None:
        self.pixels[indices] = images
        self.present[indices] = True


def open_cache(
    directory: Path | str,
    *,
    teacher: Mapping[str, str] | None = None,
    retention_mode: RetentionMode | None = None,
    verify: bool = True,
    policy_config: Any = None,
    roots: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> AnchorLoader:
    """Open a cache for training, or refuse it with what is wrong and the command that mends it.

    Args:
        directory: Of the cache.
        teacher: Fingerprints of the policy that training starts from.
        retention_mode: What training retains.
        verify: Compare checksums.
        policy_config: Of that policy: its type and precision must be the cache's, and where images are references it
            decides which past frames belong to an observation.
        roots: Directories of referenced datasets by repo_id, where they have moved since.
        progress: Told how many more bytes were verified.
    """
    store = AnchorStore.open(directory, verify=verify, progress=progress)
    manifest = store.manifest
    for problem in _problems(store):
        raise CraftError(f"{directory} is no cache of `craft cache build`: {problem}. Build it again")
    if retention_mode is not None and manifest.kind != retention_mode:
        raise CraftError(
            f"{directory} holds {manifest.kind} anchors and training retains {retention_mode}: build the right ones "
            f"with `craft cache build --retention_mode={retention_mode} ...`, or use "
            f"--craft.retention_mode={manifest.kind}"
        )
    if policy_config is not None:
        _check_policy(manifest, policy_config, directory)
    if teacher is not None and (found := compare(manifest.teacher, teacher)):
        raise CraftError(f"{directory} does not belong to this policy: {'; '.join(found)}")
    return AnchorLoader(store, _open_referenced(manifest, roots or {}, policy_config))


def _problems(store: AnchorStore) -> Iterator[str]:
    """What a batch would stumble over: a manifest may be forged, its checksum right."""
    manifest = store.manifest
    columns = manifest.columns
    reference = manifest.inputs == "reference"
    needed = {"instruction", "cross"} | ({"dataset", "frame"} if reference else set())
    if missing := sorted(name for name in needed if name not in columns or columns[name].ragged):
        yield f"it has no column {missing[0]!r}"
        return
    for name, feature in manifest.input_features.items():
        column = columns.get(f"{INPUT}{name}")
        if feature.codec == "png":
            fits = is_image_shape(feature.shape) and math.prod(feature.shape) <= _LARGEST_IMAGE
            if not fits or (column is None) is not reference:
                yield f"the images {name!r:.80} are not where it says, or not as large"
        elif column is None or column.ragged or list(column.shape) != feature.shape:
            yield f"the feature {name!r:.80} is not what it says"
    used = _dense(store.take(torch.arange(len(store)), ["instruction"])["instruction"])
    if not 0 <= int(used.min()) <= int(used.max()) < len(manifest.instructions):
        yield "anchors refer to instructions that it does not have"


def _check_policy(manifest: Manifest, config: Any, directory: Path | str) -> None:
    if (policy_type := adapter_for(config).policy_type) != manifest.policy_type:
        raise CraftError(
            f"{directory} was built by {manifest.policy_type} and this policy is {policy_type}: build its own anchors "
            "with `craft cache build`"
        )
    if (precision := autocast_dtype(config)) != manifest.autocast:
        raise CraftError(
            f"{directory} was built under {manifest.autocast or 'no'} autocast and this policy runs under "
            f"{precision or 'none'}: rounding alone would look like drift. Build the cache with the flags of training "
            "(--policy.dtype or --policy.use_amp)"
        )


def retained_of(manifest: Manifest, adapter: PolicyAdapter, policy: Any) -> Retained:
    """Which values a cache holds, as the adapter takes them."""
    values = manifest.values
    try:
        if manifest.kind != "hidden":
            return Retained(manifest.kind, top_k=int(values["top_k"]), draws=int(values["num_draws"]))
        layers = adapter.resolve(policy, [str(layer) for layer in values["layers_to_save"]])
        return Retained("hidden", layers, values["pooling"])
    except (KeyError, TypeError, ValueError) as error:
        raise CraftError(
            f"the manifest does not say which values the cache holds ({type(error).__name__}: {error}): build it again"
        ) from error


def _open_referenced(manifest: Manifest, roots: Mapping[str, str], policy_config: Any) -> list[Any]:
    if manifest.inputs == "embedded":
        return []
    opened = []
    for record in manifest.datasets:
        root = roots.get(record.repo_id, record.root)
        dataset = open_dataset(record.repo_id, root, record.revision, policy_config=policy_config)
        if dataset_fingerprint(dataset) != record.fingerprint:
            raise CraftError(
                f"the dataset {record.repo_id} is not the one that the cache refers to: give the directory of the "
                "right one, or build the cache again (with --inputs=embedded it does not depend on datasets)"
            )
        opened.append(dataset)
    return opened


def _dense(column: Column) -> Tensor:
    if isinstance(column, Ragged):
        raise CraftError("the cache has a ragged column where rows of one shape belong: rebuild it")
    return column
