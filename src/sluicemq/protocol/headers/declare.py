"""How a header is declared, and the one codec for all of them.

    @header
    class GetMinOffsetRequest:
        topic: str = text("topic")
        queue_id: int = int32("queueId")
        broker: str | None = text("bname", default=None)

A field without a default is required. On the wire every value is text: integers decimal, booleans
`true`/`false`; None is not written. An empty text where a number is wanted counts as absent, as
Java's decoder leaves such a field null.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, dataclass_transform

from sluicemq.errors import ProtocolError

T = TypeVar("T")
_REQUIRED: Final = dataclasses.MISSING
_TABLES: Final[dict[type, tuple["_Field", ...]]] = {}


class HeaderError(ProtocolError):
    """A header lacks a field or holds a bad one: answered with code 1, the connection stays."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    wire: str
    parse: Callable[[str, str], Any]
    default: Any


def _parse_text(_wire: str, value: str) -> str:
    return value


def _parse_boolean(_wire: str, value: str) -> bool:
    return value.lower() == "true"


def _integer(bits: int) -> Callable[[str, str], int | None]:
    limit = 1 << (bits - 1)

    def parse(wire: str, value: str) -> int | None:
        if not value:
            return None
        try:
            number = int(value)
        except ValueError:
            number = limit
        if not -limit <= number < limit:
            raise HeaderError(f"the custom field <{wire}> is not an integer of {bits} bits")
        return number

    return parse


_parse_int32 = _integer(32)
_parse_int64 = _integer(64)


def text(wire: str, *, default: Any = _REQUIRED) -> Any:
    """A text field named `wire` in extFields."""
    return _declared(wire, _parse_text, default)


def int32(wire: str, *, default: Any = _REQUIRED) -> Any:
    """A 32-bit integer field."""
    return _declared(wire, _parse_int32, default)


def int64(wire: str, *, default: Any = _REQUIRED) -> Any:
    """A 64-bit integer field."""
    return _declared(wire, _parse_int64, default)


def boolean(wire: str, *, default: Any = _REQUIRED) -> Any:
    """A field that is `true` or `false`."""
    return _declared(wire, _parse_boolean, default)


def _declared(wire: str, parse: Callable[[str, str], Any], default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"wire": wire, "parse": parse})


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(text, int32, int64, boolean)
)
def header(cls: type[T]) -> type[T]:
    """Make `cls` a header: a frozen dataclass with keyword arguments, known to the codec."""
    made = dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)
    _TABLES[made] = tuple(
        _Field(field.name, field.metadata["wire"], field.metadata["parse"], field.default)
        for field in dataclasses.fields(made)  # type: ignore[arg-type]
    )
    return made


def decode_header(cls: type[T], fields: Mapping[str, str] | None) -> T:
    """extFields -> header. Raises HeaderError that names the missing or bad field."""
    given = fields or {}
    values: dict[str, Any] = {}
    for field in _TABLES[cls]:
        value = given.get(field.wire)
        parsed = None if value is None else field.parse(field.wire, value)
        if parsed is not None:
            values[field.name] = parsed
        elif field.default is _REQUIRED:
            raise HeaderError(f"the custom field <{field.wire}> is null")
    return cls(**values)


def encode_header(value: Any) -> dict[str, str]:
    """Header -> extFields; None is left out."""
    fields: dict[str, str] = {}
    for field in _TABLES[type(value)]:
        item = getattr(value, field.name)
        if item is not None:
            fields[field.wire] = item if isinstance(item, str) else str(item).lower()
    return fields


def wire_names(cls: type) -> tuple[str, ...]:
    """The field names of a header as they stand on the wire, in the order declared."""
    return tuple(field.wire for field in _TABLES[cls])
