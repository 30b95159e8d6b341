"""Batches of anchors for training: determined by the seed, unchanged by a resume, split over ranks.

The order in which anchors are visited: a pure function of the seed and the step, so a resumed run continues it.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lerobot_craft.anchors.build import INPUT
from lerobot_craft.anchors.columns import Columns, ColumnSpec, Ragged, rows_without_number
from lerobot_craft.anchors.images import decode_images, is_image_shape
from lerobot_craft.anchors.manifest import FLOAT_NAMES, MANIFEST_FILE, Manifest, remedy
from lerobot_craft.anchors.observations import open_referenced, referenced_images
from lerobot_craft.anchors.retained import FIXED, Retained, dense, mode_named
from lerobot_craft.anchors.store import AnchorStore
from lerobot_craft.anchors.teacher import compare_fingerprints
from lerobot_craft.anchors.values import forged_scales
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import Progress
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.lerobot_api.pretrained import autocast_dtype
from lerobot_craft.policies import PolicyAdapter, adapter_for


class Visit(NamedTuple):
    """The anchors of one rank at one step."""

    indices: Tensor  # int64 [B]
    passes: Tensor  # int64 [B]: how often all anchors of the same origin came before
    places: Tensor  # int64 [B]: each anchor's position in the step of all ranks together


def visit(
    origins: Sequence[Tensor],
    batch_size: int,
    seed: int,
    step: int,
    rank: int = 0,
    world_size: int = 1,
    most: float | None = None,
) -> Visit:
    """Which anchors a rank takes at a step: the same number from each origin, however many anchors each has.

    Twenty old frames next to a thousand cross anchors fill half of every batch. `most` limits how often a few anchors
    are repeated, for policies to which every visit of an anchor is the same.

    The ranks split the step that one process with their combined batch would take, so the step does not depend on the
    number of ranks. Every rank gets a share of each origin that has enough slots for all ranks.

    Args:
        origins: Indices of the anchors of each origin.
        batch_size: Anchors of this rank.
        seed: Seed of the order.
        step: Anchor steps so far.
        rank: This process.
        world_size: Number of processes.
        most: Anchors of the rarer origin come at most `most` times as often, but once per step; None: no limit.
    """
    together = batch_size * world_size
    if together < len(origins):
        origins = [torch.cat(list(origins))]
    parts = []
    for anchors, share in zip(origins, _shares([len(anchors) for anchors in origins], together, most), strict=True):
        drawn = batch_indices(len(anchors), share, seed, step)
        passes = (step * share + torch.arange(share)) // len(anchors)
        parts.append((anchors[drawn], passes))
    indices, passes = (torch.cat(columns) for columns in zip(*parts, strict=True))
    places = torch.arange(rank, together, world_size)
    return Visit(indices[places], passes[places], places)


def _shares(sizes: Sequence[int], places: int, most: float | None) -> list[int]:
    """Slots of each origin in a step, at least one."""
    shares = [places // len(sizes) + (number < places % len(sizes)) for number in range(len(sizes))]
    if most is None or len(sizes) == 1:
        return shares
    rare = sizes.index(min(sizes))
    weight, others = most * sizes[rare], sizes[1 - rare]  # there are two origins
    shares[rare] = max(1, min(shares[rare], int(places * weight / (weight + others))))
    shares[1 - rare] = places - shares[rare]
    return shares


def by_origin(cross: Tensor) -> list[Tensor]:
    """Split anchors into old frames and cross anchors; empty groups are left out."""
    return [rows for kind in (False, True) if len(rows := (cross.bool() == kind).nonzero().squeeze(1))]


def without_anchors(origins: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """The same origins without the given anchors."""
    return [anchors[~torch.isin(anchors, rows)] for anchors in origins]


def batch_indices(
    num_anchors: int, batch_size: int, seed: int, step: int, rank: int = 0, world_size: int = 1
) -> Tensor:
    """Which anchors a rank takes at a step, int64 [batch_size].

    The stream of anchors is a sequence of permutations. Each step takes the next `batch_size * world_size` entries, and
    each rank a part of them. No anchor comes twice in a step unless there are fewer anchors than it needs.
    """
    if num_anchors < 1 or batch_size < 1 or step < 0 or not 0 <= rank < world_size:
        raise ValueError(f"no batch of {batch_size} from {num_anchors} anchors at {step=}, {rank=}, {world_size=}")
    global_batch = batch_size * world_size
    start = step * global_batch + rank * batch_size
    pieces, missing = [], batch_size
    while missing > 0:
        epoch, position = divmod(start, num_anchors)
        piece = _epoch_order(num_anchors, global_batch, seed, epoch)[position : position + missing]
        pieces.append(piece)
        start, missing = start + len(piece), missing - len(piece)
    return torch.cat(pieces)


def _permutation(num_anchors: int, seed: int, epoch: int) -> Tensor:
    # Hashed, so that neighboring seeds and epochs such as (1, 2) and (2, 1) are unrelated.
    digest = hashlib.sha256(f"anchors {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    return torch.randperm(num_anchors, generator=generator)


@lru_cache(maxsize=4)
def _epoch_order(num_anchors: int, global_batch: int, seed: int, epoch: int) -> Tensor:
    """An epoch's permutation. Its head shares no anchor with the last epoch's tail in the same step."""
    if num_anchors < 2 * global_batch:
        # Too few anchors to separate head and tail. Repeating one permutation is safe within a step; start a new one
        # only where an epoch and a step start together.
        period = global_batch // math.gcd(num_anchors, global_batch)
        return _permutation(num_anchors, seed, epoch - epoch % period)
    order = _permutation(num_anchors, seed, epoch)
    in_tail = epoch * num_anchors % global_batch  # entries of the last epoch in the step that both share
    if in_tail == 0:
        return order
    head = global_batch - in_tail
    tail = _permutation(num_anchors, seed, epoch - 1)[num_anchors - in_tail :]
    clashes = torch.isin(order, tail)
    misplaced = clashes[:head].nonzero().squeeze(1)
    # With at least two steps of anchors, the first free places lie before this epoch's own tail. The tail stays as
    # drawn, so the next epoch need not know about these swaps.
    free = (~clashes[head:]).nonzero().squeeze(1)[: len(misplaced)] + head
    order[misplaced], order[free] = order[free], order[misplaced]
    return order


DECODED_BYTES = 2**30
_LARGEST_IMAGE = 2**31  # values of one anchor's images; a larger image is not plausible
_INTEGERS = {"uint8", "int8", "int16", "int32", "int64"}
_LOOKED_AT = 32  # rows at once; rows that keep every token are large


@dataclass(frozen=True)
class AnchorBatch:
    """Some anchors: what the teacher saw, before any preprocessor, and its values."""

    raw: RawBatch  # observations and `task`, as a data loader would collate them; images uint8
    columns: Columns  # the teacher's values
    instruction: Tensor  # int64 [B]: index into the manifest's instructions, which are the constraint groups
    draw: int | Tensor = 0  # which stored draw this visit uses, int64 [B] or one for all; wraps around
    rows: Sequence[int] | None = None  # which anchors they are; None: not said

    def __len__(self) -> int:
        return len(self.instruction)


class AnchorLoader:
    """A cache as an endless stream of batches.

    Images are decoded when first used and then kept, up to one gigabyte.
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
        self._origins = by_origin(dense(store.take(torch.arange(len(store)), ["cross"])["cross"]))

    @property
    def manifest(self) -> Manifest:
        """The cache's manifest."""
        return self.store.manifest

    def batch(
        self, step: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, most: float | None = None
    ) -> AnchorBatch:
        """The batch of a step. It depends on the arguments only, so a resumed run continues in the same order."""
        indices, passes, _ = visit(self._origins, batch_size, seed, step, rank, world_size, most)
        return self.take(indices, draw=passes)

    def hold_out(self, indices: Tensor) -> None:
        """Exclude these anchors from all batches."""
        self._origins = without_anchors(self._origins, indices)

    def take(self, indices: Tensor, draw: int | Tensor = 0) -> AnchorBatch:
        """The anchors at these indices."""
        columns = self.store.take(indices, self._without_images)
        raw: RawBatch = {
            name: self._image(name, indices, columns) if name in self._images else dense(columns.pop(f"{INPUT}{name}"))
            for name in self.manifest.input_features
        }
        instruction = dense(columns.pop("instruction")).long()
        raw["task"] = [self.manifest.instructions[index] for index in instruction.tolist()]
        return AnchorBatch(raw, columns, instruction, draw, indices.tolist())

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
            dataset, frame = (dense(columns[where])[rows] for where in ("dataset", "frame"))
            return referenced_images(self.manifest, self._datasets, name, dataset, frame)
        column = self.store.take(indices[rows], [f"{INPUT}{name}"])[f"{INPUT}{name}"]
        if not isinstance(column, Ragged):
            raise CraftError(f"the cache has no compressed images in {INPUT}{name}: rebuild it")
        return decode_images(column, self.manifest.input_features[name].shape)


class _Images:
    """Decoded images of all anchors, filled when first used."""

    def __init__(self, num_anchors: int, shape: Sequence[int]) -> None:
        self.present = torch.zeros(num_anchors, dtype=torch.bool)
        self.nbytes = num_anchors * torch.Size(shape).numel()
        self._shape = (num_anchors, *shape)
        self._pixels: Tensor | None = None

    @property
    def pixels(self) -> Tensor:
        """uint8 [anchors, *shape], allocated on first use."""
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
    retention_mode: str | None = None,
    verify: bool = True,
    policy_config: Any = None,
    named: Sequence[tuple[str, str | None]] = (),
    progress: Progress | None = None,
) -> AnchorLoader:
    """Open a cache for training, or refuse it with the problem and the command that fixes it.

    Args:
        directory: The cache.
        teacher: Fingerprints of the policy that training starts from.
        retention_mode: What training retains.
        verify: Check checksums, and that all of the teacher's values are finite.
        policy_config: Its type and precision must match the cache. Determines the history of referenced images.
        named: Datasets given by the user (repo_id, directory), tried first for referenced images.
        progress: Called with the number of newly verified bytes.
    """
    store = AnchorStore.open(directory, verify=verify, progress=progress)
    manifest = store.manifest
    require_sound(store)
    if manifest.kind == "memory" and (retention_mode is not None or teacher is not None):
        raise CraftError(
            f"{directory} is a memory: it holds inputs and no teacher's values. `craft train` finds the memory of its "
            "checkpoint by itself, or takes another one as --craft.memory=DIR; caches are made by `craft cache build`."
        )
    if retention_mode is not None and manifest.kind != mode_named(retention_mode).mode:
        raise CraftError(
            f"{directory} holds {manifest.kind} anchors and training retains {retention_mode}: build the right ones "
            f"with `craft cache build --retention_mode={retention_mode} ...`, or use "
            f"--craft.retention_mode={manifest.kind}"
        )
    if policy_config is not None:
        _check_policy(manifest, policy_config, directory)
    if teacher is not None and (found := compare_fingerprints(manifest.teacher, teacher)):
        raise CraftError(f"{directory} does not belong to this policy: {'; '.join(found)}")
    if verify:
        _require_numbers(store)
        for problem in forged_scales(store.readers, manifest):
            raise CraftError(
                f"{Path(directory) / MANIFEST_FILE}: {problem}. The budget would be measured in a wrong unit: "
                "copy the cache again, or build it again with `craft cache build`"
            )
    return AnchorLoader(store, open_referenced(manifest, policy_config, named))


def require_sound(store: AnchorStore) -> None:
    """Refuse content that contradicts the manifest although all checksums match.

    Raises:
        CraftError: A column is missing, has another type, or refers to something that does not exist.
    """
    for problem in _problems(store):
        if store.manifest.kind == "memory":
            raise CraftError(f"{store.directory} is no sound memory: {problem}. {remedy(store.directory)}")
        raise CraftError(f"{store.directory} is no cache of `craft cache build`: {problem}. Build it again")


def _problems(store: AnchorStore) -> Iterator[str]:
    """Problems that would break a batch: a manifest can be forged with a correct checksum."""
    manifest = store.manifest
    columns = manifest.columns
    is_memory = manifest.kind == "memory"
    reference = manifest.inputs == "reference"
    needed = {"instruction": _INTEGERS, "cross": {"bool"}}
    needed |= {"dataset": _INTEGERS, "frame": _INTEGERS} if reference or is_memory else {}
    if is_memory:
        needed |= {"episode": _INTEGERS, "position": _INTEGERS, "length": _INTEGERS, "success": {"int8"}}
    for name, dtypes in needed.items():
        if name not in columns or columns[name].ragged or columns[name].shape or columns[name].dtype not in dtypes:
            yield f"it has no column {name!r}, or of another type"
            return
    yield from _input_problems(manifest)
    rows = {name: dense(column) for name, column in store.take(torch.arange(len(store)), needed).items()}
    if not _within(rows["instruction"], len(manifest.instructions)):
        yield "anchors refer to instructions that it does not have"
    if is_memory:
        yield from _memory_problems(manifest, rows)
    if not reference and not is_memory:
        return
    if not _within(rows["dataset"], len(manifest.datasets)):
        yield "anchors refer to datasets that it does not name"
    for index, record in enumerate(manifest.datasets):
        frames = rows["frame"][rows["dataset"] == index]
        if len(frames) and not _within(frames, record.total_frames):
            yield f"anchors refer to frames that {record.repo_id!r:.80} does not have"


def _memory_problems(manifest: Manifest, rows: Mapping[str, Tensor]) -> Iterator[str]:
    columns = manifest.columns
    action, padded = columns.get("action"), columns.get("action_is_pad")
    if action is None or action.ragged or action.dtype != "float32" or len(action.shape) != 2:
        yield "it has no actions float32 [steps, width]"
    elif padded is None or padded.ragged or padded.dtype != "bool" or padded.shape != action.shape[:1]:
        yield "it does not say which actions are padding"
    counts = torch.bincount(rows["instruction"].long(), minlength=len(manifest.instructions)).tolist()
    if counts != manifest.counts or bool(rows["cross"].any()):
        yield "it has other frames of its instructions than it says"
    if bool((rows["episode"] < 0).any() | (rows["position"] < 0).any() | (rows["position"] >= rows["length"]).any()):
        yield "a frame lies outside of its episode"
    if not -1 <= int(rows["success"].min()) <= int(rows["success"].max()) <= 1:
        yield "success is none of 1, 0 and -1"


def _input_problems(manifest: Manifest) -> Iterator[str]:
    reference = manifest.inputs == "reference"
    inputs = {name.removeprefix(INPUT): c for name, c in manifest.columns.items() if name.startswith(INPUT)}
    for name in sorted(inputs.keys() - manifest.input_features.keys()):
        yield f"it does not say what the column {INPUT + name!r:.80} is"
    for name, feature in manifest.input_features.items():
        column = inputs.get(name)
        if feature.codec == "png":
            fits = is_image_shape(feature.shape) and math.prod(feature.shape) <= _LARGEST_IMAGE
            if not fits or (column is None) is not reference:
                yield f"the images {name!r:.80} are not where it says, or not as large"
        elif column is None or column.ragged or list(column.shape) != feature.shape:
            yield f"the feature {name!r:.80} is not what it says"


def _require_numbers(store: AnchorStore) -> None:
    """Refuse NaN and infinity in any of the teacher's values; the check before step 0 samples only a few rows.

    Minus infinity is allowed in logits: it is the logarithm of an empty tail.
    """
    columns = store.manifest.columns
    names = [name for name, c in columns.items() if c.dtype in FLOAT_NAMES and not name.startswith(INPUT)]
    first = 0
    for shard in store.manifest.shards:
        for rows in torch.arange(first, first + shard.rows).split(_LOOKED_AT):
            for name, column in store.take(rows, names).items():
                if bad := rows_without_number(column, or_minus_infinity=name == "target" and columns[name].ragged):
                    raise CraftError(
                        f"{store.directory / shard.file}: row {int(rows[bad[0]]) - first} holds NaN or infinity in "
                        f"{name!r}, which no teacher leaves there: build the cache again with `craft cache build`"
                    )
        first += shard.rows


def _within(indices: Tensor, count: int) -> bool:
    return 0 <= int(indices.min()) <= int(indices.max()) < count


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
    """The retained values of a cache, in the adapter's terms.

    Raises:
        CraftError: They do not fit the policy, or the columns hold other values.
    """
    values = manifest.values
    if manifest.kind == "memory":
        raise CraftError("a memory holds no teacher's values: build a cache of anchors with `craft cache build`")
    retained = mode_named(manifest.kind).stored(values, adapter, policy)
    missing = [*_missing_inputs(manifest, adapter, policy), *_missing_columns(manifest.columns, adapter, retained)]
    if missing:
        raise CraftError(
            f"the cache was not built for the {manifest.kind} values of this {adapter.policy_type}, or its manifest is "
            f"wrong ({missing[0]!r:.80} is missing or of another shape): build it again with `craft cache build`"
        )
    return retained


def _missing_inputs(manifest: Manifest, adapter: PolicyAdapter, policy: Any) -> list[str]:
    """Inputs that the policy reads and the cache lacks; cameras may be missing if the policy masks them."""
    wanted = {name: feature for name, feature in policy.config.input_features.items() if "empty_camera" not in name}
    missing = [name for name in wanted if name not in manifest.input_features]
    cameras = {name for name, feature in wanted.items() if feature.type.value == "VISUAL"}
    return [] if adapter.masks_missing_cameras(policy) and set(missing) < cameras else missing


def _missing_columns(columns: Mapping[str, ColumnSpec], adapter: PolicyAdapter, retained: Retained) -> Iterator[str]:
    """Columns that `Retained` needs and the cache lacks, or has with other draws or layers."""
    logits = adapter.output_kind == "logits"
    wanted = retained.needed(adapter, columns)
    if retained.needs_fixed and logits:
        wanted[f"{FIXED}tokens"] = (True, [])
    elif retained.needs_fixed:
        wanted |= {f"{FIXED}{name}": (False, [retained.draws]) for name in adapter.fixed_names}
    for name, (ragged, begins) in wanted.items():
        column = columns.get(name)
        if column is None or column.ragged is not ragged or column.shape[: len(begins)] != begins:
            yield name
