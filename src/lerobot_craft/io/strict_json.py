"""Strict JSON to and from dataclasses; equal content gives equal bytes."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_MAX_DEPTH = 32
_MAX_INTEGER = 2**63


class StrictJSONError(ValueError):
    """A problem in a JSON text; the message begins with the field."""


def to_json(content: object) -> bytes:
    """Canonical bytes of a dataclass or plain JSON content: sorted keys, indented, UTF-8, one final newline."""
    plain = asdict(content) if is_dataclass(content) and not isinstance(content, type) else content
    _check_plain(plain, "content")
    return (json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object; refuses duplicate keys, NaN, infinity and invalid Unicode."""
    try:
        content = json.loads(data.decode(), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except StrictJSONError:
        raise
    except (ValueError, RecursionError) as error:
        raise StrictJSONError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StrictJSONError("expected a JSON object {...}")
    _check_plain(content, "content")
    return content


def decode[T](cls: type[T], content: object, where: str = "") -> T:
    """Decode a dataclass instance: no unknown or missing key, every type as annotated."""
    if not isinstance(content, dict):
        raise StrictJSONError(f"{where or 'content'}: expected an object, got {_name(content)}")
    prefix = f"{where}." if where else ""
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    if unknown := sorted(set(content) - set(names)):
        raise StrictJSONError(f"{prefix}{unknown[0]}: unknown field")
    if missing := [name for name in names if name not in content]:
        raise StrictJSONError(f"{prefix}{missing[0]}: missing field")
    return cls(**{name: _value(hints[name], content[name], prefix + name) for name in names})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return decode(hint, value, where)  # type: ignore[arg-type]
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise StrictJSONError(f"{where}: expected one of {', '.join(arguments)}; got {value!r:.80}")
        return value
    if origin in (Union, UnionType):
        (other,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _value(other, value, where)
    if origin is list and isinstance(value, list):
        return [_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not (origin or hint):
        raise StrictJSONError(f"{where}: expected {(origin or hint).__name__}, got {_name(value)}")
    return value


def _name(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise StrictJSONError(f"{key}: the same field twice")
        content[key] = value
    return content


def _no_constant(name: str) -> None:
    raise StrictJSONError(f"not JSON: {name} is no number")


def _check_plain(value: object, where: str, depth: int = 0) -> None:
    """Refuse what does not survive a round trip: other types, NaN, lone surrogates, deep nesting."""
    if depth > _MAX_DEPTH:
        raise StrictJSONError(f"{where}: nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise StrictJSONError(f"{where}: {key!r:.80} cannot be a key")
            _check_plain(key, where)
            _check_plain(item, f"{where}.{key}" if depth else key, depth + 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_plain(item, f"{where}[{i}]", depth + 1)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise StrictJSONError(f"{where}: the text is not Unicode ({error.reason})") from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise StrictJSONError(f"{where}: expected a finite number, got {value}")
    elif type(value) is int and abs(value) >= _MAX_INTEGER:
        raise StrictJSONError(f"{where}: the number is too large")
    elif value is not None and type(value) not in (bool, int, float):
        raise StrictJSONError(f"{where}: a {type(value).__name__} is not JSON")
