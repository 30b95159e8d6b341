"""Files that carry the number of their schema."""

from pathlib import Path

from lerobot_craft.anchors.files import read_bytes
from lerobot_craft.anchors.strict_json import StrictJSONError, decode, parse_object


def read_versioned[Content](path: Path, cls: type[Content], schema: int) -> Content:
    """Read a JSON file strictly into a dataclass with a field `schema`.

    Raises:
        StrictJSONError: It has another schema, or a field that is unknown, missing, doubled or of another type.
    """
    content = parse_object(read_bytes(path))
    if content.get("schema") != schema:
        raise StrictJSONError(f"schema: this release reads schema {schema}, the file has {content.get('schema')!r}")
    return decode(cls, content)
