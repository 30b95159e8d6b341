"""A cache's content, described for a person."""

from lerobot_craft.anchors.build import INPUT
from lerobot_craft.anchors.manifest import source_notes
from lerobot_craft.anchors.modes.registry import mode_named
from lerobot_craft.anchors.retained import FIXED, OWN_ERROR
from lerobot_craft.anchors.store import AnchorStore

_BOOKKEEPING = ("instruction", "cross", "dataset", "frame", OWN_ERROR)


def summary(store: AnchorStore) -> str:
    """Several lines of text."""
    m = store.manifest
    sizes = bytes_by_purpose(store)
    total = sum(shard.bytes for shard in m.shards)
    if m.kind == "memory":
        return _memory_summary(store, total)
    lines = [
        f"{store.directory}",
        f"  kind         {m.kind}: {mode_named(m.kind).describe(m.values, m.columns)}",
        f"  teacher      {m.policy_type}, {m.dtype}{f' under {m.autocast} autocast' if m.autocast else ''}, "
        f"weights {m.teacher.get('weights', '?')[:12]}",
        f"  anchors      {m.num_anchors} from {_sources(store)}, seed {m.seed}",
        f"  size         {_human(total)} in {len(m.shards)} shards, {_human(total / m.num_anchors)} per anchor",
        *(f"    {purpose:<12}{_human(size / m.num_anchors)} per anchor" for purpose, size in sizes.items() if size),
        "  instructions",
    ]
    for instruction, count, scale in zip(m.instructions, m.counts, m.scales, strict=True):
        unit = ", ".join(f"{loss} {value:.3g}" for loss, value in scale.values.items())
        lines.append(f"    {count:>6}  {instruction!r}  unit ({scale.source}, n={scale.n}): {unit}")
    return "\n".join(lines)


def _memory_summary(store: AnchorStore, total: int) -> str:
    m = store.manifest
    notes = source_notes(m)
    lines = [
        f"{store.directory}",
        f"  kind         memory of a {m.policy_type}: observations, instructions and actions; no teacher's values",
        f"  frames       {m.num_anchors}, {_human(total)}, {_human(total / m.num_anchors)} per frame",
        "  from",
        *(
            f"    {len(d.frames):>6}  {d.repo_id} ({note.kind}, {note.fps:g} frames per second)"
            for d, note in zip(m.datasets, notes, strict=True)
        ),
        "  instructions",
        *(f"    {count:>6}  {text!r}" for text, count in zip(m.instructions, m.counts, strict=True)),
    ]
    return "\n".join(lines)


def _sources(store: AnchorStore) -> str:
    m = store.manifest
    used = [f"{len(d.frames)} frames of {d.repo_id}" for d in m.datasets if d.frames]
    return f"{m.anchor_source} ({', '.join(used)}; images {m.inputs})"


def bytes_by_purpose(store: AnchorStore) -> dict[str, int]:
    """Bytes of inputs, fixed values, retained values, and the rest."""
    sizes = {"inputs": 0, "fixed": 0, "targets": 0, "bookkeeping": 0}
    for name, size in store.bytes_by_column().items():
        if name.startswith(INPUT):
            sizes["inputs"] += size
        elif name.startswith(FIXED):
            sizes["fixed"] += size
        elif name.startswith(_BOOKKEEPING):
            sizes["bookkeeping"] += size
        else:
            sizes["targets"] += size
    return sizes


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.1f} GiB"
